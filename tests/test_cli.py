"""The command line, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from attnreg import Feature, backends, matrices
from attnreg.cli import app

SHAPE = ["--query", "2,128,32,64"]


def run(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb"})


def test_doctor_says_what_is_here_and_what_is_not():
    done = run("doctor")
    assert done.exit_code == 0, done.output
    for name, backend in backends().items():
        line = [line for line in done.output.splitlines() if line.startswith(f"{name} ")][-1]
        missing = backend.reason_missing
        assert "ready" in line or "no device" in line if missing is None else missing.asked.split()[0] in line
    assert "pip install" in done.output


def test_explain_needs_no_device():
    done = run("explain", *SHAPE, "--kv-heads", "8", "--dtype", "bfloat16", "--device", "cuda", "--causal")
    assert done.exit_code == 0 and "order auto: automatic" in done.output
    done = run("explain", *SHAPE, "--kv-heads", "8", "--dtype", "bfloat16", "--device", "cuda", "--causal", "--json")
    answer = json.loads(done.output)
    assert answer["spec"]["device"] == "cuda" and answer["spec"]["key_heads"] == 8 and answer["chosen"]


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["--window", "3,none"], "window", "(True, False)"),
        (["--key-mask", "left"], "key_mask", "left"),
        (["--query-mask", "any"], "query_mask", "any"),
        (["--mask"], "mask", "(True, False, True, True)"),
        (["--bias", "--training"], "gradients", "('query', 'key', 'value', 'bias')"),
        (["--key-lengths"], "key_lengths", True),
        (["--query-lengths"], "query_lengths", True),
        (["--key-starts"], "key_starts", True),
        (["--alibi"], "alibi", "heads"),
        (["--softcap", "50"], "softcap", True),
        (["--sinks"], "sinks", True),
        (["--scale", "1.0"], "scale", True),
        (["--dropout", "0.1"], "dropout", True),
        (["--lse"], "return_lse", True),
        (["--deterministic"], "deterministic", True),
        (["--compile"], "compiling", True),
        (["--capture"], "capturing", True),
        (["--page-size", "16"], "page_size", 16),
        (["--value-dim", "32"], "value_dim", 32),
        (["--keys", "256"], "equal_lengths", False),
    ],
)
def test_every_flag_reaches_the_spec(flags, field, value):
    assert json.loads(run("explain", *SHAPE, *flags, "--json").output)["spec"][field] == value


def test_packed_rows():
    answer = json.loads(run("explain", "--query", "1,128,32,64", "--packed", "3", "--json").output)
    assert answer["spec"]["packed"] is True


def test_what_nothing_can_run_exits_with_one():
    done = run("explain", *SHAPE, "--softcap", "3", "--backend", "sdpa")
    assert done.exit_code == 1 and "softcap: not claimed" in done.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--query", "2,128,32"], "4 whole numbers"),
        ([*SHAPE, "--window", "3"], "left,right"),
        ([*SHAPE, "--dtype", "int8x"], "--dtype"),
        ([*SHAPE, "--kv-heads", "5"], "divides the query's 32"),
        ([*SHAPE, "--backend", "sdap"], "did you mean 'sdpa'"),
        (["--query", "²,1,1,1"], "4 whole numbers"),
        (["--query", "4611686018427387904,2,3,4"], "--query: sizes of a tensor that could be"),
        ([*SHAPE, "--key-mask", "middle"], "--key-mask: left, right or any"),
        ([*SHAPE, "--device", "tpu"], "--device: cpu or cuda"),
        ([*SHAPE, "--kv-heads", "0"], "--kv-heads"),
        ([*SHAPE, "--value-dim", "-3"], "--value-dim"),
        ([*SHAPE, "--keys", "-3"], "--keys"),
        ([*SHAPE, "--page-size", "0"], "--page-size"),
        (["--query", "1,128,32,64", "--packed", "-1"], "--packed"),
        ([*SHAPE, "--device", "cuda", "--capability", "9"], "--capability"),
        ([*SHAPE, "--device", "cuda", "--capability", "x"], "--capability"),
    ],
)
def test_nonsense_is_said(arguments, says):
    done = run("explain", *arguments)
    assert done.exit_code == 2 and says in done.output


def test_matrix_and_its_markdown():
    done = run("matrix")
    assert done.exit_code == 0 and "softcap" in done.output
    head, rows = matrices.claims(backends().values())
    assert run("matrix", "--markdown").output.strip() == matrices.markdown(head, rows)


def test_a_bounded_check_and_its_certificate(tmp_path):
    report = tmp_path / "reference.json"
    arguments = ["check", "reference", "--device", "cpu", "--dtype", "float32", "--report", str(report)]
    done = run(*arguments, "--examples", "2", "--sizes", "few")
    assert done.exit_code == 0, done.output
    written = json.loads(report.read_text())
    # A round of draws is three.
    assert written["profile"] == "2 calls a check, 2 a feature, few sizes" and max(c["cases"] for c in written["checks"]) <= 3
    shown = run("matrix", "--from", str(report), "--markdown").output
    assert (
        shown.startswith(f"reference on cpu: passed, {written['cases']} calls (") and f"attnreg {written['versions']['attnreg']}" in shown
    )
    assert "\n| feature | dtype | of | worst error | allowed |\n" in shown and "\n| causal | float32 | output | " in shown
    assert run(*arguments, "--sizes", "tiny").exit_code == 2


@pytest.mark.parametrize("written", ["{}", "[]", "no json"])
def test_what_is_no_certificate_is_said(tmp_path, written):
    (tmp_path / "report.json").write_text(written)
    done = run("matrix", "--from", str(tmp_path / "report.json"))
    assert done.exit_code == 2 and "--from" in done.output
    assert run("matrix", "--from", str(tmp_path)).exit_code == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--device", "nowhere"], "device"),
        (["--device", "meta"], "device"),
        (["--dtype", "int32"], "dtypes"),
        (["--report", "/no such folder/report.json"], "--report"),
        (["--report", "."], "--report"),
    ],
)
def test_a_check_that_can_not_be_run_is_said_at_once(options, says):
    done = run("check", "sdpa", *options, "--examples", "1")
    assert done.exit_code == 2 and f"Invalid value: {says}: " in done.output


@pytest.mark.parametrize("name", ["sdpa", "flash", "auto", "class"])
def test_a_new_backend_under_a_name_that_is_taken(tmp_path, name):
    done = run("new-backend", name, "--folder", str(tmp_path))
    assert done.exit_code == 2 and "is free" in done.output and not list(tmp_path.iterdir())


def test_a_check_without_hypothesis_says_what_to_install():
    code = "import sys; sys.modules['hypothesis'] = None; from attnreg.cli import app; app(['check', 'reference'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "hypothesis is missing: pip install 'attnreg[conformance]'" in done.stdout, done.stdout + done.stderr


def test_a_narrow_terminal_cuts_no_name():
    said = CliRunner().invoke(app, ["matrix"], env={"COLUMNS": "80", "TERM": "dumb"}).output
    assert all(f"\n{feature} " in said for feature in Feature) and "\u2026" not in said


def test_new_backend(tmp_path):
    done = run("new-backend", "mine", "--folder", str(tmp_path))
    assert done.exit_code == 0 and (tmp_path / "attnreg-mine" / "attnreg_mine" / "__init__.py").is_file()
    assert run("new-backend", "mine", "--folder", str(tmp_path)).exit_code == 2
    (tmp_path / "file").touch()
    assert run("new-backend", "mine", "--folder", str(tmp_path / "file")).exit_code == 2


def test_help_loads_no_kernel_library():
    code = "import sys; from attnreg.cli import app; print([m for m in sys.modules if m.split('.')[0] in ('flash_attn', 'xformers', 'transformers', 'hypothesis')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_the_version_and_a_family():
    from attnreg.version import __version__

    assert run("--version").output.strip() == f"attnreg {__version__}"
    said = run("check", "flash")
    assert said.exit_code == 2 and "a family; here one of flash2, flash3, flash4" in said.output
