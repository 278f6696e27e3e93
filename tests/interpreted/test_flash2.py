"""attnreg's flash2 through the real flash-attn 2, interpreted, against the reference: outputs, lse and gradients."""

from __future__ import annotations

import dataclasses
import math

import pytest
import shim
import torch
from amounts import always
from counted import Counted

import attnreg
from attnreg.capabilities import Reason
from attnreg.kernels.flash2 import flash2
from attnreg.packing import Padding
from attnreg.spec import Feature


def _ignored_by_the_port(spec):
    if spec.window is not None or spec.softcap:
        return Reason("window", "interpreted", "the port ignores windows and softcap")
    return None


@pytest.fixture(scope="module", autouse=True)
def interpreted():
    """flash2 with the device gate opened, for this process."""
    assert flash2.reason_missing is None, flash2.reason_missing
    claims = flash2.claims
    features = {f: c for f, c in claims.features.items() if f not in (Feature.WINDOW, Feature.SOFTCAP)}
    opened = dataclasses.replace(
        claims, features=features, devices=("cpu",), dtypes=(torch.float16, torch.float32), rules=(*claims.rules, _ignored_by_the_port)
    )
    attnreg.register(dataclasses.replace(flash2, capabilities=opened), override=True)
    yield
    attnreg.register(flash2, override=True)


def tensors(batch=2, queries=5, keys=7, heads=4, key_heads=2, dim=16, dtype=torch.float32, gradients=False):
    generator = torch.Generator().manual_seed(queries * 31 + keys)
    shapes = ((batch, queries, heads, dim), (batch, keys, key_heads, dim), (batch, keys, key_heads, dim))
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_(gradients) for s in shapes]


def starts(*lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def left(*lengths, size=7):
    return Padding.from_lengths(lengths, size, side="left")


def right(*lengths, size=7):
    return Padding.from_lengths(lengths, size)


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SAME = right(4, 7)
BOTH = left(3, 7)
# name: (sizes, options, the function that has to run forward without gradients)
CALLS = {
    "plain": ({}, {}, "fwd"),
    "causal": ({}, {"causal": True}, "fwd"),
    "causal, more queries": ({"queries": 7, "keys": 5}, {"causal": True}, "fwd"),
    "scale": ({"dim": 33}, {"scale": 0.3}, "fwd"),
    "head dim 8": ({"dim": 8}, {"causal": True}, "fwd"),
    "head dim 64": ({"batch": 1, "queries": 7, "keys": 9, "dim": 64}, {"causal": True, "cu_seqlens": (starts(4, 3), starts(5, 3))}, "varlen_fwd"),
    "head dim 128": ({"queries": 7, "dim": 128}, {"causal": True, "key_mask": BOTH, "query_mask": BOTH}, "fwd_kvcache"),
    "mqa": ({"key_heads": 1}, {"causal": True}, "fwd"),
    "alibi": ({}, {"causal": True, "alibi_slopes": SLOPES}, "fwd"),
    "alibi, not causal": ({}, {"alibi_slopes": SLOPES}, "fwd"),
    "alibi of each row": ({}, {"causal": True, "alibi_slopes": torch.stack([SLOPES, SLOPES * 3])}, "fwd"),
    "sinks": ({"queries": 7, "keys": 5}, {"causal": True, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, "fwd"),
    "query mask": ({}, {"query_mask": right(3, 5, size=5)}, "fwd"),
    "packed": ({"batch": 1, "queries": 9, "keys": 11}, {"causal": True, "cu_seqlens": (starts(4, 0, 3), starts(5, 2, 3))}, "varlen_fwd"),
    "packed with bounds": ({"batch": 1, "queries": 9, "keys": 11}, {"cu_seqlens": (starts(4, 0, 3), starts(5, 2, 0)), "max_seqlens": (4, 5)}, "varlen_fwd"),
    "packed, one query each": ({"batch": 1, "queries": 3, "keys": 11}, {"cu_seqlens": (starts(1, 0, 1), starts(5, 2, 3)), "max_seqlens": (1, 5)}, "varlen_fwd"),
    "packed alibi": ({"batch": 1, "queries": 7, "keys": 9}, {"causal": True, "cu_seqlens": (starts(4, 3), starts(5, 3)), "alibi_slopes": SLOPES}, "varlen_fwd"),
    "left padded": ({"queries": 7}, {"causal": True, "key_mask": BOTH, "query_mask": BOTH}, "fwd_kvcache"),
    "left padded keys": ({}, {"causal": True, "key_mask": left(3, 7)}, "fwd_kvcache"),
    "left padded keys, bare": ({}, {"causal": True, "key_mask": left(3, 7).mask}, "fwd_kvcache"),
    "left padded, alibi": ({}, {"causal": True, "key_mask": left(3, 7), "alibi_slopes": SLOPES}, "fwd_kvcache"),
    "right padded": ({"queries": 7}, {"causal": True, "key_mask": SAME, "query_mask": SAME}, "varlen_fwd"),
    "right padded keys": ({}, {"key_mask": right(4, 0)}, "fwd_kvcache"),
    "holes": ({}, {"key_mask": torch.tensor([[True, False, True, True, False, True, True], [True] * 7])}, "varlen_fwd"),
    "decode": ({"queries": 1}, {"causal": True, "key_lengths": [3, 7]}, "fwd_kvcache"),
    "decode, empty row": ({"queries": 1}, {"causal": True, "key_lengths": [0, 7]}, "fwd_kvcache"),
    "decode, alibi": ({"queries": 2}, {"causal": True, "key_lengths": [3, 7], "alibi_slopes": SLOPES}, "fwd_kvcache"),
    "lengths and starts": ({"queries": 3}, {"causal": True, "key_lengths": [5, 7], "key_starts": [2, 0]}, "fwd_kvcache"),
    "query lengths": ({}, {"causal": True, "key_lengths": [5, 7], "query_lengths": [2, 5]}, "varlen_fwd"),
}  # fmt: skip
NO_GRADIENTS = {"sinks"}
BACKWARD = (
    "causal",
    "scale",
    "head dim 8",
    "head dim 64",
    "head dim 128",
    "mqa",
    "alibi of each row",
    "packed",
    "packed alibi",
    "left padded",
    "right padded keys",
    "holes",
    "query lengths",
)
"""Each way to a gradient once."""


def poisoned(call, query, key, value):
    """NaN wherever padding stands."""
    query, key, value = (t.detach().clone() for t in (query, key, value))
    from attnreg.call import AttentionCall
    from attnreg.visibility import real_keys, real_queries

    checked = AttentionCall(query, key, value, **call)
    if (keys := real_keys(checked)) is not None:
        key[~keys.expand(key.shape[0], -1)] = math.nan
        value[~keys.expand(key.shape[0], -1)] = math.nan
    if (queries := real_queries(checked)) is not None:
        query[~queries.expand(query.shape[0], -1)] = math.nan
    return query, key, value


HALVES = ("causal", "packed", "left padded")
"""One call of each function in half precision too."""


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in CALLS), *((name, torch.float16) for name in HALVES)], ids=str
)
def test_forward(name, dtype):
    sizes, options, function = CALLS[name]
    inputs = poisoned(options, *tensors(**sizes, dtype=dtype))
    expected, expected_lse = attnreg.attention(*inputs, **options, return_lse=True, backend="reference")
    shim.calls.clear()
    output, lse = attnreg.attention(*inputs, **options, return_lse=True, backend="flash2")
    assert shim.calls == [function]
    tolerance = 3e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, expected_lse, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", always(BACKWARD, [n for n in CALLS if n not in NO_GRADIENTS]))
def test_backward(name, dtype):
    sizes, options, _ = CALLS[name]
    grads = {}
    for backend in ("reference", "flash2"):
        inputs = [t.requires_grad_() for t in poisoned(options, *tensors(**sizes, dtype=dtype))]
        output = attnreg.attention(*inputs, **options, backend=backend)
        upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        grads[backend] = torch.autograd.grad((output * upstream).sum(), inputs)
    tolerance = 5e-3 if dtype == torch.float16 else 2e-5
    for got, expected in zip(grads["flash2"], grads["reference"]):
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


ALL = slice(None)
DROPPED = {
    "dense": ({"keys": 9}, {}, "fwd", [(0, ALL, ALL), (1, ALL, ALL)]),
    "packed": (
        {"batch": 1, "queries": 7, "keys": 9, "dim": 64},
        {"cu_seqlens": (starts(4, 3), starts(5, 4))},
        "varlen_fwd",
        [(0, slice(0, 4), slice(0, 5)), (0, slice(4, 7), slice(5, 9))],
    ),
    "left padded": (
        {"queries": 7},
        {"key_mask": BOTH, "query_mask": BOTH},
        "varlen_fwd",
        [(0, slice(4, 7), slice(4, 7)), (1, ALL, ALL)],
    ),
}
"""Causal calls, and where the queries and the keys of each row of the kernel's mask lie: row, slots, slots."""


@pytest.mark.parametrize("name", DROPPED)
def test_dropout(name):
    """Output and gradients are those of the weights that the kernel says it kept."""
    sizes, options, function, spans = DROPPED[name]
    inputs = [t.requires_grad_() for t in poisoned(options, *tensors(**sizes))]
    shim.calls.clear(), shim.masks.clear()
    output = attnreg.attention(*inputs, **options, causal=True, dropout_p=0.4, backend="flash2")
    assert shim.calls == [function]
    (mask,) = shim.masks
    assert mask.shape[0] == len(spans) and mask.signbit().any()
    expected = torch.zeros_like(output)
    for (row, queries, keys), kept in zip(spans, ~mask.signbit()):
        query, key, value = (t[row, slots] for t, slots in zip(inputs, (queries, keys, keys)))
        key, value = (t.repeat_interleave(2, 1) for t in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + key.shape[0] - query.shape[0])
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1) * kept[:, : query.shape[0], : key.shape[0]] / (1 - 0.4)
        expected[row, queries] = torch.einsum("hqk,khd->qhd", weights, value)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    for got, right in zip(*(torch.autograd.grad((o * upstream).sum(), inputs) for o in (output, expected))):
        torch.testing.assert_close(got, right, atol=2e-5, rtol=2e-5)


HOLES = torch.tensor([[True, False, True, True, False, True, True], [True] * 7])
MEASURED = {"key_lengths": [5, 7], "query_lengths": [2, 5]}
TRAINED = {
    "left": ({"causal": True, "key_mask": BOTH, "query_mask": BOTH}, False),
    "right": ({"causal": True, "key_mask": SAME, "query_mask": SAME}, False),
    "lengths of both": ({"causal": True, **MEASURED}, False),
    "slopes of each row": ({"causal": True, **MEASURED, "alibi_slopes": torch.stack([SLOPES, SLOPES * 3])}, False),
    "in the middle": ({"causal": True, "key_mask": HOLES, "query_mask": HOLES}, True),
}
"""Padded calls of seven queries and keys, and whether their real tokens are gathered."""


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in TRAINED), ("left", torch.float16)], ids=str)
def test_padded_training_stays_in_place(name, dtype):
    options, gathers = TRAINED[name]
    results = []
    for backend in ("reference", "flash2"):
        inputs = [t.requires_grad_() for t in poisoned(options, *tensors(queries=7, dtype=dtype))]
        shim.calls.clear()
        with Counted() as counted:
            output, lse = attnreg.attention(*inputs, **options, return_lse=True, backend=backend)
            upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
            # What comes back at padding may be anything.
            upstream[lse[:, 0] == -math.inf] = 0.0 if backend == "reference" else math.nan
            grads = torch.autograd.grad(output, inputs, upstream)
        results.append((output, lse, *grads))
    assert shim.calls == ["varlen_fwd", "varlen_bwd"]
    assert ("index_select" in counted.names) == gathers and not {"index_add", "index_add_", "masked_fill_"} & set(counted.names)
    tolerance = 5e-3 if dtype == torch.float16 else 2e-5
    for expected, got in zip(*results):
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    selection = attnreg.explain(*inputs, **options, backend="flash2")
    assert ("padding stays where it is" in str(selection)) != gathers


def test_pages():
    from attnreg.call import AttentionCall, Pages

    query, key, value = tensors(2, 2, 512)
    lengths = torch.tensor([300, 512])
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    pages = [torch.full((4, 256, 2, 16), math.nan) for _ in range(2)]
    for b in range(2):
        for c in range(2):
            for held, whole in zip(pages, (key, value)):
                held[table[b, c]] = whole[b, 256 * c : 256 * (c + 1)]
    call = AttentionCall(query, None, None, causal=True, key_lengths=lengths, pages=Pages(*pages, table))
    backend = attnreg.backends()["flash2"]
    assert backend.reasons_against(call.spec) == ()
    expected = attnreg.attention(query, key, value, causal=True, key_lengths=lengths, backend="reference")
    torch.testing.assert_close(backend.run(call), expected, atol=1e-5, rtol=1e-5)
    assert shim.calls[-1] == "fwd_kvcache"


@pytest.mark.parametrize("name", ["causal", "packed", "left padded"])
def test_a_second_derivative_is_an_error(name):
    """The library itself gives the gradient as a constant, and says nothing."""
    sizes, options, _ = CALLS[name]
    inputs = [t.requires_grad_() for t in poisoned(options, *tensors(**sizes))]
    output = attnreg.attention(*inputs, **options, backend="flash2")
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(output.sum(), inputs[0], create_graph=True)
    output = attnreg.attention(*inputs, **options, backend="flash2")
    torch.autograd.grad(output.sum(), inputs[0])


def test_refused_where_packing_would_move_queries():
    query, key, value = tensors()
    with pytest.raises(attnreg.NoBackendError) as error:
        attnreg.attention(query, key, value, causal=True, key_mask=right(4, 7), backend="flash2")
    assert "moves queries against keys" in str(error.value) or "not known to keep" in str(error.value)


def test_one_packing_for_all_layers(monkeypatch):
    query, key, value = tensors(queries=7)
    made, holes = [], HOLES.clone()
    static = torch.nonzero_static
    monkeypatch.setattr(torch, "nonzero_static", lambda *a, **k: made.append(1) or static(*a, **k))
    for _ in range(3):
        attnreg.attention(query, key, value, causal=True, key_mask=holes, query_mask=holes, backend="flash2")
    assert len(made) == 1
