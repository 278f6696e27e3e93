"""Each example runs, and its differences are as small as float32 makes them."""

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import attnreg

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name):
    found = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def skip_unless_able(backend):
    known = attnreg.backends()
    if backend not in known:
        pytest.skip(f"there is no backend {backend}")
    if known[backend].reason_missing is not None:
        pytest.skip(str(known[backend].reason_missing))
    if "cpu" not in known[backend].claims.devices:
        pytest.skip(f"{backend} does not run on a CPU")


@pytest.mark.parametrize("backend", ["sdpa", "reference", "xformers"])
def test_llama_training(backend, capsys):
    skip_unless_able(backend)
    found = example("llama_training").main(backend)
    assert max(found.values()) < 2e-5
    printed = capsys.readouterr().out
    assert f"1 backend at work: {backend}" in printed
    assert "attention_mask: one column for every token so far, past and new, 17 in all; got 1" in printed


@pytest.mark.parametrize("backend", ["sdpa", "reference", "xformers"])
def test_sample_packing(backend, capsys):
    skip_unless_able(backend)
    found = example("sample_packing").main(backend)
    assert found["loss"] < 1e-4 and found["gradients"] < 1e-4 and found["leak"] == 0.0
    assert f"on {backend} (packed: " in capsys.readouterr().out


def test_sample_packing_notices_plain_causality(monkeypatch):
    """A backend that forgets the documents is caught."""
    sdpa = attnreg.backends()["sdpa"]

    def forgets(call):
        return sdpa.run(call.replaced(cu_seqlens=None, max_seqlens=None))

    attnreg.register(attnreg.Backend("forgets", forgets, sdpa.capabilities, layout=sdpa.layout))
    try:
        with pytest.raises(RuntimeError, match="packed documents are not what they are alone"):
            example("sample_packing").main("forgets")
    finally:
        attnreg.unregister("forgets")


def test_measured_order(capsys):
    try:
        orders = example("measured_order").main(length=32)
        assert set(orders) == {"*.local.*", "*.global.*"} and all("sdpa" in order and order[-1] == "auto" for order in orders.values())
        query = torch.randn(1, 4, 2, 8)
        for pattern, order in orders.items():
            selection = attnreg.explain(query, query, query, causal=True, layer=pattern.replace("*", "x"))
            assert selection.order == tuple(order) and selection.chosen.name == order[0] and pattern in selection.source
        assert attnreg.explain(query, query, query, layer="x.other.x").source == "automatic"
        # What none of the measured ones can do goes its usual way.
        assert attnreg.explain(query, query, query, sinks=torch.zeros(2), return_lse=True, layer="x.local.x").chosen is not None
        assert "by use(..., layers='*.local.*')" in capsys.readouterr().out
    finally:
        for pattern in ("*.local.*", "*.global.*"):
            attnreg.use(None, layers=pattern)
