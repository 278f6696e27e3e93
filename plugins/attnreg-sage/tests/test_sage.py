"""The conformance suite where the library runs; the argument mapping everywhere, by a stand-in that is as greedy as the library."""

from __future__ import annotations

import sys
import types

import attnreg_sage
import pytest
import torch

import attnreg
from attnreg.call import AttentionCall
from attnreg.conformance import conformance_suite

TestSage = conformance_suite("sage")


@pytest.fixture
def library(monkeypatch):
    seen = {}

    def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, smooth_k=True, **swallowed):
        assert not is_causal or k.shape[1] % 128 == 0, "the causal kernel reads steps of blocks that are not there"
        seen.update(layout=tensor_layout, causal=is_causal, scale=sm_scale, swallowed=swallowed)
        assert q.shape[0] * q.shape[2] <= 65535 and (q.shape[0] - 1) * q.stride(0) < 2**31, "a launch that is none, or an int32 too small"
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        if smooth_k:
            k -= k.mean(dim=1 if tensor_layout == "NHD" else 2, keepdim=True)
        group = q.shape[2] // k.shape[2]
        heads = [t.transpose(1, 2) for t in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))]
        return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=is_causal, scale=sm_scale).transpose(1, 2)

    monkeypatch.setitem(sys.modules, "sageattention", types.SimpleNamespace(sageattn=sageattn))
    return seen


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_maps_the_call_and_leaves_the_keys_alone(library, causal, stride):
    query, key, value = (torch.randn(2, 5, heads, 64 * stride)[..., ::stride] for heads in (4, 2, 2))
    before = key.clone()
    output = attnreg_sage.run_sage(AttentionCall(query, key, value, causal=causal, scale=0.3))
    assert library == {"layout": "NHD", "causal": causal, "scale": 0.3, "swallowed": {}}
    torch.testing.assert_close(output, attnreg.attention(query, key, value, causal=causal, scale=0.3, backend="reference"))
    assert torch.equal(key, before)


@pytest.mark.parametrize(("batch", "heads"), [(70_000, 1), (3, 40_000)])
def test_more_rows_than_one_launch_takes_go_in_parts(library, batch, heads):
    query, key, value = (torch.randn(batch, 1, heads, 2) for _ in range(3))
    output = attnreg_sage.run_sage(AttentionCall(query, key, value, causal=True))
    torch.testing.assert_close(output, value)


@pytest.mark.parametrize(
    ("strides", "sizes", "most"),
    [
        ((64, 64), (1, 64), 65535),
        ((64, 64), (40_000, 64), 1),
        ((2**30, 64), (1, 64), 2),
        ((2**40, 64), (1, 64), 1),
        ((0, 64), (2, 64), 32767),
    ],
)
def test_how_many_rows_one_launch_takes(strides, sizes, most):
    tensor = torch.empty((), device="meta").as_strided((2, 1, *sizes), (strides[0], strides[1] * sizes[0], strides[1], 1))
    assert attnreg_sage.most_rows(tensor) == most


def test_is_left_out_unless_allowed_or_named():
    claims = attnreg_sage.sage.claims
    assert claims.bound is not None and list(claims.exceptions) == ["hidden_changes_nothing"]
    spec = attnreg.AttentionSpec("cuda", (9, 0), torch.float16, 4, 4, 64, 64, causal=True)
    assert "approximate" in [r.what for r in attnreg.explain_spec(spec).rejected["sage"]]
    assert "approximate" not in [r.what for r in attnreg.explain_spec(spec, backend="sage").rejected.get("sage", ())]
    assert claims.reasons_against(spec) == ()
    assert claims.reasons_against(spec._replace(key_mask="right")) and claims.reasons_against(spec._replace(head_dim=72, value_dim=72))
    # The kernel counts keys that are not there, up to the next multiple of 64.
    assert [reason.what for reason in claims.reasons_against(spec._replace(causal=False))] == ["causal"]
