"""What makes the repeated call cheap: the checked call less its tensors, found again by what was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import policy
from .backend import Output
from .call import AttentionCall
from .select import Selection
from .selections import LIMIT


class Plan(NamedTuple):
    """What a repeated call needs: the checked call less its tensors, and what to run."""

    fits: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool]
    """Whether query, key and value are as they were: sizes, strides, dtype, device, gradients, autocast."""
    template: dict[str, Any]
    selection: Selection
    run: Callable[[AttentionCall], Output] | None
    """The backend's function, where the result needs no change of layout or shape; else None."""


by_signature: dict[tuple, list[Plan]] = {}


def signature_of(tensor: torch.Tensor | None) -> tuple | None:
    if tensor is None:
        return None
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def on_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple:
    """Facts of a CUDA call that its shapes don't tell: alignment, and whether a graph is being captured."""
    return query.data_ptr() % 16, key.data_ptr() % 16, value.data_ptr() % 16, torch.cuda.is_current_stream_capturing()


def remember(
    plans: dict[tuple, list[Plan]],
    signature: tuple,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
    selection: Selection,
) -> None:
    """Makes the plan of a call. `plans`: `by_signature` as it was before the choice."""
    template = {n: v for n, v in call.__dict__.items() if not isinstance(v, torch.Tensor) and v is not getattr(AttentionCall, n, signature)}
    as_it_is = call.layout == selection.chosen.layout and not call.return_lse and not selection.spec.zero_size
    plan = Plan(_fits(query, key, value), template, selection, selection.run if as_it_is else None)
    if len(plans) >= LIMIT:
        plans.clear()
    # A few of one signature may differ in strides or in who needs a gradient; the latest comes first.
    plans[signature] = [plan, *plans.get(signature, ())[:3]]


def _fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool]:
    """The compiler's own guard, which looks at all tensors in C; spelled out where a torch doesn't have it, or where it can't be asked: it
    refuses the same tensor twice."""
    try:
        guards = torch._C._dynamo.guards.TensorGuards
        sizes = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
        if query is not key and query is not value and key is not value:
            return guards(query, key, value, **sizes).check
        if query is not key and key is value:
            both = guards(query, key, **sizes).check
            return lambda query, key, value: key is value and both(query, key)
    except Exception:
        pass

    def facts(*tensors: torch.Tensor) -> list:
        autocast = torch._C._is_any_autocast_enabled()
        return [(type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.is_inference(), autocast) for t in tensors]

    was = facts(query, key, value)
    return lambda *tensors: facts(*tensors) == was


def _forget() -> None:
    # A new dictionary, so that a choice made under the old policy, in another thread, lands in the old one.
    global by_signature
    by_signature = {}


policy.on_change(_forget)
