"""Claims and certificates as tables: a head and rows of words, for a terminal or a README."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .backend import Backend
from .capabilities import Capabilities, Support, dtype_name, version_text
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
        "compute capability": _capabilities,
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
    results = {check["name"]: check["result"] for check in report["checks"]}
    if not any(result in ("passed", "failed") for result in results.values()):
        verdict = "nothing shown"
    elif left := sum(result == "skipped" for result in results.values()):
        verdict += f" in {len(results) - left} of {len(results)} checks"
    excepted = [name for name, result in results.items() if result == "excepted"]
    if excepted:
        verdict += f" but for {', '.join(excepted)}, as declared"
    if unshown := [name for name in report["claims"].get("exceptions", {}) if name not in excepted and results.get(name) != "failed"]:
        verdict += f" ({', '.join(unshown)}, declared to fail, not run)"
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"{report['backend']} on {report['device']}: {verdict}, {report['cases']} calls ({report['profile']}); {versions}"


def _capabilities(claims: Capabilities) -> str:
    least, most = claims.smallest_capability, claims.largest_capability
    if least is None:
        return "" if most is None else f"to {version_text(most)}"
    if least == most:
        return version_text(least)
    return f"{version_text(least)}+" if most is None else f"{version_text(least)} to {version_text(most)}"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _short(dtype) -> str:
    return dtype_name(dtype).replace("bfloat", "bf").replace("float", "f")
