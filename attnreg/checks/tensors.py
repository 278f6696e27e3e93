"""Query, key and value: four dimensions of each, whatever they were given as."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from ..call import AttentionCall

wrapped = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor belongs to a transform of torch.func: vmap, grad, vjp, jvp."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def take_tensors(call: AttentionCall, query: Any, key: Any, value: Any, n_heads: int | None, n_kv_heads: int | None, packed: bool) -> None:
    paged = call.pages is not None
    given = {"query": query} if paged else {"query": query, "key": key, "value": value}
    for name, tensor in given.items():
        check_tensor(name, tensor)
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{name}: float16, bfloat16, float32 or float64, got {tensor.dtype}")
    if not paged:
        if not query.dim() == key.dim() == value.dim():
            raise ValueError(f"query, key, value: the same number of dimensions, got {query.dim()}, {key.dim()} and {value.dim()}")
        for name, tensor in (("key", key), ("value", value)):
            if tensor.device != query.device:
                raise ValueError(f"{name}: on the query's device {query.device}, got {tensor.device}; move it there")
    for name, count in (("n_heads", n_heads), ("n_kv_heads", n_kv_heads)):
        if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
            raise TypeError(f"{name}: a whole number of heads, got {count!r}")
        if count is not None and count <= 0:
            raise ValueError(f"{name}: at least 1, got {count}")
    if query.dim() == 3:
        query, key, value = _from_three_dims(call, query, key, value, n_heads, n_kv_heads, packed)
    elif query.dim() != 4:
        raise ValueError(
            f"query: (B, Sq, Hq, D), or flat (B, Sq, Hq*D) with n_heads, or packed rows (T, Hq, D) with cu_seqlens; got shape {tuple(query.shape)}"
        )
    if query.device.type != "meta" and torch.is_autocast_enabled(query.device.type):
        query, key, value = (autocast(t) for t in (query, key, value))
        call.repeatable = False
    if not paged:
        for name, tensor in (("key", key), ("value", value)):
            if tensor.dtype != query.dtype:
                raise TypeError(f"{name}: the query's dtype {query.dtype}, got {tensor.dtype}; convert one of them")
    call.query, call.key, call.value = query, key, value
    check_sizes(call, n_heads, n_kv_heads)


def _from_three_dims(
    call: AttentionCall, query: Any, key: Any, value: Any, n_heads: int | None, n_kv_heads: int | None, packed: bool
) -> tuple:
    if call.layout != "bshd":
        raise ValueError(
            f"layout: 'bhsd' goes with 4-D tensors; flat and packed 3-D tensors have the heads last, got shape {tuple(query.shape)}"
        )
    if call.pages is not None:
        raise ValueError(f"query: 4-D (B, Sq, Hq, D) with a paged cache, got shape {tuple(query.shape)}")
    call.repeatable = False
    rows = packed and (n_heads is None or query.shape[0] != 1)
    if packed and not rows and query.shape[1] == n_heads:
        raise ValueError(
            f"query: shape {tuple(query.shape)} with cu_seqlens and n_heads={n_heads} could be packed rows (T, H, D) or flat (1, T, H*D); give a 4-D tensor"
        )
    if rows:
        call.shape_given = "packed rows"
        return tuple(t.unsqueeze(0) for t in (query, key, value))
    if n_heads is None:
        raise ValueError(
            f"query: 3-D tensors of shape {tuple(query.shape)} need n_heads (flat (B, Sq, Hq*D)) or cu_seqlens (packed rows (T, Hq, D)); "
            "a single sequence (S, H, D) is tensor.unsqueeze(0)"
        )
    call.shape_given = "flat"
    kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    split = []
    for name, tensor, heads in (("query", query, n_heads), ("key", key, kv_heads), ("value", value, kv_heads)):
        if tensor.shape[2] % heads:
            raise ValueError(
                f"{name}: flat size {tensor.shape[2]} is not a multiple of {'n_heads' if name == 'query' else 'n_kv_heads'}={heads}; "
                "for grouped heads give n_kv_heads"
            )
        split.append(tensor.unflatten(2, (heads, tensor.shape[2] // heads)))
    return tuple(split)


def check_sizes(call: AttentionCall, n_heads: int | None, n_kv_heads: int | None) -> None:
    query, key, value = call.query, call.key, call.value
    heads, kv_heads, head_dim = call.query_heads, call.key_heads, call.head_dim
    if call.pages is None:
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


def autocast(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """As torch does for its own attention: floating tensors but float64 become the autocast dtype."""
    if tensor is None or tensor.dtype == torch.float64 or not tensor.dtype.is_floating_point:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))
