"""The varlen adapter against stand-ins with each torch's signature, and against the signature that is installed.

The stand-ins (`segments_double`) compute the right thing on a CPU; what is tested is how the adapter asks, and what it makes of the answer.
"""

from __future__ import annotations

import dataclasses
import importlib
import math

import oracle
import pytest
import segments_double
import torch
from counted import Counted

import attnreg
from attnreg import Feature
from attnreg.kernels import varlen as module


def on_cpu(kernel):
    claims = dataclasses.replace(module.claims_of(kernel), devices=("cpu",), dtypes=(torch.float32,))
    return dataclasses.replace(module.varlen, name="varlen_double", capabilities=claims, missing=lambda: None)


@pytest.fixture(params=segments_double.MODULES)
def installed(request, monkeypatch):
    kernel = module.kernel_of(segments_double.MODULES[request.param])
    monkeypatch.setattr(module._Found, "kernel", kernel)
    attnreg.register(on_cpu(kernel))
    yield request.param
    attnreg.unregister("varlen_double")


def make(queries=5, keys=5, heads=4, key_heads=2, dim=8, batch=1, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, queries, heads, dim), (batch, keys, key_heads, dim), (batch, keys, key_heads, dim))
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return {"query": query, "key": key, "value": value, **options}


def rows(*patterns):
    return torch.tensor([[letter == "1" for letter in pattern] for pattern in patterns])


def starts(*lengths):
    return torch.tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)], dtype=torch.int32)


def packed(queries, keys, spare=0, **options):
    dims = {name: options.pop(name) for name in ("heads", "key_heads", "dim") if name in options}
    call = make(sum(queries) + spare, sum(keys) + spare, **dims, cu_seqlens=(starts(*queries), starts(*keys)), **options)
    if spare:
        for name in ("query", "key", "value"):
            call[name][:, -spare:] = math.nan
    return call


LEFT = rows("001111", "111111", "000000")
CASES = {
    "plain": make(),
    "causal": make(causal=True),
    "causal, more keys": make(3, 7, batch=2, causal=True),
    "causal, more queries": make(7, 3, causal=True),
    "one query, grouped": make(1, 6, batch=3, causal=True),
    "segments": packed([2, 3], [4, 1]),
    "segments, causal": packed([2, 3, 1], [4, 1, 1], causal=True),
    "segments with a tail of NaN": packed([2, 3], [4, 1], spare=3, causal=True),
    "segments with a tail of NaN, longest given": packed([2, 3], [4, 1], spare=3, max_seqlens=(3, 4)),
    "segments without queries, and without keys": packed([2, 0, 3], [0, 2, 1], causal=True),
    "segments of one query or none, grouped": packed([1, 0, 1], [3, 2, 4]),
    "no segment at all": make(3, 3, cu_seqlens=(starts(), starts())),
    "segments without any key": packed([2, 1], [0, 0], spare=2),
    "left padding": make(6, 6, batch=3, causal=True, key_mask=LEFT, query_mask=LEFT),
    "left padding of keys, one query": make(1, 6, batch=3, causal=True, key_mask=LEFT),
    "right padding": make(6, 6, batch=3, causal=True, key_mask=LEFT.flip(1), query_mask=LEFT.flip(1)),
    "gaps without distances": make(6, 6, batch=2, key_mask=rows("101101", "010000")),
    "lengths and starts": make(3, 6, batch=2, causal=True, key_lengths=[5, 2], query_lengths=[3, 1], key_starts=[1, 0]),
    "a scale": make(scale=0.3, causal=True),
    "a head dim to pad": make(dim=5, causal=True),
    "a window": make(7, 7, causal=True, window=(2, 0)),
    "a window on both sides": make(4, 7, window=(1, 2)),
    "a window open to the left": make(4, 7, window=(None, 1)),
    "a window closed to the right": make(4, 7, window=(None, 0)),
    "a window over segments": packed([4, 3], [4, 5], causal=True, window=(1, 0)),
    "a window over left padding": make(6, 6, batch=3, causal=True, window=(1, 0), key_mask=LEFT, query_mask=LEFT),
}
NOT_IN_2_10 = ("scale", "dim", "window")


@pytest.mark.parametrize("name", CASES)
def test_every_signature_gives_the_meaning_or_refuses(installed, name):
    call = CASES[name]
    chosen = attnreg.explain(**call, backend="varlen_double")
    refused = installed == "torch_2_10" and any(word in name for word in NOT_IN_2_10)
    assert (chosen.chosen is None) == refused, str(chosen)
    if refused:
        assert {reason.what for reason in chosen.rejected["varlen_double"]} <= {"window", "scale", "head_dim"}
        return
    output, lse = attnreg.attention(**call, backend="varlen_double", return_lse=True)
    tensors = {n: call[n].nan_to_num() for n in ("query", "key", "value")}
    lists = {n: torch.tensor(call[n]) for n in ("key_lengths", "query_lengths", "key_starts") if n in call}
    others = {n: v for n, v in call.items() if n not in {**tensors, **lists, "max_seqlens": 0}}
    right, right_lse = oracle.attend(**tensors, **lists, **others)
    torch.testing.assert_close(output.double(), right, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), right_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_reference(installed, name):
    if attnreg.explain(**CASES[name], backend="varlen_double").chosen is None:
        pytest.skip("refused for this signature, as the other test says")
    gradients = []
    for backend in ("varlen_double", "reference"):
        call = dict(CASES[name])
        tensors = [call[n].clone().requires_grad_() for n in ("query", "key", "value")]
        call.update(zip(("query", "key", "value"), tensors))
        output = attnreg.attention(**call, backend=backend)
        weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        gradients.append(torch.autograd.grad((output * weight).sum(), tensors))
    for ours, right in zip(*gradients):
        torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("installed", ["torch_2_11"], indirect=True)
@pytest.mark.parametrize(("name", "copies"), [("left padding", 0), ("right padding", 0), ("gaps without distances", 2)])
def test_padding_is_named_where_it_lies(installed, name, copies):
    call = dict(CASES[name])
    for tensor, mask in (("query", "query_mask"), ("key", "key_mask"), ("value", "key_mask")):
        if mask in call:
            call[tensor] = call[tensor].masked_fill(~call[mask][..., None, None], math.nan)
    inputs = [call.pop(n).requires_grad_() for n in ("query", "key", "value")]
    with Counted() as counted:
        output = attnreg.attention(*inputs, **call, backend="varlen_double")
        upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        if "query_mask" in call:
            upstream = upstream.masked_fill(~call["query_mask"][..., None, None], math.nan)
        grads = torch.autograd.grad(output, inputs, upstream)
    assert counted.names.count("index_select") == copies
    expected = attnreg.attention(*inputs, **call, backend="reference")
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    for ours, right in zip(grads, torch.autograd.grad(expected, inputs, upstream.nan_to_num())):
        torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-5)


def test_grouped_single_queries_keep_the_fast_shape_where_every_row_asks(installed, monkeypatch):
    asked = []
    function = module._Found.kernel.function
    spy = lambda *args, **options: asked.append(args[5]) or function(*args, **options)
    monkeypatch.setattr(module._Found, "kernel", module._Found.kernel._replace(function=spy))
    for name in ("one query, grouped", "segments of one query or none, grouped"):
        attnreg.attention(**CASES[name], backend="varlen_double")
    assert asked == [1, 2]


def test_padding_that_would_move_queries_is_refused(installed):
    call = make(6, 6, batch=2, causal=True, key_mask=rows("111100", "111111"))
    reasons = attnreg.explain(**call, backend="varlen_double").rejected["varlen_double"]
    assert [reason.what for reason in reasons] == ["key_mask"]


@pytest.mark.parametrize("installed", ["torch_2_12"], indirect=True)
@pytest.mark.parametrize("lengths", [None, [300, 512], [0, 1]])
def test_pages_are_read_where_they_lie(installed, lengths):
    pages = attnreg.Pages(torch.randn(5, 256, 2, 8), torch.randn(5, 256, 2, 8), torch.tensor([[3, 0], [1, 4]], dtype=torch.int32))
    query = torch.randn(2, 2, 4, 8)
    call = attnreg.AttentionCall(query, None, None, causal=True, key_lengths=lengths, pages=pages, return_lse=True)
    assert not attnreg.backends()["varlen_double"].reasons_against(call.spec)
    output, lse = module.run_varlen(call)
    key, value = (t[pages.block_table.long()].flatten(1, 2) for t in (pages.keys, pages.values))
    right = attnreg.attention(query, key, value, causal=True, key_lengths=lengths, return_lse=True, backend="reference")
    torch.testing.assert_close(output, right[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, right[1], atol=1e-5, rtol=1e-5)


def test_pages_are_claimed_only_where_the_signature_has_them():
    for name, double in segments_double.MODULES.items():
        assert (Feature.PAGED in module.claims_of(module.kernel_of(double)).features) == (name == "torch_2_12")


def spec(**changes):
    half = {n: t.to(torch.bfloat16) for n, t in make(4, 4, dim=64).items()}
    return attnreg.explain(**half, causal=True).spec._replace(**{"device": "cuda", "capability": (9, 0), **changes})


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"page_size": 16}, "paged"),
        ({"page_size": 256, "gradients": ("query",)}, "paged"),
        ({"page_size": 256, "key_starts": True}, "paged"),
        ({"key_mask": "any", "padding_fits_packing": True, "compiling": True}, "compile"),
        ({"key_mask": "any", "padding_fits_packing": True, "capturing": True}, "capture"),
        ({"key_mask": "left", "padding_fits_packing": True, "capturing": True, "single_query": True}, "capture"),
        ({"page_size": 256, "query_lengths": True, "key_lengths": True, "capturing": True}, "capture"),
        ({"deterministic": True, "gradients": ("query",)}, "deterministic"),
        ({"value_dim": 32}, "value_dim"),
        ({"head_dim": 264, "value_dim": 264}, "head_dim"),
        ({"capability": (7, 5)}, "capability"),
        ({"dtype": torch.float32}, "dtype"),
        ({"capability": (8, 9), "head_dim": 208, "value_dim": 208, "gradients": ("query",)}, "backward"),
        ({"softcap": True}, "softcap"),
        ({"dropout": True}, "dropout"),
    ],
)
def test_what_is_refused_and_why(changes, what):
    assert what in [reason.what for reason in module.claims_of(None).reasons_against(spec(**changes))]
    assert not module.claims_of(None).reasons_against(spec())
    assert not module.claims_of(None).reasons_against(spec(page_size=256, key_lengths=True, capturing=True))
    for mode in ("compiling", "capturing"):
        assert not module.claims_of(None).reasons_against(spec(key_mask="left", padding_fits_packing=True, **{mode: True}))


def test_the_installed_signature_is_understood():
    kernel = module.kernel_of(importlib.import_module("torch.nn.attention.varlen"))
    asked = {"query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "return_aux"}
    assert asked <= kernel.arguments and ({"window_size", "scale"} <= kernel.arguments or "is_causal" in kernel.arguments)
    assert kernel.lse_request.lse is True


def test_a_torch_without_it_or_without_cuda_is_a_reason(monkeypatch):
    monkeypatch.setattr(module._Found, "kernel", None)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in module._missing().supported and module.find() is None
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(module.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    assert module._missing().what == "missing" and "torch >= 2.10" in module._missing().remedy
