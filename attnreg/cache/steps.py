"""A call with a cache: the keys that it would see once the new tokens are appended, and masks that cover them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..checks.tensors import autocast, cast_dtype, check_reader, check_sizes, check_tensor, take_tensors
from ..packing import Padding
from ..visibility import cleaned_bias

if TYPE_CHECKING:
    from ..call import AttentionCall
    from .protocol import LayerCache


def check_cache(cache: Any, key: Any, value: Any, key_lengths: Any) -> None:
    if not hasattr(cache, "prepare"):
        how = "; give one layer of it, cache.layer(i)" if hasattr(cache, "layer") else ""
        raise TypeError(f"cache: one layer of a cache (attnreg.cache.LayerCache), got {type(cache).__name__}{how}")
    if key_lengths is not None:
        raise ValueError("key_lengths: not together with cache, which knows its rows' lengths; crop(lengths) shortens them")
    if (key is None) != (value is None):
        raise ValueError("key, value: both, to append; or both None, to attend without appending")


def take_step(
    call: AttentionCall,
    cache: LayerCache,
    query: Any,
    key: Any,
    value: Any,
    n_heads: Any,
    n_kv_heads: Any,
    counts: Any,
    window: Any,
    key_mask: Any,
) -> None:
    """Query, key and value as they will be once the new tokens are appended. Changes nothing: `step` remembers what to do."""
    mask = key_mask.mask if isinstance(key_mask, Padding) else key_mask
    if key is not None:
        take_tensors(call, {"query": query, "key": key, "value": value}, n_heads, n_kv_heads, packed=False)
        check_sizes(call, n_heads, n_kv_heads)
        new = (call.key, call.value) if call.layout == "bshd" else (call.key.transpose(1, 2), call.value.transpose(1, 2))
        call.see(cache, cache.prepare(*new, counts, window, mask))
        return
    take_tensors(call, {"query": query}, n_heads, n_kv_heads, packed=False)
    call.see(cache, cache.prepare(None, None, None, window, mask))
    if call.pages is not None and cast_dtype(call.pages.keys) != call.pages.keys.dtype:
        call.gather_pages()  # what is cast is a copy: of these rows, not of the whole pool
    if call.pages is None:
        call.key, call.value = autocast(call.key), autocast(call.value)
        check_reader(call, call.key, call.key.shape[0])
    check_sizes(call, n_heads, n_kv_heads)


def masks_over(call: AttentionCall, given: dict[str, Any]) -> tuple:
    """Masks and bias, which cover `step.slots`, cut or padded to the keys that the call sees."""
    slots, size = call.step.slots, call.key_length
    fitted = []
    for name in ("key_mask", "mask", "bias"):
        tensor = given[name]
        if tensor is None:
            fitted.append(tensor)
            continue
        padding = tensor if isinstance(tensor, Padding) else None
        tensor = tensor if padding is None else padding.mask
        check_tensor(name, tensor)
        width = tensor.shape[-1] if tensor.dim() else 0
        if name == "key_mask" and tuple(tensor.shape) != (call.batch, slots):
            raise ValueError(
                f"key_mask: shape (B, cache.slots(n_new)) = {(call.batch, slots)}, past and new tokens, got {tuple(tensor.shape)}"
            )
        if name != "key_mask" and tensor.dim() == 4 and width != 1 and width != slots:
            raise ValueError(f"{name}: last dimension cache.slots(n_new) = {slots}, past and new tokens, or 1; got {width}")
        if slots > size and width == slots:
            tensor = tensor[..., :size]
        elif slots < size and width == slots:
            tensor = torch.nn.functional.pad(tensor, (0, size - slots))
        elif padding is not None:
            tensor = padding
        fitted.append(tensor)
    return tuple(fitted)


def clean_queries(call: AttentionCall) -> None:
    """What a cache hands over beyond its rows is finite, and padded queries are few: once they are clean, nothing else need be."""
    if call.finite_padding or call.key_mask is not None or call.key_starts is not None:
        return  # a slot that the caller hides may hold anything
    real = call.query_mask
    if call.query_lengths is not None:
        inside = torch.arange(call.query_length, device=call.device)[None] < call.query_lengths[:, None]
        real = inside if real is None else real & inside
    if real is not None:
        if call.bias is not None:
            call.bias = cleaned_bias(call)
        call.query = call.query.masked_fill(~(real[:, :, None, None] if call.layout == "bshd" else real[:, None, :, None]), 0.0)
    call.finite_padding = True
