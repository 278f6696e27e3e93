"""Attention by the book: Python floats, one row at a time, over the visible slots only. Shares no code with attnreg."""

from __future__ import annotations

import math

import torch


def attend(
    query, key, value, *, causal=False, window=None, query_mask=None, key_mask=None, mask=None, bias=None, key_lengths=None,
    query_lengths=None, key_starts=None, cu_seqlens=None, alibi_slopes=None, softcap=None, sinks=None, scale=None,
):  # fmt: skip
    """Output (B, Sq, Hq, Dv) and lse (B, Hq, Sq), float64. Arguments as `attnreg.attention`, canonical layout, 4-D."""
    rows, queries, heads, dim = query.shape
    slots, group = key.shape[1], heads // key.shape[2]
    factor = 1 / math.sqrt(dim) if scale is None else scale
    output = torch.zeros(rows, queries, heads, value.shape[3], dtype=torch.float64)
    lse = torch.full((rows, heads, queries), -math.inf, dtype=torch.float64)

    def at(tensor, *index):
        return tensor[tuple(i if n > 1 else 0 for i, n in zip(index, tensor.shape))].item()

    for b in range(rows):
        for i, span, position in _rows(b, queries, slots, key_lengths, query_lengths, key_starts, cu_seqlens):
            if query_mask is not None and not query_mask[b, i]:
                continue
            for h in range(heads):
                seen = []
                for j in span:
                    if causal and j > position:
                        continue
                    if window and window[0] is not None and j < position - window[0]:
                        continue
                    if window and window[1] is not None and j > position + window[1]:
                        continue
                    if key_mask is not None and not key_mask[b, j]:
                        continue
                    if mask is not None and not at(mask, b, h, i, j):
                        continue
                    score = factor * sum(x * y for x, y in zip(query[b, i, h].tolist(), key[b, j, h // group].tolist()))
                    if softcap is not None:
                        score = softcap * math.tanh(score / softcap)
                    if alibi_slopes is not None:
                        score -= (alibi_slopes[h] if alibi_slopes.dim() == 1 else alibi_slopes[b, h]).item() * abs(position - j)
                    if bias is not None:
                        score += at(bias, b, h, i, j)
                    if score != -math.inf:
                        seen.append((j, score))
                terms = [score for _, score in seen] + ([] if sinks is None else [sinks[h].item()])
                if not terms:
                    continue
                top = max(terms)
                total = sum(math.exp(term - top) for term in terms)
                lse[b, h, i] = top + math.log(total)
                for j, score in seen:
                    output[b, i, h] += math.exp(score - top) / total * value[b, j, h // group].double()
    return output, lse


def _rows(b, queries, slots, key_lengths, query_lengths, key_starts, cu_seqlens):
    """(query row, the slots that exist for it, its own slot) for every real query of row b."""
    if cu_seqlens is not None:
        starts_q, starts_k = (c.tolist() for c in cu_seqlens)
        for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:]):
            for i in range(q0, q1):
                yield i, range(k0, k1), k1 - (q1 - i)
        return
    length = slots if key_lengths is None else int(key_lengths[b])
    count = queries if query_lengths is None else int(query_lengths[b])
    start = 0 if key_starts is None else int(key_starts[b])
    for i in range(count):
        yield i, range(start, length), length - count + i
