"""Query, key and value: four dimensions of each, whatever they were given as."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from .numbers import whole_number

if TYPE_CHECKING:
    from ..call import AttentionCall

wrapped = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor belongs to a transform of torch.func: vmap, grad, vjp, jvp."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def take_tensors(call: AttentionCall, given: dict[str, Any], n_heads: int | None, n_kv_heads: int | None, packed: bool) -> None:
    """given: query, key and value; or the query alone, where keys and values are there already. Their sizes are `check_sizes`' matter."""
    for name, tensor in given.items():
        check_tensor(name, tensor)
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{name}: float16, bfloat16, float32 or float64, got {tensor.dtype}")
    query = given["query"]
    if any(tensor.dim() != query.dim() for tensor in given.values()):
        dims = [tensor.dim() for tensor in given.values()]
        raise ValueError(f"query, key, value: the same number of dimensions, got {dims[0]}, {dims[1]} and {dims[2]}")
    for name, tensor in given.items():
        if tensor.device != query.device:
            raise ValueError(f"{name}: on the query's device {query.device}, got {tensor.device}; move it there")
    for name, count in (("n_heads", n_heads), ("n_kv_heads", n_kv_heads)):
        if count is not None:
            whole_number(name, count, 1)
    if query.dim() == 3:
        given = _from_three_dims(call, given, n_heads, n_kv_heads, packed)
    elif query.dim() != 4:
        raise ValueError(
            f"query: (B, Sq, Hq, D), or flat (B, Sq, Hq*D) with n_heads, or packed rows (T, Hq, D) with cu_seqlens; got shape {tuple(query.shape)}"
        )
    if query.device.type != "meta" and torch.is_autocast_enabled(query.device.type):
        given = {name: autocast(tensor) for name, tensor in given.items()}
        call.repeatable = False
    for name, tensor in given.items():
        if tensor.dtype != given["query"].dtype:
            raise TypeError(f"{name}: the query's dtype {given['query'].dtype}, got {tensor.dtype}; convert one of them")
        setattr(call, name, tensor)


def _from_three_dims(
    call: AttentionCall, given: dict[str, torch.Tensor], n_heads: int | None, n_kv_heads: int | None, packed: bool
) -> dict[str, torch.Tensor]:
    query = given["query"]
    if call.layout != "bshd":
        raise ValueError(
            f"layout: 'bhsd' goes with 4-D tensors; flat and packed 3-D tensors have the heads last, got shape {tuple(query.shape)}"
        )
    call.repeatable = False
    rows = packed and (n_heads is None or query.shape[0] != 1)
    if packed and not rows and query.shape[1] == n_heads:
        raise ValueError(
            f"query: shape {tuple(query.shape)} with cu_seqlens and n_heads={n_heads} could be packed rows (T, H, D) or flat (1, T, H*D); give a 4-D tensor"
        )
    if rows:
        call.shape_given = "packed rows"
        return {name: tensor.unsqueeze(0) for name, tensor in given.items()}
    if n_heads is None:
        raise ValueError(
            f"query: 3-D tensors of shape {tuple(query.shape)} need n_heads (flat (B, Sq, Hq*D)) or cu_seqlens (packed rows (T, Hq, D)); "
            "a single sequence (S, H, D) is tensor.unsqueeze(0)"
        )
    call.shape_given = "flat"
    split = {}
    for name, tensor in given.items():
        heads = n_heads if name == "query" or n_kv_heads is None else n_kv_heads
        if tensor.shape[2] % heads:
            raise ValueError(
                f"{name}: flat size {tensor.shape[2]} is not a multiple of {'n_heads' if name == 'query' else 'n_kv_heads'}={heads}; "
                "for grouped heads give n_kv_heads"
            )
        split[name] = tensor.unflatten(2, (heads, tensor.shape[2] // heads))
    return split


def check_sizes(call: AttentionCall, n_heads: int | None, n_kv_heads: int | None) -> None:
    query, key, value = call.query, call.key, call.value
    heads, kv_heads, head_dim = call.query_heads, call.key_heads, call.head_dim
    if call.pages is not None:
        check_reader(call, call.pages.keys, call.pages.block_table.shape[0])
    else:
        if key.shape[0] != query.shape[0] or value.shape[0] != query.shape[0]:
            raise ValueError(f"key, value: the query's batch size {query.shape[0]}, got {key.shape[0]} and {value.shape[0]}")
        length, head = (1, 2) if call.layout == "bshd" else (2, 1)
        if key.shape[length] != value.shape[length]:
            raise ValueError(f"value: as many slots as key, {key.shape[length]}, got {value.shape[length]}")
        if key.shape[head] != value.shape[head]:
            raise ValueError(f"value: as many heads as key, {key.shape[head]}, got {value.shape[head]}")
        if key.shape[3] != head_dim:
            raise ValueError(f"key: the query's head dim {head_dim}, got {key.shape[3]}")
    if n_heads is not None and heads != n_heads:
        raise ValueError(f"n_heads: {n_heads}, but query has {heads} heads (layout {call.layout!r})")
    if n_kv_heads is not None and kv_heads != n_kv_heads:
        raise ValueError(f"n_kv_heads: {n_kv_heads}, but key has {kv_heads} heads (layout {call.layout!r})")
    if head_dim == 0 or call.value_dim == 0:
        raise ValueError(f"query, value: a head dim of at least 1, got {head_dim} and {call.value_dim}")
    if kv_heads == 0:
        raise ValueError("key: at least one head, got 0")
    if kv_heads > heads:
        raise ValueError(f"key: at most as many heads as query, {heads}, got {kv_heads} (layout {call.layout!r})")
    if heads % kv_heads:
        raise ValueError(f"key: a number of heads that divides the query's {heads}, got {kv_heads} (layout {call.layout!r})")


def check_reader(call: AttentionCall, keys: torch.Tensor, rows: int) -> None:
    """The query of a call that is given no keys against those that are stored, (..., Hkv, D), for so many rows."""
    query = call.query
    if query.device != keys.device:
        raise ValueError(f"query: on the cache's device {keys.device}, got {query.device}; move one of them")
    if query.dtype != keys.dtype:
        raise TypeError(f"query: the cache's dtype {keys.dtype}, got {query.dtype}; convert it, or make the cache in that dtype")
    if query.shape[0] != rows:
        raise ValueError(f"query: batch size {rows}, that of the cache, got {query.shape[0]}")
    if query.shape[3] != keys.shape[3]:
        raise ValueError(f"query: head dim {keys.shape[3]}, as in the cache, got {query.shape[3]}")


def check_tensor(name: str, given: Any) -> None:
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{name}: a torch.Tensor, got {type(given).__name__}")
    if given.is_nested:
        raise TypeError(f"{name}: a dense tensor; nested tensors are not taken: give packed rows with cu_seqlens")
    if given.layout != torch.strided:
        raise TypeError(f"{name}: a dense tensor, got layout {given.layout}; use to_dense()")
    if type(given).__name__ == "DTensor":
        raise TypeError(f"{name}: a local tensor; distributed tensors are not taken: use to_local() or local_map")
    if not torch.compiler.is_compiling() and (wrapped(given) or forward_ad._current_level >= 0):
        _refuse_transforms(name, given)


def _refuse_transforms(name: str, tensor: torch.Tensor) -> None:
    """What few kernels take. Backward mode, by torch.func.grad and vjp too, is that of the kernel."""
    functorch = torch._C._functorch
    forward = {i.level() for i in functorch.get_interpreter_stack() or () if i.key() == functorch.TransformType.Jvp}
    while True:
        if functorch.is_batchedtensor(tensor):
            raise TypeError(
                f"{name}: an ordinary tensor; torch.func.vmap (torch.vmap) is not taken: fold the mapped dimension into the batch, or loop"
            )
        dual = forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None
        if dual or functorch.maybe_get_level(tensor) in forward:
            raise TypeError(
                f"{name}: a tensor without a tangent; forward-mode derivatives (torch.func.jvp, torch.autograd.forward_ad) are not taken: use "
                "backward mode, torch.func.vjp or torch.autograd.grad"
            )
        if not wrapped(tensor) or functorch.is_functionaltensor(tensor):
            return
        tensor = functorch.get_unwrapped(tensor)


def check_device(call: AttentionCall, name: str, tensor: torch.Tensor) -> None:
    if tensor.device != call.device:
        raise ValueError(f"{name}: on the query's device {call.device}, got {tensor.device}; move it there")


def autocast(tensor: torch.Tensor) -> torch.Tensor:
    """As torch does for its own attention: under autocast, floating tensors but float64 become its dtype."""
    return tensor.to(cast_dtype(tensor))


def cast_dtype(tensor: torch.Tensor) -> torch.dtype:
    device, dtype = tensor.device.type, tensor.dtype
    if device == "meta" or not torch.is_autocast_enabled(device) or dtype == torch.float64 or not dtype.is_floating_point:
        return dtype
    return torch.get_autocast_dtype(device)
