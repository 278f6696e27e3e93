"""The third step of a call: the chosen backend runs it, in its own layout, and the result gets the caller's shape."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .backend import Backend, Output
from .call import AttentionCall
from .spec import Feature
from .visibility import real_queries


def run(call: AttentionCall, backend: Backend, function: Callable[[AttentionCall], Output]) -> Output:
    """Runs a call by a function of the chosen backend and gives the result the caller's shape."""
    if call.pages is not None and Feature.PAGED not in backend.claims.features:
        call.gather_pages()
    given = call.layout
    if call.spec.zero_size:
        result = _of_nothing(call)
    elif backend.layout == given:
        result = function(call)
    else:
        call.to_layout(backend.layout)
        result = function(call)
        result = (result[0].transpose(1, 2), result[1]) if call.return_lse else result.transpose(1, 2)
    if call.return_lse and Feature.LSE_GRADIENT not in backend.claims.features:
        result = (result[0], result[1].detach())
    if call.shape_given == "4-D":
        return result
    output = result[0] if call.return_lse else result
    output = output.flatten(2) if call.shape_given == "flat" else output.squeeze(0)
    return (output, result[1]) if call.return_lse else output


def run_appending(call: AttentionCall, backend: Backend, function: Callable[[AttentionCall], Output]) -> Output:
    """Runs a call with a cache: new tokens go to spare room, and count only once the backend is through."""
    cache, step = call.cache, call.step
    if step.new is None:
        return run(call, backend, function)
    try:
        cache.write(step)
        result = run(call, backend, function)
    except BaseException:
        cache.undo(step)
        raise
    cache.commit(step)
    return result


def _of_nothing(call: AttentionCall) -> Output:
    """The result when a size is 0: no row sees anything. Connected to the inputs, so that a backward pass finds zero gradients."""
    shape = (*call.query.shape[:3], call.value_dim)
    output = call.query.new_zeros(shape)
    for tensor in (call.query, call.key, call.value, call.bias, call.sinks, call.alibi_slopes):
        if tensor is not None and tensor.requires_grad:
            output = output + tensor.masked_fill(torch.ones((), dtype=torch.bool, device=tensor.device), 0.0).sum().to(output.dtype)
    if not call.return_lse:
        return output
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    lse = torch.full((call.batch, call.query_heads, call.query_length), float("-inf"), dtype=dtype, device=call.device)
    if call.sinks is not None:
        lse = torch.maximum(lse, call.sinks.to(dtype)[None, :, None])
        if (queries := real_queries(call)) is not None:
            lse = lse.masked_fill(~queries[:, None], float("-inf"))
    return output, lse
