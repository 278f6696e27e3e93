"""Padded rows as segments where they lie: what the segments cover, who copies, and that the numbers are those of the reference."""

from __future__ import annotations

import math

import pytest
import torch
from counted import Counted
from hypothesis import given, settings
from hypothesis import strategies as st

import attnreg
from attnreg.call import AttentionCall
from attnreg.kernels import rows
from attnreg.kernels.flash import Kernels, run_flash
from attnreg.packing import Padding


def tensors(batch=3, queries=6, keys=6, heads=2, gradients=False):
    generator = torch.Generator().manual_seed(queries * 31 + keys)
    shapes = ((batch, queries, heads, 8), (batch, keys, heads, 8), (batch, keys, heads, 8))
    return [torch.randn(s, generator=generator).requires_grad_(gradients) for s in shapes]


def left(*lengths, size=6):
    return Padding.from_lengths(lengths, size, side="left")


def right(*lengths, size=6):
    return Padding.from_lengths(lengths, size)


def on_device(padding):
    """The same where the host knows no length."""
    return Padding(padding.mask, padding.form, padding.lengths)


# ---------------------------------------------------------------------- the segments


def bounds(data, batch, size):
    """Runs of one side, as (starts, ends): the whole row, or any."""
    if data.draw(st.booleans()):
        return 0, size
    pairs = [sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size)))) for _ in range(batch)]
    return tuple(torch.tensor(side, dtype=torch.int32) for side in zip(*pairs))


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))
def test_segments_cover_every_row_once_and_only_runs_have_queries_and_keys(data, batch, queries, keys):
    sizes = (queries, keys)
    given = [bounds(data, batch, size) for size in sizes]
    cu_query, cu_key, each = rows.cu_seqlens_of_runs(*given, batch, sizes)
    assert cu_query.dtype == cu_key.dtype == torch.int32 and cu_query.shape == cu_key.shape
    expected = [
        [
            (b * size + int(torch.as_tensor(start).expand(batch)[b]), b * size + int(torch.as_tensor(end).expand(batch)[b]))
            for b in range(batch)
        ]
        for (start, end), size in zip(given, sizes)
    ]
    found = []
    for cu, size in zip((cu_query.tolist(), cu_key.tolist()), sizes):
        assert cu[0] == 0 and cu[-1] == batch * size and cu == sorted(cu)
        found.append(list(zip(cu, cu[1:])))
    for n, (q, k) in enumerate(zip(*found)):
        if n % each == each - 1:
            assert (q, k) == (expected[0][n // each], expected[1][n // each])
        else:
            assert q[0] == q[1] or k[0] == k[1], "padding has queries and keys"


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 6), st.sampled_from(["left", "right", "lengths", "starts", "both"]), st.booleans())
def test_no_segment_is_longer_than_was_said(data, batch, size, kind, host):
    some = lambda: [data.draw(st.integers(0, size)) for _ in range(batch)]
    options = {"key_lengths": some()} if kind in ("lengths", "both") else {}
    if kind in ("starts", "both"):
        options["key_starts"] = some()
    if kind in ("left", "right"):
        padding = Padding.from_lengths(some(), size, side=kind)
        options = dict.fromkeys(("key_mask", "query_mask"), padding if host else on_device(padding))
    call = AttentionCall(*tensors(batch, size, size), **options)
    assert rows.lies_in_runs(call.spec)
    found = rows.runs_of(call)
    for cu, longest in zip((found.cu_query, found.cu_key), found.longest):
        assert int(cu.diff().max()) <= longest <= (2 if kind == "both" else 1) * size
    assert found.cu_query.shape[0] - 1 <= 3 * batch + 2


def test_what_is_not_known_to_lie_in_runs_does_not():
    lies = lambda **options: rows.lies_in_runs(AttentionCall(*tensors(), **options).spec)
    hole = torch.tensor([[True, False, True, True, True, True]] * 3)
    assert not lies() and not lies(key_mask=hole) and not lies(key_mask=Padding.from_mask(hole))
    assert not lies(key_mask=left(1, 2, 3), key_lengths=[4, 5, 6]) and not lies(query_mask=right(1, 2, 3), query_lengths=[4, 5, 6])
    many = AttentionCall(*tensors(), key_mask=left(1, 2, 3)).spec._replace(sizes=(32768, 8, 8))
    assert not rows.lies_in_runs(many) and rows.lies_in_runs(many._replace(sizes=(16384, 8, 8))), "a launch takes 65535 segments"
    assert lies(key_mask=left(1, 2, 3), query_lengths=[4, 5, 6]) and lies(query_mask=left(1, 2, 3))


def test_slopes_of_each_row_reach_its_run():
    padding = left(2, 5, 6)
    found = rows.runs_of(AttentionCall(*tensors(), key_mask=padding, query_mask=padding))
    assert found.by_segment(torch.tensor([[1.0], [2.0], [3.0]])).flatten().tolist()[2::3] == [1.0, 2.0, 3.0]
    assert found.by_segment(torch.ones(3, 1)).shape[0] == found.cu_query.shape[0] - 1


def test_one_padding_is_marked_once_for_all_layers():
    padding, other = left(2, 5, 6), left(6, 5, 6)
    made = [rows.runs_of(AttentionCall(*tensors(), key_mask=padding, query_mask=padding)) for _ in range(2)]
    assert made[0].cu_query is made[1].cu_query
    crossed = rows.runs_of(AttentionCall(*tensors(), key_mask=padding, query_mask=other))
    assert not torch.equal(crossed.cu_query, made[0].cu_query)
    measured = [rows.runs_of(AttentionCall(*tensors(), key_mask=padding, query_lengths=n)).cu_query for n in ([1, 2, 3], [4, 5, 6])]
    assert not torch.equal(*measured)


# ---------------------------------------------------------------------- through the common code of flash-attn


def careless(call, query, key, value, cu_query, cu_key, longest_query, longest_key):
    """Segments as the CUDA kernel has them: zeros for queries without keys and, backward, for keys without queries; NaN past the last."""
    output = query.new_full((*query.shape[:2], value.shape[2]), math.nan)
    lse = torch.full((query.shape[1], query.shape[0]), math.nan)
    for (a, b), (c, d) in zip(*(zip(cu.tolist(), cu.tolist()[1:]) for cu in (cu_query, cu_key))):
        assert b - a <= longest_query and d - c <= longest_key
        if a == b or c == d:
            output, lse = output.index_fill(0, torch.arange(a, b), 0.0), lse.index_fill(1, torch.arange(a, b), math.inf)
            continue
        scores = torch.einsum("qhd,khd->hqk", query[a:b], key[c:d]) * call.scale
        hidden = torch.arange(d - c)[None] > torch.arange(b - a)[:, None] + (d - c) - (b - a)
        hidden = hidden & call.causal
        scores = scores.masked_fill(hidden, -1e30)
        weights = torch.softmax(scores, -1).masked_fill(hidden, 0.0)
        output = output.slice_scatter(torch.einsum("hqk,khd->qhd", weights, value[c:d]), 0, a, b)
        lse[:, a:b] = torch.where(hidden.all(1), math.inf, scores.detach().logsumexp(-1))
    return output, lse


KERNELS = Kernels(None, careless, None, reads_lengths=False, reads_starts=False, fills_gaps=True)
CALLS = {
    "left": lambda: dict.fromkeys(("key_mask", "query_mask"), left(3, 6, 0)),
    "right": lambda: dict.fromkeys(("key_mask", "query_mask"), right(3, 6, 0)),
    "left, known to the device": lambda: dict.fromkeys(("key_mask", "query_mask"), on_device(left(3, 6, 0))),
    "right, known to the device": lambda: dict.fromkeys(("key_mask", "query_mask"), on_device(right(3, 6, 0))),
    "left, all real": lambda: dict.fromkeys(("key_mask", "query_mask"), left(6, 6, 6)),
    "keys only": lambda: {"key_mask": left(3, 6, 0)},
    "lengths of both": lambda: {"key_lengths": [5, 6, 2], "query_lengths": [3, 6, 0]},
    "starts and lengths": lambda: {"key_lengths": [5, 6, 2], "key_starts": [4, 0, 3]},
}


@pytest.mark.parametrize("name", CALLS)
def test_in_place_with_nan_in_padding_is_the_reference(name):
    options = {**CALLS[name](), "causal": True}
    checked = AttentionCall(*tensors(), **options)
    hidden = [None if real is None else ~real.expand(3, 6) for real in (rows.real_queries(checked), rows.real_keys(checked))]
    results = []
    for kind in ("ours", "with other padding", "reference"):
        inputs = [t.detach().clone() for t in tensors()]
        for tensor, padded in zip(inputs, (hidden[0], hidden[1], hidden[1])):
            if padded is not None:
                tensor[padded] = 7.0 if kind == "with other padding" else math.nan
        inputs = [t.requires_grad_() for t in inputs]
        upstream = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
        if hidden[0] is not None:
            upstream[hidden[0]] = 7.0 if kind == "with other padding" else math.nan
        if kind == "reference":
            output, lse = attnreg.attention(*inputs, **options, return_lse=True, backend="reference")
            upstream = upstream.nan_to_num()
        else:
            with Counted() as counted:
                output, lse = run_flash(AttentionCall(*inputs, **options, return_lse=True), KERNELS)
            assert not {"index_select", "index_copy_", "clone", "nonzero_static", "_local_scalar_dense"} & set(counted.names)
        results.append((output, lse, *torch.autograd.grad(output, inputs, upstream)))
    for ours, other, right_one in zip(*results):
        assert torch.equal(ours, other), "padding shows"
        torch.testing.assert_close(ours, right_one, atol=1e-5, rtol=1e-5)


def test_training_on_little_gathers_and_adds_up_nothing():
    few = dict.fromkeys(("key_mask", "query_mask"), left(1, 2, 0))
    inputs = tensors(gradients=True)
    with Counted() as counted:
        output = run_flash(AttentionCall(*inputs, **few, causal=True), KERNELS)
        grads = torch.autograd.grad(output.sum(), inputs)
    assert counted.names.count("index_select") >= 3 and "index_add" not in counted.names and "index_add_" not in counted.names
    expected = torch.autograd.grad(attnreg.attention(*inputs, **few, causal=True, backend="reference").sum(), inputs)
    torch.testing.assert_close(grads, expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad(), Counted() as counted:
        run_flash(AttentionCall(*inputs, **few, causal=True), KERNELS)
    assert "index_select" not in counted.names


@pytest.mark.parametrize("dynamic", [False, True])
def test_marks_are_traced_without_a_look_at_the_device(dynamic):
    padding = left(3, 6, 2)

    def marks(query, key, value, mask, lengths):
        declared = Padding(mask, "left")
        call = AttentionCall(
            query, key, value, key_mask=declared, query_mask=None if lengths is not None else declared, query_lengths=lengths
        )
        assert rows.lies_in_runs(call.spec)
        found = rows.runs_of(call)
        assert not declared.runs, "a traced call leaves nothing behind"
        return found.query, found.cu_query, found.cu_key

    for lengths in (None, torch.tensor([1, 2, 6])):
        torch._dynamo.reset()
        traced = torch.compile(marks, fullgraph=True, backend="aot_eager", dynamic=dynamic)(*tensors(), padding.mask, lengths)
        call = AttentionCall(*tensors(), key_mask=padding, query_mask=padding if lengths is None else None, query_lengths=lengths)
        expected = rows.runs_of(call)
        for ours, name in zip(traced, ("query", "cu_query", "cu_key")):
            assert torch.equal(ours, getattr(expected, name))
