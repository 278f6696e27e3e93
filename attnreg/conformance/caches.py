"""The suite that a KV cache must pass: any order of operations, beside a plain list of tensors, equals one shot through the reference.

TestMine = attnreg.conformance.cache_suite(lambda **sizes: MyCache(**sizes))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from ..attention import attention, explain

LAYERS, ROWS, CAPACITY, QUERY_HEADS, KEY_HEADS, HEAD_DIM = 1, 3, 24, 4, 2, 8


class _Row(NamedTuple):
    """What one row of a cache should hold, and the longest that it has been since it was empty."""

    key: torch.Tensor
    value: torch.Tensor
    real: torch.Tensor
    peak: int

    def then(self, new: _Row, count: int) -> _Row:
        key, value, real = (torch.cat([old, more[:count]]) for old, more in zip(self[:3], new[:3]))
        return _Row(key, value, real, max(self.peak, len(key)))

    def cut(self, length: int) -> _Row:
        # An empty row is a new one: nothing before it is remembered.
        return _Row(*(part[:length] for part in self[:3]), self.peak if length else 0)


def _happened(what: str, detail: str = "") -> None:
    """For the statistics of a run; the rules are also called one by one."""
    if hypothesis.currently_in_test_context():
        hypothesis.event(what, detail)


def cache_suite(
    factory: Callable[..., Any],
    *,
    left: int | None = None,
    rollback: int = CAPACITY,
    backends: tuple[str, ...] = ("sdpa", "reference"),
    examples: int = 40,
    steps: int = 12,
) -> type:
    """A test class for the caches that `factory(layers, batch, capacity, key_heads, head_dim, dtype)` makes, empty, by keyword.

    left: the cache keeps only what a window of so many earlier tokens sees; `rollback` says how far back from a row's longest it can crop.
    backends: those to attend with; each must be able to run on the CPU.
    """

    def make(**changes: Any) -> Any:
        sizes = {"layers": LAYERS, "batch": ROWS, "capacity": CAPACITY, "key_heads": KEY_HEADS, "head_dim": HEAD_DIM}
        return factory(**{**sizes, "dtype": torch.float32, **changes})

    window = None if left is None else (left, None)

    def attend(cache: Any, query: torch.Tensor, key: Any = None, value: Any = None, **options: Any) -> torch.Tensor:
        return attention(query, key, value, cache=cache[0], causal=True, window=window, **options)

    class Machine(RuleBasedStateMachine):
        """Each rule acts on one of the caches (forks are kept) and on its model, then looks at what a query sees."""

        @initialize(seed=st.integers(0, 2**16), padded=st.booleans(), prompts=st.lists(st.integers(0, 7), min_size=ROWS, max_size=ROWS))
        def start(self, seed: int, padded: bool, prompts: list[int]) -> None:
            """padded: every call has a key mask, and a fifth of the tokens are padding."""
            self.random, self.padded = torch.Generator().manual_seed(seed), padded
            self.pairs = [(make(), [self.row(0)] * ROWS)]
            _happened("padding", str(padded))
            if any(prompts):
                self.append(0, *self.pairs[0], max(prompts), prompts)

        def row(self, n: int) -> _Row:
            key, value = (torch.randn(n, KEY_HEADS, HEAD_DIM, generator=self.random) for _ in range(2))
            real = torch.rand(n, generator=self.random) > (0.2 if self.padded else -1.0)
            return _Row(key, value, real, n)

        def query(self, n: int) -> torch.Tensor:
            return torch.randn(ROWS, n, QUERY_HEADS, HEAD_DIM, generator=self.random)

        def pair(self, number: int) -> tuple[int, Any, list[_Row]]:
            at = number % len(self.pairs)
            return at, *self.pairs[at]

        def mask(self, cache: Any, model: list[_Row], n_new: int) -> dict[str, torch.Tensor]:
            """The key mask for a call, `model` being what the rows are after it; slots past a row's end are none of its business."""
            if not self.padded:
                return {}
            mask = torch.ones(ROWS, cache.slots(n_new), dtype=torch.bool)
            for b, gone in enumerate(getattr(cache[0], "dropped", None) or [0] * ROWS):
                mask[b, : len(model[b].key) - gone] = model[b].real[gone:]
            return {"key_mask": mask}

        def append(self, at: int, cache: Any, model: list[_Row], n: int, counts: list[int] | None, backend: Any = None) -> None:
            new = [self.row(n) for _ in range(ROWS)]
            taken = [n] * ROWS if counts is None else counts
            query, key, value = self.query(n), torch.stack([row.key for row in new]), torch.stack([row.value for row in new])
            for b, c in enumerate(taken):  # what is not appended must not matter
                key[b, c:], value[b, c:], query[b, c:] = float("nan"), float("nan"), float("nan")
            given = key.clone()
            after = [old.then(row, c) for old, row, c in zip(model, new, taken)]
            options = self.mask(cache, after, n)
            positions = cache.positions(n, options.get("key_mask")).expand(ROWS, n)
            output = attend(cache, query, key, value, query_lengths=counts, backend=backend, **options)
            assert torch.equal(given.nan_to_num(7.0), key.nan_to_num(7.0)), "the caller's key was changed"
            self.pairs[at] = (cache, after)
            self.check(output, query, after, taken)
            for b, c in enumerate(taken):
                slot = torch.arange(len(after[b].key) - c, len(after[b].key))
                padding = (~after[b].real).long()
                assert positions[b, :c].tolist() == (slot - (padding.cumsum(0) - padding)[slot]).clamp_min(0).tolist()

        def check(self, output: torch.Tensor, query: torch.Tensor, model: list[_Row], counts: list[int]) -> None:
            for b, row in enumerate(model):
                if counts[b] and len(row.key):
                    mask = row.real[None] if self.padded else None
                    expected = attention(
                        query[b : b + 1, : counts[b]], row.key[None], row.value[None], causal=True, window=window, key_mask=mask, backend="reference"
                    )  # fmt: skip
                    torch.testing.assert_close(output[b : b + 1, : counts[b]], expected, rtol=1e-5, atol=2e-6)
                torch.testing.assert_close(output[b, counts[b] :], torch.zeros_like(output[b, counts[b] :]), rtol=0, atol=0)

        @rule(which=st.integers(0, 3), n=st.integers(1, 5), ragged=st.booleans(), backend=st.sampled_from(backends), data=st.data())
        def appends(self, which: int, n: int, ragged: bool, backend: str, data: Any) -> None:
            at, cache, model = self.pair(which)
            counts = data.draw(st.lists(st.integers(0, n), min_size=ROWS, max_size=ROWS)) if ragged else None
            if max(len(row.key) + c for row, c in zip(model, counts or [n] * ROWS)) <= CAPACITY:
                self.append(at, cache, model, n, counts, backend)
                _happened("append", f"{'ragged' if ragged else 'alike'}, {backend}")

        @rule(which=st.integers(0, 3), backend=st.sampled_from(backends))
        def read(self, which: int, backend: str) -> None:
            _, cache, model = self.pair(which)
            assert [len(row.key) for row in model] == (cache.lengths.tolist() or [0] * ROWS)
            if cache.lengths.numel():
                query, options = self.query(1), self.mask(cache, model, 0)
                explain(query, cache=cache[0], causal=True, window=window, **options)
                self.check(attend(cache, query, backend=backend, **options), query, model, [1] * ROWS)
                _happened("read", backend)

        @rule(which=st.integers(0, 3), back=st.lists(st.integers(0, 6), min_size=ROWS, max_size=ROWS))
        def crop(self, which: int, back: list[int]) -> None:
            at, cache, model = self.pair(which)
            if not cache.lengths.numel():
                return
            lengths = [max(len(row.key) - n, row.peak - rollback, 0) for row, n in zip(model, back)]
            cache.crop(lengths)
            self.pairs[at] = (cache, [row.cut(n) for row, n in zip(model, lengths)])
            _happened("crop")

        @rule(which=st.integers(0, 3), indices=st.lists(st.integers(0, ROWS - 1), min_size=ROWS, max_size=ROWS))
        def reorder(self, which: int, indices: list[int]) -> None:
            at, cache, model = self.pair(which)
            if cache.lengths.numel():
                cache.reorder(torch.tensor(indices))
                self.pairs[at] = (cache, [model[i] for i in indices])
                _happened("reorder")

        @rule(which=st.integers(0, 3))
        def fork(self, which: int) -> None:
            _, cache, model = self.pair(which)
            self.pairs = (self.pairs + [(cache.fork(), list(model))])[-3:]
            _happened("fork")

        @rule(which=st.integers(0, 3), rows=st.sets(st.integers(0, ROWS - 1), min_size=1), free=st.booleans())
        def reset(self, which: int, rows: set[int], free: bool) -> None:
            at, cache, model = self.pair(which)
            if cache.lengths.numel():
                free = free and hasattr(cache, "free")
                (cache.free if free else cache.reset)(sorted(rows))
                self.pairs[at] = (cache, [self.row(0) if b in rows else row for b, row in enumerate(model)])
                _happened("free" if free else "reset")

        @rule(which=st.integers(0, 3), n=st.integers(1, 6), row=st.integers(0, ROWS - 1), wholly=st.booleans())
        def poison(self, which: int, n: int, row: int, wholly: bool) -> None:
            """A request full of NaN, then gone: whoever uses the room later must not find it."""
            at, cache, model = self.pair(which)
            length = len(model[row].key)
            if length + n > CAPACITY or (not wholly and length < max(model[row].peak, length + n) - rollback):
                return
            counts = [n if b == row else 0 for b in range(ROWS)]
            bad = torch.full((ROWS, n, KEY_HEADS, HEAD_DIM), float("nan"))
            poisoned = [old.then(self.row(n), c) for old, c in zip(model, counts)]
            attend(cache, self.query(n), bad, bad, query_lengths=counts, **self.mask(cache, poisoned, n))
            if wholly:
                cache.reset([row])
                model = [self.row(0) if b == row else old for b, old in enumerate(model)]
            else:
                cache.crop([len(old.key) for old in model])
                model = [bad.cut(len(old.key)) for old, bad in zip(model, poisoned)]
            self.pairs[at] = (cache, model)
            _happened("poison", "reset" if wholly else "crop")
            if max(len(old.key) for old in model) + n <= CAPACITY:
                # The others grow past that row, so that its room is among the slots that a kernel reads.
                self.append(at, cache, model, n, [1 if b == row else n for b in range(ROWS)])

        @rule(which=st.integers(0, 3), n=st.integers(1, 3))
        def fail(self, which: int, n: int) -> None:
            """A call that fails in its kernel leaves the cache as it was."""
            _, cache, model = self.pair(which)
            if max(len(row.key) for row in model) + n > CAPACITY:
                return
            bad = torch.full((ROWS, n, KEY_HEADS, HEAD_DIM), float("nan"))
            options = self.mask(cache, [row.then(self.row(n), n) for row in model], n)
            with _failing_backend() as name, pytest.raises(MemoryError):
                attend(cache, self.query(n), bad, bad, backend=name, **options)
            assert [len(row.key) for row in model] == (cache.lengths.tolist() or [0] * ROWS)
            _happened("failed call")

    class CacheSuite:
        machine = Machine

        def test_any_order_of_operations_equals_one_shot(self) -> None:
            # Each run starts a fresh machine class's settings, so that several suites may stand in one module.
            phases = [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain]  # as slow as the shrinking, and no help
            settings = hypothesis.settings(
                max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(hypothesis.HealthCheck), phases=phases
            )  # fmt: skip
            run_state_machine_as_test(Machine, settings=settings)

        # pytest then collects what `--hypothesis-show-statistics` shows.
        test_any_order_of_operations_equals_one_shot.is_hypothesis_test = True
        test_any_order_of_operations_equals_one_shot._hypothesis_internal_use_settings = hypothesis.settings()

        @pytest.mark.parametrize("how", ["crop", "reset"])
        def test_a_row_of_nan_that_is_gone_leaves_nothing(self, how: str) -> None:
            @hypothesis.settings(max_examples=1, database=None, deadline=None, phases=[hypothesis.Phase.generate])
            @hypothesis.given(st.just(how))
            def run(how: str) -> None:
                machine = Machine()
                machine.start(seed=0, padded=False, prompts=[4] * ROWS)
                machine.poison(which=0, n=min(3, rollback or 3), row=1, wholly=how == "reset" or not rollback)

            run()

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
