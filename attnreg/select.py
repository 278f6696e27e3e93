"""Choosing: a pure function of the spec, the candidates and the policy. It can be asked without running anything."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .backend import Backend, Output
from .capabilities import Reason
from .policy import Policy
from .spec import AttentionSpec

if TYPE_CHECKING:
    from .call import AttentionCall

STRICT = "ATTNREG_STRICT_PLUGINS"
"""Set to 1, a backend that is broken is an error in every call, not a reason against it."""


@dataclass(frozen=True, repr=False)
class Selection:
    """What was chosen for a spec, and why every other backend was not. Printable, and data."""

    spec: AttentionSpec
    chosen: Backend | None
    rejected: Mapping[str, tuple[Reason, ...]]
    """Every backend that can't or may not run this spec, with all of its reasons."""
    able: tuple[str, ...]
    """Backends that could run it too, lower in the order."""
    source: str
    """Where the policy came from: the call, a `using` block, `use`, the environment, or automatic."""
    order: tuple[str, ...]
    """The names that the policy allows, in order."""
    emulations: tuple[str, ...] = ()
    """What the chosen backend emulates for this spec, as "feature: cost"."""
    notes: tuple[str, ...] = ()
    failures: tuple[Any, ...] = ()
    """Plugins that failed to load (`registry.PluginFailure`)."""
    run: Callable[[AttentionCall], Output] | None = None
    """The function of the chosen backend that runs this spec."""

    def __repr__(self) -> str:
        return f"<Selection: {self._headline()}>"

    def _headline(self) -> str:
        name = self.chosen.name if self.chosen else "no backend"
        return f"{name}  (order {', '.join(self.order)}: {self.source})"

    def __str__(self) -> str:
        lines = [self._headline()]
        lines += [f"  emulated  {text}" for text in self.emulations]
        lines += [f"  note      {text}" for text in self.notes]
        lines += [f"  able, lower in the order: {other}" for other in self.able]
        for other, reasons in self.rejected.items():
            lines.append(f"  {other} was not chosen:")
            lines += [f"    - {reason}" for reason in reasons]
        lines += [f"  plugin failed: {failure}" for failure in self.failures]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data, ready for JSON."""
        return {
            "chosen": self.chosen.name if self.chosen else None,
            "source": self.source,
            "order": list(self.order),
            "emulations": list(self.emulations),
            "notes": list(self.notes),
            "able": list(self.able),
            "rejected": {name: [reason._asdict() for reason in reasons] for name, reasons in self.rejected.items()},
            "failures": [str(failure) for failure in self.failures],
            "spec": {
                name: value if isinstance(value, (bool, int, str, type(None))) else str(value)
                for name, value in self.spec._asdict().items()
            },
        }


class NoBackendError(RuntimeError):
    """A sensible call that no allowed backend can run. `selection` holds every candidate with all of its reasons."""

    def __init__(self, selection: Selection) -> None:
        super().__init__(f"no backend can run this call\n{selection}")
        self.selection = selection


def select(spec: AttentionSpec, candidates: Iterable[Backend], policy: Policy, failures: tuple = ()) -> Selection:
    """Chooses among the candidates. Never raises: a `Selection` without `chosen` says why there is none.

    A list of names means the first that can, in that order; a family's members stand by rank. "auto" stands for all candidates, in this
    order: of rank 0 or more with no emulation for this spec; of rank 0 or more with one; of a rank below 0, native or not, which are
    therefore taken only when nothing else can; these last too with native ones first. Within each of these the higher rank goes first.
    Approximate backends are left out of "auto" unless allowed.
    """
    candidates = list(candidates)
    asked = {b.name: _asked(b, spec) for b in candidates}
    reasons = {name: list(why) for name, (why, *_) in asked.items()}
    for backend in candidates:
        for mode in sorted(policy.require):
            # A mode that the call itself asks for (deterministic=True) is among the spec's features, and reported there.
            if mode not in backend.claims.features and mode not in spec.features:
                reasons[backend.name].append(Reason(mode.value, "required by using(...)", "not claimed"))

    def automatic(backend: Backend) -> tuple:
        _, rank, emulations, _ = asked[backend.name]
        return (rank < 0, bool(emulations), -rank)

    ordered: list[Backend] = []
    for name in policy.order:
        if name == "auto":
            exact = [b for b in candidates if b.claims.bound is None or "approximate" in policy.allow]
            group = sorted(exact, key=automatic)
        else:
            group = sorted((b for b in candidates if name in (b.name, b.family)), key=lambda b: -asked[b.name][1])
        ordered += [b for b in group if b not in ordered]
    for backend in candidates:
        if backend not in ordered:
            if "auto" in policy.order:
                remedy = f"name it, or using(allow={{'approximate'}}); its error bound is {backend.claims.bound} times the exact one"
                reasons[backend.name].append(Reason("approximate", "exact results", "approximate ones", remedy))
            else:
                reasons[backend.name].append(Reason("policy", ", ".join(policy.order), backend.name, f"by {policy.source}"))

    able = [b for b in ordered if not reasons[b.name]]
    chosen = able[0] if able else None
    return Selection(
        spec=spec,
        chosen=chosen,
        # Whoever the policy names comes first.
        rejected={b.name: tuple(reasons[b.name]) for b in sorted(candidates, key=lambda b: b not in ordered) if reasons[b.name]},
        able=tuple(b.name for b in able[1:]),
        source=policy.source,
        order=policy.order,
        emulations=asked[chosen.name][2] if chosen else (),
        notes=_notes(chosen, spec) if chosen else (),
        failures=failures,
        run=asked[chosen.name][3] if chosen else None,
    )


def _asked(backend: Backend, spec: AttentionSpec) -> tuple[tuple[Reason, ...], float, tuple[str, ...], Callable[..., Output] | None]:
    """What a backend says of a spec: reasons against it, its rank, what it emulates, what would run. One that can't say harms nobody but
    itself."""
    try:
        reasons = backend.reasons_against(spec)
        if reasons:
            return reasons, -math.inf, (), None
        function = backend.run_for(spec) if backend.run_for else backend.run
        return (), backend.rank(spec), backend.claims.emulations(spec), function
    except Exception as error:
        if os.environ.get(STRICT) == "1":
            raise
        raised = f"its claims raised {type(error).__name__}: {error}"
        return (Reason("broken", "what it claims for this call", raised, "repair or uninstall it"),), -math.inf, (), None


def _notes(backend: Backend, spec: AttentionSpec) -> tuple[str, ...]:
    try:
        return tuple(backend.notes(spec))
    except Exception as error:
        if os.environ.get(STRICT) == "1":
            raise
        return (f"its notes raised {type(error).__name__}: {error}",)
