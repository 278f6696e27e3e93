"""flash-attn 2's own Triton kernels on a CPU, with the manners of the CUDA package.

The arithmetic is the package's port, run by Triton's interpreter. What the port ignores (windows, softcap) is refused here; what it does
otherwise than the CUDA package (shape and empty rows of the lse, its shift by alibi, paging, left padding, segments without keys) is put
right in torch, so that those test the caller, not the port. Rows that the CUDA kernels leave unwritten are NaN here.
"""

import contextlib
import os

os.environ["FLASH_ATTENTION_TRITON_AMD_ENABLE"] = "TRUE"
os.environ["TRITON_INTERPRET"] = "1"

import torch

torch.cuda.device = lambda *a, **k: contextlib.nullcontext()

import flash_attn.flash_attn_interface as interface  # noqa: E402 - reads the switches above
from flash_attn.flash_attn_triton_amd import utils  # noqa: E402

port = interface.flash_attn_gpu
_fwd, _bwd, _varlen_fwd, _varlen_bwd, _fwd_kvcache = port.fwd, port.bwd, port.varlen_fwd, port.varlen_bwd, port.fwd_kvcache
calls = []
"""Names of the functions that ran, newest last."""
masks = []
"""What they dropped, newest last: (B, H, Sq, Sk), B being segments where they are packed; negative or -0.0 where a weight is dropped."""


def _need_alibi(self, slopes, batch, heads):
    assert slopes.shape == (batch, heads) and slopes.dtype == torch.float32
    self.alibi_slopes = slopes


utils.MetaData.need_alibi = _need_alibi


def _checked(q, k, v, causal, left, right, softcap, longest):
    assert q.dim() == k.dim() == v.dim() and q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    assert all(t.stride(-1) == 1 for t in (q, k, v)), "the last dimension must be contiguous"
    if left >= longest:
        left = -1
    if right >= longest:
        right = -1
    if causal:
        right = 0
    if softcap or left >= 0 or right > 0:
        raise NotImplementedError("the interpreted port ignores windows and softcap")
    return causal or right == 0


def _slopes(slopes, batch):
    return None if slopes is None else slopes if slopes.dim() == 2 else slopes[None].expand(batch, -1).contiguous()


def _as_cuda(lse, queries, keys, causal, slopes):
    """(H, Sq) of one segment: +inf at empty rows, and alibi's shift."""
    p = torch.arange(queries) + keys - queries
    if slopes is not None and causal:
        lse = lse + slopes[:, None] * p
    return lse.masked_fill(p < 0, float("inf")) if causal else lse


def _as_port(lse, queries, keys, causal, slopes):
    p = torch.arange(queries) + keys - queries
    if slopes is not None and causal:
        lse = lse - slopes[:, None] * p
    return lse.masked_fill(torch.isinf(lse), 0.0)


def fwd(q, k, v, out, alibi, dropout_p, scale, causal, left, right, softcap, return_softmax, generator, *rest):
    calls.append("fwd")
    causal = _checked(q, k, v, causal, left, right, softcap, k.shape[1])
    slopes = _slopes(alibi, q.shape[0])
    out, lse, mask, state = _fwd(q, k, v, out, slopes, dropout_p, scale, causal, -1, -1, 0.0, return_softmax, generator)
    masks.extend([] if mask is None else [mask])
    rows = [None] * q.shape[0] if slopes is None else slopes
    lse = torch.stack([_as_cuda(lse[b], q.shape[1], k.shape[1], causal, rows[b]) for b in range(q.shape[0])])
    return out, lse, q.new_empty(0) if mask is None else mask, q.new_empty(0) if state is None else state


def bwd(dout, q, k, v, out, lse, dq, dk, dv, alibi, dropout_p, scale, causal, left, right, softcap, deterministic, generator, state):
    causal = _checked(q, k, v, causal, left, right, softcap, k.shape[1])
    slopes = _slopes(alibi, q.shape[0])
    rows = [None] * q.shape[0] if slopes is None else slopes
    lse = torch.stack([_as_port(lse[b], q.shape[1], k.shape[1], causal, rows[b]) for b in range(q.shape[0])])
    return _bwd(
        dout,
        q,
        k,
        v,
        out,
        lse,
        dq,
        dk,
        dv,
        slopes,
        dropout_p,
        scale,
        causal,
        -1,
        -1,
        0.0,
        deterministic,
        generator,
        state if dropout_p else None,
    )


def _spans(cu_q, cu_k):
    """(queries, keys) of each segment, as slices."""
    q, k = cu_q.tolist(), cu_k.tolist()
    assert cu_q.dtype == cu_k.dtype == torch.int32 and len(q) == len(k) > 1
    return [(slice(*a), slice(*b)) for a, b in zip(zip(q, q[1:]), zip(k, k[1:]))]


def _kept(spans):
    """The segments with queries and keys: their numbers, row indices, cu_seqlens, longest."""
    numbers = [n for n, (a, b) in enumerate(spans) if a.stop > a.start and b.stop > b.start]
    if not numbers:
        return None
    sides = []
    for side in (0, 1):
        chosen = [spans[n][side] for n in numbers]
        lengths = torch.tensor([s.stop - s.start for s in chosen])
        cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        sides.append((torch.cat([torch.arange(s.start, s.stop) for s in chosen]), cu, int(lengths.max())))
    return numbers, *sides


def _check_longest(spans, longest_q, longest_k, heads, key_heads):
    assert max(a.stop - a.start for a, _ in spans) <= longest_q and max(b.stop - b.start for _, b in spans) <= longest_k
    if longest_q == 1 and heads > key_heads and any(a.stop == a.start for a, _ in spans):
        raise RuntimeError("shape is invalid for input (flash-attention issue 1537)")


def varlen_fwd(q, k, v, out, cu_q, cu_k, used_k, leftpad, table, alibi, max_q, max_k, dropout_p, scale, zero, causal, left, right, softcap,
               return_softmax, generator, *rest):  # fmt: skip
    calls.append("varlen_fwd")
    assert used_k is None and leftpad is None and table is None
    causal = _checked(q, k, v, causal, left, right, softcap, max_k)
    spans = _spans(cu_q, cu_k)
    _check_longest(spans, max_q, max_k, q.shape[1], k.shape[1])
    out = torch.full_like(q, float("nan"))
    lse = torch.full((q.shape[1], q.shape[0]), float("nan"))
    out[: spans[-1][0].stop], lse[:, : spans[-1][0].stop] = 0.0, float("inf")
    kept = _kept(spans)
    slopes = _slopes(alibi, len(spans))
    state = None
    if kept:
        numbers, (rows, cq, mq), (slots, ck, mk) = kept
        some = None if slopes is None else slopes[numbers].contiguous()
        got, logs, mask, state = _varlen_fwd(
            q[rows], k[slots], v[slots], None, cq, ck, None, None, None, some, mq, mk, dropout_p, scale, zero, causal, -1, -1, 0.0, return_softmax, generator
        )  # fmt: skip
        out[rows], lse[:, rows] = got, logs.T
        masks.extend([] if mask is None else [mask])
        for n in numbers:
            a, b = spans[n]
            lse[:, a] = _as_cuda(lse[:, a], a.stop - a.start, b.stop - b.start, causal, None if slopes is None else slopes[n])
    return out, lse, q.new_empty(0), q.new_empty(0) if state is None else state


def varlen_bwd(dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, alibi, max_q, max_k, dropout_p, scale, zero, causal, left, right, softcap,
               deterministic, generator, state, *rest):  # fmt: skip
    calls.append("varlen_bwd")
    causal = _checked(q, k, v, causal, left, right, softcap, max_k)
    spans = _spans(cu_q, cu_k)
    for gradient, end in ((dq, spans[-1][0].stop), (dk, spans[-1][1].stop), (dv, spans[-1][1].stop)):
        gradient.fill_(float("nan"))
        gradient[:end] = 0.0
    kept = _kept(spans)
    if kept:
        numbers, (rows, cq, mq), (slots, ck, mk) = kept
        slopes = _slopes(alibi, len(spans))
        lse = lse.clone()
        for n in numbers:
            a, b = spans[n]
            lse[:, a] = _as_port(lse[:, a], a.stop - a.start, b.stop - b.start, causal, None if slopes is None else slopes[n])
        some = None if slopes is None else slopes[numbers].contiguous()
        tensors = [t[i].contiguous() for t, i in ((dout, rows), (q, rows), (k, slots), (v, slots), (out, rows))]
        grads = [torch.empty_like(t) for t in tensors[1:4]]
        _varlen_bwd(
            *tensors, lse[:, rows].T.contiguous(), *grads, cq, ck, some, mq, mk, dropout_p, scale, zero, causal, -1, -1, 0.0, deterministic, generator,
            state if dropout_p else None,
        )  # fmt: skip
        dq[rows], dk[slots], dv[slots] = grads
    return dq, dk, dv, torch.empty(0)


def fwd_kvcache(q, k_cache, v_cache, k, v, lengths, cos, sin, batch_index, leftpad, table, alibi, out, scale, causal, left, right, softcap,
                interleaved, splits):  # fmt: skip
    calls.append("fwd_kvcache")
    assert k is None and v is None and cos is None, "attnreg appends in its own caches"
    assert batch_index is None or (table is None and batch_index.dtype == torch.int32)
    assert lengths.dtype == torch.int32 and not (table is not None and leftpad is not None)
    batch, queries = q.shape[:2]
    capacity = k_cache.shape[1] if table is None else table.shape[1] * k_cache.shape[1]
    causal = _checked(q, k_cache, v_cache, causal, left, right, softcap, capacity)
    starts = [0] * batch if leftpad is None else leftpad.tolist()
    buffers = range(batch) if batch_index is None else batch_index.tolist()
    slopes = _slopes(alibi, batch)
    result = torch.zeros_like(q)
    lse = torch.full((batch, q.shape[2], queries), float("inf"))
    for b, (start, end) in enumerate(zip(starts, lengths.tolist())):
        assert 0 <= start <= end <= capacity
        keys, values = (c[buffers[b]] if table is None else c[table[b].long()].flatten(0, 1) for c in (k_cache, v_cache))
        keys, values = keys[start:end], values[start:end]
        if end == start:
            continue
        some = None if slopes is None else slopes[b : b + 1]
        if queries <= 3:  # the port's decoding kernel, a program for each query row, so only for a few
            room = torch.zeros((1, keys.shape[0] + 64, *keys.shape[1:]), dtype=q.dtype)
            rooms = room.clone(), room.clone()
            rooms[0][0, : keys.shape[0]], rooms[1][0, : keys.shape[0]] = keys, values
            used = torch.tensor([keys.shape[0]], dtype=torch.int32)
            got, logs = _fwd_kvcache(
                q[b : b + 1], *rooms, None, None, used, None, None, None, None, None, some, None, scale, causal, -1, -1, 0.0, True, splits
            )
            logs = logs.reshape(q.shape[2], queries)
        else:
            got, logs, _, _ = _fwd(
                q[b : b + 1], keys[None].contiguous(), values[None].contiguous(), None, some, 0.0, scale, causal, -1, -1, 0.0, False, None
            )
            logs = logs[0]
        result[b] = got[0]
        lse[b] = _as_cuda(logs, queries, keys.shape[0], causal, None if some is None else some[0])
    return result, lse


for _name in ("fwd", "bwd", "varlen_fwd", "varlen_bwd", "fwd_kvcache"):
    setattr(port, _name, globals()[_name])
for _operator in list(vars(interface).values()):
    if type(_operator).__name__ == "CustomOpDef":
        _operator.register_kernel("cpu")(_operator._init_fn)
