"""What stands in for torch's `varlen_attn` on a CPU: right over the segments, and as careless as the kernel everywhere else.

Rows past the last segment come back as NaN, and so do their gradients; an empty row's lse is +inf; a wrong argument is an error.
"""

from __future__ import annotations

import math
import types
from typing import NamedTuple

import torch


class AuxRequest(NamedTuple):
    lse: bool = False


class Careless(torch.autograd.Function):
    """The tensor itself; the gradient of what lies past `end` is NaN."""

    @staticmethod
    def forward(context, tensor, end):
        context.end = end
        return tensor.clone()

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        gradient[context.end :] = math.nan
        return gradient, None


def attend_segments(query, key, value, cu_query, cu_key, longest, causal, window, scale, used=None, pages=None):
    assert cu_query.dtype == cu_key.dtype == torch.int32 and query.stride(-1) == key.stride(-1) == 1 and query.shape[-1] % 8 == 0
    ends, starts = cu_query.tolist(), cu_key.tolist()
    queries = [b - a for a, b in zip(ends, ends[1:])]
    assert max(queries) <= longest[0], "max_q is shorter than a segment"
    group = query.shape[1] // key.shape[-2]
    if longest[0] == 1 and group > 1 and 0 in queries:
        raise RuntimeError("shape is invalid for input size")
    query = Careless.apply(query, ends[-1])
    if pages is None:
        key, value = (Careless.apply(t, starts[-1]) for t in (key, value))
    output = query.new_full(query.shape, math.nan)
    lse = torch.full((query.shape[1], query.shape[0]), math.nan)
    for n, (a, b) in enumerate(zip(ends, ends[1:])):
        if pages is None:
            some_keys, some_values = key[starts[n] : starts[n + 1]], value[starts[n] : starts[n + 1]]
            assert some_keys.shape[0] <= longest[1], "max_k is shorter than a segment"
        else:
            some_keys, some_values = (t[pages[n].long()].flatten(0, 1)[: int(used[n])] for t in (key, value))
        some_keys, some_values = (t.repeat_interleave(group, 1) for t in (some_keys, some_values))
        scores = scale * torch.einsum("qhd,khd->hqk", query[a:b], some_keys)
        position = torch.arange(b - a)[:, None] + some_keys.shape[0] - (b - a)
        slot = torch.arange(some_keys.shape[0])[None]
        hidden = torch.zeros(position.shape[0], slot.shape[1], dtype=torch.bool)
        left, right = window
        if causal:
            right = 0
        if left >= 0:
            hidden = hidden | (slot < position - left)
        if right >= 0:
            hidden = hidden | (slot > position + right)
        empty = hidden.all(1)
        weights = torch.softmax(scores.masked_fill(hidden, -1e30), -1).masked_fill(hidden, 0.0)
        output = torch.cat([output[:a], torch.einsum("hqk,khd->qhd", weights, some_values), output[b:]])
        lse[:, a:b] = scores.detach().masked_fill(hidden, -math.inf).logsumexp(-1).masked_fill(empty, math.inf)
    return output, lse


def answer(result, return_aux):
    return result if return_aux is not None and return_aux.lse else result[0]


def same_heads(query, key, pages, enable_gqa):
    if not enable_gqa and query.shape[1] != key.shape[2 if pages is not None else 1]:
        raise ValueError("Expect query and key/value to have the same number of heads")


def torch_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    scale = 1 / math.sqrt(query.shape[-1])
    return answer(attend_segments(query, key, value, cu_seq_q, cu_seq_k, (max_q, max_k), is_causal, (-1, -1), scale), return_aux)


def torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
    causal = window_size == (-1, 0)  # False for a list, as in torch
    window = (-1, -1) if isinstance(window_size, list) else window_size
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return answer(attend_segments(query, key, value, cu_seq_q, cu_seq_k, (max_q, max_k), causal, window, scale), return_aux)


def torch_2_12(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1), enable_gqa=False,
    seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    same_heads(query, key, block_table, enable_gqa)
    if (seqused_k is not None or block_table is not None) and torch.is_grad_enabled() and query.requires_grad:
        raise RuntimeError("seqused_k is an inference-only parameter.")
    causal = window_size == (-1, 0)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    result = attend_segments(
        query, key, value, cu_seq_q, cu_seq_k, (max_q, max_k), causal, tuple(window_size), scale, seqused_k, block_table
    )
    return answer(result, return_aux)


MODULES = {
    function.__name__: types.SimpleNamespace(varlen_attn=function, AuxRequest=AuxRequest)
    for function in (torch_2_10, torch_2_11, torch_2_12)
}
