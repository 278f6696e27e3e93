"""Claims and certificates as tables: a head and rows of words, for a terminal or a README."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .backend import Backend
from .capabilities import Support, dtype_name, version_text
from .spec import Feature

Cells = tuple[list[str], list[list[str]]]


def claims(backends: Iterable[Backend]) -> Cells:
    """Features by backends: "yes", "emulated", "varies" (native or emulated, as the call goes), or nothing."""
    backends = list(backends)

    def word(backend: Backend, feature: Feature) -> str:
        claim = backend.claims.features.get(feature)
        if claim is None:
            return ""
        return "varies" if not isinstance(claim, Support) else "yes" if claim.native else "emulated"

    rows = [[feature.value, *(word(backend, feature) for backend in backends)] for feature in Feature]
    facts = {
        "devices": lambda c: " ".join(sorted(c.devices)),
        "compute capability": lambda c: "" if c.smallest_capability is None else f"{version_text(c.smallest_capability)}+",
        "dtypes": lambda c: " ".join(sorted(map(_short, c.dtypes))),
        "largest head dim": lambda c: str(c.head_dim.largest or "any"),
    }
    rows = [[name, *(fact(backend.claims) for backend in backends)] for name, fact in facts.items()] + rows
    return ["", *(backend.name for backend in backends)], rows


def certificate(report: dict[str, Any]) -> Cells:
    """A certificate's worst error beside the allowed one, for each feature and dtype."""
    rows = []
    for feature, dtypes in report["worst_errors"].items():
        for dtype, quantities in dtypes.items():
            for quantity, found in quantities.items():
                rows.append([feature, dtype, quantity, f"{found['error']:.1e}", f"{found['allowed']:.1e}"])
    return ["feature", "dtype", "of", "worst error", "allowed"], rows


def headline(report: dict[str, Any]) -> str:
    """What a certificate is of: backend, device, verdict, how much was run, and the versions that it holds for."""
    verdict = "passed" if report["passed"] else "failed"
    if excepted := [check["name"] for check in report["checks"] if check["result"] == "excepted"]:
        verdict += f" but for {', '.join(excepted)}, as declared"
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"{report['backend']} on {report['device']}: {verdict}, {report['cases']} calls ({report['profile']}); {versions}"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _short(dtype) -> str:
    return dtype_name(dtype).replace("bfloat", "bf").replace("float", "f")
