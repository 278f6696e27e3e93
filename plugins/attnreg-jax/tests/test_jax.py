"""The conformance suite over what this backend claims, and what is special to it."""

from __future__ import annotations

import importlib.metadata

import attnreg_jax
import pytest
import torch

import attnreg
from attnreg.conformance import Profile, conformance_suite

# XLA compiles for each combination of shapes and options, a fifth of a second each without optimisation. From few sizes they repeat: twice as
# many calls compile little more.
TestJax = conformance_suite("jax", profile=Profile(60, 12, "eager", sizes="few"))

here = pytest.mark.skipif(bool(attnreg_jax.jax.reason_missing), reason="JAX is not installed")


def tensors(batch=2, queries=8, keys=8, heads=4, key_heads=2, dim=8):
    return torch.randn(batch, queries, heads, dim), torch.randn(batch, keys, key_heads, dim), torch.randn(batch, keys, key_heads, dim)


@here
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_shares_the_memory_it_was_given(layout, monkeypatch):
    given = tensors(queries=16, keys=16)
    if layout == "bhsd":
        given = tuple(t.transpose(1, 2).contiguous() for t in given)
    shared = []
    to_jax = attnreg_jax._to_jax

    def spy(tensor):
        array = to_jax(tensor)
        if tensor is not None:
            shared.append(array.unsafe_buffer_pointer() == tensor.data_ptr())
        return array

    monkeypatch.setattr(attnreg_jax, "_to_jax", spy)
    output = attnreg.attention(*given, causal=True, layout=layout, backend="jax")
    assert shared == [True] * 3
    torch.testing.assert_close(output, attnreg.attention(*given, causal=True, layout=layout, backend="reference"))


@here
def test_a_growing_cache_compiles_once():
    compiled = attnreg_jax._compiled(attnreg_jax._attend, attnreg_jax.Options(causal=False, return_lse=False))
    query, key, value = tensors(batch=3, queries=1, keys=32)
    before = compiled._cache_size()
    for length in (17, 18, 25, 31):
        given = query, key[:, :length], value[:, :length]
        output = attnreg.attention(*given, scale=0.1 * length, backend="jax")
        torch.testing.assert_close(output, attnreg.attention(*given, scale=0.1 * length, backend="reference"))
    assert compiled._cache_size() == before + 1


@pytest.mark.parametrize("length, padded", [(1, 16), (16, 16), (17, 32), (64, 64), (65, 128), (128, 128), (129, 256), (300, 384)])
def test_lengths_are_compiled_for_few_sizes(length, padded):
    assert attnreg_jax.padded_length(length) == padded


@here
def test_the_gradient_of_a_bias_with_hidden_slots():
    given = [t.requires_grad_() for t in tensors()]
    bias = torch.randn(1, 4, 1, 8)
    bias[..., 3] = float("-inf")
    bias.requires_grad_()
    wanted = [*given, bias]
    found = {}
    for backend in ("jax", "reference"):
        output = attnreg.attention(*given, bias=bias, causal=True, backend=backend)
        found[backend] = torch.autograd.grad(output.square().sum(), wanted)
    torch.testing.assert_close(found["jax"], found["reference"], rtol=1e-4, atol=1e-5)
    assert not found["jax"][3][..., 3].any()
    # Only the bias, and nothing of the bias.
    output = attnreg.attention(*(t.detach() for t in given), bias=bias, causal=True, backend="jax")
    torch.testing.assert_close(torch.autograd.grad(output.square().sum(), bias)[0], found["jax"][3])
    output = attnreg.attention(*given, bias=bias.detach(), causal=True, backend="jax")
    torch.testing.assert_close(torch.autograd.grad(output.square().sum(), given), found["jax"][:3])


@here
def test_jaxs_own_settings_stay_as_they_are():
    import jax

    attnreg.attention(*tensors(), backend="jax")
    assert not jax.config.jax_enable_x64


@pytest.mark.parametrize("version, missing", [(None, True), ("0.9.2", True), ("0.10.0", False), ("0.11.1", False)])
def test_says_what_is_missing(version, missing, monkeypatch):
    def installed(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    reason = attnreg_jax.jax.missing()
    assert (reason is not None) == missing
    if missing:
        assert reason.what == "missing" and reason.remedy == "pip install attnreg-jax[jax]"
        assert version is None or f"jax {version} is installed" in reason.supported


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_refused(dtype):
    selection = attnreg.explain(*(t.to(dtype) for t in tensors()), backend="jax")
    assert "dtype" in [reason.what for reason in selection.rejected["jax"]]
