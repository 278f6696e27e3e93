"""What stands in for the operators of flash-attn 3 on a CPU, under the library's own Python: right, and as careless as the kernels.

Values past a row's end are multiplied by 0, up to a whole tile; an empty row's lse is -inf, +inf where no key was given at all.
Gradients of rows outside every segment are NaN. A wrong argument is an error.
"""

from __future__ import annotations

import math
import types

import torch
from torch import library as operators

TILE = 128
FORWARD = """fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, Tensor? q_v = None,
Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None,
Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, Tensor? page_table = None, Tensor? kv_batch_idx = None,
Tensor? leftpad_k = None, Tensor? rotary_cos = None, Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None,
Tensor? k_descale = None, Tensor? v_descale = None, float? softmax_scale = None, bool is_causal = False, int window_size_left = -1,
int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None,
int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)"""
BACKWARD = """bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq = None, Tensor(dk!)? dk = None,
Tensor(dv!)? dv = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? seqused_q = None, Tensor? seqused_k = None,
int? max_seqlen_q = None, int? max_seqlen_k = None, float? softmax_scale = None, bool is_causal = False, int window_size_left = -1,
int window_size_right = -1, float softcap = 0.0, bool deterministic = False, int sm_margin = 0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"""
"""Both as `flash_api_stable.cpp` of flash-attention/hopper has them."""


def define(namespace: str, calls: list | None = None) -> operators.Library:
    """The two operators, on the CPU, for as long as the result is held. calls: gets the name and the keywords of each."""
    library = operators.Library(namespace, "DEF")
    library.define(FORWARD.replace("\n", " "))
    library.define(BACKWARD.replace("\n", " "))
    names = [a.name for a in getattr(torch.ops, namespace).fwd.default._schema.arguments]
    backward_names = [a.name for a in getattr(torch.ops, namespace).bwd.default._schema.arguments]

    def fwd(*given, **keywords):
        named = dict(zip(names, given)) | keywords
        if calls is not None:
            calls.append(named)
        return forward(types.SimpleNamespace(**(dict.fromkeys(names) | _DEFAULTS | named)))

    def bwd(*given, **keywords):
        named = dict(zip(backward_names, given)) | keywords
        if calls is not None:
            calls.append(named)
        return backward(types.SimpleNamespace(**(dict.fromkeys(backward_names) | _DEFAULTS | named)))

    library.impl("fwd", fwd, "CPU")
    library.impl("bwd", bwd, "CPU")
    return library


_DEFAULTS = {"is_causal": False, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "num_splits": 0}


def forward(a) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(a)
    out = a.q.new_full((*a.q.shape[:-1], a.v.shape[-1]), math.nan)
    packed = a.cu_seqlens_q is not None
    lse = torch.full((a.q.shape[1], a.q.shape[0]) if packed else (a.q.shape[0], a.q.shape[2], a.q.shape[1]), math.nan)
    if a.k.numel() == 0:
        return out.zero_(), lse.fill_(math.inf), out.new_empty(0), lse.new_empty(0)
    for b, (query, keys, end) in enumerate(_rows(a)):
        o, low = _attend(a.q[query], a.k, a.v, keys, end, a, b)
        out[query] = o.to(out.dtype)
        lse[(slice(None), query) if packed else b] = low
    return out, lse, out.new_empty(0), lse.new_empty(0)


def backward(a) -> tuple[torch.Tensor, ...]:
    """By the formulas of the kernel: what is multiplied by 0 past a segment's end stands there, and NaN stays NaN."""
    _check(a)
    assert a.dout.shape == a.out.shape and a.dout.stride(-1) == 1
    packed = a.cu_seqlens_q is not None
    gradients = [torch.full_like(t, math.nan, dtype=torch.float32) for t in (a.q, a.k, a.v)]
    for b, (queries, keys, end) in enumerate(_rows(a)):
        asked = queries.stop - queries.start if packed else a.q.shape[1]
        lse = a.softmax_lse[:, queries] if packed else a.softmax_lse[b]
        q, out, dout = (_tile(t, queries, asked) for t in (a.q, a.out, a.dout))
        k, v = (_tile(t, keys, end) for t in (a.k, a.v))
        rows, slots, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        scores, slope = _scores(q, k, a)
        scores = torch.where(_hidden(rows, slots, asked, end, 0, a), -math.inf, scores)
        lse = torch.where(lse == -math.inf, 0.0, lse)
        lse = torch.nn.functional.pad(lse, (0, rows - asked), value=math.inf)
        weights = torch.exp(scores - lse[..., None])
        delta = torch.where(torch.arange(rows) < asked, (out * dout).sum(-1).T, 0.0)
        inner = weights * (torch.einsum("qhd,khd->hqk", dout, v) - delta[..., None]) * slope
        found = (
            a.softmax_scale * torch.einsum("hqk,khd->qhd", inner, k)[:asked],
            a.softmax_scale * torch.einsum("hqk,qhd->khd", inner, q)[:end].unflatten(1, (-1, group)).sum(2),
            torch.einsum("hqk,qhd->khd", weights, dout)[:end].unflatten(1, (-1, group)).sum(2),
        )
        for into, where, size, gradient in zip(gradients, (queries, keys, keys), (asked, end, end), found):
            into[slice(where.start, where.start + size) if packed else where] = gradient
    for into, gradient in zip((a.dq, a.dk, a.dv), gradients):
        into.copy_(gradient)
    return tuple(a.q.new_empty(0) for _ in range(5))


def _tile(tensor: torch.Tensor, where: int | slice, size: int) -> torch.Tensor:
    """What a kernel loads for rows that begin `where`: whole tiles, as far as the tensor goes."""
    rows = tensor[where] if isinstance(where, int) else tensor[where.start :]
    return rows[: -(-size // TILE) * TILE].float()


def _check(a) -> None:
    for t in (a.q, a.k, a.v):
        assert t.stride(-1) == 1 and t.shape[-1] % 8 == 0 and t.dtype == a.q.dtype
    assert a.q.shape[-1] == a.k.shape[-1] and a.q.shape[-2] % a.k.shape[-2] == 0
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "page_table"):
        t = getattr(a, name, None)
        if t is not None:
            assert t.dtype == torch.int32 and (t.stride(-1) == 1 if name == "page_table" else t.is_contiguous()), name


def _rows(a):
    """For each row: where its queries lie, where its keys do, and where the keys end."""
    if a.cu_seqlens_q is None:
        for b in range(a.q.shape[0]):
            size = a.k.shape[1] if getattr(a, "page_table", None) is None else a.page_table.shape[1] * a.k.shape[1]
            yield b, b, size if a.seqused_k is None else int(a.seqused_k[b])
        return
    queries, keys = a.cu_seqlens_q.tolist(), a.cu_seqlens_k.tolist()
    for n in range(len(queries) - 1):
        assert queries[n + 1] - queries[n] <= a.max_seqlen_q and keys[n + 1] - keys[n] <= a.max_seqlen_k
        yield slice(queries[n], queries[n + 1]), slice(keys[n], None), keys[n + 1] - keys[n]


def _attend(query, keys, values, where, end, a, b):
    """(Q, H, D) and the lse (H, Q), in float32."""
    if getattr(a, "page_table", None) is not None:
        pages = a.page_table[b].long()
        pages = torch.where(torch.arange(len(pages)) * keys.shape[1] < end, pages, 0)
        key, value = (t[pages].flatten(0, 1) for t in (keys, values))
        key, value = (t[: -(-end // TILE) * TILE].float() for t in (key, value))
    else:
        key, value = (_tile(t, where, end) for t in (keys, values))
    start = 0 if getattr(a, "leftpad_k", None) is None else int(a.leftpad_k[b])
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    scores, _ = _scores(query.float(), key, a)
    scores = torch.where(_hidden(query.shape[0], key.shape[0], query.shape[0], end, start, a), -math.inf, scores)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return torch.einsum("hqk,khd->qhd", weights, value), lse


def _scores(query, key, a):
    """(H, Q, K), and the derivative of the cap."""
    scores = a.softmax_scale * torch.einsum("qhd,khd->hqk", query, key)
    if not a.softcap:
        return scores, 1.0
    capped = torch.tanh(scores / a.softcap)
    return a.softcap * capped, 1 - capped**2


def _hidden(rows: int, slots: int, asked: int, end: int, start: int, a) -> torch.Tensor:
    """(rows, slots): what a query may not see, the last asked one being at slot end - 1."""
    position = torch.arange(rows)[:, None] + end - asked
    slot = torch.arange(slots)[None]
    right = 0 if a.is_causal else a.window_size_right
    hidden = (slot >= end) | (slot < start)
    if a.window_size_left >= 0:
        hidden = hidden | (slot < position - a.window_size_left)
    return hidden | (slot > position + right) if right >= 0 else hidden


# ---------------------------------------------------------------------- the library's functions over them


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(context, operators, query, key, value, options, backward_options):
        output, lse, *_ = operators.fwd(query, key, value, **options)
        context.save_for_backward(query, key, value, output, lse)
        context.operators, context.options = operators, backward_options
        return output, lse

    @staticmethod
    def backward(context, gradient, _):
        gradients = [torch.empty_like(t) for t in context.saved_tensors[:3]]
        names = ("dq", "dk", "dv")
        context.operators.bwd(gradient, *context.saved_tensors, **dict(zip(names, gradients)), **context.options)
        return None, *gradients, None, None


class Functions:
    """The three functions of `flash_attn_interface`, by the names and defaults of their arguments."""

    def __init__(self, namespace: str):
        self.operators = getattr(torch.ops, namespace)

    def _run(self, query, key, value, segments, softmax_scale, causal, window_size, softcap, num_splits, deterministic, wants_lse):
        shared = {
            "softmax_scale": softmax_scale, "is_causal": causal, "window_size_left": window_size[0], "window_size_right": window_size[1],
            "softcap": softcap, **segments,
        }  # fmt: skip
        result = _Attention.apply(
            self.operators, query, key, value, shared | {"num_splits": num_splits}, shared | {"deterministic": deterministic}
        )
        return result if wants_lse else result[0]

    def flash_attn_func(
        self, q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, num_splits=1, deterministic=False,
        return_attn_probs=False,
    ):  # fmt: skip
        return self._run(q, k, v, {}, softmax_scale, causal, window_size, softcap, num_splits, deterministic, return_attn_probs)

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False, window_size=(-1, -1),
        softcap=0.0, num_splits=1, deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        segments = {
            "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k,
        }  # fmt: skip
        return self._run(q, k, v, segments, softmax_scale, causal, window_size, softcap, num_splits, deterministic, return_attn_probs)

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, cache_seqlens=None, cache_leftpad=None, page_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, num_splits=0, return_softmax_lse=False,
    ):  # fmt: skip
        given = {"seqused_k": cache_seqlens, "leftpad_k": cache_leftpad, "page_table": page_table}
        result = self.operators.fwd(
            q, k_cache, v_cache, softmax_scale=softmax_scale, is_causal=causal, window_size_left=window_size[0],
            window_size_right=window_size[1], softcap=softcap, num_splits=num_splits, **given,
        )  # fmt: skip
        return result if return_softmax_lse else result[0]


class Unasked(Functions):
    """As they were till 2025-07-11: the lse comes always, and nobody asks for it."""

    def flash_attn_func(self, *tensors, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False):
        return self._run(*tensors, {}, softmax_scale, causal, window_size, softcap, 1, deterministic, True)

    def flash_attn_varlen_func(self, *given, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False):
        segments = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), given[3:]))
        return self._run(*given[:3], segments, softmax_scale, causal, window_size, softcap, 1, deterministic, True)
