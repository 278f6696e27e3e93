"""The tensors and options of one call, checked once. Nonsense stops here; what passes has one meaning for every backend."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from operator import index
from typing import Any

import torch

from . import packing
from .cache.protocol import LayerCache, Pages, Step
from .cache.steps import check_cache, clean_queries, masks_over, take_step
from .checks.options import take_head_terms, take_lengths, take_masks, take_numbers
from .checks.segments import take_segments
from .checks.tensors import check_sizes, take_tensors
from .looked import Looked, readable
from .spec import AttentionSpec, spec_from

HUGE = 1e5
"""From this size on a bias wipes digits out of a row's lse that gradients need, where a kernel takes the weights from it. Scores that are as
large by query and key themselves do the same, and nobody looks at those."""
_huge: Looked[bool] = Looked()
known_to_be_huge = _huge.get
"""Whether a bias holds finite numbers beyond `HUGE`, as far as somebody has looked; None if not."""


class AttentionCall:
    """One call, validated. A backend reads this, and only this.

    `query` (B, Sq, Hq, D), `key` (B, Sk, Hkv, D) and `value` (B, Sk, Hkv, Dv) are in the layout named by `layout`; before a backend
    runs they are in the backend's own. Options keep their neutral value when not given; `scale` is always the number to use. Lengths
    and starts are (B,) tensors on the query's device, in range. Masks are bool; `query_padding` and `key_padding` carry their declared
    form. With `pages`, key and value are None.
    """

    # Neutral defaults live on the class, so that the repeated call sets only what it was given.
    layout: str = "bshd"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    query_mask: torch.Tensor | None = None
    key_mask: torch.Tensor | None = None
    query_padding: packing.Padding | None = None
    key_padding: packing.Padding | None = None
    mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    huge_bias: bool | None = None
    """`known_to_be_huge` of the bias."""
    key_lengths: torch.Tensor | None = None
    query_lengths: torch.Tensor | None = None
    key_starts: torch.Tensor | None = None
    cu_seqlens: tuple[torch.Tensor, torch.Tensor] | None = None
    max_seqlens: tuple[int, int] | None = None
    lengths_given: Mapping[str, torch.Tensor] = types.MappingProxyType({})
    """Lengths and starts as the caller's own tensors, by name: what is made once of them is known by their identity."""
    alibi_slopes: torch.Tensor | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    scale: float = 1.0
    dropout_p: float = 0.0
    finite_padding: bool = False
    return_lse: bool = False
    deterministic: bool = False
    pages: Pages | None = None
    cache: LayerCache | None = None
    step: Step | None = None
    """What the cache made of the new tokens; they are appended when the call runs."""
    query: torch.Tensor | None = None
    key: torch.Tensor | None = None
    value: torch.Tensor | None = None
    layer: str | None = None
    fits_packing: bool = False
    """Dropping padding was found, by looking, to change nothing."""
    shape_given: str = "4-D"
    repeatable: bool = True
    """Whether the same shapes and options always make the same call, so that what was checked need not be checked again."""
    _spec: AttentionSpec | None = None

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        *,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        query_mask: Any = None,
        key_mask: Any = None,
        mask: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        key_lengths: Any = None,
        query_lengths: Any = None,
        key_starts: Any = None,
        cu_seqlens: tuple[torch.Tensor, torch.Tensor] | None = None,
        max_seqlens: tuple[int, int] | None = None,
        alibi_slopes: torch.Tensor | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        scale: float | None = None,
        dropout_p: float = 0.0,
        finite_padding: bool = False,
        layout: str = "bshd",
        n_heads: int | None = None,
        n_kv_heads: int | None = None,
        return_lse: bool = False,
        deterministic: bool | None = None,
        layer: str | None = None,
        pages: Pages | None = None,
        cache: LayerCache | None = None,
    ) -> None:
        if layout not in ("bshd", "bhsd"):
            raise ValueError(f"layout: 'bshd' for (B, S, H, D) or 'bhsd' for (B, H, S, D), got {layout!r}")
        for name, flag in (("causal", causal), ("finite_padding", finite_padding), ("return_lse", return_lse)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name}: True or False, got {flag!r}")
        self.layout, self.pages = layout, pages
        if pages is not None and not (key is None and value is None):
            raise ValueError("pages: in the place of key and value; give None for both")
        if cache is None:
            given = {"query": query} if pages is not None else {"query": query, "key": key, "value": value}
            take_tensors(self, given, n_heads, n_kv_heads, packed=cu_seqlens is not None)
            check_sizes(self, n_heads, n_kv_heads)
        else:
            check_cache(cache, key, value, key_lengths)
            take_step(self, cache, query, key, value, n_heads, n_kv_heads, query_lengths, window, key_mask)
            key_mask, mask, bias = masks_over(self, {"key_mask": key_mask, "mask": mask, "bias": bias})
        self.causal, self.finite_padding, self.return_lse = causal, finite_padding, return_lse
        if deterministic is not None and not isinstance(deterministic, bool):
            raise TypeError(f"deterministic: True, False, or None for torch's own switch, got {deterministic!r}")
        self.deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        self.layer = layer
        if layer is not None and not isinstance(layer, str):
            raise TypeError(f"layer: a layer's name, as in 'model.layers.3.self_attn', got {layer!r}")
        take_numbers(self, window, softcap, scale, dropout_p)
        take_masks(self, query_mask, key_mask, mask, bias)
        take_lengths(self, key_lengths, query_lengths, key_starts)
        take_head_terms(self, alibi_slopes, sinks)
        take_segments(self, cu_seqlens, max_seqlens)
        if cache is not None:
            clean_queries(self)

    # ------------------------------------------------------------------ sizes, in whatever layout

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def query_length(self) -> int:
        return self.query.shape[1 if self.layout == "bshd" else 2]

    @property
    def key_length(self) -> int:
        if self.pages is not None:
            slots = self.pages.slots
            return self.pages.block_table.shape[1] * self.pages.keys.shape[1] if slots is None else slots
        return self.key.shape[1 if self.layout == "bshd" else 2]

    @property
    def key_ends(self) -> torch.Tensor:
        """Where each row's keys end, (B,) int32: `key_lengths`, else all slots."""
        if self.key_lengths is not None:
            return self.key_lengths.to(torch.int32)
        return torch.full((self.batch,), self.key_length, dtype=torch.int32, device=self.device)

    @property
    def query_heads(self) -> int:
        # index() makes the compiler take a symbolic size as the number that it is: heads and dims choose the kernel.
        return index(self.query.shape[2 if self.layout == "bshd" else 1])

    @property
    def key_heads(self) -> int:
        if self.pages is not None:
            return index(self.pages.keys.shape[2])
        return index(self.key.shape[2 if self.layout == "bshd" else 1])

    @property
    def head_dim(self) -> int:
        return index(self.query.shape[3])

    @property
    def value_dim(self) -> int:
        return index((self.value if self.pages is None else self.pages.values).shape[3])

    # ------------------------------------------------------------------ what the pipeline does with a call

    @property
    def spec(self) -> AttentionSpec:
        if self._spec is None:
            self._spec = spec_from(self.facts())
        return self._spec

    def replaced(self, **changes: Any) -> AttentionCall:
        """The same call with some attributes changed; nothing is checked again, and the spec is made anew."""
        new = object.__new__(AttentionCall)
        new.__dict__.update(self.__dict__)
        new._spec = None
        new.lengths_given = {name: given for name, given in self.lengths_given.items() if name not in changes}
        for name, value in changes.items():
            setattr(new, name, value)
        return new

    def see(self, cache: LayerCache, step: Step) -> None:
        """Takes the keys and values that a cache shows for this call."""
        self.cache, self.step, self.pages, self.key_lengths = cache, step, step.pages, step.key_lengths
        if step.key_lengths is not None:
            self.lengths_given = {"key_lengths": step.key_lengths}
        if step.pages is not None:
            self.key = self.value = None
        elif self.layout == "bhsd":
            self.key, self.value = step.key.transpose(1, 2), step.value.transpose(1, 2)
        else:
            self.key, self.value = step.key, step.value

    def to_layout(self, layout: str) -> None:
        """Turns query, key and value into the other layout, as views."""
        if layout != self.layout:
            self.query = self.query.transpose(1, 2)
            if self.pages is None:
                self.key, self.value = self.key.transpose(1, 2), self.value.transpose(1, 2)
            self.layout = layout

    def zeros(self) -> torch.Tensor:
        """The output where no query sees a key. Connected to the inputs, so that a backward pass finds zero gradients."""
        output = self.query.new_zeros((*self.query.shape[:3], self.value_dim))
        for tensor in (self.query, self.key, self.value, self.bias, self.sinks, self.alibi_slopes):
            if tensor is not None and tensor.requires_grad:
                output = output + tensor.masked_fill(torch.ones((), dtype=torch.bool, device=tensor.device), 0.0).sum().to(output.dtype)
        return output

    def gather_pages(self) -> None:
        """Lays the pages of each row one behind the other as key and value, for a kernel that reads no block table."""
        key, value = (self.pages.gathered(pool) for pool in (self.pages.keys, self.pages.values))
        self.pages = None
        self.key, self.value = (key, value) if self.layout == "bshd" else (key.transpose(1, 2), value.transpose(1, 2))

    def examine_padding(self) -> None:
        """Finds the form of bare padding masks by looking at them: one copy to the host for each new mask tensor. Where none can be read,
        they stay "any"."""
        masks = [mask for mask in (self.query_mask, self.key_mask) if mask is not None]
        if not all(map(readable, masks)):
            self.repeatable = False
            return
        if self.query_mask is not None and self.query_padding is None:
            self.query_padding = packing.Padding.from_mask(self.query_mask)
        if self.key_mask is not None and self.key_padding is None:
            same = self.key_mask is self.query_mask
            self.key_padding = self.query_padding if same else packing.Padding.from_mask(self.key_mask)
        if not packing.known_to_fit(self):
            self.fits_packing = packing.found_to_fit(self)
        # A mask that has to be looked at every time makes another call every time.
        self.repeatable = self.repeatable and not any(mask.is_inference() for mask in masks)
        self._spec = None

    def examine_bias(self) -> None:
        """Looks whether the bias holds huge finite numbers: one copy to the host for each new tensor. Where none can be read, it may."""
        if not readable(self.bias):
            self.repeatable = False
            return
        self.huge_bias = known_to_be_huge(self.bias)
        if self.huge_bias is None:
            bias = self.bias.detach()
            self.huge_bias = torch.finfo(bias.dtype).max > HUGE and bool(((bias.abs() > HUGE) & bias.isfinite()).any())
            _huge.keep(self.bias, self.huge_bias)
        # As with a mask: one that has to be looked at every time makes another call every time.
        self.repeatable = self.repeatable and not self.bias.is_inference()
        self._spec = None

    def facts(self) -> tuple:
        """The spec's fields as constants, in order, with the device in place of its capability. Traceable by the compiler."""
        compiling = torch.compiler.is_compiling()
        query, key, value = self.query, self.key, self.value
        if self.pages is not None:
            key, value = self.pages.keys, self.pages.values
        cuda = query.device.type == "cuda"
        batch, query_length, key_length = self.batch, self.query_length, self.key_length
        if self.cu_seqlens is not None:
            equal = self.cu_seqlens[0] is self.cu_seqlens[1]
            single = self.max_seqlens is not None and self.max_seqlens[0] <= 1
        else:
            equal = query_length == key_length and self.key_lengths is None and self.query_lengths is None
            single = query_length == 1
        zero = batch == 0 or query_length == 0 or key_length == 0 or self.query_heads == 0 or self.value_dim == 0
        zero = zero or (self.cu_seqlens is not None and self.cu_seqlens[0].shape[0] < 2)
        aligned, expanded = True, False
        if cuda:
            aligned = all(_aligned(t) for t in (query, key, value))
        if cuda and not compiling:
            expanded = any(0 in t.stride() for t in (query, key, value))
        unit = query.stride(-1) == 1 and key.stride(-1) == 1 and value.stride(-1) == 1
        full = {
            name: None if t is None else tuple(True if n != 1 else False for n in t.shape)
            for name, t in (("mask", self.mask), ("bias", self.bias))
        }
        # A comparison of symbolic sizes is itself symbolic; "True if ... else False" makes the compiler decide, and guard.
        return (
            query.device.type,
            (query.device.index or 0) if cuda else None,
            query.dtype,
            self.query_heads,
            self.key_heads,
            self.head_dim,
            self.value_dim,
            True if equal else False,
            True if single else False,
            True if zero else False,
            self.causal,
            None if self.window is None else (self.window[0] is not None, self.window[1] is not None),
            None if self.query_mask is None else "any" if self.query_padding is None else self.query_padding.form,
            None if self.key_mask is None else "any" if self.key_padding is None else self.key_padding.form,
            self.key_lengths is not None,
            self.query_lengths is not None,
            self.key_starts is not None,
            self.cu_seqlens is not None,
            full["mask"],
            full["bias"],
            None if self.bias is None else self.bias.dtype,
            self._bias_may_be_huge(),
            None if self.alibi_slopes is None else "heads" if self.alibi_slopes.dim() == 1 else "rows",
            self.softcap is not None,
            self.sinks is not None,
            True if self.head_dim and self.scale != 1.0 / math.sqrt(self.head_dim) else False,
            True if self.dropout_p > 0.0 else False,
            self.return_lse,
            self.finite_padding,
            self._gradients(),
            True if unit else False,
            aligned,
            expanded,
            None if compiling else (_bucket(batch), _bucket(query_length), _bucket(key_length)),
            0 if self.pages is None else self.pages.keys.shape[1],
            True if self.fits_packing or packing.known_to_fit(self) else False,
            self.deterministic,
            compiling,
            cuda and not compiling and torch.cuda.is_current_stream_capturing(),
        )

    def _bias_may_be_huge(self) -> bool:
        """Matters beside gradients only. What nobody has looked at may be; what has no values is taken for an ordinary one."""
        if self.bias is None or self.huge_bias is False or self.device.type == "meta":
            return False
        return len(self._gradients()) > 0

    def _gradients(self) -> tuple[str, ...]:
        if not torch.is_grad_enabled():
            return ()
        tensors = {n: getattr(self, n) for n in ("query", "key", "value", "bias", "sinks", "alibi_slopes")}
        return tuple(name for name, tensor in tensors.items() if tensor is not None and tensor.requires_grad)


def _aligned(tensor: torch.Tensor) -> bool:
    step = tensor.element_size()
    # Where a tensor starts, the compiler does not say.
    starts = torch.compiler.is_compiling() or tensor.data_ptr() % 16 == 0
    return starts and all(n * step % 16 == 0 for n in tensor.stride()[:-1])


def _bucket(size: int) -> int:
    return 1 << (size - 1).bit_length() if size > 0 else 0
