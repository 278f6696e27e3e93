"""Every cache, against a plain list of tensors. Statistics: pytest -k suite --hypothesis-show-statistics"""

import hypothesis
import pytest
import torch
from hypothesis.stateful import run_state_machine_as_test

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

    suite = cache_suite(lambda layers, **sizes: LeavesPoison(layers))
    settings = hypothesis.settings(max_examples=50, deadline=None, database=None, phases=[hypothesis.Phase.generate])
    with pytest.raises(AssertionError, match="Tensor-likes are not"):
        run_state_machine_as_test(suite.machine, settings=settings)
