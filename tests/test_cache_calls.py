"""What every cache takes alike, and what it refuses: each error names the argument, what was given and what is allowed."""

import copy
import itertools
import pickle

import pytest
import torch

from attnreg import DynamicCache, Padding, PagedCache, SlidingCache, StaticCache, attention
from attnreg.call import AttentionCall

CACHES = {
    "dynamic": lambda dtype: DynamicCache(1),
    "static": lambda dtype: StaticCache(1, 2, 8, 2, 8, dtype=dtype),
    "paged": lambda dtype: PagedCache(1, 2, 8, 4, 2, 8, dtype=dtype),
    "sliding": lambda dtype: SlidingCache(1, 8),
}
ALL = pytest.mark.parametrize("kind", CACHES)
WINDOW = {"window": (8, None)}
t = lambda *shape, dtype=torch.float32: torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def filled(kind, dtype=torch.float32, n=3):
    cache = CACHES[kind](dtype)
    key, value = t(2, n, 2, 8, dtype=dtype), t(2, n, 2, 8, dtype=dtype) + 1
    attention(t(2, n, 4, 8, dtype=dtype), key, value, causal=True, cache=cache[0], **WINDOW)
    return cache, key, value


READS = [
    ("another batch", dict(query=t(40, 1, 4, 8)), ValueError, ["query: batch size 2", "got 40"]),
    ("a smaller batch", dict(query=t(1, 1, 4, 8)), ValueError, ["query: batch size 2", "got 1"]),
    ("another batch, heads first", dict(query=t(4, 2, 1, 8), layout="bhsd"), ValueError, ["query: batch size 2", "got 4"]),
    ("head dim", dict(query=t(2, 1, 4, 16)), ValueError, ["query: head dim 8", "got 16"]),
    ("dtype", dict(query=t(2, 1, 4, 8).double()), TypeError, ["query: the cache's dtype torch.float32", "got torch.float64"]),
    ("device", dict(query=t(2, 1, 4, 8).to("meta")), ValueError, ["query: on the cache's device cpu", "got meta"]),
    ("heads", dict(query=t(2, 1, 3, 8)), ValueError, ["key", "divides", "3", "2"]),
    ("3-D without heads", dict(query=t(2, 1, 32)), ValueError, ["query", "n_heads", "(2, 1, 32)"]),
    ("n_heads of text", dict(query=t(2, 1, 32), n_heads="4"), TypeError, ["n_heads", "'4'"]),
    ("n_heads 0", dict(query=t(2, 1, 32), n_heads=0), ValueError, ["n_heads: at least 1", "0"]),
    ("n_heads that do not divide", dict(query=t(2, 1, 32), n_heads=3), ValueError, ["query: flat size 32", "n_heads=3"]),
    ("flat, heads first", dict(query=t(2, 1, 32), n_heads=4, layout="bhsd"), ValueError, ["layout", "(2, 1, 32)"]),
]


@ALL
@pytest.mark.parametrize(("changes", "error", "words"), [case[1:] for case in READS], ids=[case[0] for case in READS])
def test_a_read_is_checked_against_what_is_stored(kind, changes, error, words):
    cache = filled(kind)[0]
    with pytest.raises(error) as raised:
        attention(cache=cache[0], causal=True, **WINDOW, **changes)
    assert all(word in str(raised.value) for word in words), raised.value


def test_pages_given_without_a_cache_are_of_the_querys_batch():
    pages = AttentionCall(t(2, 1, 4, 8), None, None, cache=filled("paged")[0][0]).pages
    with pytest.raises(ValueError, match=r"batch size 2.*got 40"):
        AttentionCall(t(40, 1, 4, 8), None, None, pages=pages)
    with pytest.raises(ValueError, match="pages: in the place of key and value"):
        AttentionCall(t(40, 1, 4, 8), t(5, 5, 5, 5), None, pages=pages)


@ALL
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
def test_a_read_under_autocast_casts_first(kind, stored, given):
    cache, key, value = filled(kind, stored)
    query = t(2, 1, 4, 8, dtype=given)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(query, cache=cache[0], causal=True, **WINDOW)
        expected = attention(query, key, value, causal=True, **WINDOW)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected)


COPIES = {"pickle": lambda given: pickle.loads(pickle.dumps(given)), "deepcopy": copy.deepcopy}


def step(cache, number, **options):
    query, key = t(2, 1, 4, 8) + number, t(2, 1, 2, 8) - number
    return attention(query, key, key + 1, causal=True, cache=cache[0], **WINDOW, **options)


@ALL
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("before", [[], [{}, {"query_lengths": [1, 0]}]])
def test_a_copy_goes_on_as_the_original_does(kind, how, before):
    cache = filled(kind)[0]
    for number, options in enumerate(before):
        step(cache, number, **options)
    other = COPIES[how](cache)
    for change in ("nothing", "crop", "reorder", "reset", "fork"):
        if change != "nothing":
            arguments = {"crop": [2], "reorder": [[1, 0]], "reset": [[1]], "fork": []}[change]
            cache, other = (getattr(c, change)(*arguments) or c for c in (cache, other))
        for number in range(3):
            torch.testing.assert_close(step(other, number), step(cache, number), rtol=0, atol=0)
        assert other.lengths.tolist() == cache.lengths.tolist()
        if kind == "static":  # it has room for 8
            cache.crop(3), other.crop(3)
    cache.reset(), other.reset()
    torch.testing.assert_close(step(other, 1), step(cache, 1), rtol=0, atol=0)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_a_static_cache_goes_on_in_a_compiled_region(how):
    cache = filled("static")[0]
    other = COPIES[how](cache)
    token = t(2, 1, 4, 8), t(2, 1, 2, 8), t(2, 1, 2, 8) + 1
    compiled = torch.compile(lambda layer: attention(*token, causal=True, cache=layer), backend="eager", fullgraph=True)
    for change in (lambda c: None, lambda c: c.reset([0]), lambda c: c.reset()):
        change(cache), change(other)
        for _ in range(2):
            torch.testing.assert_close(compiled(other[0]), attention(*token, causal=True, cache=cache[0]))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(other[0].contents(), cache[0].contents()))


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_holds_the_pages_of_what_was_copied(how):
    cache = PagedCache(1, 2, 8, 4, 2, 8)
    attention(t(2, 6, 4, 8), t(2, 6, 2, 8), t(2, 6, 2, 8), causal=True, cache=cache[0], query_lengths=[6, 0])
    cache.share(0, 1)
    fork = cache.fork()
    step(fork, 0)
    # A fork alone leaves behind what only the other held; both together go on sharing a pool.
    assert [c.free_pages for c in (cache, COPIES[how](fork))] == [3, 5]
    mine, theirs = COPIES[how]((cache, fork))
    assert mine[0].pool is theirs[0].pool and mine.free_pages == 3
    for copied, original in ((mine, cache), (theirs, fork)):
        torch.testing.assert_close(step(copied, 1), step(original, 1), rtol=0, atol=0)
    del theirs, copied
    mine.reset()
    assert mine.free_pages == 8


rows, cu = t(5, 2, 8), torch.tensor([0, 2, 5])
# what differs from a good packed step
PACKED = [
    ("lists", dict(cu_seqlens=([0, 5], [0, 5])), TypeError, ["cu_seqlens[0]", "Tensor", "list"]),
    ("None", dict(cu_seqlens=(None, None)), TypeError, ["cu_seqlens[0]", "Tensor", "NoneType"]),
    ("one of two", dict(cu_seqlens=(cu, None)), TypeError, ["cu_seqlens[1]", "Tensor", "NoneType"]),
    ("no pair", dict(cu_seqlens=cu), TypeError, ["cu_seqlens", "pair"]),
    ("empty", dict(cu_seqlens=(cu[:0], cu[:0])), ValueError, ["cu_seqlens[0]", "(segments + 1,)", "(0,)"]),
    ("floats", dict(cu_seqlens=(cu.float(), cu.float())), TypeError, ["cu_seqlens[0]", "int32 or int64", "float32"]),
    ("2-D", dict(cu_seqlens=(cu[None], cu[None])), ValueError, ["cu_seqlens[0]", "one dimension", "(1, 3)"]),
    ("past the end", dict(cu_seqlens=(cu + cu, cu + cu)), ValueError, ["cu_seqlens[0]", "5", "[0, 4, 10]"]),
    ("another pair", dict(cu_seqlens=(cu, torch.tensor([0, 1, 5]))), ValueError, ["cu_seqlens", "cu_k is cu_q", "[0, 1, 5]"]),
    ("too small a maximum", dict(max_seqlens=(1, 1)), ValueError, ["max_seqlens", "3 rows", "got 1"]),
    ("no query", dict(query=None), TypeError, ["query", "Tensor", "NoneType"]),
    ("a number for a query", dict(query=3), TypeError, ["query", "Tensor", "int"]),
    ("a batch", dict(query=t(2, 5, 2, 8), key=t(2, 5, 2, 8), value=t(2, 5, 2, 8)), ValueError, ["cu_seqlens", "batch size 1", "2"]),
    ("heads first", dict(layout="bhsd"), ValueError, ["layout", "'bshd'", "'bhsd'"]),
]
APPENDS = [
    ("fewer keys", dict(key=rows[:3], value=rows[:3]), ValueError, ["cu_seqlens[1]", "3", "[0, 2, 5]"]),
    ("no value", dict(value=None), ValueError, ["key, value: both"]),
    ("value of another length", dict(value=rows[:3]), ValueError, ["value", "5", "3"]),
    ("key of text", dict(key="k"), TypeError, ["key", "Tensor", "str"]),
]
WRONG = [
    (f"{how}, {name}", given, *case) for given, how in (({}, "read"), ({"key": rows, "value": rows}, "append")) for name, *case in PACKED
]
WRONG += [(name, {"key": rows, "value": rows}, *case) for name, *case in APPENDS]


@pytest.mark.parametrize(("given", "changes", "error", "words"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_packed_steps_are_checked_as_packed_rows_are(given, changes, error, words):
    cache = DynamicCache()
    attention(t(2, 3, 2, 8), t(2, 3, 2, 8), t(2, 3, 2, 8), cache=cache[0])
    with pytest.raises(error) as raised:
        attention(**{"query": rows, "cu_seqlens": (cu, cu), "cache": cache[0], **given, **changes})
    assert all(word in str(raised.value) for word in words), raised.value
    assert cache.lengths.tolist() == [3, 3]


@pytest.mark.parametrize("appends", [True, False])
@pytest.mark.parametrize(
    "shaped", [lambda given: given, lambda given: given[None], lambda given: given[None].flatten(2)], ids=["3-D", "4-D", "flat"]
)
def test_packed_steps_are_given_back_as_they_were_given(appends, shaped):
    query, key = t(5, 4, 8), t(5, 2, 8)
    cache, past = DynamicCache(), t(2, 3, 2, 8)
    attention(t(2, 3, 4, 8), past, past, cache=cache[0])
    new = {"key": shaped(key), "value": shaped(key)} if appends else {}
    heads = {"n_heads": 4, "n_kv_heads": 2} if shaped(query).dim() == 3 and shaped(query).shape[0] == 1 else {}
    out = attention(shaped(query), **new, cu_seqlens=(cu, cu), max_seqlens=(3, 3), cache=cache[0], causal=True, **heads)
    expected = []
    for b, part in enumerate((slice(0, 2), slice(2, 5))):
        whole = torch.cat([past[b], key[part]])[None] if appends else past[b : b + 1]
        expected.append(attention(query[None, part], whole, whole, causal=True)[0])
    torch.testing.assert_close(out, shaped(torch.cat(expected)))


nan, key = float("nan"), torch.ones(1, 3, 16)
SIZES = {"StaticCache": (StaticCache, (1, 2, 8, 1, 4)), "PagedCache": (PagedCache, (1, 2, 3, 4, 1, 4))}
NAMES = {"StaticCache": ("layers", "batch", "capacity", "key_heads", "head_dim"), "SlidingCache": ("layers", "left", "rollback")}
NAMES["PagedCache"] = ("layers", "rows", "pages", "page_size", "key_heads", "head_dim")
SIZES["SlidingCache"] = (SlidingCache, (1, 2, 0))


@pytest.mark.parametrize("given", ["1", 1.5, 2.0, None, True, nan, torch.tensor(1), -1, 0])
@pytest.mark.parametrize(("kind", "at"), [(kind, at) for kind, (_, sizes) in SIZES.items() for at in range(len(sizes))])
def test_sizes_of_a_cache_are_counts(kind, at, given):
    make, sizes = SIZES[kind]
    name, least = NAMES[kind][at], 0 if NAMES[kind][at] in ("batch", "rows", "left", "rollback") else 1
    sizes = [*sizes[:at], given, *sizes[at + 1 :]]
    if type(given) is int and given >= least:
        make(*sizes)
        return
    with pytest.raises(ValueError if type(given) is int else TypeError) as raised:
        make(*sizes)
    assert str(raised.value).startswith(f"{name}: ") and f"at least {least}, got {given!r}" in str(raised.value)


NUMBERS = [
    ("layers of a dynamic cache", lambda: DynamicCache(-1), ValueError, "layers: at least 1, got -1"),
    ("a value_dim of 0", lambda: StaticCache(1, 2, 8, 1, 4, 0), ValueError, "value_dim: at least 1, got 0"),
    ("an integer dtype", lambda: StaticCache(1, 2, 8, 1, 4, dtype=torch.int8), TypeError, "dtype: a floating torch.dtype.* got torch.int8"),
    ("a dtype of text", lambda: PagedCache(1, 2, 8, 4, 1, 4, dtype="half"), TypeError, "dtype: a floating torch.dtype.* got 'half'"),
    ("a layer of text", lambda: DynamicCache()["a"], TypeError, "layer: a whole number, got 'a'"),
    ("a layer of text, fixed", lambda: StaticCache(1, 2, 8, 1, 4)["a"], TypeError, "layer: a whole number, got 'a'"),
    ("a layer below 0", lambda: DynamicCache()[-1], IndexError, "layer: 0 to -1, got -1"),
    ("a length to share", lambda: PagedCache(1, 2, 8, 4, 1, 4).share(0, 1, "1"), TypeError, "length: a whole number, .*'1'"),
    ("heads of text", lambda: DynamicCache.from_legacy([(key, key)], "flat", key_heads="2"), TypeError, "key_heads: a whole number, .*'2'"),
    ("no heads", lambda: DynamicCache.from_legacy([(key, key)], "flat", key_heads=0), ValueError, "key_heads: at least 1, got 0"),
    (
        "heads of no size",
        lambda: DynamicCache.from_legacy([(key, key)], "flat", key_heads=3),
        ValueError,
        "key of layer 0: .*key_heads=3.* 16",
    ),
    (
        "no tensors",
        lambda: DynamicCache.from_legacy([(key, [1])], "flat", key_heads=2),
        TypeError,
        "value of layer 0: a torch.Tensor.*list",
    ),
    ("2-D lengths", lambda: Padding.from_lengths(torch.tensor([[1]]), 2), ValueError, r"lengths: one dimension, .*\(1, 1\)"),
    ("a size of text", lambda: Padding.from_lengths([1], "2"), TypeError, "size: a whole number, at least 0, got '2'"),
    ("a fractional size", lambda: Padding.from_lengths([1], 2.0), TypeError, "size: a whole number, at least 0, got 2.0"),
    ("lengths elsewhere", lambda: Padding.from_lengths(torch.ones(2, device="meta"), 2), TypeError, "lengths: whole numbers, .*float32"),
]


@pytest.mark.parametrize(("make", "error", "text"), [case[1:] for case in NUMBERS], ids=[case[0] for case in NUMBERS])
def test_numbers_are_whole_and_named(make, error, text):
    with pytest.raises(error, match=f"^{text}"):
        make()


@ALL
@pytest.mark.parametrize("indices", [None, torch.tensor([[0, 0]]), torch.tensor([]), torch.tensor(1.0), [0.0, 1.0], [0, 2], [-1, 0], "01"])
def test_indices_to_reorder_by_are_rows(kind, indices):
    cache = filled(kind)[0]
    before = [t.clone() for t in cache[0].contents()]
    with pytest.raises((TypeError, ValueError), match=r"^indices: (whole numbers|one dimension|each between 0 and 1), .*got"):
        cache.reorder(indices)
    assert all(torch.equal(now, was) for now, was in zip(cache[0].contents(), before))


@pytest.mark.parametrize("kind", ["dynamic", "paged", "sliding"])
@pytest.mark.parametrize("none", [[], torch.tensor([], dtype=torch.long)])
def test_a_cache_can_be_left_without_rows(kind, none):
    cache = filled(kind)[0]
    cache.reorder(none)
    assert cache.lengths.tolist() == [] and attention(t(0, 1, 4, 8), cache=cache[0], **WINDOW).shape == (0, 1, 4, 8)
    assert attention(t(0, 1, 4, 8), t(0, 1, 2, 8), t(0, 1, 2, 8), cache=cache[0], **WINDOW).shape == (0, 1, 4, 8)


def test_layers_that_are_made_as_asked_for_come_to_an_end():
    cache = DynamicCache()
    cache.layer(1)
    assert list(itertools.islice(cache, 3)) == cache.layers and len(cache) == 2
