"""The suite that a KV cache must pass: any order of operations, beside a plain list of tensors, equals one shot through the reference.

TestMine = attnreg.conformance.caches.cache_suite(lambda **sizes: MyCache(**sizes))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from ..attention import attention, explain

LAYERS, ROWS, CAPACITY, QUERY_HEADS, KEY_HEADS, HEAD_DIM = 1, 3, 24, 4, 2, 8


def cache_suite(
    factory: Callable[..., Any],
    *,
    left: int | None = None,
    rollback: int = CAPACITY,
    backends: tuple[str, ...] = ("sdpa", "reference"),
    examples: int = 20,
    steps: int = 10,
) -> type:
    """A test class for the caches that `factory(layers, batch, capacity, key_heads, head_dim, dtype)` makes, empty, by keyword.

    left: the cache keeps only what a window of so many earlier tokens sees; `rollback` says how many it can crop.
    backends: those to attend with; each must be able to run on the CPU.
    """

    def make(**changes: Any) -> Any:
        sizes = {"layers": LAYERS, "batch": ROWS, "capacity": CAPACITY, "key_heads": KEY_HEADS, "head_dim": HEAD_DIM}
        return factory(**{**sizes, "dtype": torch.float32, **changes})

    def attend(cache: Any, query: torch.Tensor, key: Any = None, value: Any = None, **options: Any) -> torch.Tensor:
        window = {} if left is None else {"window": (left, None)}
        return attention(query, key, value, cache=cache[0], causal=True, **window, **options)

    class Machine(RuleBasedStateMachine):
        """Each rule acts on one of the caches (forks are kept) and on its model, then looks at what a query sees."""

        @initialize(seed=st.integers(0, 2**16))
        def start(self, seed: int) -> None:
            self.random = torch.Generator().manual_seed(seed)
            self.pairs = [(make(), [self.tokens(0)] * ROWS)]

        def tokens(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
            return tuple(torch.randn(n, KEY_HEADS, HEAD_DIM, generator=self.random) for _ in range(2))

        def pair(self, number: int) -> tuple[int, Any, list]:
            at = number % len(self.pairs)
            return at, *self.pairs[at]

        def check(self, output: torch.Tensor, query: torch.Tensor, model: list, counts: list[int], hidden: Any = None) -> None:
            window = None if left is None else (left, None)
            for b, (key, value) in enumerate(model):
                if counts[b] and len(key):
                    mask = None if hidden is None else ~hidden[b : b + 1, : len(key)]
                    expected = attention(
                        query[b : b + 1, : counts[b]], key[None], value[None], causal=True, window=window, key_mask=mask, backend="reference"
                    )  # fmt: skip
                    torch.testing.assert_close(output[b : b + 1, : counts[b]], expected, rtol=1e-5, atol=2e-6)
                torch.testing.assert_close(output[b, counts[b] :], torch.zeros_like(output[b, counts[b] :]), rtol=0, atol=0)

        @rule(which=st.integers(0, 3), n=st.integers(1, 5), ragged=st.booleans(), backend=st.sampled_from(backends), data=st.data())
        def append(self, which: int, n: int, ragged: bool, backend: str, data: Any) -> None:
            at, cache, model = self.pair(which)
            counts = data.draw(st.lists(st.integers(0, n), min_size=ROWS, max_size=ROWS)) if ragged else [n] * ROWS
            longest = max(len(key) + c for (key, _), c in zip(model, counts))
            if longest > CAPACITY:
                return
            query, new = self.query(n), [self.tokens(n) for _ in range(ROWS)]
            key, value = (torch.stack([pair[i] for pair in new]) for i in range(2))
            for b, c in enumerate(counts):  # what is not appended must not matter
                key[b, c:], value[b, c:], query[b, c:] = float("nan"), float("nan"), float("nan")
            given = key.clone()
            hidden, options = None, {}
            if left is None and data.draw(st.booleans()):
                hidden = torch.rand(ROWS, cache.slots(n), generator=self.random) < 0.2
                options["key_mask"] = ~hidden
            if ragged:
                options["query_lengths"] = counts
            output = attend(cache, query, key, value, backend=backend, **options)
            assert torch.equal(given.nan_to_num(7.0), key.nan_to_num(7.0)), "the caller's key was changed"
            model = [tuple(torch.cat([old[i], new[b][i][: counts[b]]]) for i in range(2)) for b, old in enumerate(model)]
            self.pairs[at] = (cache, model)
            self.check(output, query, model, counts, hidden)

        def query(self, n: int) -> torch.Tensor:
            return torch.randn(ROWS, n, QUERY_HEADS, HEAD_DIM, generator=self.random)

        @rule(which=st.integers(0, 3), backend=st.sampled_from(backends))
        def read(self, which: int, backend: str) -> None:
            _, cache, model = self.pair(which)
            assert [len(key) for key, _ in model] == (cache.lengths.tolist() or [0] * ROWS)
            if cache.lengths.numel():
                query = self.query(1)
                explain(query, cache=cache[0], causal=True, window=None if left is None else (left, None))
                self.check(attend(cache, query, backend=backend), query, model, [1] * ROWS)

        @rule(which=st.integers(0, 3), back=st.lists(st.integers(0, 6), min_size=ROWS, max_size=ROWS))
        def crop(self, which: int, back: list[int]) -> None:
            at, cache, model = self.pair(which)
            if not cache.lengths.numel():
                return
            lengths = [max(len(key) - min(n, rollback), 0) for (key, _), n in zip(model, back)]
            cache.crop(lengths)
            self.pairs[at] = (cache, [(key[:n], value[:n]) for (key, value), n in zip(model, lengths)])

        @rule(which=st.integers(0, 3), indices=st.lists(st.integers(0, ROWS - 1), min_size=ROWS, max_size=ROWS))
        def reorder(self, which: int, indices: list[int]) -> None:
            at, cache, model = self.pair(which)
            if cache.lengths.numel():
                cache.reorder(torch.tensor(indices))
                self.pairs[at] = (cache, [model[i] for i in indices])

        @rule(which=st.integers(0, 3))
        def fork(self, which: int) -> None:
            _, cache, model = self.pair(which)
            self.pairs = (self.pairs + [(cache.fork(), list(model))])[-3:]

        @rule(which=st.integers(0, 3), rows=st.sets(st.integers(0, ROWS - 1), min_size=1), free=st.booleans())
        def reset(self, which: int, rows: set[int], free: bool) -> None:
            at, cache, model = self.pair(which)
            if cache.lengths.numel():
                (cache.free if free and hasattr(cache, "free") else cache.reset)(sorted(rows))
                self.pairs[at] = (cache, [self.tokens(0) if b in rows else pair for b, pair in enumerate(model)])

        @rule(which=st.integers(0, 3), n=st.integers(1, 6), row=st.integers(0, ROWS - 1), wholly=st.booleans())
        def poison(self, which: int, n: int, row: int, wholly: bool) -> None:
            """A request full of NaN, then gone: whoever uses the room later must not find it."""
            at, cache, model = self.pair(which)
            if len(model[row][0]) + n > CAPACITY or (not wholly and n > rollback):
                return
            counts = [n if b == row else 0 for b in range(ROWS)]
            bad = torch.full((ROWS, n, KEY_HEADS, HEAD_DIM), float("nan"))
            attend(cache, self.query(n), bad, bad, query_lengths=counts)
            if wholly:
                cache.reset([row])
                self.pairs[at] = (cache, [self.tokens(0) if b == row else pair for b, pair in enumerate(model)])
            else:
                cache.crop([len(key) for key, _ in model])
            model = self.pairs[at][1]
            if max(len(key) for key, _ in model) + n <= CAPACITY:
                # The others grow past that row, so that its room is among the slots that a kernel reads.
                counts = [1 if b == row else n for b in range(ROWS)]
                query, new = self.query(n), [self.tokens(n) for _ in range(ROWS)]
                output = attend(cache, query, *(torch.stack([pair[i] for pair in new]) for i in range(2)), query_lengths=counts)
                model = [tuple(torch.cat([old[i], new[b][i][: counts[b]]]) for i in range(2)) for b, old in enumerate(model)]
                self.pairs[at] = (cache, model)
                self.check(output, query, model, counts)

        @rule(which=st.integers(0, 3), n=st.integers(1, 3))
        def fail(self, which: int, n: int) -> None:
            """A call that fails in its kernel leaves the cache as it was."""
            _, cache, model = self.pair(which)
            if max(len(key) for key, _ in model) + n > CAPACITY:
                return
            bad = torch.full((ROWS, n, KEY_HEADS, HEAD_DIM), float("nan"))
            with _failing_backend() as name, pytest.raises(MemoryError):
                attend(cache, self.query(n), bad, bad, backend=name)
            assert [len(key) for key, _ in model] == (cache.lengths.tolist() or [0] * ROWS)

    class CacheSuite:
        machine = Machine

        def test_any_order_of_operations_equals_one_shot(self) -> None:
            # Each run starts a fresh machine class's settings, so that several suites may stand in one module.
            settings = hypothesis.settings(
                max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
            )  # fmt: skip
            run_state_machine_as_test(Machine, settings=settings)

        def test_a_mask_of_another_width_says_both(self) -> None:
            cache = make()
            if left is not None:
                pytest.skip("the slots of a sliding cache are those it keeps")
            key = torch.zeros(ROWS, 3, KEY_HEADS, HEAD_DIM)
            attend(cache, torch.zeros(ROWS, 3, QUERY_HEADS, HEAD_DIM), key, key)
            with pytest.raises(ValueError, match=rf"{cache.slots(1)}.*\({ROWS}, 1\)"):
                attend(cache, key[:, :1], key[:, :1], key[:, :1], key_mask=torch.ones(ROWS, 1, dtype=torch.bool))
            assert cache.lengths.tolist() == [3] * ROWS

        def test_key_lengths_are_refused(self) -> None:
            key = torch.zeros(ROWS, 1, KEY_HEADS, HEAD_DIM)
            with pytest.raises(ValueError, match="key_lengths: not together with cache"):
                attend(make(), key, key, key, key_lengths=[1] * ROWS)

        @pytest.mark.parametrize(
            ("changed", "error", "text"),
            [
                (lambda t: t.repeat(1, 1, 2, 1), ValueError, "2 heads.* got 4"),
                (lambda t: t.half(), TypeError, "float32.* got torch.float16"),
                (lambda t: t[:2], ValueError, "batch size"),
            ],
        )
        def test_other_heads_dtype_or_batch_are_refused(self, changed: Any, error: type, text: str) -> None:
            cache, key = make(), torch.zeros(ROWS, 1, KEY_HEADS, HEAD_DIM)
            attend(cache, torch.zeros(ROWS, 1, QUERY_HEADS, HEAD_DIM), key, key)
            with pytest.raises(error, match=text):
                attend(cache, changed(torch.zeros(ROWS, 1, QUERY_HEADS, HEAD_DIM)), changed(key), changed(key))
            assert cache.lengths.tolist() == [1] * ROWS

    CacheSuite.__name__ = CacheSuite.__qualname__ = "CacheSuite"
    return CacheSuite


class _failing_backend:
    """A backend that runs out of memory, for the length of a `with`."""

    def __enter__(self) -> str:
        from .. import Backend, register
        from ..kernels.reference import reference

        def run(call: Any) -> Any:
            raise MemoryError("on purpose")

        register(Backend(name="out_of_memory", run=run, capabilities=reference.claims, priority=-200, layout="bhsd"))
        return "out_of_memory"

    def __exit__(self, *_: Any) -> None:
        from .. import unregister

        unregister("out_of_memory")
