"""What a run of the suite found, as data: a certificate, `attnreg check --report`."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from typing import Any, NamedTuple

import hypothesis
import torch

from ..capabilities import Capabilities
from ..version import __version__
from .trial import Tally

OUT_OF_TIME = "the time was up"
"""How an outcome's text begins whose check was cut short."""


class Outcome(NamedTuple):
    """What one check found."""

    name: str
    result: str
    """passed, failed, skipped, or excepted: it failed, as the backend declares"""
    cases: int
    refused: int
    """Drawn calls that the backend's own rules refuse in every variant."""
    seed: int
    seconds: float
    text: str = ""
    """Why it failed or was skipped, or how far it came before time was up; a failure ends with the line that repeats it."""


class Report(NamedTuple):
    """A certificate: what was run on which backend, where, and how near to the truth it came."""

    backend: str
    device: str
    profile: str
    outcomes: tuple[Outcome, ...]
    tally: Tally
    claims: dict[str, Any]
    libraries: tuple[str, ...] = ()
    """Distributions whose versions matter: the plugin, and what it needs."""

    @property
    def passed(self) -> bool:
        """Whether something ran and nothing failed."""
        return any(o.result == "passed" for o in self.outcomes) and all(o.result != "failed" for o in self.outcomes)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data, ready for JSON."""
        worst: dict[str, Any] = {}
        for (feature, dtype, quantity), error in sorted(self.tally.worst.items()):
            numbers = {"error": _short(error.error), "allowed": _short(error.allowed)}
            worst.setdefault(feature, {}).setdefault(dtype, {})[quantity] = numbers
        return {
            "backend": self.backend,
            "device": self.device if self.device != "cuda" else torch.cuda.get_device_name(),
            "profile": self.profile,
            "passed": self.passed,
            "versions": {
                "attnreg": __version__,
                "torch": torch.__version__,
                "hypothesis": hypothesis.__version__,
                "python": platform.python_version(),
                **{name: found for name in self.libraries if (found := _version(name))},
            },
            "claims": self.claims,
            "cases": sum(o.cases for o in self.outcomes),
            "drawn": self.tally.drawn(),
            "checks": [{**o._asdict(), "seconds": _short(o.seconds)} for o in self.outcomes],
            "worst_errors": worst,
        }

    def write(self, path: str) -> None:
        """As JSON with a line for each check and feature: small enough to be kept beside the code, and read in a diff."""
        with open(path, "w") as file:
            file.write(_in_lines(self.as_dict(), 2) + "\n")


def written_claims(claims: Capabilities) -> dict[str, Any]:
    """The claims as a certificate has them: plain data."""
    return {
        "features": {str(f): str(s) if not callable(s) else "depends on the call" for f, s in claims.features.items()},
        "devices": sorted(claims.devices),
        "dtypes": sorted(str(d).removeprefix("torch.") for d in claims.dtypes),
        "head_dim": str(claims.head_dim),
        "value_dim": str(claims.value_dim),
        "bound": claims.bound,
        "exceptions": dict(claims.exceptions),
    }


def _short(number: float) -> float:
    """Three digits. Order is kept, so what was allowed still is."""
    return float(f"{number:.3g}")


def _in_lines(value: Any, levels: int, margin: str = "\n") -> str:
    """JSON, laid out in lines for so many levels and no deeper."""
    if not (levels and value and isinstance(value, (dict, list))):
        return json.dumps(value)
    parts = [f"{json.dumps(k)}: " for k in value] if isinstance(value, dict) else [""] * len(value)
    items = value.values() if isinstance(value, dict) else value
    inner = ",".join(f"{margin} {part}{_in_lines(item, levels - 1, margin + ' ')}" for part, item in zip(parts, items))
    return f"{{{inner}{margin}}}" if isinstance(value, dict) else f"[{inner}{margin}]"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except (importlib.metadata.PackageNotFoundError, ValueError):  # ValueError: a backend that nothing installed has no name there
        return None
