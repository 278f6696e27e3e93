"""The append of one launch, interpreted, against torch's operations: the same keys, values and counts, whatever the shapes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from attnreg import PagedCache, StaticCache, attention
from attnreg.cache import append, static
from attnreg.conformance import cache_suite

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
quick = settings(max_examples=30, phases=[Phase.generate], deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module", autouse=True)
def as_on_a_gpu():
    """The lengths are not at hand, and tokens go by the kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static, "lengths_at_hand", lambda device: False)
        patch.setattr(append, "taken", lambda key: True)
        yield


def by_torch(patch):
    patch.setattr(append, "taken", lambda key: False)


def drawn(data, dtype, batch, n, heads, dim):
    """New tokens, (B, n, H, D), that lie in memory in some order, with something between them."""
    order = data.draw(st.permutations(range(4)))
    sizes = [batch, n, heads, dim]
    room = torch.randn([sizes[i] + data.draw(st.integers(0, 1)) for i in order]).to(dtype)
    view = room.permute([order.index(i) for i in range(4)])
    return view[tuple(slice(0, size) for size in sizes)]


def drawn_counts(data, batch, n):
    if not data.draw(st.booleans()):
        return None
    return data.draw(st.lists(st.integers(0, n), min_size=batch, max_size=batch))


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def sizes(data):
    small = st.integers(1, 3)
    return (
        data.draw(small),
        data.draw(small),
        data.draw(st.integers(1, 9)),
        data.draw(st.integers(1, 9)),
        data.draw(st.sampled_from(DTYPES)),
    )


@quick
@given(st.data())
def test_static(data):
    batch, heads, dim, value_dim, dtype = sizes(data)
    capacity = data.draw(st.integers(1, 3))  # soon full, and asked for more
    layers = [StaticCache(1, batch, capacity, heads, dim, value_dim, dtype=dtype)[0] for _ in range(2)]
    for _ in range(7):
        n = min(data.draw(st.sampled_from([1, 1, 2, 3])), capacity)
        new = drawn(data, dtype, batch, n, heads, dim), drawn(data, dtype, batch, n, heads, value_dim)
        counts = drawn_counts(data, batch, n)
        fails = data.draw(st.integers(0, 3)) == 0
        lengths = []
        for layer, other in zip(layers, (False, True)):
            with pytest.MonkeyPatch.context() as patch:
                if other:
                    by_torch(patch)
                step = layer.prepare(*new, counts, None, None)
                version = layer.lengths._version
                layer.write(step)
                assert layer.lengths._version > version  # block masks made of them before must not be taken for theirs
                lengths.append((step.key_lengths.clone(), layer._asked.clone()))
                layer.undo(step) if fails else layer.commit(step)
        assert all(torch.equal(a, b) for a, b in zip(*lengths))
        one, two = layers
        for a, b in zip((one.key, one.value), (two.key, two.value)):
            assert torch.equal(bits(a), bits(b))
        assert torch.equal(one.lengths, two.lengths) and torch.equal(one._asked, two._asked)
        assert bool(one.overflowed) == bool(two.overflowed)


@quick
@given(st.data())
def test_paged(data):
    batch, heads, dim, value_dim, dtype = sizes(data)
    size = data.draw(st.integers(1, 4))
    layers = [PagedCache(1, batch, 80, size, heads, dim, value_dim, dtype=dtype)[0] for _ in range(2)]
    for _ in range(data.draw(st.integers(1, 6))):
        n = data.draw(st.integers(1, 3))
        new = drawn(data, dtype, batch, n, heads, dim), drawn(data, dtype, batch, n, heads, value_dim)
        counts = drawn_counts(data, batch, n)
        fails, cropped = data.draw(st.booleans()), data.draw(st.booleans())
        for layer, other in zip(layers, (False, True)):
            with pytest.MonkeyPatch.context() as patch:
                if other:
                    by_torch(patch)
                step = layer.prepare(*new, counts, None, None)
                layer.write(step)
                if not other:
                    assert step.key_lengths.tolist() == step.new.after and step.settled == (n == 1)
                layer.undo(step) if fails else layer.commit(step)
                if cropped:
                    layer.crop([length // 2 for length in layer._lengths])
        one, two = layers
        assert one._lengths == two._lengths and one._tables == two._tables
        assert one._counted is None or one._counted.tolist() == one._lengths
        for a, b in ((one.pool.keys, two.pool.keys), (one.pool.values, two.pool.values)):
            assert torch.equal(bits(a), bits(b))


def test_floats_of_8_bits():
    layer, token = StaticCache(1, 2, 3, 2, 8, dtype=torch.float8_e4m3fn)[0], torch.randn(2, 1, 2, 8).to(torch.float8_e4m3fn)
    layer.write(layer.prepare(token, token, None, None, None))
    assert torch.equal(bits(layer.key[:, :1]), bits(token)) and layer.lengths.tolist() == [1, 1]


def test_one_launch_a_step_and_no_operation_of_torch_beside_it():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function).split(".")[1])
            return function(*args, **(kwargs or {}))

    token = torch.randn(2, 1, 2, 8)
    for cache in (StaticCache(1, 2, 8, 2, 8), PagedCache(1, 2, 8, 8, 2, 8)):
        layer = cache[0]
        for _ in range(2):  # the first token of a page is entered into tables besides
            names, kernels = [], []
            with Counting(), pytest.MonkeyPatch.context() as patch:
                # The interpreter copies tensors by torch's operations; the launch itself is what is counted.
                kernel = append._kernel()
                patch.setattr(append, "_kernel", lambda kernels=kernels: lambda *a: kernels.append(a))
                step = layer.prepare(token, token, None, None, None)
                layer.write(step)
                layer.commit(step)
            kernel(*kernels[0])
        assert len(kernels) == 1 and set(names) <= {"slice", "alias"}, names


def paged(layers, batch, capacity, key_heads, head_dim, dtype):
    return PagedCache(layers, batch, 60, 4, key_heads, head_dim, dtype=dtype)


@pytest.mark.parametrize("make", [StaticCache, paged])
def test_any_order_of_operations(make, monkeypatch):
    monkeypatch.setattr(append, "_launched", {})
    cache_suite(make, examples=8, steps=8)().test_any_order_of_operations_equals_one_shot()
    assert len(append._launched) > 1


@pytest.mark.parametrize("n", [1, 3])
def test_decode_past_the_capacity(n):
    cache, tokens = StaticCache(1, 2, 7, 2, 8), [torch.randn(2, 12, h, 8) for h in (4, 2, 2)]
    fit = 7 // n * n
    right = attention(*(t[:, :fit] for t in tokens), causal=True)
    for i in range(0, 12, n):
        out = attention(*(t[:, i : i + n] for t in tokens), cache=cache[0], causal=True)
        if i < fit:
            torch.testing.assert_close(out, right[:, i : i + n], rtol=1e-5, atol=1e-6)
    assert bool(cache.overflowed) and cache.lengths.tolist() == [fit, fit]
    assert torch.equal(cache[0].key[:, :fit], tokens[1][:, :fit]) and not cache[0].key[:, fit:].any()


def test_where_the_kernel_fails_torch_does_it(monkeypatch):
    def fails(*arguments):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(append, "_kernel", lambda: fails)
    monkeypatch.setattr(append, "_launched", {})
    layer, token = StaticCache(1, 2, 8, 2, 8)[0], torch.randn(2, 1, 2, 8)
    with pytest.warns(UserWarning, match="Failed to find C compiler"):
        step = layer.prepare(token, token, None, None, None)
        layer.write(step)
    layer.commit(step)
    assert append._kernel() is None and layer.lengths.tolist() == [1, 1] and torch.equal(layer.key[:, :1], token)


COMPILED = """
import triton
from attnreg.cache.append_kernel import _append
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

names = _append.arg_names
for dtype, n, counted, paged in (("bf16", 1, False, False), ("bf16", 1, False, True), ("fp32", 3, True, True), ("u8", 3, True, False)):
    sizes = dict(HEADS=8, DIM=128, VALUE_DIM=80, BLOCK=1024, VALUE_BLOCK=1024, COUNTED=counted, PAGED=paged, key_dim=1)
    sizes |= dict(n=1) if n == 1 else {}
    types = {name: "constexpr" if name in sizes else "i32" for name in names}
    types |= dict.fromkeys(("key", "value", "keys", "values"), "*" + dtype) | dict.fromkeys(("lengths", "asked", "counts", "table"), "*i32")
    source = ASTSource(_append, types, {(names.index(name),): size for name, size in sizes.items()})
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    # The counters are stored by one thread, after a barrier behind which all have read them.
    assert text.index("bar.sync") > text.rindex("ld.global") and text[text.index("bar.sync"):].count("st.global") == (1 if paged else 2)
"""


def test_it_compiles_for_a_gpu():
    environment = {name: given for name, given in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
