"""The faults of the systems that attnreg grew out of, and other promises, by name."""

import functools
import gc
import sys
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attnreg
from attnreg import DynamicCache, PagedCache, SlidingCache, StaticCache, attention
from attnreg.cache import append, from_transformers, static, to_transformers
from attnreg.call import AttentionCall
from attnreg.conformance import cache_suite


def tensors(batch=2, size=9, heads=4, key_heads=2, dim=8, seed=0):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, size, h, dim, generator=random) for h in (heads, key_heads, key_heads)]


def caches(batch=2, capacity=16, key_heads=2, dim=8):
    return {
        "dynamic": DynamicCache(1),
        "static": StaticCache(1, batch, capacity, key_heads, dim),
        "paged": PagedCache(1, batch, 20, 4, key_heads, dim),
        "sliding": SlidingCache(1, 16),
    }


ALL = pytest.mark.parametrize("kind", ["dynamic", "static", "paged", "sliding"])


def chunked(cache, query, key, value, sizes, key_mask=None, **options):
    out, i = [], 0
    options.setdefault("window", (16, None))
    for n in sizes:
        mask = None
        if key_mask is not None:
            mask = torch.zeros(query.shape[0], cache.slots(n), dtype=torch.bool)
            mask[:, : i + n] = key_mask[:, : i + n]
        out.append(
            attention(query[:, i : i + n], key[:, i : i + n], value[:, i : i + n], cache=cache[0], causal=True, key_mask=mask, **options)
        )
        i += n
    return torch.cat(out, 1)


@ALL
@pytest.mark.parametrize("change", [None, "crop", "reorder", "reset", "fork", "restore"])
@pytest.mark.parametrize("counts", [None, [3, 1]])
def test_a_cache_that_was_begun_under_inference_mode_goes_on_outside(kind, change, counts):
    """And the other way round: its storage, and what it keeps on the device beside it, may be written in both."""
    new, modes = tensors(size=3), (torch.inference_mode, torch.no_grad)
    for first, second in (modes, modes[::-1]):
        layers = [caches()[kind][0], caches()["dynamic"][0]]
        for mode, size in ((first, 3), (second, 1), (first, 3), (second, 3), (first, 1), (second, 1)):
            each = counts if size == 3 else None
            given = [tensor[:, :size] for tensor in new]
            with mode():
                outputs = [attention(*given, cache=layer, causal=True, window=(16, None), query_lengths=each) for layer in layers]
                if change == "fork":
                    layers = [layer.fork() for layer in layers]
                elif change:
                    for layer in layers:
                        arguments = {
                            "crop": [layer.lengths - 1],
                            "reorder": [[1, 0]],
                            "reset": [[1]],
                            "restore": [t.clone() for t in layer.contents()],
                        }[change]
                        getattr(layer, change)(*arguments)
            torch.testing.assert_close(*outputs)


@ALL
@pytest.mark.parametrize("sizes", [(3, 1), (1, 1, 1, 1)])
def test_row_1_cached_equals_one_shot_and_the_callers_tensors_are_unchanged(kind, sizes):
    query, key, value = tensors(size=4, heads=2)
    before = key.clone(), value.clone()
    cache = caches()[kind]
    torch.testing.assert_close(chunked(cache, query, key, value, sizes), attention(query, key, value, causal=True), rtol=0, atol=1e-6)
    assert cache.lengths.tolist() == [4, 4]
    assert torch.equal(key, before[0]) and torch.equal(value, before[1])


def test_row_2_an_empty_past_starts_a_cache():
    cache = DynamicCache.from_legacy(())
    query, key, value = tensors()
    torch.testing.assert_close(
        attention(query, key, value, cache=cache.layer(0), causal=True), attention(query, key, value, causal=True)
    )  # fmt: skip


@ALL
def test_rows_3_and_4_left_padding_gives_zeros_and_leaks_nothing(kind):
    query, key, value = tensors(size=4)
    mask = torch.tensor([[False, False, True, True]] * 2)
    key[:, :2], value[:, :2] = float("nan"), float("inf")  # row 5
    out = chunked(caches()[kind], query, key, value, (3, 1), key_mask=mask)
    assert (out[:, :2] == 0).all()
    torch.testing.assert_close(out[:, 2:], attention(query[:, 2:], key[:, 2:], value[:, 2:], causal=True))


@ALL
def test_row_6_positions(kind):
    cache = caches(batch=1)[kind]
    mask = torch.zeros(1, cache.slots(4), dtype=torch.bool)
    mask[:, 1:4] = True
    assert cache.positions(4, mask).tolist() == [[0, 0, 1, 2]]
    query, key, value = tensors(batch=1, size=4)
    chunked(cache, query, key, value, (4,), key_mask=mask[:, :4])
    mask = torch.ones(1, cache.slots(1), dtype=torch.bool)
    mask[:, 0] = False
    assert cache.positions(1, mask).tolist() == [[3]]


def test_row_6_positions_of_a_sliding_cache_remember_dropped_padding():
    cache, (query, key, value) = SlidingCache(1, 2), tensors(batch=1, size=6)
    mask = torch.tensor([[False, True, True, True, True, True]])
    attention(query, key, value, cache=cache[0], causal=True, window=(2, None), key_mask=mask)
    assert cache.slots(1) == 4
    assert cache.positions(1, torch.ones(1, 4, dtype=torch.bool)).tolist() == [[5]]


def test_row_7_a_query_mask_with_a_past():
    query, key, value = tensors(size=10)
    cache = DynamicCache(1)
    attention(query[:, :6], key[:, :6], value[:, :6], cache=cache[0], causal=True)
    real = torch.tensor([[True, True, False, False]] * 2)
    out = attention(query[:, 6:], key[:, 6:], value[:, 6:], cache=cache[0], causal=True, query_mask=real)
    expected = attention(query[:, 6:], key, value, causal=True, query_mask=real, backend="reference")
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@ALL
@pytest.mark.parametrize("option", [{"window": (2, None)}, {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 1.0])}])
def test_rows_9_10_24_chunks_with_window_and_alibi(kind, option):
    query, key, value = tensors(size=6)
    expected = attention(query, key, value, causal=True, **option)
    torch.testing.assert_close(chunked(caches()[kind], query, key, value, (2, 3, 1), **option), expected, rtol=1e-5, atol=1e-6)


@ALL
def test_row_14_four_chunks_of_four_with_padding(kind):
    query, key, value = tensors(size=16)
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[0, -2:] = False
    expected = attention(query, key, value, causal=True, key_mask=mask)
    torch.testing.assert_close(chunked(caches()[kind], query, key, value, (4,) * 4, key_mask=mask), expected, rtol=1e-5, atol=1e-6)


def test_row_16_a_mask_covers_past_and_new():
    query, key, value = tensors(size=5)
    cache = DynamicCache(1)
    mask = torch.tensor([[False, True, True, True, True]] * 2)
    chunked(cache, query, key, value, (4,), key_mask=mask)
    with pytest.raises(ValueError, match=r"\(2, 5\).*\(2, 1\)"):
        attention(query[:, 4:], key[:, 4:], value[:, 4:], cache=cache[0], causal=True, key_mask=mask[:, 4:])
    out = attention(query[:, 4:], key[:, 4:], value[:, 4:], cache=cache[0], causal=True, key_mask=mask)
    torch.testing.assert_close(out, attention(query, key, value, causal=True, key_mask=mask)[:, 4:])


@pytest.mark.parametrize(
    ("layout", "turn"),
    [
        ("bshd", lambda k: k),
        ("bhsd", lambda k: k.transpose(1, 2)),
        ("flat", lambda k: k.flatten(2)),
        ("bhds", lambda k: k.permute(0, 2, 3, 1)),
    ],
)
def test_row_17_layouts_are_views(layout, turn):
    query, key, value = tensors()
    given = (turn(key[:, :8]).contiguous(), (turn if layout != "bhds" else lambda v: v.transpose(1, 2))(value[:, :8]).contiguous())
    cache = DynamicCache.from_legacy([given], layout, **({"key_heads": 2} if layout == "flat" else {}))
    assert cache[0].contents()[0].data_ptr() == given[0].data_ptr()
    out = attention(query[:, 8:], key[:, 8:], value[:, 8:], cache=cache[0], causal=True)
    torch.testing.assert_close(out, attention(query, key, value, causal=True)[:, 8:])
    back = cache.to_legacy(layout)[0]
    assert back[0].data_ptr() == cache[0].contents()[0].data_ptr()
    torch.testing.assert_close(back[0][..., :8] if layout == "bhds" else turn(key), given[0] if layout == "bhds" else back[0])


@ALL
def test_row_17_flat_queries_read_without_appending(kind):
    query, key, value = tensors()
    cache = caches()[kind]
    attention(query, key, value, cache=cache[0], causal=True, window=(16, None))
    expected = attention(query, cache=cache[0], causal=True, window=(16, None))
    out = attention(query.flatten(2), cache=cache[0], causal=True, window=(16, None), n_heads=query.shape[2], n_kv_heads=key.shape[2])
    torch.testing.assert_close(out, expected.flatten(2), rtol=0, atol=0)


@ALL
def test_row_19_a_chunk_after_a_past_is_causal(kind):
    query, key, value = tensors(size=8)
    torch.testing.assert_close(
        chunked(caches()[kind], query, key, value, (5, 3)), attention(query, key, value, causal=True), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("kind", ["dynamic", "static", "paged"])
def test_row_26_a_keyless_row_in_the_batch(kind):
    query, key, value = tensors(size=1)
    out = attention(query, key, value, cache=caches()[kind][0], causal=True, query_lengths=[1, 0])
    torch.testing.assert_close(out[0, 0], value[0, 0].repeat_interleave(2, 0))
    assert (out[1] == 0).all()


def test_packed_steps_append_to_rows():
    query, key, value = tensors(batch=1, size=7)
    cu = torch.tensor([0, 3, 5])
    cache = caches()["paged"]
    out = attention(query, key, value, cache=cache[0], causal=True, cu_seqlens=(cu, cu))
    torch.testing.assert_close(out, attention(query, key, value, causal=True, cu_seqlens=(cu, cu)), rtol=1e-5, atol=1e-6)
    assert cache.lengths.tolist() == [3, 2]
    assert "packs the output again" in str(attnreg.explain(query, key, value, cache=cache[0], causal=True, cu_seqlens=(cu, cu)))


def test_gradients_only_through_the_dynamic_cache():
    query, key, value = (t.requires_grad_() for t in tensors(size=4))
    chunked(DynamicCache(1), query, key, value, (3, 1)).sum().backward()
    got = key.grad.clone()
    key.grad = None
    attention(query, key, value, causal=True).sum().backward()
    torch.testing.assert_close(got, key.grad)
    for kind in ("static", "paged", "sliding"):
        with pytest.raises(ValueError, match="use DynamicCache"):
            chunked(caches()[kind], query, key, value, (4,))


@pytest.mark.parametrize("which", ["key", "value", "both"])
@pytest.mark.parametrize("counts", [[4, 4], [4, 1]])
@pytest.mark.parametrize("change", ["append", "crop", "crop twice", "crop and append", "reset", "fork and read"])
def test_what_happens_without_gradients_leaves_earlier_graphs_alone(which, counts, change):
    query, key, value = tensors(size=4)
    given = [t.requires_grad_(which in (name, "both")) for name, t in (("key", key), ("value", value))]
    before = [t.detach().clone() for t in given]
    cache = DynamicCache(1)
    out = attention(query, *given, cache=cache[0], causal=True, query_lengths=counts)
    if change == "fork and read":
        cache = cache.fork()
        out = out + attention(query, cache=cache[0], causal=True)
    expected = torch.autograd.grad(out.square().sum(), [t for t in given if t.requires_grad], retain_graph=True)
    with torch.no_grad():
        if change == "reset":
            cache.reset([0])
            cache.reset([1])
        if "crop" in change:
            cache.crop([3, 1] if counts == [4, 1] else 3)
        if change == "crop twice":
            cache.crop(1)
        if change not in ("reset", "crop twice"):
            token = [t[:, :1] + 5 for t in (query, key, value)]
            attention(*token, cache=cache[0], causal=True, query_lengths=[0, 1])
    got = torch.autograd.grad(out.square().sum(), [t for t in given if t.requires_grad])
    assert all(torch.equal(*pair) for pair in zip(got, expected)) and all(torch.equal(*pair) for pair in zip(before, given))


def test_static_says_capacity_length_and_new():
    query, key, value = tensors(size=9)
    cache = StaticCache(1, 2, 9, 2, 8)
    chunked(cache, query, key, value, (9,))
    with pytest.raises(ValueError, match="capacity 9, length 9, 1 new"):
        chunked(cache, query[:, :1], key, value, (1,))


def test_static_compiles_once_and_marks_overflow():
    import torch._dynamo.testing

    query, key, value = tensors(size=9)
    cache = StaticCache(1, 2, 8, 2, 8)
    count = torch._dynamo.testing.CompileCounter()
    step = torch.compile(lambda q, k, v: attention(q, k, v, cache=cache[0], causal=True), backend=count, fullgraph=True)
    expected = attention(query, key, value, causal=True)
    for i in range(9):
        out = step(*(t[:, i : i + 1] for t in (query, key, value)))
        if i < 8:
            torch.testing.assert_close(out, expected[:, i : i + 1], rtol=1e-5, atol=1e-6)
    assert count.frame_count == 1
    assert bool(cache.overflowed) and cache.lengths.tolist() == [8, 8]
    assert torch.equal(cache[0].key, key[:, :8])


@pytest.fixture
def lengths_unseen(monkeypatch):
    """A static cache on the CPU works as on a GPU, where the host may not look at lengths."""
    monkeypatch.setattr(static, "lengths_at_hand", lambda device: False)


def test_static_with_unseen_lengths_in_any_order_of_operations(lengths_unseen):
    cache_suite(StaticCache)().test_any_order_of_operations_equals_one_shot()


@pytest.mark.parametrize("sizes", [(1,) * 10, (3, 1, 3, 3, 1, 1)])
def test_static_with_unseen_lengths_writes_nothing_past_its_capacity(lengths_unseen, sizes):
    query, key, value = tensors(size=sum(sizes))
    cache, i, held = StaticCache(1, 2, 8, 2, 8), 0, []
    for n in sizes:
        attention(query[:, i : i + n], key[:, i : i + n], value[:, i : i + n], cache=cache[0], causal=True)
        fits = len(held) + n <= 8
        held += range(i, i + n) if fits else []
        i += n
    assert bool(cache.overflowed) and cache.lengths.tolist() == [8, 8] and torch.equal(cache[0].key, key[:, held])
    cache.crop(5)
    assert bool(cache.overflowed) and not cache[0].key[:, 5:].any()
    cache.reset([0])
    assert bool(cache.overflowed), "row 1 has lost tokens still"
    cache.reset([1])
    assert not bool(cache.overflowed)


def test_a_row_takes_its_overflow_along(lengths_unseen):
    """Of rows of 5 and 8 tokens, in room for 8, one more overflows the second alone."""
    query, key, value = tensors(size=9)
    cache = StaticCache(1, 2, 8, 2, 8)
    attention(query[:, :8], key[:, :8], value[:, :8], cache=cache[0], causal=True)
    cache.crop([5, 8])
    attention(query[:, 8:], key[:, 8:], value[:, 8:], cache=cache[0], causal=True)
    assert bool(cache.overflowed)
    cache.reorder([1, 0])
    cache.reset([1])
    assert bool(cache.overflowed)
    cache.reset([0])
    assert not bool(cache.overflowed)


@pytest.mark.parametrize("kind", ["static", "paged"])
def test_without_triton_lengths_are_kept_by_torch(kind, lengths_unseen, monkeypatch):
    monkeypatch.setattr(append, "taken", lambda key: True)
    monkeypatch.setattr(append, "_kernel", functools.cache(append._kernel.__wrapped__))
    monkeypatch.setitem(sys.modules, "triton", None)  # as where it is not installed
    monkeypatch.delitem(sys.modules, "attnreg.cache.append_kernel", raising=False)
    query, key, value = tensors(size=9)
    cache, i = caches()[kind], 0
    expected = attention(query, key, value, causal=True)
    for n in (1, 3, 1, 1, 3):
        out = attention(*(t[:, i : i + n] for t in (query, key, value)), cache=cache[0], causal=True)
        torch.testing.assert_close(out, expected[:, i : i + n], rtol=1e-5, atol=1e-6)
        i += n
    attention(*(t[:, :2] for t in (query, key, value)), cache=cache[0], causal=True, query_lengths=[2, 1])
    assert cache.lengths.tolist() == [11, 10] and append._kernel() is None
    assert kind == "static" or cache[0]._counted.tolist() == [11, 10]


def test_static_with_unseen_lengths_says_nothing_of_padding_that_depends_on_them(lengths_unseen):
    query, key, value = tensors(size=3)
    layer, real = StaticCache(1, 2, 8, 2, 8)[0], torch.tensor([[True, False, False]] * 2)
    call = AttentionCall(query, key, value, causal=True, cache=layer, query_mask=real)
    call.examine_padding()
    assert not call.spec.padding_fits_packing  # seen from lengths of 0, it would


def test_one_token_into_a_static_cache_is_two_writes_and_three_counts(lengths_unseen):
    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            ran.append(str(function))
            return function(*args, **(kwargs or {}))

    layer, token, ran = StaticCache(1, 2, 8, 2, 8)[0], torch.randn(2, 1, 2, 8), []
    with Counting():
        step = layer.prepare(token, token, None, None, None)
        layer.write(step)
        layer.commit(step)
    ran = [name.split(".")[1] for name in ran if "squeeze" not in name]
    assert ran == ["add", "index_copy_", "index_copy_", "add_", "clamp"]


def test_a_static_step_masks_what_is_past_the_lengths_in_three_operations(lengths_unseen):
    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if not any(text in str(function) for text in ("transpose", "slice", "unsqueeze", "alias", "detach", "promote_types")):
                ran.append(str(function).split(".")[1])
            return out

    query, key, value = tensors(size=1)
    layer = StaticCache(1, 2, 8, 2, 8)[0]
    for _ in range(2):  # the second time by the plan
        ran = []
        with Counting():
            attention(query, key, value, cache=layer, causal=True)
    after_the_append = ran[ran.index("clamp") + 1 :]
    assert after_the_append == ["arange", "lt", "empty", "log", "_scaled_dot_product_flash_attention_for_cpu"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: a graph is captured")
def test_static_decode_in_a_cuda_graph():
    query, key, value = (t.cuda() for t in tensors(size=9, dim=64))
    cache = StaticCache(1, 2, 8, 2, 64, device="cuda")
    inputs = [t[:, :1].clone() for t in (query, key, value)]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        attention(*inputs, cache=cache[0], causal=True)
    torch.cuda.current_stream().wait_stream(side)
    cache.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*inputs, cache=cache[0], causal=True)
    cache.reset()
    expected = attention(query, key, value, causal=True)
    for i in range(9):
        for given, whole in zip(inputs, (query, key, value)):
            given.copy_(whole[:, i : i + 1])
        graph.replay()
        if i < 8:
            torch.testing.assert_close(out, expected[:, i : i + 1], rtol=1e-3, atol=1e-3)
    assert bool(cache.overflowed) and cache.lengths.tolist() == [8, 8]


def test_pages_run_out_with_nothing_lost_and_come_back():
    query, key, value = tensors(size=8)
    cache = PagedCache(1, 2, 3, 4, 2, 8)
    attention(query[:, :4], key[:, :4], value[:, :4], cache=cache[0], causal=True)
    with pytest.raises(ValueError, match="2 new pages of 4 slots needed, 1 of 3 are free"):
        attention(query[:, 4:], key[:, 4:], value[:, 4:], cache=cache[0], causal=True)
    assert cache.lengths.tolist() == [4, 4] and cache.free_pages == 1
    cache.free([1])
    assert cache.free_pages == 2 and cache.allocate() == 1
    out = attention(query[:, 4:], key[:, 4:], value[:, 4:], cache=cache[0], causal=True, query_lengths=[4, 0])
    torch.testing.assert_close(out[:1], attention(query, key, value, causal=True)[:1, 4:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("past", [0, 4])
def test_a_row_that_lacks_more_than_one_page_is_told_of_all(past):
    query, key, value = tensors(size=16)
    cache = PagedCache(1, 2, 3, 4, 2, 8)
    if past:
        attention(query[:, :past], key[:, :past], value[:, :past], cache=cache[0], causal=True)
    needed, free = (8, 3) if not past else (4, 1)
    size = 16 if not past else 8
    with pytest.raises(ValueError, match=f"{needed} new pages of 4 slots needed, {free} of 3 are free"):
        attention(query[:, :size], key[:, :size], value[:, :size], cache=cache[0], causal=True)
    assert cache.free_pages == free and cache.lengths.tolist() == [past, past]


def test_allocated_rows_are_distinct_until_freed():
    query, key, value = tensors(batch=3, size=1)
    cache = PagedCache(1, 3, 6, 4, 2, 8)
    rows = [cache.allocate(), cache.allocate()]
    assert len(set(rows)) == 2
    fork = cache.fork()
    rows.append(cache.allocate())
    assert sorted(rows) == [0, 1, 2] and fork.allocate() == rows[2]
    with pytest.raises(ValueError, match="all 3 rows are in use"):
        cache.allocate()
    attention(query, key, value, cache=cache[0], causal=True)
    cache.crop([0, 1, 1])  # an emptied row is still its owner's
    with pytest.raises(ValueError, match="all 3 rows are in use"):
        cache.allocate()
    cache.free(rows[1])
    assert cache.allocate() == rows[1]
    cache.reset()
    assert sorted(cache.allocate() for _ in rows) == [0, 1, 2]


def test_pages_share_a_prefix_until_one_writes():
    query, key, value = tensors(size=8)
    cache = PagedCache(1, 2, 6, 4, 2, 8)
    attention(query[:, :6], key[:, :6], value[:, :6], cache=cache[0], causal=True, query_lengths=[6, 0])
    cache.share(0, 1)
    assert cache.free_pages == 6 - 3
    out = attention(query[:, 6:], key[:, 6:], value[:, 6:], cache=cache[0], causal=True)
    for b in range(2):
        past = [torch.cat([t[:1, :6], t[b : b + 1, 6:]], 1) for t in (key, value)]
        torch.testing.assert_close(out[b : b + 1], attention(query[b : b + 1, 6:], *past, causal=True), rtol=1e-5, atol=1e-6)


def test_gathered_pages_are_explained_with_their_cost():
    query, key, value = tensors(size=1)
    selection = attnreg.explain(query, key, value, cache=caches()["paged"][0], causal=True)
    assert selection.chosen and selection.emulations[0].startswith("paged: gathers the pages into copies")


@ALL
def test_explain_appends_nothing(kind):
    cache = caches()[kind]
    before = cache.lengths.tolist()
    attnreg.explain(*tensors(), cache=cache[0], causal=True, window=(3, None))
    assert cache.lengths.tolist() == before


@pytest.mark.parametrize("kind", ["dynamic", "static", "paged", "sliding"])
def test_saved_and_resumed(kind, tmp_path):
    pytest.importorskip("safetensors")
    query, key, value = tensors()
    cache, other = caches()[kind], caches()[kind]
    chunked(cache, query[:, :8], key, value, (8,))
    cache.save(tmp_path / "past.safetensors")
    other.load(tmp_path / "past.safetensors")
    out = attention(query[:, 8:], key[:, 8:], value[:, 8:], cache=other[0], causal=True, window=(16, None))
    torch.testing.assert_close(out, attention(query, key, value, causal=True)[:, 8:], rtol=1e-5, atol=1e-6)
    (tmp_path / "damaged").write_bytes((tmp_path / "past.safetensors").read_bytes()[:-9])
    with pytest.raises(ValueError, match="damaged"):
        other.load(tmp_path / "damaged")
    with pytest.raises(ValueError, match="layers"):
        DynamicCache(2).load(tmp_path / "past.safetensors")


def test_transformers_caches_both_ways():
    pytest.importorskip("transformers")
    query, key, value = tensors()
    cache = DynamicCache(1)
    chunked(cache, query[:, :8], key, value, (8,))
    theirs = to_transformers(cache)
    assert theirs.get_seq_length() == 8
    again = from_transformers(theirs)
    out = attention(query[:, 8:], key[:, 8:], value[:, 8:], cache=again[0], causal=True)
    torch.testing.assert_close(out, attention(query, key, value, causal=True)[:, 8:])


@ALL
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_calls_that_look_alike_are_told_apart_by_what_the_cache_holds(kind, layout):
    turned = lambda t: t if layout == "bshd" else t.transpose(1, 2)
    attnreg.use("auto")  # forgets what was decided before
    query, key, value = tensors(size=12)
    for first in (0, 2, 1, 0, 7):  # the same shapes: nothing before them, as many, fewer, more
        cache, expected = caches()[kind], attention(query, key, value, causal=True, window=(16, None), backend="reference")
        if first:
            chunked(cache, query, key, value, (first,))
        given = [turned(t[:, first : first + 5]) for t in (query, key, value)]
        out = attention(*given, cache=cache[0], causal=True, window=(16, None), layout=layout)
        torch.testing.assert_close(turned(out), expected[:, first : first + 5], rtol=1e-5, atol=1e-6)
        for n in range(first + 5, 12):
            token = [turned(t[:, n : n + 1]) for t in (query, key, value)]
            out = attention(*token, cache=cache[0], causal=True, window=(16, None), layout=layout)
            torch.testing.assert_close(turned(out), expected[:, n : n + 1], rtol=1e-5, atol=1e-6)
        with pytest.raises(TypeError, match="the cache's dtype"):
            attention(*(t.double() for t in token), cache=cache[0], causal=True, window=(16, None), layout=layout)


def test_a_known_call_with_a_cache_keeps_no_tensors_alive():
    query, key, value = tensors(size=1)
    cache = DynamicCache(1)
    attention(query, key, value, cache=cache[0], causal=True)
    attention(query, key, value, cache=cache[0], causal=True)
    room = weakref.ref(cache[0]._key)
    del cache
    gc.collect()
    assert room() is None


@pytest.mark.parametrize("length", [64, 500, 2000])
def test_memory_is_what_was_promised(length):
    key = torch.zeros(2, length, 2, 8)
    token, held = 2 * 2 * 2 * 8 * 4, {}  # rows, key and value, heads, dim, bytes
    pages = 2 * -(-length // 16)
    made = {"dynamic": DynamicCache(1), "static": StaticCache(1, 2, length, 2, 8), "paged": PagedCache(1, 2, pages, 16, 2, 8)}
    for kind, cache in made.items():
        for start in range(0, length, 50):
            chunk = key[:, start : start + 50]
            attention(chunk.repeat(1, 1, 2, 1), chunk, chunk, cache=cache[0], causal=True)
        tensors_in = [t for t in vars(cache[0]).values() if isinstance(t, torch.Tensor)] + list(getattr(cache[0], "_rooms", ()))
        if kind == "paged":
            tensors_in = [cache[0].pool.keys, cache[0].pool.values]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in if t.dim() == 4}
        held[kind] = sum(storages.values())
    assert held["static"] == (length + 1) * token
    assert held["paged"] - 16 * token // 2 < (length + 16) * token  # beside the page of zeros, that all rows share
    assert made["paged"].free_pages == 0
    assert held["dynamic"] <= 1.5 * length * token


def test_a_read_of_a_sliding_cache_sees_as_far_back_as_its_window():
    query, key, value = tensors(size=9)
    cache = SlidingCache(1, 5)
    chunked(cache, query, key, value, (7, 2), window=(5, None))
    expected = attention(query, key, value, causal=True, window=(5, None))[:, -1:]
    torch.testing.assert_close(attention(query[:, -1:], cache=cache[0], causal=True, window=(5, None)), expected)
    with pytest.raises(ValueError, match="rollback=1"):
        cache.crop(8)


def test_a_whole_cache_instead_of_a_layer_is_named():
    with pytest.raises(TypeError, match=r"cache.layer\(i\)"):
        attention(*tensors(), cache=DynamicCache(1))


def test_what_a_cache_was_made_from_stays_the_callers():
    query, key, value = tensors()
    before = key.clone()
    for change in (lambda c: c.crop(3), lambda c: c.reset([0]), lambda c: c.crop([3] + [2] * (key.shape[0] - 1))):
        cache = DynamicCache.from_legacy([(key, value)], layout="bshd")
        change(cache)
        assert torch.equal(key, before)
    lengths = torch.full((key.shape[0],), key.shape[1], dtype=torch.int32)
    lengths[0] = 2
    cache = DynamicCache()
    cache.load_state_dict({"layers.0.key": key, "layers.0.value": value, "layers.0.lengths": lengths})
    counts = [1] + [0] * (key.shape[0] - 1)
    attention(query[:, :1], key[:, :1] + 1, value[:, :1], cache=cache[0], query_lengths=counts)
    assert torch.equal(key, before)


def test_padding_of_a_state_does_not_leak():
    query, key, value = tensors()
    lengths = torch.full((key.shape[0],), key.shape[1], dtype=torch.int32)
    lengths[0] = 2
    poisoned = value.clone()
    poisoned[0, 2:] = float("nan")
    cache = DynamicCache()
    cache.load_state_dict({"layers.0.key": key, "layers.0.value": poisoned, "layers.0.lengths": lengths})
    assert not attention(query[:, :1], cache=cache[0]).isnan().any()


def test_a_sliding_cache_is_saved_as_it_is_after_a_crop_of_some_rows():
    query, key, value = tensors()
    first, second = SlidingCache(1, left=2, rollback=2), SlidingCache(1, left=2, rollback=2)
    attention(query[:, :8], key[:, :8], value[:, :8], cache=first[0], causal=True, window=(2, 0))
    first.crop([7] + [8] * (key.shape[0] - 1))
    second.load_state_dict(first.state_dict())
    step = (query[:, 8:9], key[:, 8:9], value[:, 8:9])
    assert torch.equal(*(attention(*step, cache=cache[0], causal=True, window=(2, 0)) for cache in (first, second)))


@pytest.mark.parametrize("named", ["held", "none held"])
def test_a_sliding_cache_takes_no_state_that_lacks_what_its_window_sees(named):
    query, key, value = tensors(size=13)
    state, past = {}, slice(0, 12)
    for left in (2, 8):
        cache = SlidingCache(1, left)
        attention(query[:, past], key[:, past], value[:, past], cache=cache[0], causal=True, window=(left, None))
        state[left] = {name: t for name, t in cache.state_dict().items() if named == "held" or not name.endswith(".held")}
    with pytest.raises(ValueError, match=r"state: layer 0: held: row 0 of length 12 has its last 3 tokens.* window of 8"):
        SlidingCache(1, 8).load_state_dict(state[2])
    for into, left in ((2, 2), (2, 8), (5, 8), (8, 8)):
        cache = SlidingCache(1, into)
        cache.load_state_dict(state[left])
        out = attention(*(t[:, 12:] for t in (query, key, value)), cache=cache[0], causal=True, window=(into, None))
        torch.testing.assert_close(out, attention(query, key, value, causal=True, window=(into, None))[:, 12:], rtol=1e-5, atol=1e-6)


def test_only_a_sliding_cache_takes_rows_that_lack_their_first_tokens():
    """Here no row is longer than what is kept of another: the lengths alone would not show it."""
    cache = SlidingCache(1, 2, rollback=5)
    attention(*tensors(size=10), cache=cache[0], causal=True, window=(2, None), query_lengths=[10, 6])
    cache.crop([6, 6])
    assert cache[0].held.tolist() == [4, 6]
    for other in (DynamicCache(), StaticCache(1, 2, 8, 2, 8), PagedCache(1, 2, 8, 4, 2, 8)):
        with pytest.raises(ValueError, match=r"state: layer 0: held: only a SlidingCache takes the last \[4, 6\] tokens of .*\[6, 6\]"):
            other.load_state_dict(cache.state_dict())


@pytest.mark.parametrize("kind", ["dynamic", "sliding"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_key_and_value_that_are_taken_over_are_of_one_dtype(kind, dtype):
    key, lengths = torch.ones(2, 3, 2, 8, dtype=dtype), torch.tensor([3, 3])
    value, cache = key if dtype == torch.int32 else key.float(), caches()[kind]
    state = {"layers.0.key": key, "layers.0.value": value, "layers.0.lengths": lengths}
    for take in (lambda: cache[0].restore(key, value, lengths), lambda: cache.load_state_dict(state)):
        with pytest.raises(ValueError, match=rf"key, value: one floating dtype .*{dtype}"):
            take()
    assert cache.lengths.tolist() == []


def test_nan_of_a_bias_at_padded_queries_reaches_no_gradient():
    query, key, value = tensors()
    key, value = key.clone().requires_grad_(), value.clone().requires_grad_()
    real = torch.ones(query.shape[:2], dtype=torch.bool)
    real[:, 0] = False
    bias = torch.zeros(1, 1, query.shape[1], key.shape[1])
    bias[:, :, 0] = float("nan")
    attention(query, key, value, cache=DynamicCache(1)[0], bias=bias, query_mask=real, causal=True).sum().backward()
    assert key.grad.isfinite().all() and value.grad.isfinite().all()


@pytest.mark.parametrize("kind", [lambda: DynamicCache(1), lambda: StaticCache(1, 2, 8, 2, 8), lambda: PagedCache(1, 2, 8, 4, 2, 8)])
@pytest.mark.parametrize("rows", [torch.tensor([False, True]), torch.tensor([0.0, 1.0]), [0.5], [True], "1"])
def test_rows_and_lengths_are_whole_numbers(kind, rows):
    """[False, True] would be rows 0 and 1, and 0.5 row 0."""
    cache = kind()
    attention(*tensors(size=4), cache=cache[0], causal=True)
    for change in (cache.reset, cache.reorder, cache.crop, cache.free if isinstance(cache, PagedCache) else cache.reset):
        with pytest.raises(TypeError, match="whole numbers"):
            change(rows)
    with pytest.raises(TypeError, match="whole numbers"):
        attention(*tensors(size=1), cache=cache[0], query_lengths=rows)
    assert cache.lengths.tolist() == [4, 4]


@ALL
def test_queries_alone_may_be_trained(kind):
    """Keys that need no gradient are written in place: the graphs of earlier steps hold copies of them."""
    query, key, value = tensors(size=6)
    query.requires_grad_()
    options = {"window": (7, None)} if kind == "sliding" else {}
    attention(query, key, value, causal=True, **options).square().sum().backward()
    expected, query.grad = query.grad, None
    cache, outputs = caches()[kind], []
    for i, n in ((0, 2), (2, 1), (3, 3)):
        part = slice(i, i + n)
        outputs.append(attention(query[:, part], key[:, part], value[:, part], cache=cache[0], causal=True, **options))
    torch.cat(outputs, 1).square().sum().backward()
    torch.testing.assert_close(query.grad, expected, rtol=1e-4, atol=1e-5)


@ALL
@pytest.mark.parametrize("counts", [None, [3, 1]])
def test_a_layer_can_be_restored_from_its_own_contents(kind, counts):
    layer, (query, key, value) = caches()[kind][0], tensors(size=3)
    attention(query, key, value, cache=layer, causal=True, window=(16, None), query_lengths=counts)
    before = [t.clone() for t in layer.contents()[:3]]
    layer.restore(*layer.contents())
    assert all(torch.equal(now, was) for now, was in zip(layer.contents(), before))


def test_a_refused_write_gives_back_nothing_of_others():
    """Another thread's call came between the check and the run: the pages that it took are not this call's to release."""
    cache = PagedCache(1, 1, 8, 2, 1, 4)
    other = cache.fork()
    mine, theirs = cache[0], other[0]
    token = torch.ones(1, 1, 1, 4)
    step = mine.prepare(token, token, None, None, None)
    attention(2 * token, 2 * token, 2 * token, cache=theirs)
    with pytest.raises(RuntimeError, match="its pages changed"):
        mine.write(step)
    mine.undo(step)
    attention(3 * token, 3 * token, 3 * token, cache=mine)
    assert theirs.contents()[0].flatten().tolist() == [2.0] * 4 and mine.contents()[0].flatten().tolist() == [3.0] * 4


def test_rows_that_append_alike_hold_the_pages_that_they_need():
    cache = PagedCache(1, 2, 8, 4, 1, 4)
    layer = cache[0]
    for n in range(1, 11):
        token = torch.full((2, 1, 1, 4), float(n))
        attention(token, token, token, cache=layer, causal=True)
        held = [page for table in layer._tables for page in table]
        assert [len(table) for table in layer._tables] == [-(-n // 4)] * 2 and len(set(held)) == len(held)
        assert cache.free_pages == 8 - len(held)
        assert layer.contents()[0][:, :, 0, 0].tolist() == [[float(i) for i in range(1, n + 1)]] * 2


def test_a_page_that_came_to_be_shared_is_copied_by_whoever_appends():
    cache = PagedCache(1, 1, 8, 4, 1, 4)
    append_to = lambda layer, number: attention(*[torch.full((1, 1, 1, 4), number)] * 3, cache=layer, causal=True)
    for number in (1.0, 2.0):
        append_to(cache[0], number)  # there is room for more in its page
    other = cache.fork()
    append_to(cache[0], 3.0)
    assert set(cache[0]._tables[0]).isdisjoint(other[0]._tables[0])
    append_to(other[0], 4.0)
    assert [c[0].contents()[0].flatten().tolist()[::4] for c in (cache, other)] == [[1.0, 2.0, 3.0], [1.0, 2.0, 4.0]]


def test_saving_without_safetensors_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for act in ("save", "load"):
        with pytest.raises(ModuleNotFoundError, match=rf"{act}: needs safetensors; pip install 'attnreg\[cache\]'"):
            getattr(DynamicCache(), act)(tmp_path / "past")
