"""On a CUDA device: the conformance suite of every backend that is here, the public faults in half precision, and the claimed modes.

Skipped without a GPU. `ATTNREG_GPU_EXAMPLES` bounds the time: how many calls each conformance check draws (default 60).
"""

from __future__ import annotations

import gc
import math
import os
import types

import oracle
import pytest
import torch
from test_public_faults import CASES

import attnreg
from attnreg import Feature, Padding
from attnreg.select import NoBackendError

HALF = (torch.bfloat16, torch.float16)
EXAMPLES = int(os.environ.get("ATTNREG_GPU_EXAMPLES", "60"))
here = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not here, reason="needs a CUDA device")
NAMES = [name for name, b in attnreg.backends().items() if here and b.reason_missing is None and "cuda" in b.claims.devices] or [
    "none, without a CUDA device"
]


def _suites() -> dict[str, type]:
    """A test class for each backend; made fresh, since Hypothesis refuses to share a test between classes."""
    try:
        from attnreg.conformance import PROFILES, conformance_suite
    except ImportError:
        return {}
    profile = PROFILES["ci"]._replace(examples=EXAMPLES, per_feature=max(EXAMPLES // 6, 1))
    suites = {}
    for name in NAMES if here else ():
        taken = [t for t in HALF if t in attnreg.backends()[name].claims.dtypes]
        suites[f"TestConformance_{name}"] = conformance_suite(name, devices=("cuda",), dtypes=taken, profile=profile)
    return suites


globals().update(_suites())


def halved(case, dtype):
    """A public fault with query, key and value in half precision; what is added to the scores keeps its own."""
    call = CASES[case]
    return {name: value.to(dtype) if name in ("query", "key", "value") else value for name, value in call.items()}


def on_gpu(value):
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, tuple) and all(isinstance(part, torch.Tensor) for part in value):
        moved = {id(part): part.cuda() for part in value}
        return tuple(moved[id(part)] for part in value)
    return value


def make(queries=64, keys=64, heads=8, key_heads=2, dim=64, batch=2, dtype=torch.bfloat16, **options):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((batch, queries, heads, dim), (batch, keys, key_heads, dim), (batch, keys, key_heads, dim))
    query, key, value = (torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes)
    return {"query": query, "key": key, "value": value, **options}


def must_be_able(call, name, **features):
    selection = attnreg.explain(**call, **features, backend=name)
    if selection.chosen is None:
        pytest.skip("; ".join(map(str, selection.rejected[name])))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_public_faults(case, backend, dtype):
    call = halved(case, dtype)
    on_card = {name: on_gpu(value) for name, value in call.items()}
    must_be_able(on_card, backend)
    output = attnreg.attention(**on_card, backend=backend)
    clean = {**call, **{n: torch.nan_to_num(call[n], posinf=0.0) for n in ("key", "value")}}
    right, _ = oracle.attend(**{n: v for n, v in clean.items() if n != "finite_padding"})
    limit = 8 * torch.finfo(dtype).eps * max(1.0, right.abs().max().item())
    torch.testing.assert_close(output.cpu().double(), right, atol=limit, rtol=limit)


# ---------------------------------------------------------------------- modes

CALLS = {
    "prefill": {"causal": True},
    "decode": {"queries": 1, "keys": 300, "causal": True},
    "chunk": {"queries": 40, "keys": 100, "causal": True},
    "window": {"causal": True, "window": (16, 0)},
    "lengths": {"queries": 1, "keys": 300, "causal": True, "key_lengths": "device"},
    "segments": {"batch": 1, "queries": 96, "keys": 96, "causal": True, "cu_seqlens": "device", "max_seqlens": (64, 64)},
}


def called(name):
    call = make(**CALLS[name])
    if call.get("key_lengths") == "device":
        call["key_lengths"] = torch.tensor([300, 17], device="cuda")
    if call.get("cu_seqlens") == "device":
        cu = torch.tensor([0, 20, 84, 90], dtype=torch.int32, device="cuda")
        call["cu_seqlens"] = (cu, cu)
    return call


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("name", CALLS)
def test_compiled_whole(name, backend):
    call = called(name)
    if Feature.COMPILE not in attnreg.backends()[backend].claims.features:
        pytest.skip("does not claim compile")
    must_be_able(call, backend)
    torch._dynamo.reset()
    compiled = torch.compile(lambda **options: attnreg.attention(**options, backend=backend), fullgraph=True)
    right = attnreg.attention(**call, backend="reference")
    try:
        output = compiled(**call)
    except Exception as error:
        if isinstance(error, NoBackendError) or "NoBackendError" in str(error):
            pytest.skip("refuses this call while compiling")
        raise
    torch.testing.assert_close(output, right, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("backend", NAMES)
def test_compiled_whole_with_masks_that_are_computed_there(backend, learned):
    call = make(queries=100, keys=100, causal=True)
    table = torch.randn(17, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).requires_grad_(learned)
    ones = (torch.arange(200, device="cuda") % 3 > 0).view(2, 100)
    distance = torch.arange(100, device="cuda")[:, None] - torch.arange(100, device="cuda")

    def layer(query, key, value, backend, *, bias_alone):
        bias = table[distance.clamp(-8, 8) + 8].permute(2, 0, 1)[None]
        masks = {} if bias_alone else {"key_mask": ones.cumsum(1) > 3, "mask": (ones.cumsum(1) < 60)[:, None, None]}
        return attnreg.attention(query, key, value, causal=True, bias=bias, backend=backend, **masks)

    if Feature.COMPILE not in attnreg.backends()[backend].claims.features:
        pytest.skip("does not claim compile")
    query, key, value = call["query"], call["key"], call["value"]
    for bias_alone in (False, True):
        right = layer(query, key, value, "reference", bias_alone=bias_alone)
        torch._dynamo.reset()
        try:
            output = torch.compile(layer, fullgraph=True)(query, key, value, backend, bias_alone=bias_alone)
        except Exception as error:
            if isinstance(error, NoBackendError) or "NoBackendError" in str(error):
                pytest.skip("refuses this call while compiling")
            raise
        torch.testing.assert_close(output, right, atol=2e-2, rtol=2e-2)
        if learned:
            ours, theirs = (torch.autograd.grad(result.float().square().sum(), table)[0] for result in (output, right))
            torch.testing.assert_close(ours, theirs, atol=0.03 * theirs.abs().max().item(), rtol=0.0)


def capture(graph):
    gc.collect()  # a graph of an earlier test that is freed during a capture would end it
    return torch.cuda.graph(graph)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("name", CALLS)
def test_captured_and_replayed(name, backend):
    call = called(name)
    if Feature.CAPTURE not in attnreg.backends()[backend].claims.features:
        pytest.skip("does not claim capture")
    must_be_able(call, backend)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            attnreg.attention(**call, backend=backend)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with capture(graph):
            output = attnreg.attention(**call, backend=backend)
    except NoBackendError:
        pytest.skip("refuses this call while capturing")
    for tensor in ("query", "key", "value"):
        call[tensor].copy_(torch.randn_like(call[tensor]))
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(output, attnreg.attention(**call, backend="reference"), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_deterministic_runs_are_equal_to_the_bit(backward, backend):
    call = make(512, 512, causal=True)
    if backward:
        call.update({n: call[n].requires_grad_() for n in ("query", "key", "value")})
    must_be_able(call, backend, deterministic=True)

    def once():
        output = attnreg.attention(**call, backend=backend, deterministic=True)
        return (
            (output, *torch.autograd.grad(output.square().sum(), [call[n] for n in ("query", "key", "value")])) if backward else (output,)
        )

    first = once()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, once()))


@pytest.mark.parametrize("backend", NAMES)
def test_a_batch_past_the_limit_of_one_launch(backend):
    call = make(2, 2, heads=2, key_heads=1, dim=8, batch=65537)
    if backend == "reference":
        pytest.skip("computes the right answer itself")
    must_be_able(call, backend)
    output = attnreg.attention(**call, backend=backend)
    torch.testing.assert_close(output, attnreg.attention(**call, backend="reference"), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("offset", [1, 4])
def test_tensors_that_start_off_16_bytes(offset, backend):
    call = make()
    for name in ("query", "key", "value"):
        room = call[name].new_zeros(call[name].numel() + offset)
        room[offset:] = call[name].flatten()
        call[name] = room[offset:].view(call[name].shape)
    must_be_able(call, backend)
    output = attnreg.attention(**call, causal=True, backend=backend)
    torch.testing.assert_close(output, attnreg.attention(**call, causal=True, backend="reference"), atol=2e-2, rtol=2e-2)


def padded(side, backend, host=True):
    """A padded training call with NaN wherever padding stands, its leaf tensors, and an upstream gradient likewise."""
    lengths = [150, 300, 0, 33]
    given = lengths if host else torch.tensor(lengths, dtype=torch.int32, device="cuda")
    padding = Padding.from_lengths(given, 300, side=side, device="cuda")
    call = make(300, 300, batch=4, causal=True, query_mask=padding, key_mask=padding)
    hidden = ~padding.mask[..., None, None]
    leaves = [call.pop(n).masked_fill(hidden, math.nan).requires_grad_() for n in ("query", "key", "value")]
    must_be_able({**call, **dict(zip(("query", "key", "value"), leaves))}, backend)
    upstream = torch.randn(leaves[0].shape, device="cuda").bfloat16().masked_fill(hidden, math.nan)
    return call, leaves, upstream, hidden


def trained(call, leaves, upstream, backend):
    output = attnreg.attention(*leaves, **call, backend=backend)
    return (output, *torch.autograd.grad(output, leaves, upstream))


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("host", [True, False], ids=["known", "on the device"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_training_with_nan_in_padding(side, host, backend):
    call, leaves, upstream, hidden = padded(side, backend, host)
    ours = trained(call, leaves, upstream, backend)
    finite = [t.detach().masked_fill(hidden, 3.0).requires_grad_() for t in leaves]
    expected = trained(call, finite, upstream.masked_fill(hidden, 0.0), "reference")
    again = trained(call, finite, upstream.masked_fill(hidden, 3.0), backend)
    for got, right, other in zip(ours, expected, again):
        torch.testing.assert_close(got, right, atol=3e-2, rtol=3e-2)
        assert (got.masked_select(hidden) == 0).all()
        if got is ours[0]:
            assert torch.equal(got, other), "padding shows"


@pytest.mark.parametrize("backend", ["flash2", "varlen"])
@pytest.mark.parametrize("mode", ["captured", "compiled"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_training_in_a_graph(side, mode, backend):
    if backend not in NAMES:
        pytest.skip("not here")
    call, leaves, upstream, _ = padded(side, backend)
    if mode == "compiled":
        torch._dynamo.reset()
        compiled = torch.compile(lambda *t: attnreg.attention(*t, **call, backend=backend), fullgraph=True)
        output = compiled(*leaves)
        results = (output, *torch.autograd.grad(output, leaves, upstream))
    else:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            trained(call, leaves, upstream, backend)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with capture(graph):
            results = trained(call, leaves, upstream, backend)
        for leaf in leaves:
            leaf.detach().mul_(0.5)
        graph.replay()
    torch.cuda.synchronize()
    for got, right in zip(results, trained(call, leaves, upstream.nan_to_num(), "reference")):
        torch.testing.assert_close(got, right, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("backend", NAMES)
def test_gradients_past_the_last_segment_are_zero(backend):
    call = called("segments")
    del call["max_seqlens"]
    for longest in ({}, {"max_seqlens": (64, 64)}):
        tensors = {n: call[n].detach().requires_grad_() for n in ("query", "key", "value")}
        must_be_able({**call, **tensors, **longest}, backend)
        output = attnreg.attention(**{**call, **tensors, **longest}, backend=backend)
        output.float().square().sum().backward()
        for tensor in (output, *(t.grad for t in tensors.values())):
            assert tensor.isfinite().all() and (tensor[:, 90:] == 0).all()


# ---------------------------------------------------------------------- caches


def tokens(batch=3, size=40, heads=8, key_heads=2, dim=64, value_dim=None, dtype=torch.bfloat16):
    sizes = ((heads, dim), (key_heads, dim), (key_heads, value_dim or dim))
    return [torch.randn(batch, size, *each, device="cuda").to(dtype) for each in sizes]


@pytest.fixture
def by_kernel():
    """The append's kernel, fresh: what ran by it is in `_launched`."""
    from attnreg.cache import append

    if append._kernel() is None:
        pytest.skip("no Triton")
    append._launched.clear()
    return append


@pytest.mark.parametrize(
    ("dim", "value_dim", "dtype"), [(64, 64, torch.bfloat16), (128, 128, torch.float16), (80, 48, torch.float32), (9, 9, torch.float64)]
)
@pytest.mark.parametrize("kind", ["static", "paged"])
def test_append_of_one_launch_equals_torch(kind, dim, value_dim, dtype, by_kernel, monkeypatch):
    sizes = {"key_heads": 3, "head_dim": dim, "value_dim": value_dim, "dtype": dtype, "device": "cuda"}
    make = {
        "static": lambda: attnreg.StaticCache(1, 5, 20, **sizes)[0],
        "paged": lambda: attnreg.PagedCache(1, 5, 60, 4, **sizes)[0],
    }[kind]
    layers, taken = [make(), make()], by_kernel.taken
    # Laid out as (B, H, n, D), in the middle of something larger, and 16 bytes off.
    rooms = [torch.randn(5, 3, 40, 2 * d, device="cuda").to(dtype) for d in (dim, value_dim)]
    i = 0
    for n, counts in ((1, None), (3, None), (4, [4, 0, 2, 1, 3]), (1, [1, 0, 1, 1, 0]), (1, None), (16, None), (1, None), (1, None)):
        new = [room[:, :, i : i + n, d : 2 * d].transpose(1, 2) for room, d in zip(rooms, (dim, value_dim))]
        i += n
        for layer, kernel in zip(layers, (True, False)):
            monkeypatch.setattr(by_kernel, "taken", taken if kernel else lambda key: False)
            step = layer.prepare(*new, counts, None, None)
            layer.write(step)
            lengths = step.key_lengths.clone()
            layer.commit(step)
            if kernel:
                right = lengths
        assert torch.equal(right, lengths) and torch.equal(layers[0].lengths, layers[1].lengths)
    assert len(by_kernel._launched) >= 5
    if kind == "static":
        assert bool(layers[0].overflowed) and bool(layers[1].overflowed)
        pairs = [(getattr(layers[0], name), getattr(layers[1], name)) for name in ("key", "value", "_asked")]
    else:
        pairs = [(getattr(layers[0].pool, name), getattr(layers[1].pool, name)) for name in ("keys", "values")]
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("backend", ["auto", *(name for name in NAMES if name != "reference")])
@pytest.mark.parametrize("n", [1, 2])
def test_a_captured_static_step_replayed_past_the_capacity(n, backend, by_kernel):
    whole, capacity = tokens(), 24
    cache = attnreg.StaticCache(1, 3, capacity, 2, 64, dtype=torch.bfloat16, device="cuda")
    inputs = [t[:, :n].clone() for t in whole]
    options = {"cache": cache[0], "causal": True, "backend": backend}
    must_be_able(dict(zip(("query", "key", "value"), inputs)) | {"cache": cache[0], "causal": True}, backend)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            attnreg.attention(*inputs, **options)
    torch.cuda.current_stream().wait_stream(side)
    assert by_kernel._launched
    cache.reset()
    graph = torch.cuda.CUDAGraph()
    try:
        with capture(graph):
            output = attnreg.attention(*inputs, **options)
    except NoBackendError:
        pytest.skip("refuses this call while capturing")
    cache.reset()
    right = attnreg.attention(*(t[:, :capacity] for t in whole), causal=True, backend="reference")
    for i in range(0, whole[0].shape[1], n):
        for given, t in zip(inputs, whole):
            given.copy_(t[:, i : i + n])
        assert bool(cache.overflowed) == (i > capacity)
        graph.replay()
        if i < capacity:
            torch.testing.assert_close(output, right[:, i : i + n], atol=2e-2, rtol=2e-2)
    assert cache.lengths.tolist() == [capacity] * 3 and bool(cache.overflowed)
    for room, t in zip(cache[0]._rooms, whole[1:]):
        assert torch.equal(room[:, :capacity], t[:, :capacity]) and not room[:, capacity:].any()


@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize("backend", ["auto", *(name for name in NAMES if name != "reference")])
def test_paged_decode_equals_one_shot(backend, page_size, by_kernel):
    if backend == "flex" and page_size == 16:
        pytest.skip("compiles for every page")
    whole = tokens(size=300)
    cache = attnreg.PagedCache(1, 3, 3 * (512 // page_size), page_size, 2, 64, dtype=torch.bfloat16, device="cuda")
    options = {"cache": cache[0], "causal": True, "backend": backend}
    must_be_able(dict(zip(("query", "key", "value"), (t[:, :1] for t in whole))) | {"cache": cache[0], "causal": True}, backend)
    attnreg.attention(*(t[:, :250] for t in whole), cache=cache[0], causal=True)
    right = attnreg.attention(*whole, causal=True, backend="reference")
    for i in range(250, 300):
        output = attnreg.attention(*(t[:, i : i + 1] for t in whole), **options)
        torch.testing.assert_close(output, right[:, i : i + 1], atol=2e-2, rtol=2e-2)
    assert by_kernel._launched and cache.lengths.tolist() == [300] * 3
    # Rows that rest, and rows that are cut and go on.
    cache.crop([280, 300, 290])
    step = [t[:, 290:291].clone() for t in whole]
    output = attnreg.attention(*step, **options, query_lengths=[0, 0, 1]) if backend == "auto" else None
    if output is not None:
        torch.testing.assert_close(output[2:], right[2:, 290:291], atol=2e-2, rtol=2e-2)
        assert cache.lengths.tolist() == [280, 300, 291]


def test_a_paged_cache_refuses_to_be_captured():
    cache = attnreg.PagedCache(1, 3, 12, 256, 2, 64, dtype=torch.bfloat16, device="cuda")
    step = [t[:, :1] for t in tokens()]
    attnreg.attention(*step, cache=cache[0], causal=True)
    with pytest.raises(RuntimeError, match="use StaticCache"), capture(torch.cuda.CUDAGraph()):
        attnreg.attention(*step, cache=cache[0], causal=True)
    assert cache.lengths.tolist() == [1, 1, 1]


def test_masks_made_of_lengths_are_made_anew_after_an_append():
    if not attnreg.backends()["flex"].reason_missing:
        whole = tokens()
        cache = attnreg.StaticCache(1, 3, 40, 2, 64, dtype=torch.bfloat16, device="cuda")
        right = attnreg.attention(*whole, causal=True, backend="reference")
        for i in range(4):
            output = attnreg.attention(*(t[:, i : i + 1] for t in whole), cache=cache[0], causal=True, backend="flex")
            torch.testing.assert_close(output, right[:, i : i + 1], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("fill", [-1e20, "min"])
@pytest.mark.parametrize("backend", NAMES)
def test_gradients_of_rows_whose_bias_is_a_huge_number(backend, fill):
    """A backward that takes weights from the lse finds log(n) wiped out of it there: gradients n times too large."""
    call = make(queries=32, keys=32, heads=4, key_heads=4)
    bias = torch.zeros(2, 1, 1, 32, device="cuda", dtype=torch.bfloat16)
    bias[0, ..., :9] = bias[1] = torch.finfo(torch.bfloat16).min if fill == "min" else fill
    found = {}
    for name in (backend, "reference"):
        leaves = {n: call[n].clone().requires_grad_() for n in ("query", "key", "value")}
        must_be_able({**leaves, "bias": bias, "causal": True}, name)
        output = attnreg.attention(**leaves, bias=bias, causal=True, backend=name)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
        found[name] = torch.autograd.grad(output, list(leaves.values()), weights)
    for what, got, expected in zip(("query", "key", "value"), found[backend], found["reference"]):
        error, largest = float((got - expected).abs().max()), float(expected.abs().max())
        assert error <= 0.1 * largest, f"gradient of {what}: off by {error:.3g}, largest {largest:.3g}"


# ---------------------------------------------------------------------- arrays of another framework


class Array:
    """An array on the card of a framework that knows DLPack and nothing else."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __array_namespace__(self):
        return types.SimpleNamespace(__name__="strange", from_dlpack=lambda given: Array(torch.from_dlpack(given)))

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def test_arrays_on_the_card():
    call = make(causal=True, key_lengths=torch.tensor([64, 17], device="cuda"))
    output, lse = attnreg.attention(**{n: Array(t) if isinstance(t, torch.Tensor) else t for n, t in call.items()}, return_lse=True)
    right = attnreg.attention(**call, return_lse=True)
    assert isinstance(output, Array) and isinstance(lse, Array) and output.tensor.is_cuda
    torch.testing.assert_close((output.tensor, lse.tensor), right)
