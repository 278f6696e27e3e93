"""The public call: a repeated one does one look-up and notices every change that matters; shapes, layouts, errors."""

from __future__ import annotations

import importlib

import pytest
import torch

import attnreg
from attnreg import NATIVE, Backend, Capabilities, Feature, attention, selections

module = importlib.import_module("attnreg.attention")
close = torch.testing.assert_close


def made(batch=2, queries=5, keys=5, heads=4, key_heads=2, dim=8, **options):
    torch.manual_seed(0)
    return [torch.randn(batch, *size, dim, **options) for size in ((queries, heads), (keys, key_heads), (keys, key_heads))]


@pytest.fixture
def asked(monkeypatch):
    """The specs that were chosen for, and how often a call was checked, from here on."""
    attnreg.attention(*made())
    attnreg.policy.changed()
    specs = []
    select, checked = selections.select, module._checked

    def counting(spec, *rest):
        specs.append(spec)
        return select(spec, *rest)

    def checking(arguments):
        specs.checks += 1
        return checked(arguments)

    class Specs(list):
        checks = 0

    specs = Specs()
    monkeypatch.setattr(selections, "select", counting)
    monkeypatch.setattr(module, "_checked", checking)
    return specs


# ---------------------------------------------------------------------- the repeated call


def test_a_repeated_call_is_neither_checked_nor_chosen_again(asked):
    for _ in range(5):
        attention(*made(), causal=True)
    assert (len(asked), asked.checks) == (1, 1)
    assert attnreg.last_selection().spec == asked[0]


def test_growing_keys_ask_once_for_each_power_of_two(asked):
    for keys in range(33, 65):
        attention(*made(queries=1, keys=keys), causal=True)
    assert len(asked) == 1 and asked.checks == 32


def test_a_mask_is_read_anew_in_a_repeated_call(asked):
    query, key, value = made()
    masks = [torch.rand(2, 5) > 0.4 for _ in range(3)]
    for mask in masks:
        mask[:, 0] = True
        right = attention(query, key, value, key_mask=mask, backend="reference")
        close(attention(query, key, value, key_mask=mask, backend="sdpa"), right)
    assert asked.checks == 2
    bias = torch.randn(1, 4, 5, 5)
    for _ in range(2):
        close(attention(query, key, value, bias=bias, backend="sdpa"), attention(query, key, value, bias=bias, backend="reference"))
        bias = bias.neg()


def test_two_calls_in_turn_each_keep_their_plan(asked):
    for _ in range(3):
        attention(*made(), causal=True)
        attention(*made(), window=(1, 0))
        attention(*made(queries=3, keys=3), causal=True)
    assert asked.checks == 3


CHANGES = {
    "causal": dict(causal=True),
    "window": dict(window=(1, None)),
    "softcap": dict(softcap=3.0, backend="reference"),
    "scale": dict(scale=0.5),
    "dropout": dict(dropout_p=0.5),
    "sinks": dict(sinks=torch.zeros(4)),
    "alibi": dict(alibi_slopes=torch.ones(4)),
    "bias": dict(bias=torch.randn(1, 1, 5, 5)),
    "key_mask": dict(key_mask=torch.tensor([[True] * 4 + [False]] * 2)),
    "query_mask": dict(query_mask=torch.tensor([[True] * 4 + [False]] * 2)),
    "mask": dict(mask=torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()),
    "key_lengths": dict(key_lengths=[5, 2]),
    "lse": dict(return_lse=True),
    "backend": dict(backend="reference"),
    "layer": dict(layer="a layer"),
    "deterministic": dict(deterministic=True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_option_more_is_noticed(asked, change):
    """And taken back again, the first call runs as before."""
    tensors = made()
    plain = attention(*tensors)
    changed = attention(*tensors, **change)
    assert asked.checks == 2
    if "dropout_p" not in change:
        again = attention(*tensors, **change)
        close(again, changed, rtol=0, atol=0)
        reference = {**change, "backend": "reference"}
        close(changed, attention(*tensors, **reference))
    close(attention(*tensors), plain, rtol=0, atol=0)


def test_strides_dtype_and_gradients_are_noticed(asked):
    tensors = made()
    right = attention(*tensors)
    assert attnreg.last_selection().spec.unit_stride
    apart = [torch.stack([t, t.neg()], -1)[..., 0] for t in tensors]
    close(attention(*apart), right)
    assert not attnreg.last_selection().spec.unit_stride
    assert attention(*(t.double() for t in tensors)).dtype == torch.float64
    learned = [t.clone().requires_grad_() for t in tensors]
    assert attention(*learned).requires_grad and attnreg.last_selection().spec.gradients == ("query", "key", "value")
    with torch.no_grad():
        assert not attention(*learned).requires_grad and attnreg.last_selection().spec.gradients == ()
    learned[0].requires_grad_(False)
    attention(*learned)
    assert attnreg.last_selection().spec.gradients == ("key", "value")
    close(attention(*tensors), right, rtol=0, atol=0)
    assert not attnreg.last_selection().spec.gradients
    torch.use_deterministic_algorithms(True)
    try:
        attention(*tensors)
        assert attnreg.last_selection().spec.deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    attention(*tensors)
    assert not attnreg.last_selection().spec.deterministic


def test_a_bias_that_needs_a_gradient_is_noticed():
    tensors, bias = made(), torch.randn(1, 4, 5, 5)
    attention(*tensors, bias=bias)
    attention(*tensors, bias=bias.requires_grad_()).sum().backward()
    assert bias.grad.shape == bias.shape and attnreg.last_selection().spec.gradients == ("bias",)


def test_autocast_is_noticed_and_left_again():
    tensors = made()
    right = attention(*tensors)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = attention(*tensors)
        assert low.dtype == torch.bfloat16
        close(low.float(), right, rtol=0.02, atol=0.02)
        assert attention(*tensors).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(*made(dtype=torch.float64)).dtype == torch.float64


def test_a_change_of_policy_or_registry_takes_effect_at_once():
    tensors = made()
    ran = lambda: (attention(*tensors), attnreg.last_selection().chosen.name)[1]
    assert ran() == ran() == "sdpa"
    attnreg.use("reference")
    assert ran() == "reference"
    attnreg.use(None)
    assert ran() == "sdpa"
    mine = Backend("mine", lambda call: call.query + 7, Capabilities({Feature.GROUPED_HEADS: NATIVE}), priority=9999)
    attnreg.register(mine)
    try:
        assert ran() == "mine" and torch.equal(attention(*tensors), tensors[0] + 7)
    finally:
        attnreg.unregister("mine")
    assert ran() == "sdpa"
    with attnreg.using("reference"):
        assert ran() == "reference"
    assert ran() == "sdpa"


def test_last_selection_is_of_this_thread():
    import threading

    attention(*made(), backend="reference")
    seen = []
    thread = threading.Thread(target=lambda: seen.append(attnreg.last_selection()))
    thread.start()
    thread.join()
    assert seen == [None] and attnreg.last_selection().chosen.name == "reference"


# ---------------------------------------------------------------------- layouts and shapes


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("options", [dict(causal=True), dict(window=(1, 1)), dict(key_mask=torch.tensor([[True] * 4 + [False]] * 2))])
def test_layouts_agree(backend, options):
    query, key, value = made()
    value = torch.randn(2, 5, 2, 6)
    turned = [t.transpose(1, 2) for t in (query, key, value)]
    for _ in range(3):  # the first, the one that makes a plan, the one that uses it
        one, one_lse = attention(query, key, value, backend=backend, return_lse=True, **options)
        other, other_lse = attention(*turned, backend=backend, return_lse=True, layout="bhsd", **options)
        close(other.transpose(1, 2), one)
        close(other_lse, one_lse)
        close(attention(query, key, value, backend=backend, **options), one)
        close(attention(*turned, backend=backend, layout="bhsd", **options).transpose(1, 2), one)
    assert one.shape == (2, 5, 4, 6) and one_lse.shape == (2, 4, 5) and one_lse.dtype == torch.float32


def test_heads_are_checked_when_given_with_four_dimensions():
    tensors = made()
    close(attention(*tensors, n_heads=4, n_kv_heads=2), attention(*tensors))
    with pytest.raises(ValueError, match="n_heads: 2"):
        attention(*tensors, n_heads=2)


def test_flat_tensors_come_back_flat_with_a_lse():
    query, key, value = made()
    whole, lse = attention(query, key, value, return_lse=True)
    flat, flat_lse = attention(query.flatten(2), key.flatten(2), value.flatten(2), n_heads=4, n_kv_heads=2, return_lse=True)
    assert flat.shape == (2, 5, 32)
    close(flat, whole.flatten(2))
    close(flat_lse, lse)


def test_packed_rows_of_three_and_of_four_dimensions():
    query, key, value = made(batch=1, queries=7, keys=7)
    cu = torch.tensor([0, 3, 3, 6], dtype=torch.int32)
    four, lse = attention(query, key, value, cu_seqlens=(cu, cu), causal=True, return_lse=True)
    three = attention(query[0], key[0], value[0], cu_seqlens=(cu, cu), causal=True, max_seqlens=(3, 3))
    close(three, four[0])
    assert lse.shape == (1, 4, 7) and three[6].abs().max() == 0 and lse[0, :, 6].isneginf().all()
    close(four[:, 3:6], attention(query[:, 3:6], key[:, 3:6], value[:, 3:6], causal=True))


@pytest.mark.parametrize("sizes", [dict(batch=0), dict(queries=0), dict(keys=0), dict(queries=0, keys=0)], ids=str)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_sizes_of_zero(sizes, layout):
    """Nothing is seen: zeros, lse -inf, or the sink; gradients are zero and not absent. The same in the repeated call."""
    for sinks in (None, torch.full((4,), 0.5)):
        for _ in range(3):
            tensors = [t.requires_grad_() for t in made(**sizes)]
            given = [t.transpose(1, 2) for t in tensors] if layout == "bhsd" else tensors
            output, lse = attention(*given, sinks=sinks, layout=layout, return_lse=True, causal=True)
            output = output.transpose(1, 2) if layout == "bhsd" else output
            assert output.shape == tensors[0].shape and not output.any()
            assert torch.equal(lse, torch.full_like(lse, float("-inf") if sinks is None else 0.5))
            output.sum().backward()
            assert all(t.grad is not None and not t.grad.any() for t in tensors)


# ---------------------------------------------------------------------- what cannot run


def test_no_backend_error_carries_the_selection():
    with pytest.raises(attnreg.NoBackendError) as raised:
        attention(*made(), softcap=2.0, backend=["sdpa", "flash2"])
    selection = raised.value.selection
    assert selection.chosen is None and selection.order == ("sdpa", "flash2") and selection.source == "backend= of this call"
    assert {"sdpa", "flash2", "reference"} <= set(selection.rejected)
    assert [r.what for r in selection.rejected["sdpa"]] == ["softcap"] and "device" in [r.what for r in selection.rejected["flash2"]]
    assert str(selection) in str(raised.value)
    asked = attnreg.explain(*made(), softcap=2.0, backend=["sdpa", "flash2"])
    assert asked.as_dict() == selection.as_dict(), "explain says the same, and raises nothing"
    attention(*made(), softcap=2.0, backend="reference")
    with pytest.raises(attnreg.NoBackendError):
        attention(*made(), softcap=2.0, backend="sdpa")
    assert attnreg.last_selection().chosen.name == "reference", "a refused call did not run"


def test_deterministic_is_asked_of_the_backend():
    mine = Backend("mine", lambda call: call.query, Capabilities({Feature.GROUPED_HEADS: NATIVE}))
    attnreg.register(mine)
    try:
        attention(*made(), backend="mine")
        with pytest.raises(attnreg.NoBackendError, match="deterministic: not claimed"):
            attention(*made(), backend="mine", deterministic=True)
        attention(*made(), backend="mine", deterministic=False)
    finally:
        attnreg.unregister("mine")


def test_explain_runs_nothing_and_takes_the_same_arguments():
    selection = attnreg.explain(*(t.to("meta") for t in made()), causal=True, backend="sdpa")
    assert selection.chosen is None and "device" in str(selection)
    with pytest.raises(TypeError, match="'is_causal'"):
        attnreg.explain(*made(), is_causal=True)


# ---------------------------------------------------------------------- one tensor given twice, and sizes of zero

x, y, z = torch.randn(3, 1, 4, 2, 8)


@pytest.mark.parametrize("given", [(x, y, z), (x, y, y), (x, x, x), (x, x, y), (x, y, x)], ids=["xyz", "xyy", "xxx", "xxy", "xyx"])
def test_a_repeated_call_is_not_checked_again(given, monkeypatch):
    first = attnreg.attention(*given, causal=True)
    others = attnreg.attention(z, x, y, causal=True)
    monkeypatch.setattr(attnreg.AttentionCall, "__init__", None)
    assert torch.equal(attnreg.attention(*given, causal=True), first)
    with pytest.raises(TypeError):
        attnreg.attention(x, y, z[..., :4], causal=True)
    if len({id(t) for t in given}) == 3:
        assert torch.equal(attnreg.attention(z, x, y, causal=True), others)


def test_learned_terms_get_zero_gradients_where_there_are_no_keys():
    bias, sinks = torch.zeros(1, 1, 4, 1, requires_grad=True), torch.zeros(2, requires_grad=True)
    attnreg.attention(x, y[:, :0], y[:, :0], bias=bias[..., :0], sinks=sinks).sum().backward()
    assert bias.grad.eq(0).all() and sinks.grad.eq(0).all()


@pytest.mark.parametrize("side", [2**31 - 1, 2**63 - 1, 10**30])
def test_a_window_beyond_every_size_limits_nothing(side):
    query, key, value = (torch.randn(1, 4, 2, 8) for _ in range(3))
    expected = attnreg.attention(query, key, value, window=(1, None))
    torch.testing.assert_close(attnreg.attention(query, key, value, window=(1, side)), expected)
    expected = attnreg.attention(query, key, value)
    torch.testing.assert_close(attnreg.attention(query, key, value, window=(side, side)), expected)


def test_a_backend_may_change_its_call():
    """As one does that turns the layout itself."""

    def run(call):
        call.to_layout("bhsd")
        return call.query.transpose(1, 2)

    attnreg.register(Backend("turning", run, attnreg.backends()["reference"].claims))
    try:
        query = torch.randn(1, 3, 2, 8)
        assert torch.equal(attention(query, query, query, backend="turning"), query)
    finally:
        attnreg.unregister("turning")


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda call: None, "a NoneType"),
        (lambda call: (call.query, None), "a tuple"),
        (lambda call: call.query[:, :, :1], r"\(1, 3, 1, 8\) of torch.float32"),
        (lambda call: call.query.double(), r"\(1, 3, 2, 8\) of torch.float64"),
    ],
)
def test_a_backend_that_returns_something_else_is_named(returned, says):
    attnreg.register(Backend("odd", returned, attnreg.backends()["reference"].claims))
    try:
        query = torch.randn(1, 3, 2, 8)
        for layout in ("bshd", "bshd", "bhsd"):  # twice: nothing of it is remembered
            given = query if layout == "bshd" else query.transpose(1, 2)
            with pytest.raises((TypeError, ValueError), match=f"'odd': run returned {says}"):
                attention(given, given, given, backend="odd", layout=layout)
    finally:
        attnreg.unregister("odd")
