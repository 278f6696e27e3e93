"""The suite can fail: each wrong backend is caught under the ci profile, by the check that is there for it."""

import pytest
from wrong_backends import WRONG

from attnreg.conformance import PROFILES, reproduce
from attnreg.conformance.suite import checks_for, run_check, usual_dtypes
from attnreg.conformance.trial import Tally

FAIL_BY_RAISING = ("claims_sinks_and_raises", "breaks_the_graph", "output_in_float32")
"""By an error of theirs or, the last, of the core, which looks at the shape and dtype of what a backend returns."""


@pytest.mark.parametrize("name", WRONG)
def test_is_caught(name, record_property, capsys):
    backend, caught_by = WRONG[name]
    todo = {check.name: check for check in checks_for(backend, "cpu", usual_dtypes(backend, "cpu"), PROFILES["ci"])}
    outcome = run_check(backend, todo[caught_by], PROFILES["ci"], Tally(), shrink=False)
    with capsys.disabled():
        first = outcome.text.splitlines()[0] if outcome.text else ""
        print(f"\n{name:42} {outcome.result} by {outcome.name} after {outcome.cases} calls, {outcome.seconds:.1f} s: {first[:110]}", end="")
    assert outcome.result == "failed", f"{name} passes {caught_by}"
    assert "Error: " not in outcome.text or name in FAIL_BY_RAISING, f"noticed for another reason than being wrong: {outcome.text}"


def test_there_are_at_least_25():
    assert len(WRONG) >= 25


def test_the_printed_line_repeats_the_failure():
    backend, caught_by = WRONG["window_off_by_one"]
    todo = {check.name: check for check in checks_for(backend, "cpu", usual_dtypes(backend, "cpu"), PROFILES["ci"])}
    outcome = run_check(backend, todo[caught_by], PROFILES["ci"], Tally())
    line = outcome.text.splitlines()[-1]
    assert line.startswith("attnreg.conformance.reproduce('window_off_by_one', ")
    example = eval(line[len("attnreg.conformance.reproduce('window_off_by_one', ") : -1])
    with pytest.raises(AssertionError, match="output"):
        reproduce(backend, example)
