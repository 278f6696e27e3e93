"""Which slots a query sees, as tensors: the contract's "Visibility", once, for every backend that needs it spelled out.

Shapes are broadcastable: B, Hq, Sq and Sk may be 1 where nothing depends on them. Nothing here reads a tensor's values on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .call import AttentionCall


def slots(call: AttentionCall) -> torch.Tensor:
    """The slot p(b, i) at which each query sits, (B or 1, Sq) int64: the last query sits on the last key."""
    i = torch.arange(call.query_length, device=call.device)
    if call.cu_seqlens is not None:
        cu_query, cu_key = call.cu_seqlens
        segment = segments(cu_query, i)
        return (cu_key[segment + 1].long() - (cu_query[segment + 1].long() - i))[None]
    keys = call.key_length if call.key_lengths is None else call.key_lengths.long()[:, None]
    queries = call.query_length if call.query_lengths is None else call.query_lengths.long()[:, None]
    return i[None] + (keys - queries)


def real_keys(call: AttentionCall) -> torch.Tensor | None:
    """Slots that hold a key, (B or 1, Sk) bool: inside starts and lengths, unmasked, not past the last segment. None means all."""
    if call.key_lengths is None and call.key_starts is None and call.cu_seqlens is None:
        return call.key_mask
    j = torch.arange(call.key_length, device=call.device)[None]
    parts = []
    if call.key_lengths is not None:
        parts.append(j < call.key_lengths[:, None])
    if call.key_starts is not None:
        parts.append(j >= call.key_starts[:, None])
    if call.key_mask is not None:
        parts.append(call.key_mask)
    if call.cu_seqlens is not None:
        parts.append(j < call.cu_seqlens[1][-1])
    return _all(parts)


def real_queries(call: AttentionCall) -> torch.Tensor | None:
    """Rows that are a query and not padding, (B or 1, Sq) bool; None means all."""
    if call.query_lengths is None and call.cu_seqlens is None:
        return call.query_mask
    i = torch.arange(call.query_length, device=call.device)[None]
    parts = []
    if call.query_lengths is not None:
        parts.append(i < call.query_lengths[:, None])
    if call.query_mask is not None:
        parts.append(call.query_mask)
    if call.cu_seqlens is not None:
        parts.append(i < call.cu_seqlens[0][-1])
    return _all(parts)


def structure(call: AttentionCall) -> torch.Tensor | None:
    """What causality, the window and packed segments allow, (B or 1, Sq, Sk) bool; None means everything."""
    if not call.causal and call.window is None and call.cu_seqlens is None:
        return None
    j = torch.arange(call.key_length, device=call.device)
    lone = call.query_length == 1 and call.cu_seqlens is None  # and so on the last key
    if lone and call.key_lengths is None and call.query_lengths is None:
        j, p = j[None, None], call.key_length - 1
    else:
        p = slots(call)[:, :, None]
    left, right = call.window or (None, None)
    parts = []
    if call.causal and not lone:
        parts.append(j <= p)
    if left is not None:
        parts.append(j >= p - left)
    if right is not None:
        parts.append(j <= p + right)
    if call.cu_seqlens is not None:
        cu_query, cu_key = call.cu_seqlens
        i = torch.arange(call.query_length, device=call.device)
        parts.append((segments(cu_query, i)[:, None] == segments(cu_key, j)[None, :])[None])
    return _all(parts)


def visible(call: AttentionCall) -> torch.Tensor | None:
    """Slot j visible to query i, by everything but `bias`: (B or 1, Hq or 1, Sq or 1, Sk) bool; None means everything is.

    Padded queries keep what they see: padding of queries only concerns the output.
    """
    parts = []
    if (real := real_keys(call)) is not None:
        parts.append(real[:, None, None, :])
    if (allowed := structure(call)) is not None:
        parts.append(allowed[:, None])
    if call.mask is not None:
        parts.append(call.mask)
    return _all(parts)


def cleaned_bias(call: AttentionCall) -> torch.Tensor:
    """`call.bias` with zeros in padded query rows. NaN may stand there, and would reach key and value backward: 0 * NaN is NaN.

    Padded slots need no cleaning: masking replaces their scores. A number that also serves a real row is no padding.
    """
    bias = call.bias
    if call.finite_padding or (queries := real_queries(call)) is None:
        return bias
    padded = ~queries
    padded = padded.all(0, keepdim=True) if bias.shape[0] == 1 else padded
    padded = padded.all(1, keepdim=True) if bias.shape[2] == 1 else padded
    return bias.masked_fill(padded[:, None, :, None], 0.0)


def alibi_bias(call: AttentionCall, dtype: torch.dtype) -> torch.Tensor:
    """-slope * |p(b, i) - j|, the linear bias of Press et al. 2021 (arXiv:2108.12409) by slots: (B or 1, Hq, Sq, Sk)."""
    j = torch.arange(call.key_length, device=call.device)
    distance = (slots(call)[:, None, :, None] - j).abs().to(dtype)
    slopes = call.alibi_slopes.to(dtype)
    return -(slopes[None, :, None, None] if slopes.dim() == 1 else slopes[:, :, None, None]) * distance


def added(call: AttentionCall, dtype: torch.dtype) -> torch.Tensor | None:
    """What is added to the scores, `bias` and alibi, as small as broadcasting allows; None means nothing."""
    bias = None if call.bias is None else cleaned_bias(call)
    if call.alibi_slopes is None:
        return None if bias is None else _narrowed(bias, dtype)
    alibi = alibi_bias(call, torch.promote_types(dtype, torch.float32))
    # Added up before they are narrowed: two finite numbers of half precision may add up to -inf, which would hide a slot.
    return _narrowed(alibi if bias is None else alibi + _narrowed(bias, alibi.dtype), dtype)


def _narrowed(bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In another dtype; a finite number too large for it stays finite, since only -inf means "not seen"."""
    limit = torch.finfo(dtype).max
    if torch.finfo(bias.dtype).max <= limit:
        return bias.to(dtype)
    narrowed = torch.where(bias == float("-inf"), bias, bias.clamp(-limit, limit)).to(dtype)
    if not bias.requires_grad:
        return narrowed
    # A clamp stops the gradient of what it cuts, whose slots are seen all the same.
    finite = bias.masked_fill(~bias.isfinite(), 0.0)
    return narrowed.detach() + (finite - finite.detach()).to(dtype)


def cleaned(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, queries: torch.Tensor | None, keys: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies with zeros at padding, in (B, H, S, D): it may hold NaN, and 0 * NaN is NaN. This also keeps gradients out of it.

    queries, keys: what `real_queries` and `real_keys` say.
    """
    if queries is not None:
        query = query.masked_fill(~queries[:, None, :, None], 0.0)
    if keys is not None:
        hidden = ~keys[:, None, :, None]
        key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
    return query, key, value


def segments(cu_seqlens: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Segment number of each packed row. Rows past the end get the last segment; `real_keys` and `real_queries` rule them out."""
    return (torch.searchsorted(cu_seqlens.long(), index, right=True) - 1).clamp(0, max(cu_seqlens.shape[0] - 2, 0))


def _all(parts: list[torch.Tensor]) -> torch.Tensor | None:
    if not parts:
        return None
    whole = parts[0]
    for part in parts[1:]:
        whole = whole & part
    return whole
