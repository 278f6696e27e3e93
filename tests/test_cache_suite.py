"""Every cache, against a plain list of tensors. Statistics: pytest -k suite --hypothesis-show-statistics"""

import dataclasses
import functools

import pytest
import torch

import attnreg
from attnreg import DynamicCache, PagedCache, SlidingCache, StaticCache
from attnreg.conformance import cache_suite
from attnreg.kernels.flex import _attend, flex, run_flex

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


class TestFlex:
    """The same machine through flex_attention's formula, uncompiled: compiled, it would take seconds for each shape."""

    def test_any_order_of_operations_equals_one_shot(self, monkeypatch):
        from torch.nn.attention import flex_attention as module

        monkeypatch.setattr(module, "_validate_device", lambda *tensors: None)
        monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        claims = flex.claims
        rules = tuple(rule for rule in claims.rules if "_cpu" not in rule.__name__ and rule.__name__ != "_no_compiler")
        run = functools.partial(run_flex, attend=_attend)
        backend = dataclasses.replace(flex, name="flex-uncompiled", run=run, capabilities=dataclasses.replace(claims, rules=rules))
        attnreg.register(backend)
        try:
            for factory in (lambda layers, **sizes: DynamicCache(layers), StaticCache):
                suite = cache_suite(factory, backends=(backend.name,), examples=8, steps=8)
                suite().test_any_order_of_operations_equals_one_shot()
        finally:
            attnreg.unregister(backend.name)


def test_the_suite_catches_a_cache_that_leaves_poison():
    class Leaves(type(DynamicCache()[0])):
        def crop(self, lengths):
            self._lengths = [int(n) for n in torch.as_tensor(lengths)] if not isinstance(lengths, int) else [lengths] * len(self._lengths)

    class LeavesPoison(DynamicCache):
        def __init__(self, layers):
            super().__init__(layers)
            self.layers = [Leaves() for _ in range(layers)]

    suite = cache_suite(lambda layers, **sizes: LeavesPoison(layers))
    with pytest.raises(AssertionError, match="Tensor-likes are not"):
        suite().test_a_row_of_nan_that_is_gone_leaves_nothing("crop")
