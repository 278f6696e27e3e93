"""The repeated call: what is checked once is not checked again, and what changes the answer always is."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import fresh
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import attnreg
from attnreg import Backend, Padding
from attnreg.call import AttentionCall
from attnreg.kernels import reference


@pytest.fixture
def checked(monkeypatch):
    """The calls that were checked in full, while a backend that packs is the first of all."""
    seen = []
    init = AttentionCall.__init__

    def counted(self, *args, **kwargs):
        seen.append(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(AttentionCall, "__init__", counted)
    kernel = next(value for value in vars(reference).values() if isinstance(value, Backend))
    attnreg.register(Backend("packing", kernel.run, kernel.capabilities, priority=10**6, layout=kernel.layout, packs=True))
    yield seen
    attnreg.unregister("packing")


def tensors():
    return [torch.randn(2, 4, 1, 8) for _ in range(3)]


def left(*lengths):
    return torch.arange(4)[None] >= 4 - torch.tensor(lengths)[:, None]


GIVEN = {
    "nothing more": dict,
    "masks": lambda: dict.fromkeys(("query_mask", "key_mask"), left(3, 4)),
    "two masks": lambda: {"query_mask": left(3, 4), "key_mask": left(3, 4)},
    "a padding": lambda: dict.fromkeys(("query_mask", "key_mask"), Padding.from_lengths([3, 4], 4, "left")),
    "lengths": lambda: {"key_lengths": [3, 4], "query_lengths": torch.tensor([2, 4])},
    "starts": lambda: {"key_starts": torch.tensor([1, 0])},
    "a bias": lambda: {"bias": torch.randn(1, 1, 4, 4)},
}


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("same", [False, True])
def test_a_repeated_call_is_checked_once(name, same, checked):
    options = GIVEN[name]()
    query, key, value = tensors()
    call = (query, query, query) if same else (query, key, value)
    outputs = [attnreg.attention(*call, causal=True, **options) for _ in range(4)]
    assert len(checked) == 1
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert torch.equal(outputs[0], attnreg.attention(*call, causal=True, backend="reference", **options))


def test_another_padding_is_looked_at(checked):
    call = tensors()
    forms = []
    for mask in (left(3, 4), left(2, 4), left(3, 4).flip(1), torch.tensor([[1, 0, 1, 1], [1, 1, 0, 1]]).bool()):
        for _ in range(3):
            output = attnreg.attention(*call, causal=True, key_mask=mask)
        torch.testing.assert_close(output, attnreg.attention(*call, causal=True, key_mask=mask, backend="reference"))
        output = attnreg.attention(*call, causal=True, key_mask=mask)
        forms.append(attnreg.last_selection().spec.key_mask)
    assert forms == ["left", "left", "right", "any"]
    assert len(checked) == 8, "each mask once by each of the two ways"


def test_a_mask_changed_in_place_is_looked_at_again(checked):
    call, mask = tensors(), left(3, 4)
    for _ in range(2):
        attnreg.attention(*call, causal=True, key_mask=mask)
    assert attnreg.last_selection().spec.key_mask == "left"
    mask.copy_(mask.flip(1))
    output = attnreg.attention(*call, causal=True, key_mask=mask)
    assert attnreg.last_selection().spec.key_mask == "right"
    assert torch.equal(output, attnreg.attention(*call, causal=True, key_mask=mask, backend="reference"))


def test_a_mask_without_versions_is_looked_at_every_time(checked):
    call = tensors()
    with torch.inference_mode():
        mask = left(3, 4)
        attnreg.attention(*call, causal=True, key_mask=mask)
        mask.copy_(mask.flip(1))
        attnreg.attention(*call, causal=True, key_mask=mask)
    assert attnreg.last_selection().spec.key_mask == "right"


def test_a_plan_keeps_no_padding_alive(checked):
    padding = Padding.from_lengths([3, 4], 4, "left")
    for _ in range(2):
        attnreg.attention(*tensors(), causal=True, key_mask=padding)
    gone = weakref.ref(padding)
    checked.clear()
    del padding
    gc.collect()
    assert gone() is None


def test_what_changes_the_answer_makes_another_plan(checked):
    query, key, value = tensors()
    attnreg.attention(query, key, value)
    for changed in (
        dict(causal=True),
        dict(window=(1, None)),
        dict(scale=2.0),
        dict(softcap=3.0),
        dict(sinks=torch.zeros(1)),
        dict(query=query.double(), key=key.double(), value=value.double()),
        dict(query=query.requires_grad_()),
        dict(backend="reference"),
    ):
        count = len(checked)
        given = {"query": query.detach(), "key": key, "value": value, **changed}
        attnreg.attention(**given)
        assert len(checked) == count + 1, changed
        attnreg.attention(**given)
        assert len(checked) == count + 1, changed
    with attnreg.using("reference"):
        attnreg.attention(query.detach(), key, value)
        assert attnreg.last_selection().chosen.name == "reference"


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"causal": False}, {"causal": 0.0}),
        ({"return_lse": True}, {"return_lse": 1}),
        ({"finite_padding": True}, {"finite_padding": 1}),
        ({"deterministic": True}, {"deterministic": 1}),
        ({"dropout_p": 0.0}, {"dropout_p": False}),
        ({"scale": 1.0}, {"scale": True}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"window": (1, None)}, {"window": (True, None)}),
        ({"window": (1, None)}, {"window": (1.0, None)}),
        ({"n_heads": 1}, {"n_heads": True}),
        ({"n_kv_heads": 1}, {"n_kv_heads": 1.0}),
    ],
    ids=str,
)
def test_what_only_equals_an_option_is_refused_before_and_after(right, wrong, checked):
    """True == 1 == 1.0 to Python, and to a dictionary."""
    call = tensors()
    with pytest.raises(TypeError, match=next(iter(wrong))):
        attnreg.attention(*call, **wrong)
    for _ in range(3):
        attnreg.attention(*call, **right)
    assert len(checked) == 2
    with pytest.raises(TypeError, match=next(iter(wrong))):
        attnreg.attention(*call, **wrong)
    attnreg.attention(*call, **right)
    assert len(checked) == 3, "the refused call made the right one be checked again"


@pytest.mark.parametrize("same", [{"scale": 1}, {"dropout_p": 0}, {"softcap": 1}])
def test_whole_numbers_are_numbers_too(same, checked):
    call = tensors()
    (name,) = same
    for given in (float(same[name]), same[name]):
        attnreg.attention(*call, **{name: given})
    assert len(checked) == 1


def test_a_bias_beside_gradients_is_looked_at_once_and_again_when_it_changes(checked):
    """Which kernel gives right gradients depends on its values: huge finite ones leave only math (sdpa)."""
    query, key, value = (t.requires_grad_() for t in tensors())
    bias, huge = torch.randn(1, 1, 4, 4), torch.full((1, 1, 4, 4), torch.finfo(torch.float32).min)

    def kernel(given):
        output = attnreg.attention(query, key, value, bias=given, backend="sdpa")
        wanted = attnreg.attention(query, key, value, bias=given, backend="reference")
        for got, right in zip(*(torch.autograd.grad(o.square().sum(), (query, key, value)) for o in (output, wanted))):
            torch.testing.assert_close(got, right, atol=1e-4, rtol=1e-4)
        return attnreg.explain(query, key, value, bias=given, backend="sdpa").notes[0]

    assert [kernel(given) for given in (bias, bias, huge, bias)] == ["torch's cpu flash kernel"] * 2 + [
        "torch's math kernel",
        "torch's cpu flash kernel",
    ]
    checked.clear()
    attnreg.attention(query, key, value, bias=bias, backend="sdpa")
    assert not checked, "known, and so remembered"
    bias.copy_(huge)
    assert kernel(bias) == "torch's math kernel"
    with torch.no_grad():
        assert attnreg.explain(query, key, value, bias=huge, backend="sdpa").notes[0] == "torch's cpu flash kernel"


def test_a_bias_without_versions_is_looked_at_every_time(checked):
    query, key, value = (t.requires_grad_() for t in tensors())
    with torch.inference_mode():
        small, huge = (torch.full((1, 1, 4, 4), number, dtype=torch.bfloat16) for number in (0.0, -1e9))
    for bias, kernel in ((small, "torch's cpu flash kernel"), (huge, "torch's math kernel")) * 2:
        output = attnreg.attention(query, key, value, bias=bias, backend="sdpa")
        assert attnreg.last_selection().notes[0] == kernel
        # The kernel's own float32 has no digit left of the scores beside so huge a bias: the slots weigh alike.
        if bias is huge:
            (got,) = torch.autograd.grad(output.sum(), value)
            torch.testing.assert_close(got, torch.ones_like(value), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_a_backend_may_change_the_call_that_it_runs(layout):
    """The one that was checked is as much its own as any later one: nothing of what it writes there is remembered."""
    kernel = reference.reference

    def scaled_first(call):
        call.query, call.scale = call.query * call.scale, 1.0
        return kernel.run(call)

    attnreg.register(Backend("scaled_first", scaled_first, kernel.capabilities, layout=kernel.layout))
    try:
        query, key, value = (torch.randn(2, 4, 4, 8) for _ in range(3))
        wanted = attnreg.attention(query, key, value, causal=True, layout=layout, backend="reference")
        for _ in range(4):
            output = attnreg.attention(query, key, value, causal=True, layout=layout, backend="scaled_first")
            torch.testing.assert_close(output, wanted)
    finally:
        attnreg.unregister("scaled_first")


def exported(function, *given):
    class Model(torch.nn.Module):
        def forward(self, *given):
            return function(*given)

    return torch.export.export(Model(), given).module()


TRACERS = {
    "torch.export": exported,
    "make_fx": lambda function, *given: make_fx(function)(*given),
    "make_fx, fake": lambda function, *given: make_fx(function, tracing_mode="fake")(*given),
    "make_fx, symbolic": lambda function, *given: make_fx(function, tracing_mode="symbolic")(*given),
}


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("name", ["bias", "key_mask"])
def test_tracers_read_no_values(tracer, name, checked):
    """There are none, or they are an example's: gradients beside a bias go to math then, and the form of a mask is not known."""
    call = [t.requires_grad_() for t in tensors()]
    given = {"bias": torch.randn(1, 1, 4, 4), "key_mask": left(3, 4)}[name]

    def attend(query, key, value, given):
        return attnreg.attention(query, key, value, causal=True, **{name: given}, **{"bias": {"backend": "sdpa"}, "key_mask": {}}[name])

    traced = TRACERS[tracer](attend, *call, given)
    for other in (given, torch.full_like(given, -1e9) if name == "bias" else left(4, 2)):
        wanted = attend(*call, other)
        got = traced(*call, other)
        torch.testing.assert_close(got, wanted)
        for one, right in zip(*(torch.autograd.grad(o.sum(), call) for o in (got, wanted))):
            torch.testing.assert_close(one, right)
    assert attnreg.last_selection().spec.key_mask == (None if name == "bias" else "left"), "looked at where there are values"


def test_an_export_is_compared_with_no_earlier_call():
    """A symbolic size that is compared with that of a plan is guarded: the export held for all sizes but those called before."""

    class Model(torch.nn.Module):
        def forward(self, query, bias):
            return attnreg.attention(query, query, query, bias=bias, causal=True)

    def given(size):
        return torch.randn(2, size, 2, 8), torch.randn(1, 1, size, size)

    wanted = [(case, Model()(*case)) for case in map(given, (7, 5))]
    size = torch.export.Dim("size", min=2, max=64)
    traced = torch.export.export(Model(), given(4), dynamic_shapes=({1: size}, {2: size, 3: size})).module()
    for case, output in wanted:
        torch.testing.assert_close(traced(*case), output)


def test_fake_tensors_have_no_values(checked):
    with FakeTensorMode():
        call = [torch.empty(2, 4, 1, 8, requires_grad=True) for _ in range(3)]
        for options in ({"bias": torch.empty(1, 1, 4, 4)}, {"key_mask": torch.ones(2, 4, dtype=torch.bool)}):
            attnreg.attention(*call, causal=True, **options).sum().backward()
            assert call[0].grad.shape == (2, 4, 1, 8)


def test_lengths_are_looked_at_in_every_call(checked):
    call = tensors()
    for given in ([3, 4], torch.tensor([1, 2]), torch.tensor([0, 4], dtype=torch.int32), (4, 4)):
        output = attnreg.attention(*call, causal=True, key_lengths=given)
        before = len(checked)
        torch.testing.assert_close(output, attnreg.attention(*call, causal=True, key_lengths=given, backend="reference"))
        assert len(checked) <= before + 1
    checked.clear()
    attnreg.attention(*call, causal=True, key_lengths=[2, 2])
    assert not checked
    for wrong, error in (([3, 5], ValueError), ([3.0, 4.0], TypeError), ([3], ValueError), (torch.tensor([True, False]), TypeError)):
        with pytest.raises(error, match="key_lengths"):
            attnreg.attention(*call, causal=True, key_lengths=wrong)
    mask = left(3, 4)
    for lengths in ([4, 4], [3, 2]):  # what they mean beside a mask depends on both
        output = attnreg.attention(*call, causal=True, key_mask=mask, key_lengths=lengths)
        torch.testing.assert_close(output, attnreg.attention(*call, causal=True, key_mask=mask, key_lengths=lengths, backend="reference"))
    assert all(c.key_mask is not None for c in checked[-4:])


@pytest.mark.parametrize("place", range(3))
def test_a_nested_tensor_after_a_remembered_call_is_an_error_and_not_the_end(tmp_path, place):
    """The compiler's guard ends the process where it is asked about one: so this runs in another."""
    code = f"""
import torch, attnreg
tensors = [torch.randn(1, 4, 2, 8) for _ in range(3)]
for _ in range(3):
    attnreg.attention(*tensors)
tensors[{place}] = torch.nested.nested_tensor([torch.randn(4, 2, 8)])
try:
    attnreg.attention(*tensors)
except TypeError as error:
    print(error)
"""
    assert "nested tensors are not taken" in fresh.run(tmp_path, code, Path(attnreg.__file__).parents[1])
