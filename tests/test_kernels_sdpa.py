"""What `sdpa` asks of torch: which kernel, and nothing besides it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import attnreg
from attnreg.kernels.sdpa import widened

FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Recorder(TorchDispatchMode):
    """Every operator that runs inside, with its arguments, and the largest tensor that is not a view or the output."""

    def __init__(self):
        super().__init__()
        self.calls, self.largest = [], 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.calls.append((operator, args, kwargs or {}))
        if isinstance(result, torch.Tensor) and not any(a.alias_info for a in operator._schema.returns):
            self.largest = max(self.largest, result.numel())
        return result

    def work(self):
        return [call for call in self.calls if not any(a.alias_info for a in call[0]._schema.returns)]


def tensors(queries=64, keys=64, heads=8, key_heads=2, dim=16, batch=2):
    return torch.randn(batch, queries, heads, dim), torch.randn(batch, keys, key_heads, dim), torch.randn(batch, keys, key_heads, dim)


def record(*args, **options):
    attnreg.attention(*args, **options, backend="sdpa")
    with Recorder() as recorder:
        attnreg.attention(*args, **options, backend="sdpa")
    return recorder


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_plain_causal_grouped_call_is_the_fused_kernel_alone(layout):
    query, key, value = tensors()
    if layout == "bhsd":
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    (operator, args, kwargs), *others = record(query, key, value, causal=True, layout=layout).work()
    assert operator is FUSED and not others
    assert args[1].shape[1] == 2 and args[4] is True and kwargs.get("attn_mask") is None


@pytest.mark.parametrize("options", [{"key_mask": "right"}, {"key_mask": "left"}, {"key_lengths": [40, 64]}, {"key_starts": [10, 0]}])
@pytest.mark.parametrize("causal", [False, True])
def test_padding_costs_no_square_mask(options, causal):
    queries = 64 if "key_lengths" not in options or not causal else 1  # lengths move the diagonal of several queries
    query, key, value = tensors(queries, 64)
    options = dict(options)
    if "key_mask" in options:
        lengths, slot = torch.tensor([[40], [64]]), torch.arange(64)[None]
        options["key_mask"] = slot < lengths if options["key_mask"] == "right" else slot >= 64 - lengths
    recorder = record(query, key, value, causal=causal, **options)
    assert recorder.largest <= max(key.numel(), query.numel())
    masks = [kwargs["attn_mask"] for operator, _, kwargs in recorder.calls if operator is FUSED]
    assert [tuple(mask.shape) for mask in masks] == [(2, 1, 1, 64)]


@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 5), (1, 9)])
def test_kernel_causality_is_never_used_for_unequal_lengths(queries, keys):
    calls = [call for call in record(*tensors(queries, keys), causal=True).calls if call[0] is FUSED]
    assert len(calls) == 1 and not any(argument is True for argument in calls[0][1])


def test_process_wide_switches_change_nothing():
    query, key, value = tensors()
    with sdpa_kernel(SDPBackend.MATH):
        assert [call[0] for call in record(query, key, value, causal=True).work()] == [FUSED]


def test_dropout_runs_in_the_math_kernel_and_says_so():
    query, key, value = tensors()
    selection = attnreg.explain(query, key, value, dropout_p=0.1, backend="sdpa")
    assert selection.notes[0] == "torch's math kernel"
    assert any("grouped_heads" in text for text in selection.emulations)


def test_the_kernel_on_cuda_is_known_without_one():
    query, key, value = (t.to(torch.bfloat16) for t in tensors())
    spec = attnreg.explain(query, key, value, causal=True).spec._replace(device="cuda", capability=(9, 0))
    plain = attnreg.explain_spec(spec, "sdpa")
    masked = attnreg.explain_spec(spec._replace(key_mask="any"), "sdpa")
    assert plain.notes[0] == "torch's flash kernel" and not plain.emulations
    assert masked.notes[0] == "torch's efficient kernel" and "grouped_heads: repeats key and value heads" in masked.emulations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("fill", [-1e20, 1e30, "min"])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_rows_whose_bias_is_a_huge_number(dtype, fill, learned, causal):
    """Only -inf means "not seen": a row of one huge number weighs its slots alike, and so do its gradients."""
    random = torch.Generator().manual_seed(0)
    query, key, value, output_gradient = (torch.randn(2, 9, 2, 8, generator=random).to(dtype) for _ in range(4))
    # By the slot alone, as a padding mask in numbers: the first rows of a causal call see nothing else.
    bias = torch.zeros(2, 1, 1, 9, dtype=dtype)
    bias[0, ..., :4] = bias[1] = torch.finfo(dtype).min if fill == "min" else fill
    found = {}
    for backend in ("sdpa", "reference"):
        leaves = [t.clone().requires_grad_() for t in (query, key, value)] + [bias.clone().requires_grad_(learned)]
        output = attnreg.attention(*leaves[:3], bias=leaves[3], causal=causal, backend=backend)
        wanted = leaves if learned else leaves[:3]
        found[backend] = [output.detach(), *torch.autograd.grad(output, wanted, output_gradient)]
    near = {torch.float32: 2e-6, torch.bfloat16: 0.1, torch.float64: 1e-12}[dtype]
    for got, expected in zip(found["sdpa"], found["reference"]):
        torch.testing.assert_close(got, expected, rtol=near, atol=near)


def test_widened_head_dims_lie_densely():
    """`pad` keeps the order of a tensor that looks like an image with its channels last; kernels read along a last stride of 1."""
    tensor = torch.randn(1, 3, 2, 9).permute(0, 3, 1, 2)
    assert torch.nn.functional.pad(tensor, (0, 6)).stride(-1) != 1, "the case this is about"
    wide = widened(tensor, 8)
    assert wide.stride(-1) == 1
    assert torch.equal(wide[..., :2], tensor) and not wide[..., 2:].any()
    assert widened(tensor, 2) is tensor
    # A dimension of size 1 that lies between no two elements gets a stride like all others: the card's bulk copies want multiples of 16 bytes.
    step = torch.randn(2, 3, 12, 1).permute(0, 3, 1, 2)
    assert torch.nn.functional.pad(step, (0, 4)).stride(1) == 1, "the case this is about"
    assert widened(step, 16).stride() == (48, 48, 16, 1)


def test_a_bias_too_large_for_the_dtype_of_the_kernel_keeps_its_gradient():
    random = torch.Generator().manual_seed(0)
    query, key, value, output_gradient = (torch.randn(2, 5, 2, 8, generator=random).to(torch.bfloat16) for _ in range(4))
    bias = torch.full((1, 1, 1, 5), torch.finfo(torch.float32).min)
    bias[..., 3] = float("-inf")
    found = {}
    for backend in ("sdpa", "reference"):
        leaf = bias.clone().requires_grad_()
        attnreg.attention(query, key, value, bias=leaf, backend=backend).backward(output_gradient)
        found[backend] = leaf.grad
    assert found["reference"].abs().max() > 0.1
    torch.testing.assert_close(found["sdpa"], found["reference"], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("learned", [False, True])
def test_finite_terms_of_half_precision_never_add_up_to_hidden(learned):
    """-65504 and -200 are two float16 numbers whose sum is not: only -inf means "not seen"."""
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1 if n == 0 else 6, 2, 8, generator=random).half() for n in range(3))
    query.requires_grad_(learned)
    bias = torch.full((1, 1, 1, 6), torch.finfo(torch.float16).min, dtype=torch.float16)
    bias[..., 4:] = float("-inf")
    given = {"bias": bias, "alibi_slopes": torch.tensor([100.0, 0.0])}
    found = attnreg.attention(query, key, value, **given, backend="sdpa")
    expected = attnreg.attention(query, key, value, **given, backend="reference")
    assert expected.abs().amax(-1).min() > 0.1
    torch.testing.assert_close(found[:, :, 1], expected[:, :, 1], rtol=0.01, atol=0.01)
    assert found[:, :, 0].abs().max() > 0.01


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [(0, None), (5, None), (5, 3), (200, None), (None, 2)])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_lone_query_is_given_what_its_window_shows(causal, window, gradients):
    """By views of the keys, where a mask would be made for all of them."""
    query, key, value = (t.requires_grad_(gradients) for t in tensors(queries=1, keys=100))
    options = {"causal": causal, "window": window}
    expected = attnreg.attention(query, key, value, **options, backend="reference")
    calls = record(query, key, value, **options).work()
    assert [call[0] for call in calls] == [FUSED]
    assert not attnreg.last_selection().emulations
    output = attnreg.attention(query, key, value, **options, backend="sdpa")
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    if gradients:
        got, right = (torch.autograd.grad(out.square().sum(), (query, key, value)) for out in (output, expected))
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


SIZE = 160
ASKED = (
    [{}, {"causal": True}],
    [
        {},
        {"key_mask": attnreg.Padding.from_lengths([100, SIZE], SIZE)},
        {"key_lengths": torch.tensor([100, SIZE])},
        {"key_starts": torch.tensor([3, 0])},
        {"query_lengths": torch.tensor([80, 140])},
    ],
    [{}, {"return_lse": True}],
    [
        {},
        {"bias": torch.randn(1, 1, 1, SIZE)},
        {"bias": torch.randn(1, 1, 1, SIZE, requires_grad=True)},
        {"mask": torch.rand(1, 1, 1, SIZE) > 0.3},
        {"alibi_slopes": torch.ones(2)},
        {"sinks": torch.ones(2)},
    ],
    [{}, {"window": (5, None)}],
)


@pytest.mark.parametrize("queries", [SIZE, 150])
def test_memory_that_grows_with_the_square_of_the_length_is_announced(queries):
    query, key, value = (torch.randn(2, length, heads, 8) for length, heads in ((queries, 2), (SIZE, 1), (SIZE, 1)))
    announced = 0
    for parts in itertools.product(*ASKED):
        options = {name: value for part in parts for name, value in part.items()}
        selection = attnreg.explain(query, key, value, **options, backend="sdpa")
        if selection.chosen is None:
            continue
        if record(query, key, value, **options).largest >= queries * SIZE:
            announced += 1
            assert "Sq" in " ".join((*selection.emulations, *selection.notes)), (options, str(selection))
    assert announced > 50
