"""What every cache takes alike, and what it refuses: each error names the argument, what was given and what is allowed."""

import pytest
import torch

from attnreg import DynamicCache, PagedCache, SlidingCache, StaticCache, attention
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
