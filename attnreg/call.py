"""The tensors and options of one call, checked once. Nonsense stops here; what passes has one meaning for every backend."""

from __future__ import annotations

import math
import os
import types
from collections.abc import Mapping
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import packing
from .spec import AttentionSpec

if TYPE_CHECKING:
    from .cache.protocol import LayerCache, Step

CHECK_DEVICE = os.environ.get("ATTNREG_CHECK", "") == "1"
"""Whether device-side assertions look at lengths and cu_seqlens on a GPU (they are always looked at on a CPU)."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Pages(NamedTuple):
    """Keys and values in pages: what a paged cache hands to a call in place of `key` and `value`."""

    keys: torch.Tensor
    """(pages, page_size, Hkv, D)"""
    values: torch.Tensor
    """(pages, page_size, Hkv, Dv)"""
    block_table: torch.Tensor
    """(B, n) int32: the page that holds slots `page_size * c` to `page_size * (c + 1) - 1` of row b."""


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
        if cache is None:
            self._set_tensors(query, key, value, n_heads, n_kv_heads, packed=cu_seqlens is not None)
        else:
            given = {"query_mask": query_mask, "key_mask": key_mask, "mask": mask, "bias": bias}
            self._check_cache(cache, key, value, key_lengths)
            self._append(cache, query, key, value, n_heads, n_kv_heads, query_lengths, window, given["key_mask"])
            key_mask, mask, bias = self._masks_over(given, cache)
        self.causal, self.finite_padding, self.return_lse = causal, finite_padding, return_lse
        if deterministic is not None and not isinstance(deterministic, bool):
            raise TypeError(f"deterministic: True, False, or None for torch's own switch, got {deterministic!r}")
        self.deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        self.layer = layer
        if layer is not None and not isinstance(layer, str):
            raise TypeError(f"layer: a layer's name, as in 'model.layers.3.self_attn', got {layer!r}")
        self._set_numbers(window, softcap, scale, dropout_p)
        self._set_masks(query_mask, key_mask, mask, bias)
        self._set_lengths(key_lengths, query_lengths, key_starts)
        self._set_head_terms(alibi_slopes, sinks)
        self._set_segments(cu_seqlens, max_seqlens)
        if cache is not None:
            self._set_finite()

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
            return self.pages.block_table.shape[1] * self.pages.keys.shape[1]
        return self.key.shape[1 if self.layout == "bshd" else 2]

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

    def to_layout(self, layout: str) -> None:
        """Turns query, key and value into the other layout, as views."""
        if layout != self.layout:
            self.query = self.query.transpose(1, 2)
            if self.pages is None:
                self.key, self.value = self.key.transpose(1, 2), self.value.transpose(1, 2)
            self.layout = layout

    def gather_pages(self) -> None:
        """Copies the pages of each row into key and value, for a kernel that reads no block table."""
        table = self.pages.block_table.long()
        key, value = (pool[table].flatten(1, 2) for pool in (self.pages.keys, self.pages.values))
        self.pages = None
        self.key, self.value = (key, value) if self.layout == "bshd" else (key.transpose(1, 2), value.transpose(1, 2))

    def examine_padding(self) -> None:
        """Finds the form of bare padding masks by looking at them: one copy to the host for each new mask tensor."""
        self.repeatable = False
        if self.query_mask is not None and self.query_padding is None:
            self.query_padding = packing.Padding.from_mask(self.query_mask)
        if self.key_mask is not None and self.key_padding is None:
            same = self.key_mask is self.query_mask
            self.key_padding = self.query_padding if same else packing.Padding.from_mask(self.key_mask)
        if not packing.known_to_fit(self):
            self.fits_packing = packing.found_to_fit(self)
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
            self.fits_packing or packing.known_to_fit(self),
            self.deterministic,
            compiling,
            cuda and not compiling and torch.cuda.is_current_stream_capturing(),
        )

    def _gradients(self) -> tuple[str, ...]:
        if not torch.is_grad_enabled():
            return ()
        tensors = {n: getattr(self, n) for n in ("query", "key", "value", "bias", "sinks", "alibi_slopes")}
        return tuple(name for name, tensor in tensors.items() if tensor is not None and tensor.requires_grad)

    # ------------------------------------------------------------------ a call with a cache

    def _check_cache(self, cache: Any, key: Any, value: Any, key_lengths: Any) -> None:
        if not hasattr(cache, "prepare"):
            how = "; give one layer of it, cache.layer(i)" if hasattr(cache, "layer") else ""
            raise TypeError(f"cache: one layer of a cache (attnreg.cache.LayerCache), got {type(cache).__name__}{how}")
        if key_lengths is not None:
            raise ValueError("key_lengths: not together with cache, which knows its rows' lengths; crop(lengths) shortens them")
        if (key is None) != (value is None):
            raise ValueError("key, value: both, to append; or both None, to attend without appending")

    def _append(
        self, cache: LayerCache, query: Any, key: Any, value: Any, n_heads: Any, n_kv_heads: Any, counts: Any, window: Any, key_mask: Any
    ) -> None:
        """Query, key and value as they will be once the new tokens are appended. Changes nothing: `step` remembers what to do."""
        bhsd = self.layout == "bhsd"
        mask = key_mask.mask if isinstance(key_mask, packing.Padding) else key_mask
        if key is not None:
            self._set_tensors(query, key, value, n_heads, n_kv_heads, packed=False)
            new = (self.key.transpose(1, 2), self.value.transpose(1, 2)) if bhsd else (self.key, self.value)
            step = cache.prepare(*new, counts, window, mask)
            query = self.query
        else:
            step = cache.prepare(None, None, None, window, mask)
        self.pages = step.pages
        if step.pages is None:
            key, value = (step.key.transpose(1, 2), step.value.transpose(1, 2)) if bhsd else (step.key, step.value)
            self.key, self.value = key, value
        else:
            self.key = self.value = None
            if query.dtype != step.pages.keys.dtype or query.shape[-1] != step.pages.keys.shape[-1]:
                raise ValueError(
                    f"query: dtype {step.pages.keys.dtype} and head dim {step.pages.keys.shape[-1]}, as in the cache, "
                    f"got {query.dtype} and {query.shape[-1]}"
                )
        if self.query is None:
            if query.dim() == 3 and n_heads is not None:
                query, self.shape_given = query.unflatten(2, (n_heads, -1)), "flat"
            self._set_tensors(query, self.key, self.value, None, None, packed=False)
        self._check_sizes(n_heads, n_kv_heads)
        self.step, self.cache, self.key_lengths, self.repeatable = step, cache, step.key_lengths, False
        if step.key_lengths is not None:
            self.lengths_given = {"key_lengths": step.key_lengths}

    def _masks_over(self, given: dict[str, Any], cache: LayerCache) -> tuple:
        """Masks and bias, which cover `step.slots`, cut or padded to the keys that the call sees."""
        slots, size = self.step.slots, self.key_length
        fitted = []
        for name in ("key_mask", "mask", "bias"):
            tensor = given[name]
            if tensor is None:
                fitted.append(tensor)
                continue
            padding = tensor if isinstance(tensor, packing.Padding) else None
            tensor = tensor if padding is None else padding.mask
            _check_tensor(name, tensor)
            width = tensor.shape[-1] if tensor.dim() else 0
            if name == "key_mask" and tuple(tensor.shape) != (self.batch, slots):
                raise ValueError(
                    f"key_mask: shape (B, cache.slots(n_new)) = {(self.batch, slots)}, past and new tokens, got {tuple(tensor.shape)}"
                )
            if name != "key_mask" and tensor.dim() == 4 and width not in (1, slots):
                raise ValueError(f"{name}: last dimension cache.slots(n_new) = {slots}, past and new tokens, or 1; got {width}")
            if slots > size and width == slots:
                tensor = tensor[..., :size]
            elif slots < size and width == slots:
                tensor = torch.nn.functional.pad(tensor, (0, size - slots))
            elif padding is not None:
                tensor = padding
            fitted.append(tensor)
        return tuple(fitted)

    def _set_finite(self) -> None:
        """What a cache hands over beyond its rows is finite, and padded queries are few: once they are clean, nothing else need be."""
        if self.finite_padding or self.key_mask is not None or self.key_starts is not None:
            return  # a slot that the caller hides may hold anything
        real = None if self.query_mask is None else self.query_mask
        if self.query_lengths is not None:
            inside = torch.arange(self.query_length, device=self.device)[None] < self.query_lengths[:, None]
            real = inside if real is None else real & inside
        if real is not None:
            self.query = self.query.masked_fill(~(real[:, :, None, None] if self.layout == "bshd" else real[:, None, :, None]), 0.0)
        self.finite_padding = True

    # ------------------------------------------------------------------ checks, one group of arguments each

    def _set_tensors(self, query: Any, key: Any, value: Any, n_heads: int | None, n_kv_heads: int | None, packed: bool) -> None:
        paged = self.pages is not None
        given = {"query": query} if paged else {"query": query, "key": key, "value": value}
        for name, tensor in given.items():
            _check_tensor(name, tensor)
            if tensor.dtype not in _DTYPES:
                raise TypeError(f"{name}: float16, bfloat16, float32 or float64, got {tensor.dtype}")
        if not paged:
            if not query.dim() == key.dim() == value.dim():
                raise ValueError(f"query, key, value: the same number of dimensions, got {query.dim()}, {key.dim()} and {value.dim()}")
            for name, tensor in (("key", key), ("value", value)):
                if tensor.device != query.device:
                    raise ValueError(f"{name}: on the query's device {query.device}, got {tensor.device}; move it there")
        for name, count in (("n_heads", n_heads), ("n_kv_heads", n_kv_heads)):
            if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
                raise TypeError(f"{name}: a whole number of heads, got {count!r}")
            if count is not None and count <= 0:
                raise ValueError(f"{name}: at least 1, got {count}")
        if query.dim() == 3:
            query, key, value = self._from_three_dims(query, key, value, n_heads, n_kv_heads, packed)
        elif query.dim() != 4:
            raise ValueError(
                f"query: (B, Sq, Hq, D), or flat (B, Sq, Hq*D) with n_heads, or packed rows (T, Hq, D) with cu_seqlens; got shape {tuple(query.shape)}"
            )
        if query.device.type != "meta" and torch.is_autocast_enabled(query.device.type):
            query, key, value = (_autocast(t) for t in (query, key, value))
            self.repeatable = False
        if not paged:
            for name, tensor in (("key", key), ("value", value)):
                if tensor.dtype != query.dtype:
                    raise TypeError(f"{name}: the query's dtype {query.dtype}, got {tensor.dtype}; convert one of them")
        self.query, self.key, self.value = query, key, value
        self._check_sizes(n_heads, n_kv_heads)

    def _from_three_dims(self, query: Any, key: Any, value: Any, n_heads: int | None, n_kv_heads: int | None, packed: bool) -> tuple:
        if self.layout != "bshd":
            raise ValueError(
                f"layout: 'bhsd' goes with 4-D tensors; flat and packed 3-D tensors have the heads last, got shape {tuple(query.shape)}"
            )
        if self.pages is not None:
            raise ValueError(f"query: 4-D (B, Sq, Hq, D) with a paged cache, got shape {tuple(query.shape)}")
        self.repeatable = False
        rows = packed and (n_heads is None or query.shape[0] != 1)
        if packed and not rows and query.shape[1] == n_heads:
            raise ValueError(
                f"query: shape {tuple(query.shape)} with cu_seqlens and n_heads={n_heads} could be packed rows (T, H, D) or flat (1, T, H*D); give a 4-D tensor"
            )
        if rows:
            self.shape_given = "packed rows"
            return tuple(t.unsqueeze(0) for t in (query, key, value))
        if n_heads is None:
            raise ValueError(
                f"query: 3-D tensors of shape {tuple(query.shape)} need n_heads (flat (B, Sq, Hq*D)) or cu_seqlens (packed rows (T, Hq, D)); "
                "a single sequence (S, H, D) is tensor.unsqueeze(0)"
            )
        self.shape_given = "flat"
        kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        split = []
        for name, tensor, heads in (("query", query, n_heads), ("key", key, kv_heads), ("value", value, kv_heads)):
            if tensor.shape[2] % heads:
                raise ValueError(
                    f"{name}: flat size {tensor.shape[2]} is not a multiple of {'n_heads' if name == 'query' else 'n_kv_heads'}={heads}; "
                    "for grouped heads give n_kv_heads"
                )
            split.append(tensor.unflatten(2, (heads, tensor.shape[2] // heads)))
        return tuple(split)

    def _check_sizes(self, n_heads: int | None, n_kv_heads: int | None) -> None:
        query, key, value = self.query, self.key, self.value
        heads, kv_heads, head_dim = self.query_heads, self.key_heads, self.head_dim
        if self.pages is None:
            if key.shape[0] != query.shape[0] or value.shape[0] != query.shape[0]:
                raise ValueError(f"key, value: the query's batch size {query.shape[0]}, got {key.shape[0]} and {value.shape[0]}")
            length, head = (1, 2) if self.layout == "bshd" else (2, 1)
            if key.shape[length] != value.shape[length]:
                raise ValueError(f"value: as many slots as key, {key.shape[length]}, got {value.shape[length]}")
            if key.shape[head] != value.shape[head]:
                raise ValueError(f"value: as many heads as key, {key.shape[head]}, got {value.shape[head]}")
            if key.shape[3] != head_dim:
                raise ValueError(f"key: the query's head dim {head_dim}, got {key.shape[3]}")
        if n_heads is not None and heads != n_heads:
            raise ValueError(f"n_heads: {n_heads}, but query has {heads} heads (layout {self.layout!r})")
        if n_kv_heads is not None and kv_heads != n_kv_heads:
            raise ValueError(f"n_kv_heads: {n_kv_heads}, but key has {kv_heads} heads (layout {self.layout!r})")
        if head_dim == 0 or self.value_dim == 0:
            raise ValueError(f"query, value: a head dim of at least 1, got {head_dim} and {self.value_dim}")
        if kv_heads == 0:
            raise ValueError("key: at least one head, got 0")
        if kv_heads > heads:
            raise ValueError(f"key: at most as many heads as query, {heads}, got {kv_heads} (layout {self.layout!r})")
        if heads % kv_heads:
            raise ValueError(f"key: a number of heads that divides the query's {heads}, got {kv_heads} (layout {self.layout!r})")

    def _set_numbers(self, window: Any, softcap: Any, scale: Any, dropout_p: Any) -> None:
        if window is not None:
            if isinstance(window, int):
                raise TypeError(
                    f"window: a pair (left, right) of slots besides the query's own, None for unlimited; got {window!r}. transformers, xformers and "
                    f"aten count the query itself: their window of W is (W - 1, 0) with causal=True"
                )
            if not isinstance(window, tuple) or len(window) != 2:
                raise TypeError(f"window: a pair (left, right), got {window!r}")
            for side in window:
                if side is not None and (isinstance(side, bool) or not isinstance(side, int)):
                    raise TypeError(f"window: whole numbers or None, got {window!r}")
                if side is not None and side < 0:
                    raise ValueError(f"window: no side below 0, got {window!r}; an unlimited side is None, not -1")
            # Under causal the right side says nothing more.
            left, right = window[0], None if self.causal else window[1]
            if left is not None or right is not None:
                self.window = (left, right)
        if softcap is not None:
            self.softcap = _positive("softcap", softcap, "; no cap is None")
        self.scale = 1.0 / math.sqrt(self.head_dim) if scale is None else _positive("scale", scale, "; the default is 1/sqrt(head dim)")
        if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
            raise TypeError(f"dropout_p: a number, got {dropout_p!r}")
        if not 0.0 <= dropout_p < 1.0:
            raise ValueError(f"dropout_p: at least 0 and below 1, got {dropout_p!r}")
        self.dropout_p = float(dropout_p)

    def _set_masks(self, query_mask: Any, key_mask: Any, mask: Any, bias: Any) -> None:
        for side, given, length in (("query", query_mask, self.query_length), ("key", key_mask, self.key_length)):
            if given is None:
                continue
            if isinstance(given, packing.Padding):
                setattr(self, f"{side}_padding", given)
                given = given.mask
                self.repeatable = False
            name, size = f"{side}_mask", "Sq" if side == "query" else "Sk"
            _check_bool(name, given)
            if tuple(given.shape) != (self.batch, length):
                raise ValueError(f"{name}: shape (B, {size}) = {(self.batch, length)}, got {tuple(given.shape)}")
            self._check_device(name, given)
            setattr(self, name, given)
        if mask is not None:
            _check_bool("mask", mask)
            self._check_broadcast("mask", mask)
            self.mask = mask
        if bias is not None:
            _check_tensor("bias", bias)
            if not bias.dtype.is_floating_point:
                raise TypeError(
                    f"bias: a floating tensor that is added to the scores, got {bias.dtype}; a bool tensor (True = may attend) is mask="
                )
            self._check_broadcast("bias", bias)
            self.bias = _autocast(bias) if self.device.type != "meta" and torch.is_autocast_enabled(self.device.type) else bias

    def _check_broadcast(self, name: str, tensor: torch.Tensor) -> None:
        whole = (self.batch, self.query_heads, self.query_length, self.key_length)
        if tensor.dim() != 4:
            raise ValueError(
                f"{name}: 4-D, each dimension that of (B, Hq, Sq, Sk) = {whole} or 1, got shape {tuple(tensor.shape)}; say which dimensions are "
                f"meant with {name}[:, None] or {name}[None, None]; a (B, Sk) padding mask is key_mask="
            )
        if any(n not in (1, m) for n, m in zip(tensor.shape, whole)):
            raise ValueError(f"{name}: each dimension that of (B, Hq, Sq, Sk) = {whole} or 1, got shape {tuple(tensor.shape)}")
        self._check_device(name, tensor)

    def _set_lengths(self, key_lengths: Any, query_lengths: Any, key_starts: Any) -> None:
        as_given: dict[str, torch.Tensor] = {}
        for name, given, size in (
            ("key_lengths", key_lengths, self.key_length),
            ("query_lengths", query_lengths, self.query_length),
            ("key_starts", key_starts, self.key_length),
        ):
            if given is None:
                continue
            if isinstance(given, (list, tuple)):
                if any(isinstance(n, (bool, float, str)) for n in given):
                    raise TypeError(f"{name}: whole numbers, one a row, got {given!r}")  # torch would cut fractions off
                given = torch.tensor(given, dtype=torch.int32)
            _check_tensor(name, given)
            as_given[name] = given
            if given.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{name}: an int32 or int64 tensor or a list of numbers, got {given.dtype}")
            if tuple(given.shape) != (self.batch,):
                raise ValueError(f"{name}: one number a row, shape (B,) = {(self.batch,)}, got {tuple(given.shape)}")
            if given.device.type == "cpu" and not torch.compiler.is_compiling():
                values = given.tolist()
                if any(not 0 <= n <= size for n in values):
                    raise ValueError(f"{name}: each between 0 and {size}, got {values}")
                given = given.to(self.device, non_blocking=True)
                self.repeatable = False
            else:
                self._check_device(name, given)
                if CHECK_DEVICE:
                    torch._assert_async(((given >= 0) & (given <= size)).all(), f"{name}: each between 0 and {size}")
                given = given.clamp(0, size)
                self.repeatable = False
            setattr(self, name, given)
        if as_given:
            self.lengths_given = as_given

    def _set_head_terms(self, alibi_slopes: Any, sinks: Any) -> None:
        heads = self.query_heads
        for name, given, shapes in (("alibi_slopes", alibi_slopes, ((heads,), (self.batch, heads))), ("sinks", sinks, ((heads,),))):
            if given is None:
                continue
            _check_tensor(name, given)
            if not given.dtype.is_floating_point:
                raise TypeError(f"{name}: a floating tensor, got {given.dtype}")
            if tuple(given.shape) not in shapes:
                raise ValueError(f"{name}: shape {' or '.join(map(str, shapes))}, one number a query head, got {tuple(given.shape)}")
            self._check_device(name, given)
            setattr(self, name, given)

    def _set_segments(self, cu_seqlens: Any, max_seqlens: Any) -> None:
        if cu_seqlens is None:
            if max_seqlens is not None:
                raise ValueError("max_seqlens: goes with cu_seqlens, which was not given")
            return
        others = ("query_mask", "key_mask", "key_lengths", "query_lengths", "key_starts")
        clash = [name for name in others if getattr(self, name) is not None]
        if clash:
            raise ValueError(f"cu_seqlens: not together with {', '.join(clash)}; packed rows have no padding to describe")
        if not isinstance(cu_seqlens, tuple) or len(cu_seqlens) != 2:
            raise TypeError("cu_seqlens: a pair (cu_q, cu_k) of cumulative starts; for self-attention give the same tensor twice")
        if self.batch != 1:
            raise ValueError(f"cu_seqlens: packed rows have batch size 1, or shape (T, H, D); got batch size {self.batch}")
        self.repeatable = False
        for name, cu, size in (("cu_seqlens[0]", cu_seqlens[0], self.query_length), ("cu_seqlens[1]", cu_seqlens[1], self.key_length)):
            _check_tensor(name, cu)
            if cu.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{name}: int32 or int64, got {cu.dtype}")
            if cu.dim() != 1 or cu.shape[0] < 1:
                raise ValueError(f"{name}: one dimension, (segments + 1,), got shape {tuple(cu.shape)}")
            self._check_device(name, cu)
            if torch.compiler.is_compiling() or cu.device.type != "cpu":
                if CHECK_DEVICE or cu.device.type == "cpu":
                    right = (cu[0] == 0) & (cu[1:] >= cu[:-1]).all() & (cu[-1] <= size)
                    torch._assert_async(right, f"{name}: starts at 0, never decreases, ends at or before {size}")
            else:
                starts = cu.tolist()
                if starts[0] != 0:
                    raise ValueError(f"{name}: starts at 0, got {starts}")
                if any(b < a for a, b in zip(starts, starts[1:])):
                    raise ValueError(f"{name}: never decreases, got {starts}")
                if starts[-1] > size:
                    raise ValueError(f"{name}: ends at or before the number of rows, {size}, got {starts}")
        if cu_seqlens[0].shape != cu_seqlens[1].shape:
            raise ValueError(
                f"cu_seqlens: as many segments for queries as for keys, got {cu_seqlens[0].shape[0] - 1} and {cu_seqlens[1].shape[0] - 1}"
            )
        if max_seqlens is not None:
            if (
                not isinstance(max_seqlens, tuple)
                or len(max_seqlens) != 2
                or any(isinstance(n, bool) or not isinstance(n, int) for n in max_seqlens)
            ):
                raise TypeError(f"max_seqlens: a pair of whole numbers (longest query segment, longest key segment), got {max_seqlens!r}")
            if any(n < 0 for n in max_seqlens):
                raise ValueError(f"max_seqlens: none below 0, got {max_seqlens!r}")
            self._check_longest(cu_seqlens, max_seqlens)
        self.cu_seqlens, self.max_seqlens = cu_seqlens, max_seqlens

    def _check_longest(self, cu_seqlens: tuple[torch.Tensor, torch.Tensor], max_seqlens: tuple[int, int]) -> None:
        """A maximum that is too small would leave rows unread: checked where the segments can be seen."""
        for side, cu, longest in (("query", cu_seqlens[0], max_seqlens[0]), ("key", cu_seqlens[1], max_seqlens[1])):
            if cu.shape[0] < 2:
                continue
            if cu.device.type == "cpu" and not torch.compiler.is_compiling():
                if int(cu.diff().max()) > longest:
                    raise ValueError(f"max_seqlens: the longest {side} segment has {int(cu.diff().max())} rows, got {longest}")
            elif CHECK_DEVICE:
                torch._assert_async((cu.diff() <= longest).all(), f"max_seqlens: a {side} segment is longer than {longest}")

    def _check_device(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.device != self.device:
            raise ValueError(f"{name}: on the query's device {self.device}, got {tensor.device}; move it there")


def spec_from(facts: tuple) -> AttentionSpec:
    """The spec of `AttentionCall.facts`: the device's index becomes its compute capability."""
    device, index, *rest = facts
    return AttentionSpec(device, None if index is None else divmod(_capability(index), 10), *rest)


def _capability(index: int) -> int:
    """Compute capability of a CUDA device as one number, 90 for 9.0; a constant to the compiler."""
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


_capability._dynamo_marked_constant = True


def _check_tensor(name: str, given: Any) -> None:
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{name}: a torch.Tensor, got {type(given).__name__}")
    if given.is_nested:
        raise TypeError(f"{name}: a dense tensor; nested tensors are not taken: give packed rows with cu_seqlens")
    if given.layout != torch.strided:
        raise TypeError(f"{name}: a dense tensor, got layout {given.layout}; use to_dense()")
    if type(given).__name__ == "DTensor":
        raise TypeError(f"{name}: a local tensor; distributed tensors are not taken: use to_local() or local_map")


def _check_bool(name: str, given: Any) -> None:
    _check_tensor(name, given)
    if given.dtype != torch.bool:
        how = (
            f"({name} != 0)"
            if not given.dtype.is_floating_point
            else f"({name} >= 0) if it holds 0 and -inf, ({name} != 0) if it holds ones for real tokens"
        )
        raise TypeError(
            f"{name}: a bool tensor, True = may be attended to (a real token), got {given.dtype}; convert it with {how}, or add it as bias="
        )


def _positive(name: str, given: Any, hint: str) -> float:
    if isinstance(given, torch.Tensor) or isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"{name}: a number, got {type(given).__name__}{hint}")
    if not (given > 0 and math.isfinite(given)):
        raise ValueError(f"{name}: above 0 and finite, got {given!r}{hint}")
    return float(given)


def _autocast(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """As torch does for its own attention: floating tensors but float64 become the autocast dtype."""
    if tensor is None or tensor.dtype == torch.float64 or not tensor.dtype.is_floating_point:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _aligned(tensor: torch.Tensor) -> bool:
    step = tensor.element_size()
    # Where a tensor starts, the compiler does not say.
    starts = torch.compiler.is_compiling() or tensor.data_ptr() % 16 == 0
    return starts and all(n * step % 16 == 0 for n in tensor.stride()[:-1])


def _bucket(size: int) -> int:
    return 1 << (size - 1).bit_length() if size > 0 else 0
