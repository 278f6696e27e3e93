"""The automatic order on CUDA, as measured on an H200 (docs/order.md, made by benchmarks/order.py): for each kind of call, fastest first.

A backend's rank is its place in the line of the call's kind; who was not measured there stands behind those who were. Other cards are taken to be
alike until somebody measures them. Where two take the card as long, or one a few microseconds less, the one that costs the host less comes first.
cuDNN makes a plan for every new shape, which takes tens of milliseconds, and keys that grow by one a step are a new shape each. So a lone
query goes to cuDNN only where lengths stand beside a buffer of one size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..spec import AttentionSpec

ORDER = {
    "one query of few rows": "flash3 flash2 flash4 xformers cudnn sdpa varlen flex",
    "one query": "flash2 flash4 flash3 xformers cudnn sdpa varlen flex",
    "one query, lengths": "flash2 flash4 flash3 cudnn sdpa xformers varlen flex",
    "one query, many lengths": "flash4 flash3 flash2 cudnn sdpa xformers varlen flex",
    "one query, window": "flash4 flash3 flash2 xformers varlen sdpa cudnn flex",
    "one query, softcap": "flash3 flash2 flash4 flex",
    "few queries": "flash3 flash2 sdpa flash4 xformers cudnn varlen flex",
    "short": "cudnn flash4 flash3 flash2 sdpa xformers varlen flex",
    "long": "flash3 flash4 cudnn flash2 sdpa xformers varlen flex",
    "long, narrow and grouped": "flash4 flash3 cudnn flash2 sdpa xformers varlen flex",
    "training": "flash3 flash4 cudnn flash2 sdpa xformers varlen flex",
    "training, odd": "flash3 cudnn flash4 flash2 sdpa xformers varlen flex",
    "unequal": "flash3 flash4 flash2 sdpa xformers varlen cudnn flex",
    "window": "flash4 flash3 flash2 sdpa varlen xformers cudnn flex",
    "softcap": "flash3 flash4 flash2 flex",
    "left padded": "flash3 flash2 flash4 varlen xformers cudnn sdpa flex",
    "padded": "flash2 flash3 flash4 varlen xformers cudnn sdpa flex",
    "padded, training": "flash3 flash4 flash2 varlen xformers cudnn sdpa flex",
    "packed": "flash3 flash4 flash2 varlen xformers flex sdpa",
    "packed, training": "flash4 flash3 flash2 varlen xformers flex sdpa",
    "masked": "flash2 cudnn sdpa xformers flex",
}
SHORT = 1024
"""Keys up to which cuDNN's forward beats flash-attn 4's."""
FEW = 64
"""Queries up to which flash-attn 3's and 2's split keys fill the card better than flash-attn 4's tiles."""
WIDE = 128
"""Head dims below it are where flash-attn 4's forward beats flash-attn 3's, if key heads are fewer than query heads."""
ODD = 32
"""Head dims that are no multiples of it flash-attn 4 pads where gradients are asked for, in copies: cuDNN's training is faster then."""
ROWS = 128
"""Batch rows times key heads up to which flash-attn 3's split keys fill the card better than flash-attn 2's."""
MANY = 1 << 20
"""Keys of all rows and key heads beyond which rows of different lengths share the card better in flash-attn 4 and 3; nor is the host the bound."""


def kind(spec: AttentionSpec) -> str:
    """Which line of `ORDER` a spec falls under. Sizes are known in eager mode only."""
    batch, queries, keys = spec.sizes or (1, SHORT, SHORT)
    if spec.mask is not None or spec.bias is not None or spec.alibi is not None:
        return "masked"
    if spec.softcap:
        return "one query, softcap" if spec.single_query else "softcap"
    if spec.packed:
        return "packed, training" if spec.gradients else "packed"
    if spec.single_query:
        if spec.window:
            return "one query, window"
        if spec.key_lengths:
            return "one query, many lengths" if batch * spec.key_heads * keys > MANY else "one query, lengths"
        return "one query of few rows" if batch * spec.key_heads <= ROWS else "one query"
    if spec.padded or spec.page_size:
        # Forward, flash-attn 3 and 2 read left padding by its starts.
        if spec.gradients:
            return "padded, training"
        return "left padded" if spec.key_mask == "left" else "padded"
    if spec.window:
        return "window"
    if not spec.equal_lengths:
        return "few queries" if queries <= FEW else "unequal"
    if spec.gradients:
        return "training, odd" if spec.head_dim % ODD else "training"
    if keys <= SHORT:
        return "short"
    return "long, narrow and grouped" if spec.head_dim < WIDE and spec.key_heads < spec.query_heads else "long"


def _rank(name: str, spec: AttentionSpec) -> int:
    line = ORDER[kind(spec)].split()
    if name == "cudnn" and spec.capability is not None and spec.capability[0] not in (9, 10):
        return 5  # as torch has it: cuDNN's attention is fast from Hopper on
    return 90 - 10 * line.index(name) if name in line else 0


def rank_of(name: str) -> Callable[[AttentionSpec], int]:
    """The `priority` of a built-in CUDA backend."""
    return functools.partial(_rank, name)
