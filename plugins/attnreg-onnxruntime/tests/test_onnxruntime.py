"""The conformance suite over what this backend claims, and what is special to it."""

from __future__ import annotations

import importlib.metadata

import attnreg_onnxruntime
import pytest
import torch

import attnreg
from attnreg.conformance import conformance_suite

TestOnnxruntime = conformance_suite("onnxruntime")

here = pytest.mark.skipif(bool(attnreg_onnxruntime.onnxruntime.reason_missing), reason="ONNX Runtime is not installed")


def tensors(batch=2, queries=6, keys=6, heads=4, key_heads=2, dim=8):
    return torch.randn(batch, queries, heads, dim), torch.randn(batch, keys, key_heads, dim), torch.randn(batch, keys, key_heads, dim)


@here
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_binds_the_memory_it_was_given(layout, monkeypatch):
    given = tensors() if layout == "bshd" else tuple(t.transpose(1, 2).contiguous() for t in tensors())
    bound = {}
    run = attnreg_onnxruntime._run

    def spy(model, inputs, output):
        bound.update({name: tensor.data_ptr() for name, tensor in inputs.items()}, output=output.data_ptr())
        run(model, inputs, output)

    monkeypatch.setattr(attnreg_onnxruntime, "_run", spy)
    output = attnreg.attention(*given, causal=True, layout=layout, backend="onnxruntime")
    assert bound == dict(zip(("query", "key", "value", "output"), [t.data_ptr() for t in (*given, output)]))


@here
def test_one_session_for_all_lengths():
    attnreg_onnxruntime._sessions.clear()
    for length in (3, 4, 17):
        attnreg.attention(*tensors(keys=length), causal=True, backend="onnxruntime")
    # Six queries on other lengths go through nonpad_kv_seqlen, which one session does for all.
    assert len(attnreg_onnxruntime._sessions) == 1
    attnreg.attention(*tensors(), causal=True, softcap=5.0, backend="onnxruntime")
    assert len(attnreg_onnxruntime._sessions) == 2


@pytest.mark.parametrize("version, remedy", [(None, True), ("1.27.0", True), ("1.28.0", False), ("1.32.0", False)])
def test_says_what_is_missing(version, remedy, monkeypatch):
    def installed(name):
        if name == "onnx":
            return "1.23.2"
        if version is None or name != "onnxruntime":
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    reason = attnreg_onnxruntime.onnxruntime.missing()
    assert (reason is not None) == remedy
    if remedy:
        assert reason.what == "missing" and "pip install attnreg-onnxruntime" in reason.remedy
        assert "1.27.0 is installed" in reason.supported or version is None


@pytest.mark.parametrize("options, word", [({"bias": torch.zeros(1, 1, 1, 6)}, "bias"), ({"alibi_slopes": torch.ones(4)}, "alibi")])
def test_half_precision_does_not_round_what_is_added(options, word):
    half = [t.half() for t in tensors()]
    selection = attnreg.explain(*half, backend="onnxruntime", **options)
    assert word in [reason.what for reason in selection.rejected["onnxruntime"]]


@here
def test_bias_of_the_largest_negative_number_hides_nothing():
    query, key, value = tensors()
    bias = torch.full((1, 1, 6, 6), torch.finfo(torch.float32).min)
    expected = attnreg.attention(query, key, value, bias=bias, backend="reference")
    torch.testing.assert_close(attnreg.attention(query, key, value, bias=bias, backend="onnxruntime"), expected)


@here
def test_a_cap_that_float16_cannot_hold():
    query, key, value = (t.half() for t in tensors())
    capped = attnreg.attention(query, key, value, softcap=1e6, backend="onnxruntime")
    torch.testing.assert_close(capped, attnreg.attention(query, key, value, backend="reference"), rtol=5e-3, atol=5e-3)
