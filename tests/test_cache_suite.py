"""Every cache, against a plain list of tensors. Statistics: pytest -k suite --hypothesis-show-statistics"""

import torch

from attnreg import DynamicCache, PagedCache, SlidingCache, StaticCache
from attnreg.conformance.caches import cache_suite

TestDynamic = cache_suite(lambda layers, **sizes: DynamicCache(layers))
TestStatic = cache_suite(StaticCache)
TestPaged = cache_suite(
    lambda layers, batch, capacity, key_heads, head_dim, dtype: PagedCache(layers, batch, 60, 4, key_heads, head_dim, dtype=dtype)
)
TestPagesOfOneSlot = cache_suite(
    lambda layers, batch, capacity, key_heads, head_dim, dtype: PagedCache(layers, batch, 300, 1, key_heads, head_dim, dtype=dtype),
    examples=10,
)
TestSliding = cache_suite(lambda layers, **sizes: SlidingCache(layers, 5, rollback=3), left=5, rollback=3)


def test_the_suite_catches_a_cache_that_leaves_poison():
    class Leaves(type(DynamicCache()[0])):
        def crop(self, lengths):
            self._lengths = [int(n) for n in torch.as_tensor(lengths)] if not isinstance(lengths, int) else [lengths] * len(self._lengths)

    class LeavesPoison(DynamicCache):
        def __init__(self, layers):
            super().__init__(layers)
            self.layers = [Leaves() for _ in range(layers)]

    suite = cache_suite(lambda layers, **sizes: LeavesPoison(layers), examples=100)
    try:
        suite().test_any_order_of_operations_equals_one_shot()
    except BaseException:
        return
    raise AssertionError("a cache that leaves NaN in its spare room passed")
