"""A backend: a kernel with its claims, as a value. There is no class to inherit."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .capabilities import Capabilities, Reason
from .spec import AttentionSpec

if TYPE_CHECKING:
    from .call import AttentionCall

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def _never_missing() -> Reason | None:
    return None


def needs(*requirements: str, remedy: str = "") -> Callable[[], Reason | None]:
    """For `Backend.missing`: whether libraries are installed, by their metadata and without an import, as in `needs("jax>=0.5")`.

    requirements: as pip takes them; alternatives are parted by "|", as in "onnxruntime>=1.28 | onnxruntime-gpu>=1.28".
    remedy: what the user may do; by default the pip command.

    The function returned has the libraries' names as `libraries`, for whoever reports versions.
    """

    def missing() -> Reason | None:
        from packaging.requirements import Requirement  # takes a quarter of the time of `import attnreg`, and is needed later if at all

        for requirement in requirements:
            found = []
            for alternative in map(Requirement, requirement.split("|")):
                try:
                    version = importlib.metadata.version(alternative.name)
                except importlib.metadata.PackageNotFoundError:
                    continue
                if alternative.specifier.contains(version, prereleases=True):
                    break
                found.append(f"{alternative.name} {version} is installed")
            else:
                first = requirement.split("|")[0].strip()
                return Reason("missing", requirement, "; ".join(found) or "not installed", remedy or f"pip install '{first}'")
        return None

    missing.libraries = tuple(re.match(r"[\w.-]+", part.strip())[0] for text in requirements for part in text.split("|"))
    return missing


def _no_notes(spec: AttentionSpec) -> Sequence[str]:
    return ()


@dataclass(frozen=True, eq=False)
class Backend:
    """One way to compute attention.

    name: what users write: `backend="mine"`. Letters, digits, "_" and "-".
    run: takes an `AttentionCall` whose query, key and value are in this backend's `layout`, returns the output in that layout,
        and with it the lse (B, Hq, Sq) when `call.return_lse`. It is only called for specs that it has no reason against, and
        never with a size of 0.
    capabilities: the claims, or a function that returns them when they depend on what is installed (asked once, lazily).
    priority: the place in the automatic order, higher first; or a function of the spec.
    missing: why the backend can't run here at all (its library is absent, too old, broken), or None. Asked once, lazily.
    family: a name that stands for several backends, as "flash" does.
    notes: what a run of this spec will do that the user may want to know: the kernel inside, a copy that is made.
    run_for: optional; returns the function to run for a spec, where it depends on the spec alone: decided once, off the repeated call.
    packs: the backend wants to know whether padding may be dropped; a bare padding mask is then examined once (one
        device-to-host copy a mask, spared by `packing.Padding`).
    """

    name: str
    run: Callable[[AttentionCall], Output]
    capabilities: Capabilities | Callable[[], Capabilities]
    priority: int | Callable[[AttentionSpec], int] = 0
    missing: Callable[[], Reason | None] = _never_missing
    layout: str = "bshd"
    family: str | None = None
    notes: Callable[[AttentionSpec], Sequence[str]] = _no_notes
    run_for: Callable[[AttentionSpec], Callable[[AttentionCall], Output]] | None = None
    packs: bool = False
    _known: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.replace("_", "").replace("-", "").isalnum():
            raise ValueError(f"name: letters, digits, '_' and '-', got {self.name!r}")
        if self.name == "auto":
            raise ValueError("name: 'auto' means the automatic order; give the backend another name")
        if self.layout not in ("bshd", "bhsd"):
            raise ValueError(f"layout of backend {self.name!r}: 'bshd' or 'bhsd', got {self.layout!r}")
        if not callable(self.run):
            raise TypeError(f"run of backend {self.name!r}: a function of one AttentionCall, got {self.run!r}")
        if not callable(self.capabilities) and not isinstance(self.capabilities, Capabilities):
            raise TypeError(
                f"capabilities of backend {self.name!r}: a Capabilities or a function that returns one, got {self.capabilities!r}"
            )

    @property
    def reason_missing(self) -> Reason | None:
        """Why this backend can't run here at all, or None; asked once."""
        if "missing" not in self._known:
            try:
                why = self.missing()
                if not (why is None or isinstance(why, Reason)):
                    raise TypeError(f"missing of backend {self.name!r}: an attnreg.Reason or None, got {why!r}")
            except Exception as error:  # as of a library that is there and can't be loaded: nobody else's call is harmed
                why = Reason("missing", "its own check", f"raised {type(error).__name__}: {error}", "repair or uninstall it")
            self._known["missing"] = why
        return self._known["missing"]

    @property
    def claims(self) -> Capabilities:
        """The claims as they are on this machine; asked once."""
        if "claims" not in self._known:
            claims = self.capabilities() if callable(self.capabilities) else self.capabilities
            if not isinstance(claims, Capabilities):
                raise TypeError(f"capabilities of backend {self.name!r} must be a Capabilities, got {claims!r}")
            self._known["claims"] = claims
        return self._known["claims"]

    def reasons_against(self, spec: AttentionSpec) -> tuple[Reason, ...]:
        """All reasons why this backend can't take the spec here; empty means it can."""
        missing = self.reason_missing
        return ((missing,) if missing else ()) + self.claims.reasons_against(spec)

    def rank(self, spec: AttentionSpec) -> int:
        return self.priority(spec) if callable(self.priority) else self.priority
