"""The suite for one backend: which checks there are, how many examples each gets, and the three ways to run them."""

from __future__ import annotations

import functools
import math
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import hypothesis
import torch
from hypothesis import strategies as st

from .. import registry
from ..backend import Backend
from ..capabilities import dtype_name
from ..spec import Feature
from . import checks, modes
from .cases import Case
from .jobs import Drawn, Part, parts_of, run_parts
from .kinds import Kinds
from .report import OUT_OF_TIME, Outcome, Report, written_claims
from .strategies import cases
from .trial import Tally, fitted


class Profile(NamedTuple):
    """How much is tried."""

    examples: int
    """Calls drawn from all options at once, for each check."""
    per_feature: int
    """Calls that each claimed feature is forced into."""
    compiler: str
    """The backend of torch.compile."""
    sizes: str = "small"
    derandomize: bool = True
    """The same calls in every run."""
    kinds: int | None = None
    """For backends that compile for each kind of call: how many kinds a check of one feature draws, of those that all checks share: each
    feature alone (but not with 1), and as many at once as the backend takes. None: every call may be of its own kind."""


PROFILES = {
    "ci": Profile(150, 25, "eager"),
    "thorough": Profile(600, 60, "inductor", sizes="mixed", derandomize=False),
    "large": Profile(100, 20, "inductor", sizes="large"),
    "jit": Profile(12, 4, "eager", sizes="compiled", kinds=2),
}

_ALWAYS_LEFT_OUT = frozenset({Feature.DROPOUT})
"""Random, so never compared with the reference; `modes.dropout` looks at its statistics."""
_OF_THE_CALL = tuple(f for f in Feature if f not in (Feature.DROPOUT, Feature.COMPILE, Feature.CAPTURE, Feature.BATCH_INVARIANT))
"""Features that a drawn call can be made to ask for."""
_SELDOM_PAGED = frozenset({Feature.BACKWARD, Feature.KEY_MASK, Feature.KEY_STARTS, Feature.QUERY_LENGTHS})
"""What few kernels that read pages take beside them."""
_PADDING = (Feature.KEY_MASK, Feature.QUERY_MASK, Feature.KEY_LENGTHS, Feature.QUERY_LENGTHS, Feature.KEY_STARTS, Feature.PACKED)
_MOVED_BY_SPLITTING = frozenset(
    {
        Feature.CAUSAL,
        Feature.WINDOW,
        Feature.ALIBI,
        Feature.KEY_LENGTHS,
        Feature.KEY_STARTS,
        Feature.PACKED,
        Feature.SINKS,
        Feature.BACKWARD,
    }
)


_ROUND = 3
"""Examples of one Hypothesis run: the simplest call, a drawn one, and a variation of it. A longer run spends most of its examples on
variations of its first draws; many short ones, each with its own seed, see more kinds of calls."""


_KERNELS = ("flash-attn", "flash-attn-3", "flash-attn-4", "xformers", "mslk", "triton", "nvidia-cudnn-cu13")
"""Whose versions a certificate of a built-in backend names, where they are installed."""


class Check(NamedTuple):
    """One thing to check. `cases` is None for a check that draws nothing."""

    name: str
    body: Callable[..., None]
    cases: st.SearchStrategy[Case] | None
    examples: int
    required: frozenset[Feature] = frozenset()


def checks_for(backend: Backend, device: str, dtypes: Sequence[torch.dtype], profile: Profile) -> list[Check]:
    """Every check of a backend, from its own claims."""
    claims = backend.claims
    claimed = frozenset(claims.features)
    few, many = profile.per_feature, profile.examples

    def free(require: Collection[Feature] = (), without: Collection[Feature] = (), **how: Any) -> st.SearchStrategy[Case]:
        left_out = _ALWAYS_LEFT_OUT | set(without)
        return cases(claims, device=device, dtypes=dtypes, require=require, without=left_out, sizes=profile.sizes, **how)

    kinds = Kinds(backend, device, dtypes, profile.sizes, _OF_THE_CALL, profile.kinds) if profile.kinds else None

    def drawn(require: Collection[Feature] = (), without: Collection[Feature] = (), **how: Any) -> st.SearchStrategy[Case]:
        return free(require, without, **how) if kinds is None else kinds.drawn(require, without)

    found = [Check("equals_reference", checks.equals_reference, drawn(), many)]
    for feature in _OF_THE_CALL:
        only = frozenset({feature})
        if feature in claimed:
            draws = drawn(only)
            if feature is Feature.PAGED:
                draws = st.one_of(drawn(only, _SELDOM_PAGED), drawn(only, _SELDOM_PAGED), draws)
            found.append(Check(f"equals_reference[{feature}]", checks.equals_reference, draws, few, only))
        elif feature is Feature.PAGED:
            # Never refused for them: they are gathered into key and value.
            found.append(Check("gathers[paged]", checks.equals_reference, drawn(only), max(few // 4, 2), only))
        elif feature is not Feature.LSE_GRADIENT:
            refuse = functools.partial(checks.refuses, feature=feature)
            found.append(Check(f"refuses[{feature}]", refuse, free({feature}), max(few // 4, 2), frozenset({feature})))
    for feature in _PADDING:
        if feature in claimed:
            # Gradients and a bias are where poison is easiest forgotten: asked for in two draws of three.
            ways = ({feature}, {feature, Feature.BACKWARD}, {feature, Feature.BACKWARD, Feature.BIAS})
            # Not by pages: a cache shows finite numbers alone.
            draws = st.one_of(*[drawn(way, {Feature.PAGED}, dense=True, nothing=False) for way in ways if way <= claimed])
            found.append(Check(f"poison_does_not_leak[{feature}]", checks.poison_does_not_leak, draws, few, frozenset({feature})))
    found.append(Check("hidden_changes_nothing", checks.hidden_changes_nothing, drawn(dense=True, nothing=False), many))
    found.append(Check("empty_rows_are_zero", checks.empty_rows_are_zero, drawn(), many))
    one_row_each = drawn(without={Feature.PACKED}, dense=True)
    found.append(Check("rows_permute", checks.rows_permute, one_row_each, few))
    if Feature.DETERMINISTIC in claimed:
        only = frozenset({Feature.DETERMINISTIC})
        found.append(Check("same_bits_twice", checks.same_bits_twice, drawn(only), few, only))
    if Feature.BATCH_INVARIANT in claimed:
        found.append(Check("batch_invariant", checks.batch_invariant, one_row_each, few))
    if Feature.LSE in claimed:
        only = frozenset({Feature.LSE})
        found.append(Check("halves_merge", checks.halves_merge, drawn(only, _MOVED_BY_SPLITTING, dense=True, nothing=False), few, only))
    for name, body in modes.checks_for(backend, device, dtypes, profile.compiler):
        found.append(Check(name, body, None, 1))
    return found


def run_check(backend: Backend, check: Check, profile: Profile, tally: Tally, *, seed: int | None = None, shrink: bool = True) -> Outcome:
    """Runs one check. A failure's text ends with one line that repeats it."""
    return _judged(backend, check, _run(backend, check, profile, tally, seed=seed, shrink=shrink))


def _run(
    backend: Backend,
    check: Check,
    profile: Profile,
    tally: Tally,
    *,
    seed: int | None = None,
    shrink: bool = True,
    part: tuple[int, int] = (0, 1),
    until: float | None = None,
) -> Outcome:
    """What came of a check's calls, or of those of one part (its number, of how many): passed, or failed by an error or a difference.

    until: of `time.time`; no call begins after it.
    """
    chosen_seed = zlib.crc32(check.name.encode()) if seed is None else seed
    why = backend.claims.exceptions.get(check.name)
    start, before, refused = time.perf_counter(), tally.cases, tally.refused

    def outcome(result: str, text: str = "") -> Outcome:
        seconds = time.perf_counter() - start
        return Outcome(check.name, result, tally.cases - before, tally.refused - refused, chosen_seed, seconds, text)

    def time_is_up() -> bool:
        return until is not None and time.time() > until

    seen: set[Case] = set()
    failures: dict[Case, str] = {}
    number, parts = part
    examples = math.ceil(check.examples / parts)

    def one(case: Case) -> None:
        if case not in failures and (case in seen or time_is_up()):
            return
        seen.add(case)
        wanted = case if check.name.startswith("refuses") else fitted(backend, case, check.required)
        if wanted is None:
            tally.refused += 1
            return
        tally.cases += 1
        if not check.name.startswith("refuses"):
            tally.see(wanted)
        try:
            _tried(backend, check, wanted, tally)
        except AssertionError as error:
            failures[case] = str(error)
            raise

    if time_is_up():
        return outcome("skipped", OUT_OF_TIME)
    try:
        if check.cases is None:
            tally.cases += 1
            try:
                check.body(tally)
            except Exception as error:
                what = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
                raise AssertionError(f"{check.name}: {what}\n{_line(backend, check.name)}") from error
        else:
            phases = [hypothesis.Phase.generate] + ([hypothesis.Phase.shrink] if shrink and not why else [])
            limits = hypothesis.settings(
                max_examples=_ROUND,
                derandomize=profile.derandomize,
                database=None,
                deadline=None,
                phases=phases,
                report_multiple_bugs=False,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            for round_number in range(number, 2 * check.examples, parts):
                if len(seen) >= examples:
                    break
                limits(hypothesis.seed(chosen_seed + round_number)(hypothesis.given(case=check.cases)(lambda case: one(case))))()
                if time_is_up() and len(seen) < examples:
                    return outcome("passed", OUT_OF_TIME)
    except hypothesis.errors.Flaky as error:
        # It failed once and not again: the backend does not give the same answer every time.
        return outcome("failed", next(reversed(failures.values()), f"{check.name}: {error}"))
    except AssertionError as error:
        if why and isinstance(error.__cause__, AssertionError):
            return outcome("excepted", f"{why}\n{error}")
        return outcome("failed", str(error))
    return outcome("passed")


def _judged(backend: Backend, check: Check, outcome: Outcome) -> Outcome:
    """The outcome of a whole check: one without a call has shown nothing, and one that is declared to fail must."""
    why = backend.claims.exceptions.get(check.name)
    if outcome.result == "passed" and check.cases is not None and not outcome.cases and not outcome.text:
        wanted = ", ".join(check.required) or "a plain call"
        if not check.required <= set(backend.claims.features):
            text = f"{outcome.refused} calls with {wanted}, which is not claimed, all refused for what else they ask"
            return outcome._replace(result="skipped", text=text)
        text = f"claims {wanted}, but refuses every one of {outcome.refused} calls that ask for it"
        return outcome._replace(result="failed", text=text)
    if outcome.text == OUT_OF_TIME:
        drawn = outcome.cases + outcome.refused
        text = f"{OUT_OF_TIME} after {drawn} calls, where {check.examples} were to be drawn" if drawn else f"{OUT_OF_TIME} before it began"
        if why:
            return outcome._replace(result="skipped", text=f"{text}; declared to fail, and not seen to")
        return outcome._replace(result="passed" if outcome.cases else "skipped", text=text)
    if why and outcome.result == "passed":
        return outcome._replace(result="failed", text=f"{check.name}: declared to fail ({why}), and passes: take it from the exceptions")
    return outcome


def _joined(outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome of a check's parts: the first failure's, if there is one. A check that is declared to fail has one part."""
    if len(outcomes) == 1:
        return outcomes[0]
    worst = next((o for o in outcomes if o.result == "failed"), None) or next((o for o in outcomes if o.text), outcomes[0])
    return worst._replace(
        result="failed" if worst.result == "failed" else "passed" if any(o.result == "passed" for o in outcomes) else "skipped",
        cases=sum(o.cases for o in outcomes),
        refused=sum(o.refused for o in outcomes),
        seconds=sum(o.seconds for o in outcomes),
    )


def _tried(backend: Backend, check: Check, case: Case, tally: Tally) -> None:
    """The check's body, with the line that repeats a failure."""
    try:
        check.body(backend, case, tally)
    except Exception as error:
        what = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        raise AssertionError(f"{check.name}: {what}\n{_line(backend, f'{check.name} {case}')}") from error


def _line(backend: Backend, example: str) -> str:
    return f"attnreg.conformance.reproduce({backend.name!r}, {example!r})"


def run_checks(
    backend: Backend | str,
    *,
    device: str = "cpu",
    dtypes: Sequence[torch.dtype] | None = None,
    profile: str | Profile = "ci",
    progress: Callable[[int, int, Outcome], None] | None = None,
    shrink: bool = True,
    stop: bool = False,
    jobs: int = 1,
    seconds: float | None = None,
) -> Report:
    """Runs every check of a backend and reports.

    progress: called after each check with (done, of how many, its outcome). stop: at the first failure.
    jobs: processes, for a backend of an installed package; a script that asks for several is guarded by `if __name__ == "__main__"`.
    seconds: how long calls are begun; what was cut short says so.
    Raises LookupError for an unknown name, ValueError for a device that is not here, or one or a dtype that the backend does not claim.
    """
    backend = named(backend)
    amount = PROFILES[profile] if isinstance(profile, str) else profile
    if jobs > 1 and (registry.backends().get(backend.name) is not backend or registry.origin(backend.name) == "register()"):
        raise ValueError(
            f"jobs: 1 for backend {backend.name!r}, got {jobs}: other processes find a backend by its name, in an installed package"
        )
    if not backend.reason_missing:
        _check_asked(backend, device, dtypes)
    tally = Tally()
    outcomes: dict[str, Outcome] = {}
    names: list[str] = []
    if backend.reason_missing:
        names, outcomes = ["all"], {"all": Outcome("all", "skipped", 0, 0, 0, 0.0, str(backend.reason_missing))}
    else:
        chosen = tuple(dtypes or usual_dtypes(backend, device))
        todo = checks_for(backend, device, chosen, amount)
        names = [check.name for check in todo]
        if unknown := set(backend.claims.exceptions) - set(names):
            raise ValueError(f"exceptions of backend {backend.name!r}: checks that it has, {', '.join(names)}, got {', '.join(unknown)}")
        until = None if seconds is None else time.time() + seconds
        run = _in_turn if jobs == 1 else functools.partial(_in_processes, device=device, dtypes=chosen, jobs=jobs)
        for outcome in run(backend, todo, amount, tally, shrink=shrink, until=until):
            outcomes[outcome.name] = outcome
            if progress is not None:
                progress(len(outcomes), len(todo), outcome)
            if stop and outcome.result == "failed":
                break
    origin = registry.origin(backend.name).partition(" ")[0]  # a distribution's comes with its version
    libraries = _KERNELS if origin == "attnreg" and device == "cuda" else () if origin == "attnreg" else (origin,)
    libraries += getattr(backend.missing, "libraries", ())
    in_order = tuple(outcomes[name] for name in names if name in outcomes)
    cut = f", cut short after {seconds:.0f} s" if any(o.text.startswith(OUT_OF_TIME) for o in in_order) else ""
    return Report(backend.name, device, _name(amount) + cut, in_order, tally, written_claims(backend.claims), libraries)


def _in_turn(
    backend: Backend, todo: Sequence[Check], profile: Profile, tally: Tally, *, shrink: bool, until: float | None
) -> Iterator[Outcome]:
    for check in todo:
        yield _judged(backend, check, _run(backend, check, profile, tally, seed=_seed(check, profile), shrink=shrink, until=until))


def _in_processes(
    backend: Backend,
    todo: Sequence[Check],
    profile: Profile,
    tally: Tally,
    *,
    device: str,
    dtypes: tuple[torch.dtype, ...],
    jobs: int,
    shrink: bool,
    until: float | None,
) -> Iterator[Outcome]:
    """Checks in the order in which they end."""
    parts: dict[str, list[Part]] = {}
    for check in todo:
        drawn = None if check.cases is None or check.name in backend.claims.exceptions else check.examples
        parts[check.name] = parts_of(check.name, _seed(check, profile), drawn, jobs)
    found: dict[str, list[Outcome]] = {name: [] for name in parts}
    by_name = {check.name: check for check in todo}
    work = functools.partial(_runner, backend.name, device, dtypes, profile, shrink, until)
    for part, (outcome, counted) in run_parts([p for each in parts.values() for p in each], work, jobs, device, until):
        tally.join(counted)
        earlier = found[part.check]
        earlier.append(outcome)
        if any(o.result == "failed" for o in earlier[:-1]):
            continue  # that was said when the first one failed
        if len(earlier) == part.of or outcome.result == "failed":
            yield _judged(backend, by_name[part.check], _joined(earlier))


def _runner(
    name: str, device: str, dtypes: tuple[torch.dtype, ...], profile: Profile, shrink: bool, until: float | None
) -> Callable[[Part], Drawn]:
    """What a process does with each part."""
    backend = named(name)
    checks_by_name = {check.name: check for check in checks_for(backend, device, dtypes, profile)}

    def run(part: Part) -> Drawn:
        tally = Tally()
        check = checks_by_name[part.check]
        return _run(backend, check, profile, tally, seed=part.seed, shrink=shrink, part=(part.number, part.of), until=until), tally

    return run


def _seed(check: Check, profile: Profile) -> int:
    return zlib.crc32(check.name.encode()) if profile.derandomize else torch.seed() % 2**32


def _check_asked(backend: Backend, device: str, dtypes: Sequence[torch.dtype] | None) -> None:
    if ":" in device:
        raise ValueError(f"device: a kind, as in 'cuda', got {device!r}; which one it is say environment variables as CUDA_VISIBLE_DEVICES")
    if device not in backend.claims.devices:
        raise ValueError(f"device: among those that {backend.name} claims, {', '.join(sorted(backend.claims.devices))}, got {device!r}")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device: one that is here, got {device!r}: {error}") from error
    usual = usual_dtypes(backend, device)
    if unclaimed := [dtype for dtype in dtypes or () if dtype not in usual]:
        names = ", ".join(map(dtype_name, usual))
        raise ValueError(f"dtypes: among those that {backend.name} claims, {names}, got {', '.join(map(dtype_name, unclaimed))}")


def _name(profile: Profile) -> str:
    """A profile's name, or what it is."""
    names = [name for name, known in PROFILES.items() if known == profile]
    kinds = f", {profile.kinds} kinds of calls" if profile.kinds else ""
    return names[0] if names else f"{profile.examples} calls a check, {profile.per_feature} a feature{kinds}, {profile.sizes} sizes"


def conformance_suite(
    backend: Backend | str,
    *,
    devices: Sequence[str] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    profile: str | Profile = "ci",
) -> type:
    """A test class for pytest with one test for each check: `TestMine = conformance_suite(my_backend)`.

    devices: by default those of the backend's claims that are here. Every call makes fresh test functions.
    """
    amount = PROFILES[profile] if isinstance(profile, str) else profile
    value = named(backend)
    if devices is None:
        devices = [d for d in value.claims.devices if d == "cpu" or (d == "cuda" and torch.cuda.is_available())] or list(
            value.claims.devices
        )
    tests: dict[str, Any] = {"__doc__": f"The conformance suite of backend {value.name!r}, from its own claims."}
    for device in devices:
        chosen = dtypes or usual_dtypes(value, device)
        for check in checks_for(value, device, chosen, amount):
            name = "test_" + check.name.replace("[", "_").replace("]", "")
            tests[name if len(devices) == 1 else f"{name}_{device}"] = _test(value, check, amount, device)
    return type(f"Test{value.name.title().replace('-', '').replace('_', '')}", (), tests)


def _test(backend: Backend, check: Check, profile: Profile, device: str) -> Callable[[Any], None]:
    def test(self: Any) -> None:
        import pytest

        if backend.reason_missing:
            pytest.skip(str(backend.reason_missing))
        if device == "cuda" and not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        seed = None if profile.derandomize else torch.seed() % 2**32
        outcome = run_check(backend, check, profile, Tally(), seed=seed)
        if outcome.result == "skipped":
            pytest.skip(outcome.text)
        if outcome.result == "excepted":
            pytest.xfail(outcome.text)
        if outcome.result == "failed":
            pytest.fail(outcome.text, pytrace=False)

    return test


def reproduce(backend: Backend | str, example: str) -> None:
    """Repeats one example of a failure message: raises the same AssertionError, or returns if it now holds."""
    backend = named(backend)
    name, _, text = example.partition(" ")
    case = Case.read(text)
    dtypes = (getattr(torch, case.dtype),)
    for check in checks_for(backend, case.device, dtypes, PROFILES["ci"]):
        if check.name == name and check.cases is None:
            return check.body(Tally())
        if check.name == name:
            return _tried(backend, check, case, Tally())
    raise ValueError(f"example: starts with a check of backend {backend.name!r}, got {name!r}")


def named(backend: Backend | str) -> Backend:
    """A backend by name, or itself. Raises LookupError for an unknown name."""
    if isinstance(backend, Backend):
        return backend
    registry.check_name(backend, "backend", families=False)
    return registry.backends()[backend]


def usual_dtypes(backend: Backend, device: str) -> tuple[torch.dtype, ...]:
    """The dtypes that the backend claims, simplest first."""
    known = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    return tuple(dtype for dtype in known if dtype in backend.claims.dtypes)
