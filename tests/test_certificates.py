"""The certificates in docs/certificates: of this format, of a run that passed, and of nothing but what may be shown to all."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attnreg.cli import app
from attnreg.conformance import Outcome

FOLDER = Path(__file__).parent.parent / "docs" / "certificates"
BUILT_IN = {"sdpa", "reference"}
FILES = sorted(FOLDER.glob("*.json"))


def test_there_is_one_for_each_backend_that_runs_on_a_cpu():
    assert {"sdpa", "reference", "chunked", "onnxruntime", "jax"} <= {file.stem for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_certificate_is_read_and_names_its_versions(file):
    report = json.loads(file.read_text())
    done = CliRunner().invoke(app, ["matrix", "--from", str(file)], env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exit_code == 0, done.output
    first = done.output.splitlines()[0]
    assert first.startswith(f"{report['backend']} on {report['device']}: passed, {report['cases']} calls (")
    libraries = {"attnreg", "torch"} | ({f"attnreg-{report['backend']}"} - {f"attnreg-{name}" for name in BUILT_IN})
    assert all(re.search(rf"\b{name} \d+\.\d+", first) for name in libraries), first
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


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_certificate_is_of_a_whole_run(file):
    report = json.loads(file.read_text())
    assert report["backend"] == file.stem and report["passed"]
    assert report["cases"] == sum(check["cases"] for check in report["checks"]) > 1000
    for check in report["checks"]:
        outcome = Outcome(**check)
        assert outcome.result == "passed" or (outcome.result == "skipped" and outcome.text), outcome
    forced = {check["name"].partition("[")[2].rstrip("]") for check in report["checks"] if check["name"].startswith("equals_reference[")}
    # What needs the compiler, a card or a cache is not a drawn call.
    assert set(report["claims"]["features"]) - {"compile", "capture", "paged", "dropout", "batch_invariant"} <= forced
    for dtypes in report["worst_errors"].values():
        for quantities in dtypes.values():
            assert all(0 <= number["error"] <= number["allowed"] for number in quantities.values())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_certificate_names_no_machine(file):
    text = file.read_text()
    assert not re.search(r"[\"' ](/|[A-Z]:\\\\|~/)\w", text), "an absolute path"
    fields = {"backend", "device", "profile", "passed", "versions", "claims", "cases", "drawn", "checks", "worst_errors"}
    assert set(json.loads(text)) | {"drawn"} == fields  # which the first ones did not say yet
