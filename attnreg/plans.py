"""What makes the repeated call cheap: the checked call less its tensors, found again by what was given."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import packing, policy
from .backend import Output
from .cache.protocol import Step
from .call import AttentionCall, known_to_be_huge
from .checks.tensors import wrapped
from .run import changes_nothing
from .select import Selection
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
    step: tuple | None = None
    """With a cache: the facts of its step, `step_facts`."""


LIMIT = 512
"""How many signatures are remembered before all are forgotten. A growing cache leaves one behind at each step."""

LATEST = ()
"""The key under which the plan that served last stands alone."""

by_signature: dict[tuple, Any] = {}
"""Plans by what was asked and by shapes, in lists; and the latest."""


def of_their_kinds(flags: tuple, numbers: tuple, counts: tuple) -> bool:
    """Whether options that equal checked ones are of kinds that the checks take: True == 1 == 1.0, and a dictionary finds one by another."""
    return (
        all(flag is None or flag.__class__ is bool for flag in flags)
        and all(number is None or (isinstance(number, (int, float)) and number.__class__ is not bool) for number in numbers)
        and all(count is None or (isinstance(count, int) and count.__class__ is not bool) for count in counts)
    )


def optional(
    query_mask: Any, key_mask: Any, mask: torch.Tensor | None, bias: torch.Tensor | None, alibi_slopes: torch.Tensor | None, sinks: Any
) -> dict[str, Any]:
    """The tensors that few calls have, by their names in a call, with what is known of the padding."""
    query_padding = None if query_mask is None else packing.known(query_mask)
    key_padding = None if key_mask is None else query_padding if key_mask is query_mask else packing.known(key_mask)
    return {
        "query_mask": query_mask if query_padding is None else query_padding.mask,
        "key_mask": key_mask if key_padding is None else key_padding.mask,
        "mask": mask,
        "bias": bias,
        "huge_bias": None if bias is None else known_to_be_huge(bias),
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "query_padding": query_padding,
        "key_padding": key_padding,
    }


def signature_of(given: torch.Tensor | packing.Padding | None) -> Any:
    """What a plan depends on: of a tensor its facts; of a padding which one it is, for its form and whether it may be dropped stay."""
    if given is None or given is True or given is False:
        return given
    if isinstance(given, packing.Padding):
        return weakref.ref(given)  # equal while the padding lives, and to nothing afterwards
    return given.shape, given.dtype, given.device, given.requires_grad, wrapped(given)


def on_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple:
    """Facts of a CUDA call that its shapes don't tell: alignment, and whether a graph is being captured."""
    return query.data_ptr() % 16, key.data_ptr() % 16, value.data_ptr() % 16, torch.cuda.is_current_stream_capturing()


def step_facts(step: Step, query_length: int) -> tuple:
    """What the choice of a backend depends on in a cache's step, beside the new tokens. Strides and addresses stand for alignment."""
    pages, key, value = step.pages, step.key, step.value
    if pages is not None:
        key, value = pages.keys, pages.values
        slots = pages.block_table.shape[1] * key.shape[1] if pages.slots is None else pages.slots
    else:
        slots = key.shape[1]
    return (
        (slots - 1).bit_length() if slots else -1, slots == query_length, step.key_lengths is None, pages and key.shape[1],
        key.stride(), value.stride(), key.data_ptr() % 16, value.data_ptr() % 16, key.requires_grad or value.requires_grad,
    )  # fmt: skip


def plan_of(asked: tuple, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall, selection: Selection) -> Plan:
    """The plan of a checked call that has not run yet."""
    apart = ("layout", "causal", "scale", "_spec", "cache", "step", "pages", "lengths_given")
    template = {
        name: given
        for name, given in call.__dict__.items()
        if not isinstance(given, (torch.Tensor, packing.Padding)) and name not in apart and given is not getattr(AttentionCall, name, apart)
    }
    function = selection.run if changes_nothing(call, selection.chosen) else None
    facts = None if call.step is None else step_facts(call.step, call.query_length)
    return Plan(asked, _fits(query, key, value), call.scale, selection.spec, template, selection, function, selection.chosen.layout, facts)


def remember(plans: dict[tuple, Any], plan: Plan, query: torch.Tensor, key: torch.Tensor) -> None:
    """Keeps a plan for calls of such tensors. `plans`: `by_signature` as it was before the choice."""
    if len(plans) >= LIMIT:
        plans.clear()
    # A few of one signature may differ in strides or in who needs a gradient; the latest comes first.
    signature = (plan.asked, query.shape, key.shape)
    plans[signature] = [plan, *plans.get(signature, ())[:3]]
    plans[LATEST] = plan


def _fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool]:
    """The compiler's own guard, which looks at all tensors in C; spelled out where a torch doesn't have it, or where it can't be asked: it
    refuses the same tensor twice."""
    try:
        guards = torch._C._dynamo.guards.TensorGuards
        if query is not key and key is not value and query is not value:
            return guards(query, key, value, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        # One guard never lets the same tensor pass twice.
        q, k, v = (guards(t, dynamic_dims_sizes=None, dynamic_dims_strides=None).check for t in (query, key, value))
        return lambda query, key, value: q(query) and k(key) and v(value)
    except Exception:
        pass

    def facts(*tensors: torch.Tensor) -> list:
        autocast = torch._C._is_any_autocast_enabled()
        return [(wrapped(t), type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.is_inference(), autocast) for t in tensors]

    was = facts(query, key, value)
    return lambda *tensors: facts(*tensors) == was


def _forget() -> None:
    # A new dictionary, so that a choice made under the old policy, in another thread, lands in the old one.
    global by_signature
    by_signature = {}


policy.on_change(_forget)
