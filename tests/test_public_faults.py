"""Faults that users of attention libraries met and reported in public, each as a small call with the right value.

Every backend that is able runs every case; the right values come from `oracle.attend`, which shares no code with attnreg.
"""

from __future__ import annotations

import math

import oracle
import pytest
import torch

import attnreg

HIDDEN = -math.inf
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def make(queries=4, keys=4, heads=2, key_heads=2, dim=8, *, batch=1, value_dim=None, seed=0, dtype=torch.float32, **options):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, queries, heads, dim), (batch, keys, key_heads, dim), (batch, keys, key_heads, value_dim or dim))
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return {"query": query, "key": key, "value": value, **options}


def rows(*patterns):
    return torch.tensor([[letter == "1" for letter in pattern] for pattern in patterns])


def starts(*lengths):
    return torch.tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)], dtype=torch.int32)


def hidden(shape, where):
    return torch.zeros(shape).masked_fill(where, HIDDEN)


def filled(call, key=None, value=None):
    """The same call with what stands behind its key mask replaced."""
    call = {**call, "key": call["key"].clone(), "value": call["value"].clone()}
    call["key"][~call["key_mask"]], call["value"][~call["key_mask"]] = key, value
    return call


def strided():
    call = make(6, 6, seed=33)
    return {**call, **{n: call[n].transpose(1, 3).contiguous().transpose(1, 3) for n in ("query", "key", "value")}}


def views():
    call = make(6, 12, batch=2, seed=34)
    return {
        "query": call["query"][:1].expand(2, -1, -1, -1),
        "key": call["key"][:, ::2],
        "value": call["value"][:, 6:].transpose(1, 2).contiguous().transpose(1, 2),
    }


def loud_padding():
    call = make(4, 4, 1, 1, 4, key_mask=rows("1110"))
    call["query"].fill_(200.0), call["key"].zero_()
    return filled(call, 200.0, 1.0)


CASES = {
    "rows hidden by a bias of -inf are 0": make(8, 8, 1, 1, bias=hidden((1, 1, 8, 8), (torch.arange(8) < 4)[:, None])),
    "NaN keys and infinite values behind a mask": filled(make(2, 2, 1, 1, 4, key_mask=rows("10")), math.nan, math.inf),
    "decode sees every key": make(1, 16, causal=True),
    "causal, more queries than keys": make(5, 2, 2, 1, causal=True),
    "causal, more keys than queries": make(2, 5, causal=True),
    "causal, more keys, grouped": make(2, 4, 4, 2, batch=2, causal=True),
    "a window of two keys in all": make(5, 5, causal=True, window=(1, 0)),
    "a window's left bound counts": make(6, 6, causal=True, window=(2, 0)),
    "a window of the query's own slot": make(5, 5, 2, 1, causal=True, window=(0, 0)),
    "a window on both sides": make(6, 6, window=(1, 2)),
    "a window open on both sides hides nothing": make(3, 5, window=(None, None)),
    "a window closed to the right is causal": make(3, 5, window=(None, 0)),
    "a window in a chunk after a past": make(4, 7, causal=True, window=(2, 0)),
    "junk behind masks with gaps and left padding": filled(make(3, 6, batch=2, key_mask=rows("001101", "111100")), 1e4, -1e4),
    "a key mask removes no query": make(7, 3, batch=2, key_mask=rows("110", "111")),
    "nothing to see is 0": make(10, 10, key_mask=torch.zeros(1, 10, dtype=torch.bool)),
    "one row of a batch sees nothing, bfloat16": make(
        6, 16, dim=16, batch=2, dtype=torch.bfloat16, key_mask=rows("1" * 9 + "0" * 7, "0" * 16)
    ),
    "finfo.min is a number": make(4, 4, bias=torch.full((1, 1, 4, 4), torch.finfo(torch.float32).min).triu(1)),
    "a float32 bias beside bfloat16": make(
        8, 8, 4, 4, 16, batch=2, dtype=torch.bfloat16, bias=hidden((1, 1, 8, 8), torch.ones(8, 8, dtype=torch.bool).triu(1))
    ),
    "a padded key with a huge score": loud_padding(),
    "both masks, scale 1": make(8, 8, scale=1.0, query_mask=rows("11110000"), key_mask=rows("11110000")),
    "both masks of different lengths": make(6, 4, batch=2, query_mask=rows("111100", "111111"), key_mask=rows("1100", "1111")),
    "a query mask that is not the key mask's tail": make(4, 10, causal=True, query_mask=rows("1100"), key_mask=rows("1" * 10)),
    "alibi distances need the past": make(3, 7, 4, 4, causal=True, alibi_slopes=SLOPES),
    "alibi with grouped heads, window, left padding": make(
        4, 7, 4, 2, batch=2, causal=True, window=(3, 0), alibi_slopes=2 * SLOPES, key_mask=rows("0011111", "1111111")
    ),
    "window and alibi count slots, not real tokens": make(
        2, 6, 4, 4, causal=True, window=(3, 0), alibi_slopes=2 * SLOPES, key_mask=rows("110011")
    ),
    "a cap before a hiding bias": make(2, 2, 1, 1, 2, softcap=1.0, bias=hidden((1, 1, 1, 2), torch.tensor([False, True]))),
    "grouped heads are consecutive": make(3, 5, 6, 2, 4, batch=2),
    "lengths of each row, junk beyond": filled(make(6, 6, batch=2, key_mask=rows("110000", "111110")), 1e3, 1e3),
    "a bias of each head and key": make(4, 5, batch=3, bias=torch.randn(1, 2, 1, 5, generator=torch.Generator().manual_seed(1))),
    "a bias constant along keys": make(4, 5, batch=2, bias=3 * torch.randn(2, 1, 4, 1, generator=torch.Generator().manual_seed(2))),
    "a bias with last stride 0": make(
        3, 43, causal=True, bias=torch.randn(1, 2, 3, 1, generator=torch.Generator().manual_seed(3)).expand(1, 2, 3, 43)
    ),
    "causal beside a finite bias": make(5, 5, causal=True, bias=0.5 * (torch.arange(5.0)[:, None] - torch.arange(5.0))[None, None]),
    "causal beside a key mask": make(causal=True, key_mask=rows("1110")),
    "causal beside left padding": make(batch=2, causal=True, key_mask=rows("0011", "1111")),
    "a chunk after a left-padded past": make(3, 8, 4, 2, batch=2, causal=True, key_mask=rows("11111111", "00011111")),
    "a cache's spare slots": make(1, 12, causal=True, key_mask=rows("111110000000")),
    "a segment without keys": make(5, 4, cu_seqlens=(starts(1, 2, 2), starts(2, 0, 2))),
    "packed rows, causal": make(6, 6, causal=True, cu_seqlens=(starts(3, 3), starts(3, 3))),
    "packed rows of one token, window, alibi": make(
        6, 6, 4, 1, causal=True, window=(1, 0), alibi_slopes=SLOPES, cu_seqlens=(starts(1, 1, 4), starts(1, 1, 4))
    ),
    "packed rows align each to its own end": make(4, 5, causal=True, cu_seqlens=(starts(2, 2), starts(3, 2))),
    "a last dimension that is not contiguous": strided(),
    "expanded, stepped and transposed views": views(),
    "the scale of an odd head dim": make(3, 4, dim=5),
    "a scale of 1 is used": make(3, 5, dim=16, scale=1.0),
    "a value dim above the head dim": make(3, 6, 4, 1, batch=2, value_dim=12, causal=True),
    "a value dim below the head dim": make(3, 6, dim=12, batch=2, value_dim=8),
    **{f"{n} keys of equal weight": {**(call := make(2, n, 1, 1, 4)), "query": call["query"] * 0} for n in (17, 33, 129)},
}


@pytest.mark.parametrize("backend", ["reference", "sdpa", "auto"])
@pytest.mark.parametrize("name", CASES)
def test_right_value(name, backend):
    call = CASES[name]
    if attnreg.explain(**call, backend=backend).chosen is None:
        pytest.skip(f"{backend} refuses it, with reasons")
    clean = {**call, **{n: torch.nan_to_num(call[n], posinf=0.0) for n in ("key", "value")}}
    expected, expected_lse = oracle.attend(**clean)
    output, lse = attnreg.attention(**call, backend=backend, return_lse=True)
    tolerance = 2e-2 if output.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, atol=tolerance, rtol=tolerance)


REFUSED = {
    "a negative scale": (make(scale=-0.7), "scale"),
    "query heads not a multiple": (make(heads=6, key_heads=4), "key"),
    "more key heads than query heads": (make(heads=2, key_heads=4), "key"),
    "value longer than key": ({**make(3, 5), "value": torch.randn(1, 6, 2, 8)}, "value"),
    "a float key mask": (make(3, 4, key_mask=torch.tensor([[0.0, 0.0, HIDDEN, HIDDEN]])), "key_mask"),
    "a bool bias": (make(3, 4, bias=torch.ones(1, 1, 3, 4, dtype=torch.bool)), "bias"),
    "a key mask wider than the keys": (make(1, 4, key_mask=torch.ones(1, 9, dtype=torch.bool)), "key_mask"),
    "a 3-D bias": (make(3, 3, 3, 3, batch=3, bias=torch.randn(3, 3, 3)), "bias"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, argument = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=f"^{argument}: "):
        attnreg.attention(**call)


def test_three_tokens_anywhere_in_six_slots():
    """Without distances, where the padding stands changes nothing; padded rows are 0, NaN in them goes nowhere."""
    alone = make(3, 3, causal=True)
    expected = attnreg.attention(**alone)[0]
    for pattern in ("111000", "000111", "110001"):
        real, call = rows(pattern), {"causal": True}
        for name in ("query", "key", "value"):
            call[name] = torch.full((1, 6, 2, 8), math.nan)
            call[name][real] = alone[name][0]
        output = attnreg.attention(**call, query_mask=real, key_mask=real)
        torch.testing.assert_close(output[real], expected)
        assert (output[~real] == 0).all()


def test_chunks_equal_one_shot():
    call = make(8, 8, 4, 2, batch=2, causal=True, window=(3, 0), alibi_slopes=SLOPES)
    real = rows("11111111", "00111111")
    whole = attnreg.attention(**call, key_mask=real)
    parts = []
    for low, high in ((0, 3), (3, 4), (4, 8)):
        cut = {**call, "query": call["query"][:, low:high], "key": call["key"][:, :high], "value": call["value"][:, :high]}
        parts.append(attnreg.attention(**cut, key_mask=real[:, :high]))
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_a_document_does_not_reach_the_next():
    call = make(6, 6, causal=True, cu_seqlens=(starts(4, 2), starts(4, 2)))
    other = {**call, "key": call["key"].clone(), "value": call["value"].clone()}
    other["key"][:, :4] += 3
    other["value"][:, :4] -= 50
    alone = {**call, "cu_seqlens": None, **{n: call[n][:, 4:] for n in ("query", "key", "value")}}
    assert torch.equal(attnreg.attention(**call)[:, 4:], attnreg.attention(**other)[:, 4:])
    torch.testing.assert_close(attnreg.attention(**call)[:, 4:], attnreg.attention(**alone))


def test_the_future_does_not_reach_the_past():
    call = make(3, 8, causal=True)
    other = {**call, "key": call["key"].clone(), "value": call["value"].clone()}
    other["key"][:, 7] += 2
    other["value"][:, 7] += 100
    one, two = attnreg.attention(**call), attnreg.attention(**other)
    assert torch.equal(one[:, :2], two[:, :2])
    assert not torch.allclose(one[:, 2], two[:, 2])


def test_gradients_of_rows_that_see_nothing():
    call = make(5, 5, 2, 1, causal=True, key_mask=rows("00011"))
    for name in ("query", "key", "value"):
        call[name].requires_grad_()
    attnreg.attention(**call).square().sum().backward()
    assert (call["query"].grad[:, :3] == 0).all() and (call["key"].grad[:, :3] == 0).all() and (call["value"].grad[:, :3] == 0).all()
    assert all(call[name].grad.isfinite().all() for name in ("query", "key", "value"))
