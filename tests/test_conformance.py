"""The suite on the built-in backends that every machine has, and what it says about itself."""

import dataclasses
import importlib.metadata
import json
import subprocess
import sys

import hypothesis
import pytest
import torch
from wrong_backends import paged

import attnreg
from attnreg.conformance import PROFILES, Profile, conformance_suite, reproduce, run_checks
from attnreg.conformance.cases import Case
from attnreg.conformance.strategies import cases
from attnreg.conformance.suite import checks_for, run_check
from attnreg.conformance.trial import Tally

TestReference = conformance_suite("reference", devices=("cpu",))
TestSdpa = conformance_suite("sdpa", devices=("cpu",))
TestPaged = conformance_suite(paged)


def test_a_printed_case_reads_back():
    @hypothesis.settings(max_examples=200, derandomize=True)
    @hypothesis.given(cases(attnreg.backends()["reference"].claims))
    def same(case):
        assert Case.read(str(case)) == case

    same()
    with pytest.raises(ValueError, match="words like batch=2"):
        Case.read("batches=2")


def test_paged_draws_reach_what_goes_wrong_in_pages():
    (check,) = [c for c in checks_for(paged, "cpu", (torch.float32,), PROFILES["ci"]) if c.name == "equals_reference[paged]"]
    drawn = []
    body = lambda backend, case, tally: drawn.append(case)
    assert run_check(paged, check._replace(body=body), PROFILES["ci"], Tally()).result == "passed"
    assert all(case.page_size % 4 == 0 for case in drawn), "sizes that the backend's rule refuses"
    several = [case for case in drawn if case.key_length > case.page_size and case.batch > 1 and case.key_lengths]
    assert {case.query_length > 1 for case in several} == {True, False} and len(several) >= 6
    for name in ("causal", "window", "softcap", "lse"):
        assert any(getattr(case, name) for case in drawn), name


def test_reproduce_repeats_an_example():
    reproduce("sdpa", "equals_reference[causal] query_length=3 key_length=5 causal=True")
    with pytest.raises(ValueError, match="starts with a check of backend 'sdpa'"):
        reproduce("sdpa", "no_such_check query_length=3")
    with pytest.raises(LookupError, match="did you mean 'sdpa'"):
        reproduce("sdpaa", "equals_reference")


def test_the_report_is_a_certificate(tmp_path):
    seen = []
    report = run_checks("sdpa", profile=Profile(3, 2, "eager"), progress=lambda done, total, outcome: seen.append((done, total)))
    assert report.passed, [o.text for o in report.outcomes if o.result == "failed"]
    assert seen[-1] == (len(report.outcomes), len(report.outcomes))
    report.write(tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["backend"] == "sdpa" and written["passed"] and written["versions"]["attnreg"] == attnreg.__version__
    worst = written["worst_errors"]["causal"]
    assert all(0 <= number["error"] <= number["allowed"] for dtype in worst.values() for number in dtype.values())
    assert all(isinstance(check["seed"], int) for check in written["checks"])
    assert written == json.loads(json.dumps(report.as_dict())), "laid out in lines, but the same"


def test_a_certificate_names_the_versions_of_what_the_backend_needs():
    backend = dataclasses.replace(attnreg.backends()["sdpa"], missing=attnreg.needs("numpy>=1 | no-such-library", "packaging"))
    report = run_checks(backend, profile=Profile(1, 1, "eager"), stop=True)
    versions = report.as_dict()["versions"]
    assert versions["numpy"] == importlib.metadata.version("numpy") and "packaging" in versions and "no-such-library" not in versions
    assert report.profile == "1 calls a check, 1 a feature, small sizes"


def test_nothing_run_is_not_passed():
    absent = attnreg.Backend(
        name="absent", run=lambda call: call.query, capabilities=attnreg.Capabilities(features={}),
        missing=lambda: attnreg.Reason("missing", "a library", "not installed"),
    )  # fmt: skip
    assert not run_checks(absent).passed


def test_the_plugin_adds_the_suite_to_a_run(tmp_path):
    (tmp_path / "test_nothing.py").write_text("")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--attnreg-backend",
        "reference",
        "--attnreg-device",
        "cpu",
        "-k",
        "halves_merge or dropout",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
    done = subprocess.run([*command[:5], "no_such"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 4 and "no backend is called 'no_such'" in done.stdout + done.stderr


def test_the_plugin_imports_neither_torch_nor_hypothesis():
    code = "import sys, attnreg_pytest; print(sorted({'torch', 'hypothesis', 'attnreg'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
