"""Running a case on a backend, and comparing what comes out with the truth."""

from __future__ import annotations

from typing import Any

import torch

from ..backend import Backend
from ..call import AttentionCall
from ..kernels.reference import reference
from ..policy import Policy
from ..run import run
from ..select import NoBackendError, Selection, select
from ..spec import AttentionSpec, Feature
from . import numerics
from .cases import Case
from .numerics import Error
from .tensors import Result, Values, arrange, canonical, checked

COPIES = 4
"""Of each size in `leave_nan`: what is computed on the way takes some of them."""


class Tally:
    """What a run of checks adds up: how many cases, and the worst error for each feature and dtype against the allowed one."""

    def __init__(self) -> None:
        self.cases = 0
        self.refused = 0
        self.worst: dict[tuple[str, str, str], Error] = {}
        self.kinds: set[Case] = set()

    def see(self, case: Case) -> None:
        """Counts a call that is tried."""
        self.kinds.add(case.kind)

    def drawn(self) -> dict[str, Any]:
        """Of how many kinds the calls were (lengths, rows and values aside), their dtypes and dims."""
        seen = {name: sorted({getattr(case, name) for case in self.kinds}) for name in ("dtype", "head_dim", "value_dim")}
        return {"kinds": len(self.kinds), **seen}

    def add(self, spec: AttentionSpec, quantity: str, error: Error) -> None:
        dtype = str(spec.dtype).removeprefix("torch.")
        for feature in spec.features or ("plain",):
            self._worse((str(feature), dtype, quantity), error)

    def join(self, other: Tally) -> None:
        """Adds what another process counted."""
        self.cases += other.cases
        self.refused += other.refused
        self.kinds |= other.kinds
        for key, error in other.worst.items():
            self._worse(key, error)

    def _worse(self, key: tuple[str, str, str], error: Error) -> None:
        if key not in self.worst or error.share > self.worst[key].share:
            self.worst[key] = error


def choose(backend: Backend, call: AttentionCall) -> Selection:
    """The selection when this backend is the only one there is, registered or not."""
    bare = (call.query_mask is not None and call.query_padding is None) or (call.key_mask is not None and call.key_padding is None)
    if backend.packs and bare:
        call.examine_padding()
    if call.spec.huge_bias and call.huge_bias is None and not call.spec.capturing:
        call.examine_bias()
    return select(call.spec, [backend], Policy((backend.name,), "conformance"))


def attend(backend: Backend, arguments: dict[str, Any]) -> Any:
    """`attnreg.attention(..., backend=...)` for a backend that need not be registered."""
    call = AttentionCall(**arguments)
    selection = choose(backend, call)
    if selection.chosen is None:
        raise NoBackendError(selection)

    try:
        return run(call, selection.chosen, selection.run)
    except AssertionError as error:  # not to be taken for what a check finds
        raise RuntimeError(f"backend {backend.name!r} raised AssertionError: {error}") from error


def attempt(backend: Backend, case: Case, given: Values, dtype: torch.dtype | None = None) -> Result:
    """Forward, and backward where the case wants gradients."""
    arguments, leaves = arrange(case, given, dtype)
    leave_nan(case)
    result = attend(backend, arguments)
    output, lse = result if case.lse else (result, None)
    shape = canonical(case, output)
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = {}
    if wanted:
        ends, starts = [shape], [given.output_gradient.to(shape.dtype)]
        if case.lse_gradient and lse.requires_grad:
            # It need not: the lse does not depend on value, and not on anything if a size is 0. An empty row's lse is -inf, a constant.
            ends.append(lse.masked_fill(lse == float("-inf"), 0.0))
            starts.append(given.lse_gradient.to(lse.dtype))
        leave_nan(case)
        found = torch.autograd.grad(ends, list(wanted.values()), starts, allow_unused=True)
        # A backend may leave out a gradient that is 0, as torch does.
        gradients = {name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in zip(wanted.items(), found)}
    return Result(shape.detach(), None if lse is None else lse.detach(), gradients)


def leave_nan(case: Case) -> None:
    """Frees memory that is full of NaN, in the sizes that the case's kernels will ask for: what they leave unwritten must not pass for right
    by what was there before."""
    itemsize = getattr(torch, case.dtype).itemsize
    rows = case.batch * case.query_length * case.query_heads
    keys = case.batch * case.key_length * case.key_heads
    scores = rows * (case.key_length + -case.key_length % 16)
    numbers = (rows, rows * case.head_dim, rows * case.value_dim, keys * case.head_dim, keys * case.value_dim, scores)
    sizes = {number * size for number in numbers for size in (itemsize, 4)}
    _ = [torch.full((size,), 0xFF, dtype=torch.uint8, device=case.device) for size in sizes for _ in range(COPIES)]


def fitted(backend: Backend, case: Case, required: frozenset[Feature]) -> Case | None:
    """The nearest case that the backend has no reason against, `required` kept; None if there is none.

    A backend's rules may refuse combinations that single claims can't say: what is not required is given up, one at a time.
    """
    for _ in range(len(Feature) + 8):
        call = checked(case)
        selection = choose(backend, call)
        if selection.chosen is not None:
            # Some combinations ask for less than they say, such as a right side of the window under causality.
            return case if required - {Feature.LSE_GRADIENT} <= set(call.spec.features) else None
        spec, changed = call.spec, None
        reasons = {reason.what for reason in selection.rejected[backend.name]}
        optional = [f for f in reversed(spec.features) if f not in required]
        if Feature.CAUSAL.value in reasons and not case.causal and Feature.CAUSAL in backend.claims.features:
            changed = case.replace(causal=True)  # the one thing that a rule may demand instead of refusing it
        else:
            for feature in sorted(optional, key=lambda f: f.value not in reasons):
                changed = case.without(feature)
                if changed != case:
                    break
            else:
                changed = None
        if changed is None:
            if case.key_length != 1 and "device" not in reasons and "dtype" not in reasons and case.form != "bshd":
                changed = case.replace(form="bshd", strides="contiguous")
            elif case.strides != "contiguous":
                changed = case.replace(strides="contiguous")
            else:
                return None
        case = changed
    return None


def truth(case: Case, given: Values) -> Result:
    return attempt(reference, case.without(Feature.PAGED), given, torch.float64)


def compare(backend: Backend, case: Case, given: Values, got: Result, tally: Tally | None = None) -> None:
    """Raises AssertionError where the result is further from the truth than allowed."""
    right = truth(case, given)
    spec = checked(case, given).spec
    # Pages change nothing but where the keys lie.
    case = case.without(Feature.PAGED)
    yardstick = attempt(numerics.plain, case, given)
    bound = backend.claims.bound or 1.0
    dtype = getattr(torch, case.dtype)
    call = checked(case.replace(gradients=()), given, torch.float64)
    eps = 8 * torch.finfo(dtype).eps + (0.0 if spec.zero_size else numerics.truth_rounding(call))

    def within(quantity: str, got: torch.Tensor, right: torch.Tensor, plain: torch.Tensor, times: float, floor: float) -> None:
        assert got.shape == right.shape, f"{quantity}: shape {tuple(got.shape)}, expected {tuple(right.shape)}"
        error = numerics.largest_difference(got, right)
        limit = bound * (times * numerics.largest_difference(plain, right) + floor)
        if tally is not None:
            tally.add(spec, quantity, Error(error, limit))
        assert error <= limit, f"{quantity}: largest error {error:.3g}, allowed {limit:.3g}\n{_where(got, right)}"

    assert got.output.dtype == dtype, f"output: dtype {got.output.dtype}, expected the query's {dtype}"
    assert got.output.device.type == case.device, f"output: on {got.output.device}, expected {case.device}"
    within("output", got.output, right.output, yardstick.output, 2, eps * numerics.largest(given.tensors["value"]))
    if case.lse:
        wide = torch.promote_types(dtype, torch.float32)
        assert got.lse.dtype == wide, f"lse: dtype {got.lse.dtype}, expected {wide}"
        within("lse", got.lse, right.lse, yardstick.lse, 2, eps * max(1.0, numerics.largest(right.lse)))
    if case.gradients:
        into_lse = given.lse_gradient if case.lse_gradient else None
        floors = {}
        if not spec.zero_size:
            floors = numerics.gradient_floors(call, given.output_gradient.transpose(1, 2), into_lse, dtype)
        for name, gradient in got.gradients.items():
            floor = floors.get(name, 0.0) * (case.batch if case.strides == "expanded" else 1)
            within(f"gradient of {name}", gradient, right.gradients[name], yardstick.gradients[name], 3, floor)


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal element by element, NaN with NaN; +0 and -0 count as the same value."""
    return got.shape == expected.shape and bool(((got == expected) | (got.isnan() & expected.isnan())).all())


def _where(got: torch.Tensor, right: torch.Tensor) -> str:
    difference = torch.nan_to_num((got.double() - right.double()).abs(), nan=float("inf"))
    difference = torch.where(got.double() == right.double(), 0.0, difference)
    index = int(difference.flatten().argmax())
    at = tuple(int(n) for n in torch.unravel_index(torch.tensor(index), got.shape))
    return f"at {at}: {float(got.flatten()[index])!r}, expected {float(right.flatten()[index])!r}"
