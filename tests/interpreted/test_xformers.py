"""attnreg's xformers through the real library and its flash operator, interpreted, against the reference: outputs, lse and gradients."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("xformers") is None:
    pytest.skip("needs flash-attn 2 and xformers", allow_module_level=True)

import shim  # noqa: F401 - before anything imports flash_attn
import torch
from amounts import always

import attnreg
from attnreg.kernels import xformers as module


@pytest.fixture(scope="module", autouse=True)
def interpreted():
    """xformers with the device gate opened, for this process; float32 counts as a half precision."""
    fmha, _ = module._import()
    flash = fmha.flash
    for operator in (flash.FwOp, flash.BwOp):
        operator.SUPPORTED_DEVICES = {*operator.SUPPORTED_DEVICES, "cpu"}
        operator.SUPPORTED_DTYPES = {*operator.SUPPORTED_DTYPES, torch.float32}
    for operator in (flash._flash_fwd, flash._flash_bwd):
        operator.register_kernel("cpu")(operator._init_fn)
    found, half = module._Found.fmha, module._HALF
    module._Found.fmha, module._HALF = fmha, (torch.float16, torch.float32)
    claims = dataclasses.replace(module.xformers.claims, devices=("cpu",), dtypes=(torch.float16, torch.float32))
    attnreg.register(dataclasses.replace(module.xformers, name="xformers_interpreted", capabilities=claims, missing=lambda: None))
    yield
    attnreg.unregister("xformers_interpreted")
    module._Found.fmha, module._HALF = found, half


def make(batch=1, queries=5, keys=7, heads=4, key_heads=2, dim=16, dtype=torch.float32, gradients=False):
    generator = torch.Generator().manual_seed(queries * 31 + keys)
    shapes = ((batch, queries, heads, dim), (batch, keys, key_heads, dim), (batch, keys, key_heads, dim))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_(gradients) for shape in shapes]


def starts(*lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


LEFT = attnreg.Padding.from_lengths([3, 7], 7, side="left")
CALLS = {
    "plain": ({}, {}),
    "causal": ({"batch": 2}, {"causal": True}),
    "causal, more queries": ({"queries": 7, "keys": 5}, {"causal": True}),
    "every head its own, a scale": ({"key_heads": 4, "dim": 20}, {"scale": 0.3}),
    "segments": ({"queries": 7, "keys": 9}, {"cu_seqlens": (starts(4, 3), starts(5, 4))}),
    "segments, causal, some with fewer keys": ({"queries": 8, "keys": 9}, {"causal": True, "cu_seqlens": (starts(4, 3), starts(2, 5))}),
    "left padding": ({"batch": 2, "queries": 7}, {"causal": True, "key_mask": LEFT, "query_mask": LEFT}),
}


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in CALLS), ("causal", torch.float16)], ids=str)
def test_output_and_lse(name, dtype):
    sizes, options = CALLS[name]
    ours, right = (
        attnreg.attention(*make(**sizes, dtype=dtype), **options, return_lse=True, backend=b) for b in ("xformers_interpreted", "reference")
    )
    limit = 1e-5 if dtype == torch.float32 else 4e-3
    for one, other in zip(ours, right):
        torch.testing.assert_close(one, other, atol=limit, rtol=limit)


@pytest.mark.parametrize(
    "name", always(["causal", "every head its own, a scale", "segments, causal, some with fewer keys", "left padding"], CALLS)
)
def test_gradients(name):
    sizes, options = CALLS[name]
    gradients = []
    for backend in ("xformers_interpreted", "reference"):
        tensors = make(**sizes, gradients=True)
        output = attnreg.attention(*tensors, **options, backend=backend)
        weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        gradients.append(torch.autograd.grad((output * weight).sum(), tensors))
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


def test_a_lone_query_beside_segments_without_one():
    """Where the longest segment has one query, the kernel lays the heads of a group side by side, which needs a query in each."""
    tensors = make(queries=2, keys=9, key_heads=2)
    options = {"cu_seqlens": (starts(1, 0, 1), starts(4, 2, 3)), "max_seqlens": (1, 4)}
    ours, right = (attnreg.attention(*tensors, **options, backend=b) for b in ("xformers_interpreted", "reference"))
    torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-5)


def test_gradients_of_a_query_whose_heads_lie_three_dims_apart():
    """By that stride xformers takes query, key and value for slices of one tensor, whose gradients have one shape."""
    gradients = []
    for backend in ("xformers_interpreted", "reference"):
        query, key, value = make(queries=3, keys=8, key_heads=4, dim=16, gradients=True)
        apart = torch.cat([query] * 3, -1)[..., :16]
        assert apart.stride(-2) == 48
        lengths = {"key_lengths": torch.tensor([5])}
        output = attnreg.attention(apart, key, value, **lengths, backend=backend)
        gradients.append(torch.autograd.grad(output.pow(2).sum(), (query, key, value)))
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


def test_a_second_derivative_is_refused():
    tensors = make(gradients=True)
    output = attnreg.attention(*tensors, backend="xformers_interpreted")
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(output.sum(), tensors, create_graph=True)
