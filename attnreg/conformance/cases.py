"""One drawn call as a line of plain data: what a strategy draws, a failure prints, and `reproduce` reads back."""

from __future__ import annotations

import ast
import dataclasses
from dataclasses import dataclass
from typing import Any

from ..spec import Feature

Pattern = tuple[bool, bool, bool, bool]
BLOCK = 128
"""Kernels may be compiled anew for a single row, for lengths of one block and for longer ones."""


@dataclass(frozen=True)
class Case:
    """A call without its tensors: sizes, forms, and a seed from which every value is made. Defaults ask for nothing.

    Small integers and words only, so that Hypothesis draws it fast and shrinks it well.
    """

    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    batch: int = 1
    query_length: int = 1
    key_length: int = 1
    key_heads: int = 1
    group: int = 1
    """Query heads per key head."""
    head_dim: int = 8
    value_dim: int = 8
    form: str = "bshd"
    """How the tensors are given: "bshd", "bhsd", "flat", or, if packed, "rows"."""
    strides: str = "contiguous"
    """How they lie in memory: "contiguous", "transposed", "sliced", "expanded" (stride 0) or "spread" (last stride 2)."""
    peaked: bool = False
    """Large scores, so that few keys take all the weight."""
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    query_mask: str | None = None
    """Where the padding is: "left", "right", "any", or "keys" for the very mask of the keys."""
    key_mask: str | None = None
    declared: bool = False
    """Masks are given as `Padding`, not as bool tensors."""
    mask: Pattern | None = None
    """Which dimensions are full, the others broadcast."""
    bias: Pattern | None = None
    wide_bias: bool = False
    """float32, whatever the query is."""
    holes: bool = False
    """Some of the bias is -inf, and some rows of mask and bias are wholly hidden."""
    key_lengths: bool = False
    query_lengths: bool = False
    key_starts: bool = False
    page_size: int = 0
    """Slots in a page of a cache that is read; 0 means that key and value are given. Lengths of keys are then the cache's."""
    listed: bool = False
    """Lengths and starts are lists of numbers, not tensors."""
    segments: int = 0
    """Packed rows: how many segments; 0 means not packed."""
    same_segments: bool = False
    """One cu_seqlens tensor for queries and keys."""
    tail: int = 0
    """Rows past the last segment."""
    max_seqlens: bool = False
    alibi: str | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    dropout: float = 0.0
    finite_padding: bool = False
    lse: bool = False
    lse_gradient: bool = False
    deterministic: bool = False
    gradients: tuple[str, ...] = ()

    @property
    def query_heads(self) -> int:
        return self.key_heads * self.group

    def replace(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)

    def without(self, feature: Feature) -> Case:
        """The nearest case that does not ask for a feature."""
        gradients = self.gradients
        if feature in _GRADIENT_OF:
            return self.replace(gradients=tuple(name for name in gradients if name != _GRADIENT_OF[feature]))
        if feature in _TENSOR_OF:
            self = self.replace(gradients=tuple(name for name in gradients if name != _TENSOR_OF[feature]))
        if feature is Feature.KEY_MASK and self.query_mask == "keys":
            self = self.replace(query_mask=None)
        if feature is Feature.UNEQUAL_LENGTHS:
            size = self.query_length
            return self.replace(key_length=size, key_lengths=False, query_lengths=False, same_segments=True, tail=min(self.tail, size))
        if feature is Feature.VALUE_DIM:
            return self.replace(value_dim=self.head_dim)
        return self.replace(**_NEUTRAL.get(feature, {}))

    @property
    def kind(self) -> Case:
        """The case less what a kernel need not be compiled for: values, rows, and lengths but for their class."""

        def like(length: int) -> int:
            return min(length, 2) if length <= BLOCK else 2 * BLOCK

        query_length, key_length = like(self.query_length), like(self.key_length)
        key_length += self.key_length != self.query_length and key_length == query_length
        return self.replace(seed=0, batch=min(self.batch, 2), query_length=query_length, key_length=key_length)

    def __str__(self) -> str:
        """Everything that is not the default, as `name=value` words."""
        given = ((f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self))
        return " ".join(f"{name}={value!r}".replace(" ", "") for name, value, default in given if value != default)

    @classmethod
    def read(cls, text: str) -> Case:
        """The case of a printed line. Raises ValueError for a word that is none."""
        changes = {}
        for word in text.split():
            name, equals, value = word.partition("=")
            if not equals or name not in cls.__dataclass_fields__:
                raise ValueError(f"example: words like batch=2, got {word!r}; the names are {', '.join(cls.__dataclass_fields__)}")
            changes[name] = ast.literal_eval(value)
        return cls(**changes)


_GRADIENT_OF = {Feature.BIAS_GRADIENT: "bias", Feature.SINKS_GRADIENT: "sinks", Feature.ALIBI_GRADIENT: "alibi_slopes"}
_TENSOR_OF = {Feature.BIAS: "bias", Feature.SINKS: "sinks", Feature.ALIBI: "alibi_slopes"}
_NEUTRAL: dict[Feature, dict[str, Any]] = {
    Feature.CAUSAL: {"causal": False},
    Feature.WINDOW: {"window": None},
    Feature.QUERY_MASK: {"query_mask": None},
    Feature.KEY_MASK: {"key_mask": None},
    Feature.MASK: {"mask": None},
    Feature.BIAS: {"bias": None},
    Feature.KEY_LENGTHS: {"key_lengths": False},
    Feature.QUERY_LENGTHS: {"query_lengths": False},
    Feature.KEY_STARTS: {"key_starts": False},
    Feature.PACKED: {"segments": 0, "tail": 0, "same_segments": False, "max_seqlens": False, "form": "bshd"},
    Feature.PAGED: {"page_size": 0},
    Feature.ALIBI: {"alibi": None},
    Feature.SOFTCAP: {"softcap": None},
    Feature.SINKS: {"sinks": False},
    Feature.SCALE: {"scale": None},
    Feature.DROPOUT: {"dropout": 0.0},
    Feature.LSE: {"lse": False, "lse_gradient": False},
    Feature.GROUPED_HEADS: {"group": 1},
    Feature.BACKWARD: {"gradients": (), "lse_gradient": False},
    Feature.LSE_GRADIENT: {"lse_gradient": False},
    Feature.DETERMINISTIC: {"deterministic": False},
}
