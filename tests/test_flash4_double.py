"""flash4 on a CPU, its two functions doubled by the reference: what the adapter gives them, sinks above all, and what it makes of the results."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

import attnreg
from attnreg.call import AttentionCall
from attnreg.conformance import Profile, run_checks
from attnreg.kernels import flash4
from attnreg.kernels.installed import Library
from attnreg.kernels.lse import beside_sinks
from attnreg.spec import Feature

GIVEN: list[dict] = []


def reference(query, key, value, options, **rows):
    return attnreg.attention(
        query, key, value, backend="reference", return_lse=True, causal=options["causal"], window=options.get("window_size"),
        softcap=options.get("softcap"), scale=options["softmax_scale"], sinks=options.get("learnable_sink"), **rows,
    )  # fmt: skip


def flash_attn_func(query, key, value, **options):
    GIVEN.append(options)
    output, lse = reference(query, key, value, options)
    return output, lse if options.get("return_lse") else None


def flash_attn_varlen_func(
    query, key, value, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, seqused_k=None, page_table=None, **options
):  # fmt: skip
    GIVEN.append(options)
    if seqused_k is not None:
        if page_table is not None:
            key, value = (t[page_table.long()].flatten(1, 2) for t in (key, value))
        output, lse = reference(query, key, value, options, key_lengths=seqused_k)
    else:
        output, lse = reference(query[None], key[None], value[None], options, cu_seqlens=(cu_seqlens_q, cu_seqlens_k))
        output, lse = output[0], lse[0]
    return output, lse if options.get("return_lse") else None


@pytest.fixture
def doubled(monkeypatch):
    functions = SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setattr(flash4._Found, "where", Library("flash-attn-4", "4.0.0b36", functions))
    GIVEN.clear()


def on_the_cpu() -> attnreg.Backend:
    claims = flash4.claims("4.0.0b36")
    features = {f: support for f, support in claims.features.items() if f is not Feature.CAPTURE}
    claims = dataclasses.replace(claims, features=features, devices=("cpu",), smallest_capability=None, largest_capability=None)
    return dataclasses.replace(flash4.flash4, name="flash4_double", capabilities=lambda: claims, missing=lambda: None)


def test_the_suite(doubled):
    report = run_checks(on_the_cpu(), profile=Profile(5, 3, "eager"), shrink=False)
    assert not [outcome.text for outcome in report.outcomes if outcome.result == "failed"]
    assert report.passed and any("learnable_sink" in options for options in GIVEN)


@pytest.mark.parametrize(
    ("queries", "learned", "native"), [(8, False, True), (8, True, True), (1, False, False), (1, True, True)],
    ids=["prefill", "training", "one query", "one query, training"],
)  # fmt: skip
@pytest.mark.parametrize("sink_dtype", [torch.bfloat16, torch.float64])
def test_sinks_go_to_the_kernel(queries, learned, native, sink_dtype, doubled):
    """All but those of a lone query, which may have kernels that split its keys."""
    torch.manual_seed(0)
    tensors = [torch.randn(2, n, h, 16).requires_grad_(learned) for n, h in ((queries, 4), (8, 2), (8, 2))]
    sinks = torch.randn(4, dtype=sink_dtype).requires_grad_(learned)
    options = {"causal": True, "sinks": sinks, "return_lse": True}
    output, lse = flash4.run_flash4(AttentionCall(*tensors, **options))
    (given,) = GIVEN
    assert ("learnable_sink" in given) == native and given.get("learnable_sink", sinks.float()).dtype != torch.float64
    wanted, wanted_lse = attnreg.attention(*tensors, backend="reference", **options)
    torch.testing.assert_close((output, lse), (wanted, wanted_lse.to(lse.dtype)), atol=1e-5, rtol=1e-5)
    if learned:
        learning = [*tensors, sinks]
        found, right = (torch.autograd.grad(o, learning, torch.ones_like(o)) for o in (output, wanted))
        torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)


def test_an_empty_row_beside_a_sink_of_nothing():
    """exp(-inf) of exp(-inf) + exp(-inf) is 0 here, as the reference has it, and not 0 / 0."""
    lse = torch.tensor([[[-math.inf, 0.0]]], requires_grad=True)
    sinks = torch.tensor([-math.inf], requires_grad=True)
    share, after = beside_sinks(lse, sinks)
    assert share.tolist() == [[[0.0, 1.0]]] and after.tolist() == [[[-math.inf, 0.0]]]
    assert all(not g.isnan().any() for g in torch.autograd.grad(share.sum(), (lse, sinks)))


def test_sinks_by_card_and_version():
    """The library asserts Hopper or Blackwell with two tiles of scores; its backward has sinks from the 26th beta on, at 256 on Hopper alone."""
    asked = AttentionCall(*(torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16) for _ in range(3)), sinks=torch.zeros(2)).spec._replace(
        device="cuda", capability=(9, 0)
    )
    learned = asked._replace(gradients=("query", "key", "value", "sinks"))
    new, old = flash4.claims("4.0.0b36"), flash4.claims("4.0.0b25")
    for claims in (new, old):
        assert claims.support(Feature.SINKS, asked).native
        assert not claims.support(Feature.SINKS, asked._replace(capability=(12, 0))).native
    assert not new.reasons_against(learned) and {r.what for r in old.reasons_against(learned)} == {"sinks"}
    wide = learned._replace(head_dim=256, value_dim=256)
    assert not new.reasons_against(wide) and "sinks" in {r.what for r in new.reasons_against(wide._replace(capability=(10, 0)))}
