"""What makes the repeated call cheap: the checked call less its tensors, found again by what was given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import policy
from .backend import Output
from .call import AttentionCall
from .select import Selection
from .selections import LIMIT
from .spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Plan:
    """What a repeated call needs: the checked call less its tensors, and what to run."""

    asked: tuple
    """Everything that was given besides query, key and value."""
    fits: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool]
    """Whether query, key and value are as they were: sizes, strides, dtype, device, gradients, autocast."""
    scale: float
    spec: AttentionSpec
    template: dict[str, Any]
    """The call's other attributes that are not neutral."""
    selection: Selection
    run: Callable[[AttentionCall], Output] | None
    """The backend's function, where the result needs no change but of the layout; else None."""
    layout: str
    """The layout in which it takes the call."""


LATEST = ()
"""The key under which the plan that served last stands alone."""

by_signature: dict[tuple, Any] = {}
"""Plans by what was asked and by shapes, in lists; and the latest."""


def signature_of(tensor: torch.Tensor | None) -> tuple | None:
    if tensor is None:
        return None
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def on_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple:
    """Facts of a CUDA call that its shapes don't tell: alignment, and whether a graph is being captured."""
    return query.data_ptr() % 16, key.data_ptr() % 16, value.data_ptr() % 16, torch.cuda.is_current_stream_capturing()


def find(plans: dict[tuple, Any], asked: tuple, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Plan | None:
    for plan in plans.get((asked, query.shape, key.shape), ()):
        if plan.fits(query, key, value):
            plans[LATEST] = plan
            return plan
    return None


def remember(
    plans: dict[tuple, Any],
    asked: tuple,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
    selection: Selection,
) -> None:
    """Makes the plan of a call. `plans`: `by_signature` as it was before the choice."""
    apart = ("layout", "causal", "scale", "_spec")
    template = {
        name: given
        for name, given in call.__dict__.items()
        if not isinstance(given, torch.Tensor) and name not in apart and given != getattr(AttentionCall, name, plans)
    }
    function = None if call.return_lse or selection.spec.zero_size else selection.run
    fits = _fits(query, key, value)
    plan = Plan(asked, fits, call.scale, selection.spec, template, selection, function, selection.chosen.layout)
    if len(plans) >= LIMIT:
        plans.clear()
    # A few of one signature may differ in strides or in who needs a gradient; the latest comes first.
    signature = (asked, query.shape, key.shape)
    plans[signature] = [plan, *plans.get(signature, ())[:3]]
    plans[LATEST] = plan


def _fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool]:
    """The compiler's own guard, which looks at all three tensors in C; spelled out where a torch doesn't have it."""
    try:
        return torch._C._dynamo.guards.TensorGuards(query, key, value, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
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
