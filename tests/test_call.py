"""Calls that make no sense for any backend: each error names the argument, what was given and what is allowed."""

import pytest
import torch

import attnreg

NAN = float("nan")
rows = lambda *starts, dtype=torch.int32: torch.tensor(starts, dtype=dtype)
t = lambda *shape, dtype=torch.float32: torch.ones(*shape, dtype=dtype)
q, kv = t(2, 3, 4, 8), t(2, 5, 2, 8)
packed = dict(query=t(1, 6, 4, 8), key=t(1, 6, 4, 8), value=t(1, 6, 4, 8))
seen = torch.ones(2, 5, dtype=torch.bool)

# what is wrong, the arguments that differ from a good call, the error, words of its text
BAD = [
    ("2-D query", dict(query=t(3, 8)), ValueError, ["query", "2"]),
    ("5-D", dict(query=t(1, 2, 3, 4, 8), key=t(1, 2, 3, 4, 8), value=t(1, 2, 3, 4, 8)), ValueError, ["query", "(B, Sq, Hq, D)", "(1, 2, 3, 4, 8)"]),
    ("3-D without heads", dict(query=t(2, 3, 32), key=t(2, 5, 32), value=t(2, 5, 32)), ValueError, ["n_heads", "cu_seqlens", "(2, 3, 32)"]),
    ("flat, heads do not divide", dict(query=t(2, 3, 32), key=t(2, 5, 32), value=t(2, 5, 32), n_heads=5), ValueError, ["query", "32", "n_heads=5"]),
    ("heads do not divide", dict(key=t(2, 5, 3, 8), value=t(2, 5, 3, 8)), ValueError, ["key", "4", "3"]),
    ("more key heads", dict(key=t(2, 5, 8, 8), value=t(2, 5, 8, 8)), ValueError, ["key", "4", "8"]),
    ("n_heads contradicts", dict(n_heads=8), ValueError, ["n_heads: 8", "4"]),
    ("n_kv_heads contradicts", dict(n_kv_heads=4), ValueError, ["n_kv_heads: 4", "2"]),
    ("batch", dict(key=t(3, 5, 2, 8), value=t(3, 5, 2, 8)), ValueError, ["batch", "2", "3"]),
    ("value length", dict(value=t(2, 6, 2, 8)), ValueError, ["value", "5", "6"]),
    ("head dim", dict(key=t(2, 5, 2, 16)), ValueError, ["key", "8", "16"]),
    ("device", dict(key=kv.to("meta"), value=kv.to("meta")), ValueError, ["key", "cpu", "meta"]),
    ("dtype", dict(key=kv.half(), value=kv.half()), TypeError, ["key", "float32", "float16"]),
    ("integer query", dict(query=q.int()), TypeError, ["query", "int32"]),
    ("value missing", dict(value=None), (TypeError, ValueError), ["value"]),
    ("integer key_mask", dict(key_mask=seen.int()), TypeError, ["key_mask", "bool", "int32"]),
    ("float mask", dict(mask=t(1, 1, 3, 5)), TypeError, ["mask", "bool", "float32", "bias"]),
    ("bool bias", dict(bias=torch.ones(1, 1, 3, 5, dtype=torch.bool)), TypeError, ["bias", "mask="]),
    ("lengths beyond 64 bits", dict(key_lengths=[2**80, 1]), ValueError, ["key_lengths", "between 0 and"]),
    ("lengths without a number", dict(key_lengths=[None, 1]), TypeError, ["key_lengths", "whole numbers", "None"]),
    ("a length beyond 32 bits", dict(key_lengths=[2**40, 1]), ValueError, ["key_lengths", "0 and 5", str(2**40)]),
    ("a number for lengths", dict(key_lengths=3), TypeError, ["key_lengths", "one a row", "list", "3"]),
    ("a scale beyond floats", dict(scale=10**400), ValueError, ["scale", "finite"]),
    ("2-D bias", dict(bias=t(3, 5)), ValueError, ["bias", "4-D", "(3, 5)"]),
    ("2-D mask", dict(mask=seen), ValueError, ["mask", "4-D", "key_mask"]),
    ("mask of another size", dict(mask=torch.ones(1, 1, 3, 4, dtype=torch.bool)), ValueError, ["mask", "(2, 4, 3, 5)"]),
    ("key_mask of another size", dict(key_mask=seen[:, :4]), ValueError, ["key_mask", "(2, 5)", "(2, 4)"]),
    ("negative window", dict(window=(-1, 0)), ValueError, ["window", "(-1, 0)", "None"]),
    ("int window", dict(window=4), TypeError, ["window", "4", "transformers", "xformers", "(W - 1, 0)"]),
    ("float window", dict(window=(1.0, 0)), TypeError, ["window", "1.0"]),
    ("scale 0", dict(scale=0.0), ValueError, ["scale", "0.0"]),
    ("scale NaN", dict(scale=NAN), ValueError, ["scale", "nan"]),
    ("scale below 0", dict(scale=-1.0), ValueError, ["scale", "-1.0"]),
    ("scale infinite", dict(scale=float("inf")), ValueError, ["scale", "inf"]),
    ("tensor scale", dict(scale=t(1)), TypeError, ["scale", "Tensor"]),
    ("softcap 0", dict(softcap=0.0), ValueError, ["softcap", "0.0"]),
    ("softcap below 0", dict(softcap=-5.0), ValueError, ["softcap", "-5.0"]),
    ("dropout 1", dict(dropout_p=1.0), ValueError, ["dropout_p", "1.0"]),
    ("dropout below 0", dict(dropout_p=-0.1), ValueError, ["dropout_p", "-0.1"]),
    ("dropout NaN", dict(dropout_p=NAN), ValueError, ["dropout_p", "nan"]),
    ("lengths too long", dict(key_lengths=[5, 6]), ValueError, ["key_lengths", "5", "6"]),
    ("lengths below 0", dict(key_lengths=rows(-1, 5)), ValueError, ["key_lengths", "-1"]),
    ("query_lengths too long", dict(query_lengths=[4, 1]), ValueError, ["query_lengths", "3", "4"]),
    ("starts too late", dict(key_starts=[0, 6]), ValueError, ["key_starts", "6"]),
    ("lengths of another batch", dict(key_lengths=[5]), ValueError, ["key_lengths", "(2,)"]),
    ("float lengths", dict(key_lengths=t(2)), TypeError, ["key_lengths", "float32"]),
    ("fractions as lengths", dict(key_lengths=[1.7, 2]), TypeError, ["key_lengths", "1.7"]),
    ("bools as lengths", dict(key_starts=[True, False]), TypeError, ["key_starts", "True"]),
    ("words for deterministic", dict(deterministic="no"), TypeError, ["deterministic", "'no'"]),
    ("sparse query", dict(query=q.to_sparse()), TypeError, ["query", "dense", "sparse"]),
    ("sparse mask", dict(mask=seen[:, None, None].to_sparse()), TypeError, ["mask", "dense"]),
    ("nested query", dict(query=torch.nested.nested_tensor([t(3, 4, 8), t(2, 4, 8)])), TypeError, ["query", "nested", "cu_seqlens"]),
    ("slopes", dict(alibi_slopes=t(3)), ValueError, ["alibi_slopes", "(4,)", "(3,)"]),
    ("sinks of key heads", dict(sinks=t(2)), ValueError, ["sinks", "(4,)", "(2,)"]),
    ("layout", dict(layout="sbhd"), ValueError, ["layout", "bshd", "sbhd"]),
    ("causal as a number", dict(causal=1), TypeError, ["causal", "1"]),
    ("cu starts late", dict(**packed, cu_seqlens=(rows(1, 6), rows(0, 6))), ValueError, ["cu_seqlens[0]", "0", "1, 6"]),
    ("cu decreases", dict(**packed, cu_seqlens=(rows(0, 6), rows(0, 5, 4))), ValueError, ["cu_seqlens[1]", "decreases"]),
    ("cu exceeds", dict(**packed, cu_seqlens=(rows(0, 7), rows(0, 6))), ValueError, ["cu_seqlens[0]", "6", "7"]),
    ("cu segments differ", dict(**packed, cu_seqlens=(rows(0, 6), rows(0, 3, 6))), ValueError, ["cu_seqlens", "1 and 2"]),
    ("cu with a batch", dict(cu_seqlens=(rows(0, 3), rows(0, 5))), ValueError, ["cu_seqlens", "batch size 2"]),
    ("cu alone", dict(**packed, cu_seqlens=rows(0, 6)), TypeError, ["cu_seqlens", "(cu_q, cu_k)"]),
    ("cu with lengths", dict(**packed, cu_seqlens=(rows(0, 6),) * 2, key_lengths=[6]), ValueError, ["cu_seqlens", "key_lengths"]),
    ("max_seqlens alone", dict(max_seqlens=(3, 5)), ValueError, ["max_seqlens", "cu_seqlens"]),
    ("unknown keyword", dict(is_causal=True), TypeError, ["is_causal"]),
    ("unknown backend", dict(backend="sdpaa"), LookupError, ["sdpaa", "sdpa", "reference"]),
]  # fmt: skip


@pytest.mark.parametrize("ask", [attnreg.attention, attnreg.explain])
@pytest.mark.parametrize(("changed", "error", "words"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_nonsense_is_named(ask, changed, error, words):
    with pytest.raises(error) as raised:
        ask(**{"query": q, "key": kv, "value": kv, **changed})
    text = str(raised.value)
    assert [word for word in words if word not in text] == [], text


def test_a_good_call_runs():
    assert attnreg.attention(q, kv, kv, key_mask=seen, window=(2, None), backend="sdpa").shape == q.shape


def test_flat_and_packed_rows_equal_4d():
    torch.manual_seed(0)
    query, key = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 2, 8)
    whole = attnreg.attention(query, key, key, causal=True)
    flat = attnreg.attention(query.flatten(2), key.flatten(2), key.flatten(2), causal=True, n_heads=4, n_kv_heads=2)
    torch.testing.assert_close(flat, whole.flatten(2))
    cu = rows(0, 3, 6)
    thd = attnreg.attention(query.flatten(0, 1), key.flatten(0, 1), key.flatten(0, 1), causal=True, cu_seqlens=(cu, cu))
    torch.testing.assert_close(thd, whole.flatten(0, 1))
