"""The third step of a call: the chosen backend runs it, in its own layout, and the result gets the caller's shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .backend import Backend, Output
from .call import AttentionCall
from .spec import Feature
from .visibility import real_queries


def run(call: AttentionCall, backend: Backend, function: Callable[[AttentionCall], Output]) -> Output:
    """Runs a call by a function of the chosen backend and gives the result the caller's shape."""
    if _gathers(call, backend):
        call.gather_pages()
    if _keeps(call):
        # The graph keeps what it was given, and the next step writes into the cache's own.
        call.key, call.value = call.key.clone(), call.value.clone()
    given = call.layout
    if call.spec.zero_size:
        result = _of_nothing(call)
    elif backend.layout == given:
        result = _promised(function, call, backend)
    else:
        call.to_layout(backend.layout)
        result = _promised(function, call, backend)
        result = (result[0].transpose(1, 2), result[1]) if call.return_lse else result.transpose(1, 2)
    if call.return_lse and Feature.LSE_GRADIENT not in backend.claims.features:
        result = (result[0], result[1].detach())
    if call.shape_given == "4-D":
        return result
    output = result[0] if call.return_lse else result
    output = output.flatten(2) if call.shape_given == "flat" else output.squeeze(0)
    return (output, result[1]) if call.return_lse else output


def changes_nothing(call: AttentionCall, backend: Backend) -> bool:
    """Whether what the backend returns is the result as it is, but for the layout."""
    return not (call.return_lse or call.spec.zero_size or call.shape_given != "4-D" or _gathers(call, backend) or _keeps(call))


def _gathers(call: AttentionCall, backend: Backend) -> bool:
    return call.pages is not None and Feature.PAGED not in backend.claims.features


def _keeps(call: AttentionCall) -> bool:
    return call.cache is not None and call.pages is None and bool(call.spec.gradients) and not {"key", "value"} & set(call.spec.gradients)


def _promised(function: Callable[[AttentionCall], Output], call: AttentionCall, backend: Backend) -> Output:
    """What a backend returns, if it is of the kind that every backend returns. Values are the conformance suite's matter."""
    # Asked before, since a backend may change its call.
    shape, dtype, return_lse, compiling = (*call.query.shape[:3], call.value_dim), call.query.dtype, call.return_lse, call.spec.compiling
    lse_shape = (call.batch, call.query_heads, call.query_length)
    result = function(call)
    if return_lse and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(f"backend {backend.name!r}: run returned a {type(result).__name__}, where call.return_lse asks for (output, lse)")
    output = result[0] if return_lse else result
    if not isinstance(output, torch.Tensor):
        raise TypeError(f"backend {backend.name!r}: run returned a {type(output).__name__}, where the output tensor was asked for")
    if not compiling and (output.shape != shape or output.dtype != dtype):
        raise ValueError(
            f"backend {backend.name!r}: run returned {tuple(output.shape)} of {output.dtype}, where the output is {shape} of {dtype}; "
            f"`attnreg check {backend.name}` tries what it claims"
        )
    if return_lse and not compiling and not (isinstance(result[1], torch.Tensor) and result[1].shape == lse_shape):
        given = tuple(result[1].shape) if isinstance(result[1], torch.Tensor) else f"a {type(result[1]).__name__}"
        raise ValueError(f"backend {backend.name!r}: run returned {given} as the lse, which is {lse_shape}: batch, query heads, queries")
    return result


def run_appending(function: Callable[..., Output], call: AttentionCall, *arguments: Any) -> Output:
    """`function(call, *arguments)` for a call with a cache: new tokens go to spare room, and count only once the backend is through."""
    cache, step = call.cache, call.step
    if step.new is None:
        return function(call, *arguments)
    try:
        cache.write(step)
        result = function(call, *arguments)
    except BaseException:
        cache.undo(step)
        raise
    cache.commit(step)
    return result


def _of_nothing(call: AttentionCall) -> Output:
    """The result when a size is 0: no row sees anything."""
    output = call.zeros()
    if not call.return_lse:
        return output
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    lse = torch.full((call.batch, call.query_heads, call.query_length), float("-inf"), dtype=dtype, device=call.device)
    if call.sinks is not None:
        lse = torch.maximum(lse, call.sinks.to(dtype)[None, :, None])
        if (queries := real_queries(call)) is not None:
            lse = lse.masked_fill(~queries[:, None], float("-inf"))
    return output, lse
