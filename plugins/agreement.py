"""Do implementations that share no code agree? The reference, torch, ONNX Runtime and JAX over calls that the conformance suite draws.

For each feature, calls are drawn that ask for it, otherwise from what all backends that claim it can do. Each backend that has no reason
against a call runs it, backward too where it asks for gradients, and must come as near to the float64 reference as the contract says.

usage: python plugins/agreement.py [--per-feature 25] [--sizes small] [--backends sdpa,onnxruntime,jax] [--jobs 1]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import multiprocessing
import platform
import sys
import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import hypothesis
import torch

import attnreg
from attnreg import NATIVE, Backend, Capabilities, Feature
from attnreg.conformance.cases import Case
from attnreg.conformance.strategies import cases
from attnreg.conformance.tensors import checked, values
from attnreg.conformance.trial import Tally, attempt, choose, compare

NOT_DRAWN = {Feature.DROPOUT, Feature.PAGED, Feature.COMPILE, Feature.CAPTURE, Feature.BATCH_INVARIANT}
LIBRARIES = {"sdpa": "torch", "onnxruntime": "onnxruntime", "jax": "jax"}


class Row(NamedTuple):
    """What came out for one feature."""

    feature: Feature
    cases: int
    ran: dict[str, int]
    """Calls that each backend ran; backends that don't claim the feature are left out."""
    worst: dict[str, float]
    """Each backend's largest error, in units of the allowed one."""
    together: int
    """Calls that all of `ran` ran."""
    wrong: list[str]
    """A line for each backend and call that was further off than allowed."""


def compared(feature: Feature, backends: Sequence[Backend], examples: int, sizes: str) -> Row:
    """Draws calls that ask for a feature, and runs them on every backend that claims it."""
    claiming = [b for b in backends if feature in b.claims.features]
    features = set.intersection(*(set(b.claims.features) for b in claiming)) if claiming else {feature}
    common = Capabilities(features=dict.fromkeys(features - NOT_DRAWN, NATIVE))
    row = Row(feature, 0, {b.name: 0 for b in claiming}, {b.name: 0.0 for b in claiming}, 0, [])
    together = 0
    seen: set[Case] = set()

    def one(case: Case) -> None:
        nonlocal together
        if case in seen:
            return
        seen.add(case)
        given = values(case)
        able = [b for b in claiming if choose(b, checked(case, given)).chosen is not None]
        together += bool(able) and len(able) == len(claiming)
        for backend in able:
            tally = Tally()
            row.ran[backend.name] += 1
            try:
                compare(backend, case, given, attempt(backend, case, given), tally)
            except AssertionError as error:
                row.wrong.append(f"{feature}: {backend.name}: {str(error).splitlines()[0]}  {case}")
            row.worst[backend.name] = max([row.worst[backend.name], *(e.share for e in tally.worst.values())])

    drawn = cases(common, require={feature}, without=NOT_DRAWN, sizes=sizes)
    # Many short runs: a long one spends most of its examples on variations of its first draws.
    settings = hypothesis.settings(
        max_examples=3, database=None, deadline=None, phases=[hypothesis.Phase.generate], suppress_health_check=list(hypothesis.HealthCheck)
    )
    for number in range(2 * examples):
        if len(seen) < examples:
            hypothesis.seed(zlib.crc32(feature.encode()) + number)(settings(hypothesis.given(case=drawn)(lambda case: one(case))))()
    return row._replace(cases=len(seen), together=together)


def rows(
    backends: Sequence[Backend], examples: int, sizes: str, features: Collection[Feature] = tuple(Feature), jobs: int = 1
) -> Iterable[Row]:
    """A row for each feature that is claimed. jobs: processes that share the features out, for which backends must be installed."""
    wanted = [f for f in features if f not in NOT_DRAWN and any(f in b.claims.features for b in backends)]
    names = [b.name for b in backends]
    with contextlib.ExitStack() as stack:
        if jobs > 1:  # a process each: what a library keeps of one feature's calls, such as compiled functions, is given up with it
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1))
            yield from pool.imap(functools.partial(_by_name, names, examples, sizes), wanted)
        else:
            yield from (compared(feature, backends, examples, sizes) for feature in wanted)


def _by_name(names: Sequence[str], examples: int, sizes: str, feature: Feature) -> Row:
    torch.set_num_threads(1)
    return compared(feature, [attnreg.backends()[name] for name in names], examples, sizes)


def line(row: Row, names: Sequence[str]) -> list[str]:
    cells = [f"{row.ran[n]}, {row.worst[n]:.2f}" if n in row.ran else "not claimed" for n in names]
    return [str(row.feature), str(row.cases), *cells, f"{row.together} by {len(row.ran)}"]


def versions(names: Sequence[str]) -> str:
    found = {name: importlib.metadata.version(name) for name in dict.fromkeys(["attnreg", *(LIBRARIES.get(n, "attnreg") for n in names)])}
    return ", ".join([f"Python {platform.python_version()}", *(f"{name} {version}" for name, version in found.items())])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--per-feature", type=int, default=25)
    parser.add_argument("--sizes", default="small", help="small, mixed, few (for backends that compile for each), large")
    parser.add_argument("--backends", default=",".join(LIBRARIES))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args(arguments)
    names = options.backends.split(",")
    known = attnreg.backends()
    missing = {name: known[name].reason_missing if name in known else "its plugin is not installed" for name in names}
    if any(missing.values()):
        print("; ".join(f"{name}: {why}" for name, why in missing.items() if why))
        return 2
    torch.set_num_threads(1)
    print(f"{versions(names)}; {options.per_feature} calls a feature, sizes {options.sizes}, float32")
    header = ["feature", "calls", *names, "together"]
    print("\n| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    wrong, calls = [], 0
    for row in rows([known[name] for name in names], options.per_feature, options.sizes, jobs=options.jobs):
        print("| " + " | ".join(line(row, names)) + " |", flush=True)
        wrong += row.wrong
        calls += sum(row.ran.values())
    print(f"\n{calls} runs, {len(wrong)} further from the reference than allowed")
    print("\n".join(wrong))
    return 1 if wrong or not calls else 0


if __name__ == "__main__":
    sys.exit(main())
