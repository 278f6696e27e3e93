"""Attention over one block of keys at a time, with the running maximum and sum of Milakov and Gimelshein 2018 (arXiv:1805.02867)."""

from __future__ import annotations

import functools
import os

import torch

from attnreg import EMULATED, NATIVE, AttentionCall, Backend, Capabilities, Feature, hookimpl
from attnreg.visibility import cleaned, cleaned_bias, real_keys, real_queries, segments, slots

NEGATIVE_INFINITY = float("-inf")


def run_chunked(call: AttentionCall, block: int = 256):
    """Query, key and value are (B, H, S, D) here, as the backend's layout says; so is the output."""
    queries, keys = real_queries(call), real_keys(call)
    query, key, value = (t.to(_accumulator(call)) for t in cleaned(call.query, call.key, call.value, queries, keys))
    group = call.query_heads // call.key_heads
    query = query.unflatten(1, (call.key_heads, group))

    # Of the keys so far, for each row: the largest score, the sum of exp(score - largest), and the weighted sum of values.
    if call.sinks is None:
        largest = query.new_full((*query.shape[:4], 1), NEGATIVE_INFINITY).flatten(1, 2)
        total = torch.zeros_like(largest)
    else:
        largest = call.sinks.to(query.dtype)[None, :, None, None].expand(call.batch, -1, call.query_length, 1)
        total = torch.ones_like(largest)
    output = query.new_zeros(*total.shape[:3], call.value_dim)
    for start in range(0, call.key_length, block):
        part = slice(start, min(start + block, call.key_length))
        scores = call.scale * (query @ key[:, :, None, part].transpose(-1, -2)).flatten(1, 2)
        scores = _scored(call, scores, torch.arange(part.start, part.stop, device=call.device), keys)
        new = torch.maximum(largest, scores.detach().amax(-1, keepdim=True))
        # Where nothing was seen yet, -inf - -inf would be NaN.
        safe = new.masked_fill(new == NEGATIVE_INFINITY, 0.0)
        weights, kept = torch.exp(scores - safe), torch.exp(largest - safe)
        seen = weights.unflatten(1, (call.key_heads, group)) @ value[:, :, None, part]
        output = output * kept + seen.flatten(1, 2)
        total = total * kept + weights.sum(-1, keepdim=True)
        largest = new

    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    output, lse = output / total, (largest + torch.log(total)).masked_fill(empty, NEGATIVE_INFINITY)
    if queries is not None:
        output = output.masked_fill(~queries[:, None, :, None], 0.0)
        lse = lse.masked_fill(~queries[:, None, :, None], NEGATIVE_INFINITY)
    output = output.to(call.query.dtype)
    return (output, lse[..., 0].to(torch.promote_types(call.query.dtype, torch.float32))) if call.return_lse else output


def _accumulator(call: AttentionCall) -> torch.dtype:
    asked = os.environ.get("ATTNREG_CHUNKED_FLOAT64") == "1"
    return torch.float64 if asked else torch.promote_types(call.query.dtype, torch.float32)


def _scored(call: AttentionCall, scores: torch.Tensor, j: torch.Tensor, keys: torch.Tensor | None) -> torch.Tensor:
    """Scores of the slots `j` with everything that the call adds and hides, in the contract's order."""
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    p = slots(call)[:, None, :, None]
    if call.alibi_slopes is not None:
        scores = scores - call.alibi_slopes.to(scores.dtype).reshape(-1, call.query_heads, 1, 1) * (p - j).abs()
    if call.bias is not None:
        scores = scores + _columns(cleaned_bias(call), j).to(scores.dtype)
    left, right = call.window or (None, None)
    hidden = [] if keys is None else [~keys[:, None, None, j]]
    hidden += [] if call.mask is None else [~_columns(call.mask, j)]
    hidden += [j > p] if call.causal else []
    hidden += [] if left is None else [j < p - left]
    hidden += [] if right is None else [j > p + right]
    if call.cu_seqlens is not None:
        i = torch.arange(call.query_length, device=call.device)
        hidden.append(segments(call.cu_seqlens[0], i)[:, None] != segments(call.cu_seqlens[1], j))
    for part in hidden:
        scores = scores.masked_fill(part, NEGATIVE_INFINITY)
    return scores


def _columns(tensor: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.shape[3] == 1 else tensor[..., j]


_NATIVE = (
    "CAUSAL UNEQUAL_LENGTHS WINDOW QUERY_MASK KEY_MASK MASK BIAS KEY_LENGTHS QUERY_LENGTHS KEY_STARTS PACKED ALIBI SOFTCAP SINKS SCALE LSE"
)
_LEARNED = EMULATED("autograd keeps the weights of every block")


def backend(name: str = "chunked", block: int = 256) -> Backend:
    return Backend(
        name=name,
        run=functools.partial(run_chunked, block=block),
        capabilities=Capabilities(
            features={
                **{Feature[word]: NATIVE for word in (*_NATIVE.split(), "GROUPED_HEADS", "VALUE_DIM", "DETERMINISTIC")},
                **{Feature[word]: _LEARNED for word in ("BACKWARD", "BIAS_GRADIENT", "ALIBI_GRADIENT")},
            },
            devices=("cpu",),
            dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        ),
        priority=-10,
        layout="bhsd",
        notes=lambda spec: (f"plain torch, {block} keys at a time",),
    )


@hookimpl
def attnreg_backends():
    return [backend()]
