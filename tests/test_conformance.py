"""The suite on the built-in backends that every machine has, and what it says about itself."""

import dataclasses
import importlib.metadata
import itertools
import json
import subprocess
import sys

import hypothesis
import pytest
import torch
from wrong_backends import WRONG, paged

import attnreg
from attnreg.conformance import PROFILES, Profile, conformance_suite, reproduce, run_checks
from attnreg.conformance.cases import Case
from attnreg.conformance.strategies import cases
from attnreg.conformance.suite import checks_for, run_check
from attnreg.conformance.tensors import checked
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


def test_draws_for_a_backend_that_demands_causality_are_made_causal():
    """Its rule refuses three draws of four; what is refused checks nothing."""
    demands = lambda spec: None if spec.causal else attnreg.Reason("causal", "no", "causal calls alone")
    claims = attnreg.Capabilities({attnreg.Feature.CAUSAL: attnreg.NATIVE, attnreg.Feature.SCALE: attnreg.NATIVE}, rules=(demands,))
    backend = attnreg.Backend("causal_only", attnreg.backends()["sdpa"].run, claims, layout="bhsd")
    report = run_checks(backend, profile=Profile(40, 20, "eager"), shrink=False)
    assert report.passed, [o.text for o in report.outcomes if o.result == "failed"]
    assert all(o.cases > 8 * o.refused for o in report.outcomes), [(o.name, o.cases, o.refused) for o in report.outcomes]


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


@pytest.mark.parametrize("lse", [True, False])
def test_what_run_returns_is_named_where_it_is_not_what_was_asked(lse):
    """An author's usual slip: the lse claimed and left out, or always returned."""
    right = attnreg.backends()["sdpa"].run
    features = {attnreg.Feature.LSE: attnreg.NATIVE} if lse else {}

    def run(call):
        result = right(call)
        return result[0] if lse else (result, None)

    backend = attnreg.Backend("slip", run, attnreg.Capabilities(features=features), layout="bhsd")
    report = run_checks(backend, profile=Profile(3, 2, "eager"), shrink=False)
    found = [o.text for o in report.outcomes if o.result == "failed"]
    wanted = "run returned a Tensor, where call.return_lse" if lse else "run returned a tuple, where the output tensor"
    assert any(wanted in text for text in found), found


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


@pytest.fixture
def counted_flex(monkeypatch):
    """flex with the claims of a card, uncompiled, and the kinds of calls that it would compile."""
    from torch.nn.attention import flex_attention as module

    from attnreg.kernels import flex

    compiled = {}
    monkeypatch.setattr(flex, "_compiled", compiled)
    monkeypatch.setattr(flex, "_apart", lambda spec: False)
    monkeypatch.setattr(flex.torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(module, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    claims = flex.flex.claims
    rules = tuple(rule for rule in claims.rules if "_cpu" not in rule.__name__ and rule.__name__ != "_no_compiler")
    features = {f: c for f, c in claims.features.items() if f not in (attnreg.Feature.COMPILE, attnreg.Feature.BIAS_GRADIENT)}
    capabilities = dataclasses.replace(claims, rules=rules, features=features)
    return dataclasses.replace(flex.flex, name="flex_counted", capabilities=capabilities), compiled


def test_few_kinds_of_calls_need_few_compilations(counted_flex):
    backend, compiled = counted_flex
    report = run_checks(backend, profile=PROFILES["jit"]._replace(examples=2, per_feature=1, kinds=1), dtypes=HALF, shrink=False)
    # Uncompiled, flex_attention's backward says nothing of second derivatives; compiled, it does.
    assert [o for o in report.outcomes if o.result == "failed" and o.name != "second_derivative"] == []
    drawn, calls = report.tally.drawn(), sum(o.cases for o in report.outcomes)
    # A check may change what its calls ask: no promise of finite padding, no gradient into the lse.
    assert drawn["kinds"] <= 20 and len(compiled) <= 2 * drawn["kinds"] < calls
    assert_covered(report, backend, HALF)


def test_all_sizes_of_a_kind_change_together():
    """A compiler makes sizes symbolic that it has seen change: together in its second compilation, one by one in several."""
    backend = attnreg.backends()["sdpa"]
    (check,) = [c for c in checks_for(backend, "cpu", HALF, PROFILES["jit"]) if c.name == "equals_reference"]
    drawn = []
    body = lambda backend, case, tally: drawn.append(case)
    run_check(backend, check._replace(body=body, examples=300), PROFILES["jit"], Tally())
    kinds = {}
    for case in drawn:
        sizes = tuple(n for n in (case.batch, case.query_length, case.key_length) if n > 1)
        kinds.setdefault(case.kind, set()).add(sizes)
    assert len(kinds) > 20 and sum(len(sizes) == 3 for sizes in kinds.values()) > 20
    for sizes in kinds.values():
        for one, other in itertools.combinations(sizes, 2):
            assert all(a != b for a, b in zip(one, other)), f"{one} and {other}"


@pytest.mark.parametrize(("kinds", "most"), [(1, 20), (2, 50)])
def test_few_kinds_of_calls_ask_for_everything_claimed(kinds, most):
    backend = attnreg.backends()["sdpa"]
    report = run_checks(backend, profile=PROFILES["jit"]._replace(kinds=kinds), dtypes=HALF, shrink=False)
    assert report.passed, [o.text for o in report.outcomes if o.result == "failed"]
    assert report.as_dict()["drawn"]["kinds"] <= most and sum(o.cases for o in report.outcomes) >= 150
    assert_covered(report, backend, HALF)


HALF = (torch.bfloat16, torch.float16)


def assert_covered(report, backend, dtypes):
    drawn = report.tally.drawn()
    assert drawn["dtype"] == sorted(str(dtype).removeprefix("torch.") for dtype in dtypes) and len(drawn["head_dim"]) > 1
    covered = {name for case in report.tally.kinds for name in checked(case).spec.features}
    claimed = set(backend.claims.features) - {attnreg.Feature.DROPOUT, attnreg.Feature.COMPILE, attnreg.Feature.CAPTURE}
    assert covered >= claimed - {attnreg.Feature.LSE_GRADIENT}


@pytest.mark.parametrize("kinds", [1, 2])
@pytest.mark.parametrize("name", ["window_off_by_one", "softcap_after_bias", "default_scale_of_padded_head_dim", "table_ignored"])
def test_few_kinds_of_calls_still_catch_wrong_backends(name, kinds):
    report = run_checks(WRONG[name].backend, profile=PROFILES["jit"]._replace(kinds=kinds), shrink=False, stop=True)
    assert not report.passed
