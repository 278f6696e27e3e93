"""The suite in several processes and within a time: nothing is lost, nothing is hidden, and what dies or hangs harms no one else."""

from __future__ import annotations

import os
import signal
import time

import pytest
from typer.testing import CliRunner
from wrong_backends import WRONG

import attnreg
from attnreg import NATIVE, Capabilities, Feature
from attnreg.cli import app
from attnreg.conformance import Outcome, Profile, jobs, run_checks
from attnreg.conformance.jobs import Part, parts_of, run_parts
from attnreg.conformance.suite import checks_for
from attnreg.conformance.trial import Tally

FEW = Profile(4, 2, "eager", sizes="few")


def test_a_long_check_is_parted_and_a_short_one_is_not():
    assert parts_of("long", 7, 150, 4) == [Part("long", 7, number, 4) for number in range(4)]
    assert [len(parts_of("short", 7, calls, 4)) for calls in (1, 25, 26, None)] == [1, 1, 2, 1]


def test_processes_find_what_one_finds():
    one, two = run_checks("sdpa", profile=FEW), run_checks("sdpa", profile=FEW, jobs=2)
    assert two.passed, [o.text for o in two.outcomes if o.result == "failed"]
    # 4 calls are one part: the very same ones.
    assert [o._replace(seconds=0) for o in one.outcomes] == [o._replace(seconds=0) for o in two.outcomes]
    assert one.tally.kinds == two.tally.kinds and one.tally.worst == two.tally.worst
    assert one.as_dict().keys() == two.as_dict().keys()


def doing():
    """What each process does with a part: as the part's check is called."""

    def run(part):
        if part.check == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if part.check == "raises":
            raise RuntimeError("no such kernel")
        if part.check == "hangs":
            time.sleep(600)
        tally = Tally()
        tally.cases = 3
        failed = part.check == "fails" and part.number == 1
        return Outcome(part.check, "failed" if failed else "passed", 3, 0, part.seed, 0.1, "wrong" if failed else ""), tally

    return run


def found(names, of=3, processes=2, until=None):
    parts = [Part(name, 0, number, of) for name in names for number in range(of)]
    seen = {}
    for part, (outcome, _tally) in run_parts(parts, doing, processes, "cpu", until):
        seen.setdefault(part.check, []).append(outcome)
    return seen


def test_what_dies_or_raises_is_a_failure_of_its_check_alone():
    seen = found(["dies", "holds", "raises"])
    assert [o.result for o in seen["holds"]] == ["passed"] * 3
    assert seen["dies"][0].result == "failed" and "its process ended with exit code -9; it was at part " in seen["dies"][0].text
    assert seen["raises"][0].result == "failed" and "RuntimeError: no such kernel" in seen["raises"][0].text


def test_after_a_failure_the_rest_of_the_check_is_left_out():
    seen = found(["fails"], of=40, processes=1)
    assert [o.text for o in seen["fails"]] == ["", "wrong"]


def test_a_device_that_no_longer_answers_costs_one_process(monkeypatch):
    monkeypatch.setattr(jobs, "_serve", serving_a_broken_device)
    seen = found(["fails", "holds"], processes=1)
    assert [o.result for o in seen["fails"]] == ["passed", "failed"] and len(seen["holds"]) == 3


def serving_a_broken_device(connection, *arguments):
    jobs._usable = lambda device: False
    jobs_serve(connection, *arguments)


jobs_serve = jobs._serve


def test_what_hangs_is_ended_and_what_had_not_begun_says_so(monkeypatch):
    monkeypatch.setattr(jobs, "GRACE", 1.0)
    seen = found(["hangs", "late"], processes=1, until=time.time() + 1)
    assert seen["hangs"][0].result == "failed" and "no end 1 s after the time was up" in seen["hangs"][0].text
    assert [(o.result, o.text) for o in seen["late"]] == [("skipped", "the time was up")] * 3


@pytest.mark.parametrize("processes", [1, 2])
def test_the_time_bounds_a_run_and_its_certificate_says_so(processes):
    report = run_checks("reference", profile=Profile(4000, 2, "eager"), seconds=0.5, jobs=processes)
    assert report.profile.endswith("cut short after 0 s") or report.profile.endswith("cut short after 1 s")
    # In their order, whenever they ended, and none is missing.
    names = [check.name for check in checks_for(attnreg.backends()["reference"], "cpu", USUAL, FEW)]
    assert [outcome.name for outcome in report.outcomes] == names
    assert report.outcomes[-1].result == "skipped" and report.outcomes[-1].text == "the time was up before it began"
    if processes == 1:
        first = report.outcomes[0]
        assert first.result == "passed" and first.text == f"the time was up after {first.cases} calls, where 4000 were to be drawn"


USUAL = tuple(attnreg.backends()["reference"].claims.dtypes)


def test_processes_are_for_backends_that_each_of_them_can_find():
    with pytest.raises(ValueError, match="jobs: 1 for backend 'window_off_by_one', got 2"):
        run_checks(WRONG["window_off_by_one"].backend, jobs=2)


# ---------------------------------------------------------------------- declared exceptions


def backend(name, **claims):
    """The wrong backend of that name, with other claims."""
    wrong = WRONG[name].backend
    known = wrong.claims
    features = {f: NATIVE for f in (Feature.CAUSAL, Feature.WINDOW, Feature.UNEQUAL_LENGTHS) if f in known.features}
    return attnreg.Backend(name, wrong.run, Capabilities(features=features, **claims), layout=wrong.layout)


def one_check(backend, name):
    report = run_checks(backend, profile=Profile(40, 20, "eager"), shrink=False)
    return report, next(o for o in report.outcomes if o.name == name)


WHY = {"equals_reference[window]": "the window is one slot short"}


def test_a_declared_exception_must_fail_and_is_not_hidden():
    wrong = backend("window_off_by_one", bound=1.0, exceptions=WHY)
    report, outcome = one_check(wrong, "equals_reference[window]")
    assert outcome.result == "excepted" and outcome.text.startswith("the window is one slot short\nequals_reference[window]: ")
    others = [o.name for o in report.outcomes if o.result == "failed"]
    assert "equals_reference[window]" not in others and not report.passed, "it fails elsewhere too, which is not declared"
    assert report.as_dict()["claims"]["exceptions"] == WHY


def test_an_error_is_no_declared_exception():
    def run(call):
        raise RuntimeError("no such kernel")

    report = run_checks(
        attnreg.Backend("mine", run, Capabilities({}, bound=1.0, exceptions={"rows_permute": "no"})), profile=FEW, shrink=False
    )
    outcome = next(o for o in report.outcomes if o.name == "rows_permute")
    assert outcome.result == "failed" and "RuntimeError: no such kernel" in outcome.text


def test_an_exception_that_holds_is_a_failure():
    right = attnreg.backends()["sdpa"]
    report, outcome = one_check(
        attnreg.Backend(
            "right", right.run, Capabilities({Feature.CAUSAL: NATIVE}, bound=1.0, exceptions={"rows_permute": "no"}), layout="bhsd"
        ),
        "rows_permute",
    )
    assert outcome.result == "failed" and "declared to fail (no), and passes" in outcome.text and not report.passed


def test_a_report_with_exceptions_alone_has_passed_but_for_them(tmp_path):
    right = attnreg.backends()["sdpa"]
    report = run_checks(attnreg.Backend("right", right.run, Capabilities({}), layout="bhsd"), profile=FEW)
    excepted = Outcome("hidden_changes_nothing", "excepted", 1, 0, 0, 0.0, "one step for all")
    report = report._replace(outcomes=tuple(excepted if o.name == excepted.name else o for o in report.outcomes))
    assert report.passed
    report.write(tmp_path / "right.json")
    shown = CliRunner().invoke(app, ["matrix", "--from", str(tmp_path / "right.json")]).output
    assert shown.startswith("right on cpu: passed but for hidden_changes_nothing, as declared, ")


def test_what_may_be_declared():
    with pytest.raises(ValueError, match="exceptions: only beside a bound"):
        Capabilities({}, exceptions={"rows_permute": "no"})
    with pytest.raises(ValueError, match="the reason why it fails in words"):
        Capabilities({}, bound=2.0, exceptions={"rows_permute": ""})
    with pytest.raises(ValueError, match=r"exceptions of backend 'mine': checks that it has, .*equals_reference.*got no_such_check"):
        run_checks(attnreg.Backend("mine", lambda call: call.query, Capabilities({}, bound=2.0, exceptions={"no_such_check": "no"})))


def test_the_command_takes_both(tmp_path):
    arguments = ["check", "reference", "--device", "cpu", "--dtype", "float32", "--sizes", "few", "--examples", "2"]
    done = CliRunner().invoke(app, [*arguments, "--jobs", "2", "--report", str(tmp_path / "reference.json")])
    assert done.exit_code == 0 and "0 checks failed" in done.output, done.output
    done = CliRunner().invoke(app, [*arguments[:-2], "--seconds", "1"])
    assert "the time was up" in done.output, done.output


def test_a_kernel_that_asserts_is_no_exception():
    def run(call):
        assert not call.return_lse, "an assert of the kernel"
        return attnreg.backends()["sdpa"].run(call)

    claims = Capabilities({Feature.LSE: NATIVE}, bound=1.0, exceptions={"equals_reference[lse]": "no"})
    report, outcome = one_check(attnreg.Backend("asserting", run, claims, layout="bhsd"), "equals_reference[lse]")
    assert outcome.result == "failed" and "raised AssertionError: an assert of the kernel" in outcome.text and not report.passed


def test_what_is_declared_to_fail_is_not_passed_for_want_of_time(tmp_path):
    def slow(call):
        time.sleep(0.3)
        return attnreg.backends()["sdpa"].run(call)

    claims = Capabilities({}, bound=1.0, exceptions={"equals_reference": "no"})
    report = run_checks(attnreg.Backend("slow", slow, claims, layout="bhsd"), profile=FEW, seconds=1)
    outcome = next(o for o in report.outcomes if o.name == "equals_reference")
    assert outcome.result == "skipped" and "declared to fail, and not seen to" in outcome.text
    report.write(tmp_path / "slow.json")
    shown = CliRunner().invoke(app, ["matrix", "--from", str(tmp_path / "slow.json")], env={"COLUMNS": "300"}).output
    assert shown.startswith("slow on cpu: nothing shown (equals_reference, declared to fail, not run), ")
