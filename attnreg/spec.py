"""What one attention call asks for, without its tensors: the facts by which a backend is chosen.

A spec holds facts, not lengths, so that a growing key cache keeps asking the same question. It is a plain tuple: hashable,
comparable and buildable from constants, which is what lets the compiler trace a call (see `attention.py`).
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch


class Feature(str, enum.Enum):
    """One thing that a call may ask for. A backend that does not claim it is rejected, never silently wrong."""

    CAUSAL = "causal"
    UNEQUAL_LENGTHS = "unequal_lengths"
    WINDOW = "window"
    QUERY_MASK = "query_mask"
    KEY_MASK = "key_mask"
    MASK = "mask"
    BIAS = "bias"
    KEY_LENGTHS = "key_lengths"
    QUERY_LENGTHS = "query_lengths"
    KEY_STARTS = "key_starts"
    PACKED = "packed"
    PAGED = "paged"
    ALIBI = "alibi"
    SOFTCAP = "softcap"
    SINKS = "sinks"
    SCALE = "scale"
    DROPOUT = "dropout"
    LSE = "lse"
    GROUPED_HEADS = "grouped_heads"
    VALUE_DIM = "value_dim"
    BACKWARD = "backward"
    BIAS_GRADIENT = "bias_gradient"
    SINKS_GRADIENT = "sinks_gradient"
    ALIBI_GRADIENT = "alibi_gradient"
    LSE_GRADIENT = "lse_gradient"
    COMPILE = "compile"
    CAPTURE = "capture"
    DETERMINISTIC = "deterministic"
    BATCH_INVARIANT = "batch_invariant"

    __str__ = str.__str__


class AttentionSpec(NamedTuple):
    """The tensor-free description of one call. Each field is a fact that some kernel somewhere cares about."""

    device: str
    """Device type of the query: "cpu", "cuda", ..."""
    capability: tuple[int, int] | None
    """Compute capability of a CUDA device, else None."""
    dtype: torch.dtype
    query_heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    equal_lengths: bool = True
    """Sq == Sk (for packed rows: the two cu_seqlens are the same tensor)."""
    single_query: bool = False
    """Sq == 1, or every packed segment is known to have at most one query."""
    zero_size: bool = False
    """Some size is 0: the result is known without a kernel."""
    causal: bool = False
    window: tuple[bool, bool] | None = None
    """Which of the sides (left, right) is limited; the right one never is under `causal`."""
    query_mask: str | None = None
    """Declared form of the query padding: "left", "right" or "any" (`packing.Padding`); None if there is none."""
    key_mask: str | None = None
    """Declared form of the key padding, likewise."""
    key_lengths: bool = False
    query_lengths: bool = False
    key_starts: bool = False
    packed: bool = False
    mask: tuple[bool, bool, bool, bool] | None = None
    """Which dimensions of `mask` are full (not broadcast from 1)."""
    bias: tuple[bool, bool, bool, bool] | None = None
    bias_dtype: torch.dtype | None = None
    huge_bias: bool = False
    """Beside gradients: the bias holds finite numbers beyond `call.HUGE`, or nobody could look."""
    alibi: str | None = None
    """ "heads" for slopes (Hq,), "rows" for (B, Hq)."""
    softcap: bool = False
    sinks: bool = False
    scale: bool = False
    """A scale other than 1/sqrt(head_dim)."""
    dropout: bool = False
    return_lse: bool = False
    finite_padding: bool = False
    gradients: tuple[str, ...] = ()
    """Names of the tensors that need a gradient."""
    unit_stride: bool = True
    """The last dimension of query, key and value has stride 1."""
    aligned: bool = True
    """Query, key and value start at, and step rows by, multiples of 16 bytes."""
    expanded: bool = False
    """Query, key or value has a stride of 0 (a broadcast view)."""
    sizes: tuple[int, int, int] | None = None
    """Eager mode only: batch, query length and key length, each rounded up to a power of two."""
    page_size: int = 0
    """Slots per page of a paged key cache; 0 when keys are dense."""
    padding_fits_packing: bool = False
    """Dropping the padded slots is known to give the same answer (contract, "Visibility")."""
    deterministic: bool = False
    compiling: bool = False
    capturing: bool = False

    @property
    def padded(self) -> bool:
        """Whether some slots or rows may hold padding, whose content must not matter."""
        return bool(self.query_mask or self.key_mask or self.key_lengths or self.query_lengths or self.key_starts or self.packed)

    @property
    def distances(self) -> bool:
        """Whether the answer depends on how far a key is from its query, so that dropping slots could change it."""
        return self.causal or self.window is not None or self.alibi is not None

    @property
    def features(self) -> tuple[Feature, ...]:
        """Everything this call asks for, in the order of `Feature`."""
        asked = {
            Feature.CAUSAL: self.causal,
            Feature.UNEQUAL_LENGTHS: self.distances and not self.equal_lengths,
            Feature.WINDOW: self.window is not None,
            Feature.QUERY_MASK: self.query_mask is not None,
            Feature.KEY_MASK: self.key_mask is not None,
            Feature.MASK: self.mask is not None,
            Feature.BIAS: self.bias is not None,
            Feature.KEY_LENGTHS: self.key_lengths,
            Feature.QUERY_LENGTHS: self.query_lengths,
            Feature.KEY_STARTS: self.key_starts,
            Feature.PACKED: self.packed,
            Feature.PAGED: self.page_size > 0,
            Feature.ALIBI: self.alibi is not None,
            Feature.SOFTCAP: self.softcap,
            Feature.SINKS: self.sinks,
            Feature.SCALE: self.scale,
            Feature.DROPOUT: self.dropout,
            Feature.LSE: self.return_lse,
            Feature.GROUPED_HEADS: self.key_heads != self.query_heads,
            Feature.VALUE_DIM: self.value_dim != self.head_dim,
            Feature.BACKWARD: bool(self.gradients),
            Feature.BIAS_GRADIENT: "bias" in self.gradients,
            Feature.SINKS_GRADIENT: "sinks" in self.gradients,
            Feature.ALIBI_GRADIENT: "alibi_slopes" in self.gradients,
            Feature.COMPILE: self.compiling,
            Feature.CAPTURE: self.capturing,
            Feature.DETERMINISTIC: self.deterministic,
        }
        return tuple(feature for feature, wanted in asked.items() if wanted)


def spec_from(facts: tuple) -> AttentionSpec:
    """The spec of `AttentionCall.facts`: the device's index becomes its compute capability."""
    device, index, *rest = facts
    return AttentionSpec(device, None if index is None else divmod(_capability(index), 10), *rest)


def _capability(index: int) -> int:
    """Compute capability of a CUDA device as one number, 90 for 9.0; a constant to the compiler."""
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


_capability._dynamo_marked_constant = True
