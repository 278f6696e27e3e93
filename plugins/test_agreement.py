"""The script that compares implementations: it runs on what is installed, and sees one that is wrong."""

from __future__ import annotations

import dataclasses

import agreement

import attnreg
from attnreg import Feature
from attnreg.kernels.sdpa import sdpa


def test_installed_backends_agree(capsys):
    names = [name for name in ("sdpa", "onnxruntime", "jax") if name in attnreg.backends() and not attnreg.backends()[name].reason_missing]
    assert agreement.main(["--per-feature", "3", "--backends", ",".join(names)]) == 0
    printed = capsys.readouterr().out
    assert "\n| causal | " in printed and "0 further from the reference" in printed


def test_processes_find_what_one_process_finds():
    sdpa_and_reference = [attnreg.backends()[name] for name in ("sdpa", "reference")]
    features = [Feature.CAUSAL, Feature.SINKS]
    alone, shared = (list(agreement.rows(sdpa_and_reference, 4, "few", features, jobs=jobs)) for jobs in (1, 2))
    assert [row.feature for row in alone] == features and alone == shared


def test_a_wrong_one_is_seen():
    wrong = dataclasses.replace(sdpa, name="wrong", run=lambda call: sdpa.run(call.replaced(causal=False)), run_for=None)
    (row,) = agreement.rows([sdpa, wrong], 8, "small", [Feature.CAUSAL])
    assert row.wrong and all(text.startswith("causal: wrong: ") for text in row.wrong)
    assert row.together == row.cases == row.ran["sdpa"] and row.worst["sdpa"] <= 1 < row.worst["wrong"]


def test_a_backend_that_is_not_here_is_named(capsys):
    assert agreement.main(["--backends", "sdpa,nobody"]) == 2
    assert "nobody: its plugin is not installed" in capsys.readouterr().out
