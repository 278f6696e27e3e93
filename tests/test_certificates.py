"""The certificates in docs/certificates: of this format, of a run that passed, and of nothing but what may be shown to all."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attnreg import kernels
from attnreg.cli import app
from attnreg.conformance import Outcome
from attnreg.conformance.report import OUT_OF_TIME, written_claims

FOLDER = Path(__file__).parent.parent / "docs" / "certificates"
BUILT_IN = {"sdpa", "reference"}
LIBRARIES = {"flashinfer": "flashinfer-python", "sage": "sageattention"}
"""Of plugins that run on a card: whose kernels the certificate is of."""
FILES = sorted(FOLDER.glob("*.json"))


def test_there_is_one_for_each_backend_that_runs_on_a_cpu():
    assert {"sdpa", "reference", "chunked", "onnxruntime", "jax"} <= {file.stem for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_certificate_is_read_and_names_its_versions(file):
    report = json.loads(file.read_text())
    done = CliRunner().invoke(app, ["matrix", "--from", str(file)], env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exit_code == 0, done.output
    first = done.output.splitlines()[0]
    excepted = report["claims"].get("exceptions")
    verdict = f"passed but for {', '.join(excepted)}, as declared" if excepted else "passed"
    assert first.startswith(f"{report['backend']} on {report['device']}: {verdict}, {report['cases']} calls (")
    libraries = {"attnreg", "torch"} | ({f"attnreg-{report['backend']}"} - {f"attnreg-{name}" for name in BUILT_IN})
    libraries |= {LIBRARIES[report["backend"]]} if report["backend"] in LIBRARIES else set()
    assert all(re.search(rf"\b{name} \d+\.\d+", first) for name in libraries), first
    assert ("cpu" in report["claims"]["devices"]) == (report["device"] == "cpu") and report["device"] != "cuda", "the card's name"
    for feature in report["worst_errors"]:
        assert f"\n{feature} " in done.output


def test_the_docs_show_what_the_certificate_says():
    text = (FOLDER.parent / "writing-a-backend.md").read_text()
    shown = text.partition("<!-- certificate -->")[2].partition("<!-- /certificate -->")[0].strip().splitlines()[1:-1]
    command, *lines = shown
    assert command == "$ attnreg matrix --from docs/certificates/chunked.json"
    said = CliRunner().invoke(app, ["matrix", "--from", str(FOLDER / "chunked.json")], env={"COLUMNS": "160", "TERM": "dumb"}).output
    said = [line.rstrip() for line in said.splitlines()]
    assert [line for line in lines if line != "..." and line not in said] == [] and lines[0] == said[0] and len(lines) > 5


def assert_whole(report):
    """Every check ran as far as its profile says. What failed is what the backend declares to fail, and says why."""
    assert report["passed"] and "cut short" not in report["profile"]
    assert report["cases"] == sum(check["cases"] for check in report["checks"]) > 1000
    exceptions = report["claims"].get("exceptions", {})
    for check in report["checks"]:
        outcome = Outcome(**check)
        if outcome.result == "excepted":
            assert outcome.text.startswith(exceptions[outcome.name]) and "reproduce" in outcome.text, outcome
        else:
            assert outcome.result == "passed" or (outcome.result == "skipped" and outcome.text), outcome
            assert outcome.name not in exceptions and not outcome.text.startswith(OUT_OF_TIME), outcome
    assert set(exceptions) <= {check["name"] for check in report["checks"]}
    forced = {check["name"].partition("[")[2].rstrip("]") for check in report["checks"] if check["name"].startswith("equals_reference[")}
    # What needs the compiler, a card or a cache is not a drawn call.
    assert set(report["claims"]["features"]) - {"compile", "capture", "paged", "dropout", "batch_invariant"} <= forced
    for dtypes in report["worst_errors"].values():
        for quantities in dtypes.values():
            assert all(0 <= number["error"] <= number["allowed"] for number in quantities.values())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_certificate_is_of_a_whole_run(file):
    report = json.loads(file.read_text())
    assert report["backend"] == file.stem
    assert_whole(report)


def live_claims(name):
    """What the backend of this source claims now. A plugin's module needs neither an installed package nor its library to say it."""
    if name in BUILT_IN:
        backends = kernels.attnreg_backends()
    else:
        path = FOLDER.parent.parent / "plugins" / f"attnreg-{name}" / f"attnreg_{name}.py"
        spec = importlib.util.spec_from_file_location(f"claims_of_{name}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        backends = module.attnreg_backends()
    (claims,) = (backend.claims for backend in backends if backend.name == name)
    return written_claims(claims)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_certificate_is_of_what_is_claimed(file):
    """A claim that came, went or changed since must be proven again."""
    assert json.loads(file.read_text())["claims"] == live_claims(file.stem)


def of_one_check(**changes):
    """The certificate of chunked, one of its checks with another outcome."""
    report = json.loads((FOLDER / "chunked.json").read_text())
    report["checks"][3].update(changes)
    return report


DECLARED = "one step for all\nwrong\nattnreg.conformance.reproduce('chunked', '')"


@pytest.mark.parametrize(
    ("changes", "exceptions"),
    [
        ({"result": "failed"}, {}),
        ({"result": "skipped"}, {}),
        ({"text": f"{OUT_OF_TIME} after 3 calls, where 60 were to be drawn"}, {}),
        ({"result": "excepted", "text": DECLARED}, {}),
        ({"result": "excepted", "text": DECLARED}, {"another_check": "one step for all"}),
        ({"result": "excepted", "text": DECLARED}, {"equals_reference[window]": "another reason"}),
        ({}, {"equals_reference[window]": "one step for all"}),
        ({}, {"no_such_check": "one step for all"}),
    ],
)
def test_what_is_no_whole_run(changes, exceptions):
    report = of_one_check(**changes)
    assert report["checks"][3]["name"] == "equals_reference[window]"
    report["claims"]["exceptions"] = exceptions
    with pytest.raises((AssertionError, KeyError)):
        assert_whole(report)


def test_a_declared_exception_is_of_a_whole_run():
    report = of_one_check(result="excepted", text=DECLARED)
    report["claims"]["exceptions"] = {"equals_reference[window]": "one step for all"}
    assert_whole(report)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_certificate_names_no_machine(file):
    text = file.read_text()
    assert not re.search(r"[\"' ](/|[A-Z]:\\\\|~/)\w", text), "an absolute path"
    fields = {"backend", "device", "profile", "passed", "versions", "claims", "cases", "drawn", "checks", "worst_errors"}
    assert set(json.loads(text)) | {"drawn"} == fields  # which the first ones did not say yet
