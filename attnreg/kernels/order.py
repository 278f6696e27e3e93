"""The automatic order on CUDA, as measured on an H200 (docs/order.md, made by benchmarks/order.py): for each kind of call, fastest first.

A backend's rank is its place in the line of the call's kind. Those of other cards are taken to be alike until somebody measures them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..spec import AttentionSpec

ORDER = {
    "one query": "cudnn flash3 flash2 flash4 xformers sdpa varlen flex",
    "one query, lengths": "flash3 flash2 flash4 cudnn sdpa varlen xformers flex",
    "one query, window": "flash4 flash3 flash2 xformers varlen sdpa cudnn flex",
    "few queries": "flash3 flash2 sdpa flash4 xformers cudnn varlen flex",
    "short": "cudnn flash4 flash3 flash2 sdpa xformers varlen flex",
    "long": "flash4 flash3 cudnn flash2 sdpa xformers varlen flex",
    "unequal": "flash4 flash3 flash2 sdpa xformers varlen cudnn flex",
    "window": "flash4 flash3 flash2 sdpa varlen xformers cudnn flex",
    "softcap": "flash3 flash2 flash4 flex",
    "padded": "flash3 flash2 flash4 varlen xformers cudnn sdpa flex",
    "packed": "flash3 flash2 varlen flash4 xformers flex sdpa",
    "masked": "flash2 cudnn sdpa xformers flex",
}
SHORT = 2048
"""Keys up to which cuDNN's start beats flash-attn 4's speed."""
FEW = 64
"""Queries up to which flash-attn 2's split keys fill the card better than flash-attn 4's tiles."""


def kind(spec: AttentionSpec) -> str:
    """Which line of `ORDER` a spec falls under."""
    if spec.softcap:
        return "softcap"
    if spec.mask is not None or spec.bias is not None or spec.alibi is not None or spec.sinks:
        return "masked"
    if spec.packed:
        return "packed"
    if spec.single_query:
        lengths = spec.key_lengths or spec.key_starts or spec.key_mask or spec.page_size
        return "one query, window" if spec.window else "one query, lengths" if lengths else "one query"
    if spec.padded or spec.page_size:
        return "padded"
    if spec.window:
        return "window"
    if not spec.equal_lengths:
        return "few queries" if spec.sizes is not None and spec.sizes[1] <= FEW else "unequal"
    return "long" if spec.sizes is not None and spec.sizes[2] > SHORT else "short"


def _rank(name: str, spec: AttentionSpec) -> int:
    line = ORDER[kind(spec)].split()
    return 90 - 10 * line.index(name) if name in line else 0


def rank_of(name: str) -> Callable[[AttentionSpec], int]:
    """The `priority` of a built-in CUDA backend."""
    return functools.partial(_rank, name)
