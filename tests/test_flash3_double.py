"""flash3 on a CPU, its kernels doubled (`flash3_double.py`): by the library's functions and by the operator under them."""

from __future__ import annotations

import dataclasses
import sys

import flash3_double
import pytest
import torch
from test_kernels_flash import built, files_of
from torch import library as operators
from torch._subclasses import FakeTensorMode

import attnreg
from attnreg.call import AttentionCall
from attnreg.conformance import Profile, run_checks
from attnreg.kernels import flash3
from attnreg.kernels.flash import Kernels, run_flash
from attnreg.kernels.installed import Library
from attnreg.packing import Padding
from attnreg.spec import Feature

CALLS: list[dict] = []
OPERATORS = flash3_double.define("flash3_double", CALLS)
HERE = flash3.flash3.reason_missing, flash3.flash3.claims
"""Asked before anything is doubled: a backend asks its library once, and other tests shall find what is really installed."""


@pytest.fixture(params=["functions", "operator", "lse unasked"])
def way(request, monkeypatch):
    found = flash3._Found
    functions = (flash3_double.Unasked if request.param == "lse unasked" else flash3_double.Functions)("flash3_double")
    monkeypatch.setattr(found, "where", Library("flash-attn-3", "3.0.0", functions))
    monkeypatch.setattr(found, "asks_lse", flash3._asks_lse(functions))
    monkeypatch.setattr(found, "operator", torch.ops.flash3_double.fwd.default if request.param == "operator" else None)
    monkeypatch.setattr(found, "kernels", flash3.kernels(()))
    CALLS.clear()
    return request.param


def on_the_cpu(flags, without=(Feature.CAPTURE, Feature.COMPILE)) -> attnreg.Backend:
    claims = flash3.claims(flags, flash3._Found.asks_lse)
    features = {feature: support for feature, support in claims.features.items() if feature not in without}
    claims = dataclasses.replace(claims, features=features, devices=("cpu",), smallest_capability=None, largest_capability=None)
    return dataclasses.replace(flash3.flash3, name="flash3_double", capabilities=lambda: claims, missing=lambda: None)


@pytest.mark.parametrize("flags", [{}, built(64, wide=False)], ids=["all", "64 alone"])
def test_the_suite(way, flags, monkeypatch):
    monkeypatch.setattr(flash3._Found, "kernels", flash3.kernels(tuple(sorted(flags.items()))))
    report = run_checks(on_the_cpu(flags), profile=Profile(5, 2, "eager"), shrink=False)
    assert not [outcome.text for outcome in report.outcomes if outcome.result == "failed"]
    assert report.passed and {"q", "dout"} <= {name for call in CALLS for name in call}


LEFT = Padding.from_lengths([3, 8], 8, side="left")
OPTIONS = {
    "dense": {},
    "window": {"causal": True, "window": (2, None)},
    "both sides": {"window": (2, 1), "softcap": 5.0},
    "left padded": {"key_mask": LEFT, "query_mask": LEFT, "causal": True},
    "lengths": {"key_lengths": torch.tensor([[3, 0], [8, 0]])[:, 0], "causal": True, "return_lse": True},
    "starts": {"key_starts": torch.tensor([3, 0])},
    "packed": {"cu_seqlens": (torch.tensor([0, 3, 8]),) * 2, "causal": True},
    "packed, longest known": {"cu_seqlens": (torch.tensor([0, 3, 7]),) * 2, "max_seqlens": (5, 5), "window": (1, 0), "causal": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_operator_is_given_what_the_functions_give_it(options, monkeypatch):
    torch.manual_seed(0)
    batch = 1 if "cu_seqlens" in options else 2
    query, key, value = torch.randn(batch, 8, 4, 16), torch.randn(batch, 8, 2, 16), torch.randn(batch, 8, 2, 16)
    results, given = [], []
    for operator in (None, torch.ops.flash3_double.fwd.default):
        monkeypatch.setattr(flash3._Found, "where", Library("flash-attn-3", "3.0.0", flash3_double.Functions("flash3_double")))
        monkeypatch.setattr(flash3._Found, "operator", operator)
        monkeypatch.setattr(flash3._Found, "kernels", flash3.kernels(()))
        CALLS.clear()
        result = flash3.run_flash3(AttentionCall(query, key, value, **options))
        results.append(result[0] if isinstance(result, tuple) else result)
        (call,) = CALLS
        given.append({name: call.get(name, flash3_double._DEFAULTS.get(name)) for name in flash3._GIVEN})
    assert torch.equal(*results)
    for name, one, other in ((name, given[0][name], given[1][name]) for name in given[0]):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other or name == "window_size_right", name
    torch.testing.assert_close(
        results[0], attnreg.attention(query, key, value, backend="reference", **(options | {"return_lse": False})), atol=1e-5, rtol=1e-5
    )


@pytest.mark.skipif(hasattr(torch.ops.flash_attn_3, "fwd"), reason="the true operators are loaded here")
def test_an_operator_of_other_arguments_is_left_alone():
    older = operators.Library("flash_attn_3", "FRAGMENT")
    older.define("fwd(Tensor q, Tensor k, Tensor v, float? softmax_scale = None) -> Tensor[]")
    try:
        assert flash3._operator("flash_attn_interface") is None and flash3._operator("fa3_fwd_interface") is None
    finally:
        older._destroy()


def test_gradients_and_tracers_go_by_the_functions(monkeypatch):
    """Which have what they ask for; the operator under them has not."""
    monkeypatch.setattr(flash3._Found, "operator", torch.ops.flash3_double.fwd.default)
    tensors = [torch.zeros(1, 2, 1, 8) for _ in range(3)]
    assert flash3._reaches_operator(AttentionCall(*tensors))
    assert not flash3._reaches_operator(AttentionCall(*(t.clone().requires_grad_() for t in tensors)))
    assert not flash3._reaches_operator(AttentionCall(*(t.to("meta") for t in tensors)))
    with FakeTensorMode() as mode:
        assert not flash3._reaches_operator(AttentionCall(*(mode.from_tensor(t) for t in tensors)))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not flash3._reaches_operator(AttentionCall(*tensors))


class Twice(torch.autograd.Function):
    """A function with a backward of its own, as the libraries' are."""

    @staticmethod
    def forward(context, query, key, value, *cu):
        return query * 2 + key * 3 + value * 5

    @staticmethod
    def backward(context, gradient):
        return gradient * 2, gradient * 3, gradient * 5, None, None


@pytest.mark.parametrize("packed", [False, True])
def test_one_tensor_given_twice_is_traced(packed):
    def segments(call, query, key, value, cu_query, cu_key, *longest):
        return Twice.apply(query, key, value, cu_query, cu_key), None

    def dense(call, query, key, value):
        return Twice.apply(query, key, value, None, None), None

    known = Kernels(dense, segments, dense)
    backend = dataclasses.replace(on_the_cpu({}, without=()), run=lambda call: run_flash(call, known))
    attnreg.register(backend)
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    options = {"cu_seqlens": (cu, cu), "max_seqlens": (5, 5)} if packed else {}
    try:
        query = torch.randn(1, 8, 2, 16, dtype=torch.bfloat16, requires_grad=True)
        compiled = torch.compile(lambda q: attnreg.attention(q, q, q, backend=backend.name, **options), fullgraph=True, backend="aot_eager")
        (gradient,) = torch.autograd.grad(compiled(query).sum(), query)
        assert (gradient == 10).all()
    finally:
        attnreg.unregister(backend.name)


@pytest.mark.parametrize(("distribution", "interface"), [("flash-attn-3", "flash_attn_interface.py"), ("fa3-fwd", "fa3_fwd_interface.py")])
def test_the_true_functions(distribution, interface, tmp_path, monkeypatch):
    """The library's own Python file, compiled calls included, over the doubled operators."""
    text = files_of(distribution, interface).read_text()
    name = interface.removesuffix(".py")
    package = "fa3_fwd" if distribution == "fa3-fwd" else "flash_attn_3"
    if hasattr(torch.ops, package) and hasattr(getattr(torch.ops, package), "fwd"):
        pytest.skip("the true operators are loaded here")
    operators = flash3_double.define(package, CALLS)
    (tmp_path / interface).write_text(text.replace('device_types="cuda"', 'device_types="cpu"'))
    (tmp_path / "flash_attn_config.py").write_text(f"CONFIG = {{'build_flags': {built(64, 96, 128, 192, 256)}}}\n")
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / package / "_C.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    before = set(sys.modules)
    try:
        module = __import__(name)
        monkeypatch.setattr(flash3._Found, "where", Library(distribution, "3.0.0", module))
        monkeypatch.setattr(flash3._Found, "operator", flash3._operator(name))
        monkeypatch.setattr(flash3._Found, "kernels", flash3.kernels(()))
        assert flash3._Found.operator is not None
        CALLS.clear()
        report = run_checks(on_the_cpu({}, without=(Feature.CAPTURE,)), profile=Profile(5, 2, "eager"), shrink=False)
        assert not [outcome.text for outcome in report.outcomes if outcome.result == "failed"]
        assert {"compiles", "equals_reference[backward]"} <= {o.name for o in report.outcomes if o.result == "passed"}
        compiled_with_gradients()
    finally:
        for loaded in set(sys.modules) - before:
            if loaded.split(".")[0] in (name, package, "flash_attn_config"):
                del sys.modules[loaded]
        operators._destroy()


def compiled_with_gradients() -> None:
    backend = on_the_cpu({}, without=(Feature.CAPTURE,))
    attnreg.register(backend)
    try:
        cu = torch.tensor([0, 3, 8], dtype=torch.int32)
        tensors = [torch.randn(1, 8, 2, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        for options in (
            {"causal": True, "window": (2, None)},
            {"cu_seqlens": (cu, cu), "max_seqlens": (5, 5), "causal": True, "softcap": 5.0},
        ):

            def layer(q, k, v, options=options):
                return attnreg.attention(q, k, v, backend="flash3_double", **options)

            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
            output, right = compiled(*tensors), layer(*tensors)
            torch.testing.assert_close(output, right)
            weight = torch.randn_like(output)
            mine, true = (torch.autograd.grad((o * weight).sum(), tensors) for o in (output, right))
            torch.testing.assert_close(mine, true)
    finally:
        attnreg.unregister("flash3_double")
