"""Few kinds of calls, for backends that compile for each: what is asked stays the same within a kind, values, lengths and rows differ."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence

import hypothesis
import torch
from hypothesis import strategies as st

from ..backend import Backend
from ..spec import Feature
from .cases import BLOCK, Case
from .strategies import IMPLIED, NOT_PACKED, SIZES, cases
from .tensors import checked
from .trial import fitted


class Kinds:
    """The kinds of calls that a backend's checks draw from: a plain one of each dtype, each claimed feature alone, and as many at once as the
    rules allow. With one kind a check, no feature alone."""

    def __init__(
        self, backend: Backend, device: str, dtypes: Sequence[torch.dtype], sizes: str, features: Collection[Feature], most: int
    ) -> None:
        """features: those that a call can ask for. most: kinds of one check that asks for something."""
        self.backend, self.device, self.dtypes, self.sizes, self.most = backend, device, dtypes, sizes, most
        self.features = [f for f in features if f in backend.claims.features]
        self._found: dict[Case, frozenset[Feature]] = {}

    def drawn(self, require: Collection[Feature], without: Collection[Feature]) -> st.SearchStrategy[Case]:
        """Calls of the kinds that ask for all of `require` and for nothing of `without`. Made when first drawn from, on the device."""
        return st.deferred(lambda: _varied(self._fitting(frozenset(require), frozenset(without)), self.sizes))

    def _fitting(self, require: frozenset[Feature], without: frozenset[Feature]) -> list[Case]:
        if not self._found:
            self._find()
        required = require.union(*(IMPLIED.get(f, ()) for f in require))
        fitting = [case for case, asks in self._found.items() if required <= asks and not asks & without - required]
        if not fitting:
            fitting = [self._draw(required, without, required)]
            self._add(fitting[0])
        return fitting[: self.most] if require else fitting

    def _find(self) -> None:
        every = frozenset(self.features)
        for n in range(len(self.dtypes)):
            self._add(self._draw((), every, (), n))
        for n, feature in enumerate(self.features if self.most > 1 else ()):
            alone = self._draw({feature}, every, {feature}, n)
            # Broadcast ones stand in the kinds that ask for more.
            self._add(alone.replace(mask=alone.mask and (True,) * 4, bias=alone.bias and (True,) * 4))
        left, n = list(self.features), 0
        while left:
            first = left[0]
            apart = {Feature.PACKED, Feature.PAGED} - {first} | (NOT_PACKED if first is Feature.PACKED else frozenset())
            together = self._draw(set(left) - apart, (), {first}, n)
            self._add(together)
            left = [f for f in left if f is not first and f not in self._found[together]]
            n += 1

    def _draw(self, require: Collection[Feature], without: Collection[Feature], keep: Collection[Feature], n: int = 0) -> Case:
        """A call of one dtype, the n-th. What the rules refuse beside `keep` is given up; where they refuse that too, as it was drawn."""
        dtype = self.dtypes[n % len(self.dtypes)]
        strategy = cases(
            self.backend.claims, device=self.device, dtypes=(dtype,), require=require, without={Feature.DROPOUT, *without},
            sizes=self.sizes, dense=True, nothing=False,
        )  # fmt: skip
        found: list[Case] = []
        settings = hypothesis.settings(
            max_examples=3, derandomize=True, database=None, deadline=None, phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        seed = zlib.crc32(" ".join(sorted(require)).encode()) + n
        hypothesis.seed(seed)(settings(hypothesis.given(case=strategy)(lambda case: found.append(case))))()
        return fitted(self.backend, found[-1], frozenset(keep)) or found[-1]

    def _add(self, case: Case) -> None:
        asks = set(checked(case).spec.features)
        self._found[case] = frozenset(asks | {Feature.LSE_GRADIENT} if case.lse_gradient else asks)


@st.composite
def _varied(draw: st.DrawFn, kinds: Sequence[Case], sizes: str) -> Case:
    """A call of one of the kinds, in one of its few sizes. From one to the next all that can change does: a compiler that makes sizes symbolic
    once they have changed then compiles a kind twice, and not once more for each that changes alone."""
    kind = draw(st.sampled_from(kinds))
    lengths, batches, _ = SIZES[sizes]
    places = [_like(size, known) for size, known in ((kind.batch, batches), (kind.query_length, lengths), (kind.key_length, lengths))]
    turn = draw(st.integers(0, max(map(len, places)) - 1))
    batch, query_length, key_length = (place[turn % len(place)] for place in places)
    if kind.page_size:
        key_length = kind.key_length + turn * (kind.page_size + 1)
    elif kind.key_length != kind.query_length:
        key_length += key_length == query_length
    return kind.replace(seed=draw(st.integers(0, 9999)), batch=batch, query_length=query_length, key_length=key_length)


def _like(size: int, known: Sequence[int]) -> list[int]:
    """The sizes that a kernel need not be compiled anew for, from this one or the first on: 1 stays 1, one block one block."""
    like = [n for n in known if n > 1 and (n <= BLOCK) == (size <= BLOCK)]
    if size <= 1 or not like:
        return [size]
    start = like.index(size) if size in like else 0
    return like[start:] + like[:start]
