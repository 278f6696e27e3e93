"""Padding in declared form, and the ways between padded batches, documents in one row, and packed rows.

A kernel that drops padding ("varlen") needs to know where the padding is. Reading that from a mask on a device costs a copy to
the host; `Padding` carries it from the place where it is known, the tokenizer's lengths, so that nobody has to look.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import visibility
from .capabilities import Reason
from .checks.numbers import whole_number, whole_numbers, whole_tensor
from .looked import Looked, readable, transforming
from .spec import AttentionSpec, Feature

if TYPE_CHECKING:
    from .call import AttentionCall

FORMS = ("left", "right", "any")


class Packed(NamedTuple):
    """Where the real tokens of a padded batch are, for kernels that take them packed."""

    indices: torch.Tensor
    """(T,) int64: position of each real token in the flattened (B * S) batch, rows in order."""
    cu_seqlens: torch.Tensor
    """(B + 1,) int32: where each row starts among the packed tokens."""
    max_seqlen: int
    """The longest row, in tokens; an upper bound where the lengths are only known to the device."""


class Padding:
    """Which slots of a batch hold real tokens, in declared form. Accepted wherever `key_mask` or `query_mask` is.

    form: "left" (real tokens at the end of each row), "right" (at its start) or "any".
    mask: (B, S) bool, True for a real token.
    lengths: (B,) int32, the number of real tokens in each row, on the mask's device.
    host_lengths: the same as Python numbers, where the host knows them.

    What is declared is compared with the mask where the host can read it, on a CPU; on a device it is the caller's word. The mask stays as it
    is: after a change in place, of a tensor that it shares memory with too, a call raises ValueError.
    """

    def __init__(
        self, mask: torch.Tensor, form: str, lengths: torch.Tensor | None = None, host_lengths: tuple[int, ...] | None = None
    ) -> None:
        if form not in FORMS:
            raise ValueError(f"form: one of {', '.join(FORMS)}, got {form!r}")
        _check_mask(mask)
        _check_lengths(mask, lengths, host_lengths)
        if mask.device.type == "cpu" and readable(mask) and not transforming():
            _check_claims(mask, form, lengths, host_lengths)
        self.mask = mask
        self.form = form
        self.lengths = mask.sum(1, dtype=torch.int32) if lengths is None else lengths
        self.host_lengths = host_lengths
        self.fits: dict = {}
        self.runs: dict = {}
        self._packed: Packed | None = None
        self._bounds: tuple[torch.Tensor, torch.Tensor] | None = None
        # Of a mask made under inference_mode no change can be seen, nor while the compiler traces.
        self._version = None if torch.compiler.is_compiling() or mask.is_inference() else mask._version

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int] | torch.Tensor, size: int, side: str = "right", device: torch.device | str | None = None
    ) -> Padding:
        """Rows of `lengths[b]` real tokens, padded to `size` on one side. No device is read: give Python numbers to spare every copy.

        Raises ValueError when a length known to the host is below 0 or above `size`; lengths on a device are clamped there.
        """
        if side not in ("left", "right"):
            raise ValueError(f"side: 'left' or 'right', the side on which the padding stands, got {side!r}")
        host, size = None, whole_number("size", size)
        if not isinstance(lengths, torch.Tensor) or lengths.device.type == "cpu":
            host = tuple(whole_numbers("lengths", lengths))
            if any(not 0 <= n <= size for n in host):
                raise ValueError(f"lengths: each between 0 and size={size}, got {list(host)}")
            count = torch.tensor(host, dtype=torch.int32, device="cpu").to(device or "cpu", non_blocking=True)
        else:
            count = whole_tensor("lengths", lengths).to(device or lengths.device, torch.int32).clamp(0, size)
        slot = torch.arange(size, device=count.device)[None]
        mask = slot < count[:, None] if side == "right" else slot >= size - count[:, None]
        return cls(mask, side, count, host)

    @classmethod
    def from_mask(cls, mask: torch.Tensor) -> Padding:
        """Looks at a (B, S) bool mask, True = a real token, and finds its form. On a device this is one copy to the host.

        The same mask tensor, unchanged, is looked at once: the answer is kept as long as the tensor lives.
        """
        _check_mask(mask)
        found = known(mask)
        if found is not None:
            return found
        with to_be_kept():
            lengths = mask.sum(1, dtype=torch.int32)
        # A row padded on the right never goes from padding to a real token, one padded on the left never the other way.
        before, after = mask[:, :-1], mask[:, 1:]
        begins, ends = (before < after).any(), (before > after).any()
        # One copy for everything that the host wants to know.
        begins, ends, *host = torch.cat([begins[None].int(), ends[None].int(), lengths]).tolist()
        form = "right" if not begins else "left" if not ends else "any"
        # The padding holds an alias of the mask, so that what is remembered does not keep the tensor alive.
        padding = cls(mask.detach(), form, lengths, tuple(host))
        _examined.keep(mask, padding)
        return padding

    @property
    def shape(self) -> torch.Size:
        return self.mask.shape

    @property
    def packed(self) -> Packed:
        """Indices and cu_seqlens of the real tokens; computed once. Needs no host copy when `host_lengths` is known."""
        packed = self._packed
        if packed is None:
            total = None if self.host_lengths is None else sum(self.host_lengths)
            with to_be_kept():
                flat = self.mask.reshape(-1)
                if total is None:
                    indices = flat.nonzero().flatten()
                else:
                    indices = torch.nonzero_static(flat, size=total).flatten()
                cu = torch.nn.functional.pad(self.lengths.cumsum(0, dtype=torch.int32), (1, 0))
            longest = self.mask.shape[1] if self.host_lengths is None else max(self.host_lengths, default=0)
            packed = Packed(indices, cu, longest)
            if not transforming():
                self._packed = packed
        return packed

    @property
    def bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots where each row's real tokens start and end, (B,) int32 each; computed once. For the forms "left" and "right"."""
        bounds = self._bounds
        if bounds is None:
            size = self.mask.shape[1]
            with to_be_kept():
                lengths = self.lengths.to(torch.int32)
                if self.form == "left":
                    bounds = size - lengths, torch.full_like(lengths, size)
                else:
                    bounds = torch.zeros_like(lengths), lengths
            if not transforming():
                self._bounds = bounds
        return bounds

    def __reduce__(self) -> tuple:
        """For copies and pickles, made anew: the mask's copy counts its own changes, and what was found is told apart by ids."""
        known(self)  # one that is refused has no copy that is not
        return type(self), (self.mask, self.form, self.lengths, self.host_lengths)

    def __repr__(self) -> str:
        return f"Padding(form={self.form!r}, shape={tuple(self.shape)}, lengths={self.host_lengths or 'on ' + str(self.mask.device)})"


def to_be_kept() -> AbstractContextManager:
    """For tensors that later calls use too, perhaps with gradients: one made under inference_mode can't be saved for a backward pass."""
    usual = torch.compiler.is_compiling() or not torch.is_inference_mode_enabled()
    return nullcontext() if usual else torch.inference_mode(False)


def _check_mask(mask: Any) -> None:
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"mask: a (B, S) bool tensor, True = a real token, got {type(mask).__name__}")
    if mask.dtype != torch.bool or mask.dim() != 2:
        raise TypeError(f"mask: a (B, S) bool tensor, True = a real token, got {mask.dtype} of shape {tuple(mask.shape)}; use mask.bool()")


def _check_lengths(mask: torch.Tensor, lengths: Any, host_lengths: Any) -> None:
    rows = mask.shape[0]
    if host_lengths is not None and len(whole_numbers("host_lengths", host_lengths)) != rows:
        raise ValueError(f"host_lengths: one number for each of the mask's {rows} rows, got {host_lengths}")
    if lengths is None:
        return
    if not isinstance(lengths, torch.Tensor):
        raise TypeError(f"lengths: a (B,) tensor of integers, got {type(lengths).__name__}; Padding.from_lengths takes Python numbers")
    if lengths.dtype.is_floating_point or lengths.dtype.is_complex or lengths.dtype == torch.bool:
        raise TypeError(f"lengths: a (B,) tensor of integers, got {lengths.dtype}")
    if tuple(lengths.shape) != (rows,) or lengths.device != mask.device:
        raise ValueError(f"lengths: ({rows},) on {mask.device}, as the mask, got {tuple(lengths.shape)} on {lengths.device}")


def _check_claims(mask: torch.Tensor, form: str, lengths: torch.Tensor | None, host_lengths: tuple[int, ...] | None) -> None:
    real = mask.sum(1).tolist()
    for name, given in (("lengths", lengths), ("host_lengths", host_lengths)):
        if given is not None and (found := whole_numbers(name, given)) != real:
            raise ValueError(f"{name}: the number of real tokens in each row of the mask, {real}, got {found}")
    before, after = mask[:, :-1], mask[:, 1:]
    fits = {"left": not (before > after).any(), "right": not (before < after).any(), "any": True}
    if not fits[form]:
        allowed = " or ".join(repr(name) for name in FORMS if fits[name])
        raise ValueError(f"form: {allowed} for this mask, got {form!r}; Padding.from_mask finds it")


_examined: Looked[Padding] = Looked()


def known(mask: Any) -> Padding | None:
    """What is known of a padding mask without looking at it: a declared form, or what was found in this tensor before."""
    if isinstance(mask, Padding):
        if not torch.compiler.is_compiling() and mask._version is not None and mask._version != mask.mask._version:
            raise ValueError(
                f"query_mask, key_mask: a Padding whose mask is as it was made, got {mask!r}, whose mask was changed in place; make a new one"
            )
        return mask
    return _examined.get(mask)


KEPT = 32
"""Partners of a padding whose answers it keeps: a mask of keys that lives long meets new masks of queries all the time."""


def keep(kept: dict, question: tuple, answer: tuple) -> None:
    """Remembers an answer; all are forgotten first where there are many."""
    if len(kept) >= KEPT:
        kept.clear()
    kept[question] = answer


def pack(tensor: torch.Tensor, packed: Packed) -> torch.Tensor:
    """The real tokens of (B, S, ...) as (T, ...)."""
    return tensor.flatten(0, 1).index_select(0, packed.indices)


def unpack(rows: torch.Tensor, packed: Packed, batch: int, size: int) -> torch.Tensor:
    """(T, ...) packed tokens back to (B, S, ...), zeros at padding."""
    whole = rows.new_zeros((batch * size, *rows.shape[1:]))
    return whole.index_copy(0, packed.indices, rows).unflatten(0, (batch, size))


def fits_packing(real_queries: torch.Tensor, real_keys: torch.Tensor, slots: torch.Tensor, *, holes_matter: bool) -> torch.Tensor:
    """Whether dropping the padded slots keeps every distance and every diagonal: what the contract's "Visibility" asks of it.

    real_queries (B, Sq), real_keys (B, Sk) bool; slots (B or 1, Sq) int64, the slot of each query; returns a bool scalar, on the device.
    """
    batch, size = real_keys.shape
    seen = torch.nn.functional.pad(real_keys.long().cumsum(1), (1, 0))
    upto = seen.gather(1, (slots.expand(batch, -1) + 1).clamp(0, size))
    index = real_queries.long().cumsum(1) - 1
    wanted = index + 1 + (real_keys.sum(1) - real_queries.sum(1))[:, None]
    # A query whose diagonal lies before the first real key is empty either way, unless the compacted one would see something.
    right = (upto == wanted) | ~real_queries | ((upto == 0) & (wanted <= 0))
    fits = right.all()
    if holes_matter:
        first = real_keys.long().argmax(1)
        last = size - 1 - real_keys.flip(1).long().argmax(1)
        span = torch.where(real_keys.any(1), last - first + 1, 0)
        fits = fits & (span == real_keys.sum(1)).all()
        # Distances stay only if the query keeps its own to the first real key; one that sits in padding behind the last key does not.
        same = (wanted == slots - first[:, None] + 1) | ~real_queries | ~real_keys.any(1)[:, None]
        fits = fits & same.all()
    return fits


def cu_seqlens_from_lengths(lengths: Sequence[int] | torch.Tensor, device: torch.device | str | None = None) -> torch.Tensor:
    """Cumulative starts of consecutive segments: [3, 1, 2] -> [0, 3, 4, 6], int32."""
    if isinstance(lengths, torch.Tensor):
        lengths = whole_tensor("lengths", lengths).to(torch.int32)
    else:
        lengths = torch.tensor(whole_numbers("lengths", lengths), dtype=torch.int32, device="cpu")
    if lengths.device.type == "cpu" and bool((lengths < 0).any()):
        raise ValueError(f"lengths: none below 0, got {lengths.tolist()}")
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)).to(device or lengths.device)


def cu_seqlens_from_documents(document_ids: torch.Tensor) -> torch.Tensor:
    """Segments from document ids (S,) or (B, S): a new segment wherever the id changes, and at every row's start.

    Rows are laid one behind the other, so equal ids at the end of one row and the start of the next are not merged. A negative id is
    padding; it may stand only at the end of the last row, since packed rows have no gaps. Reads the ids on the host.
    """
    rows = _rows_of_numbers("document_ids", document_ids)
    starts, total = [], 0
    flat = [n for row in rows for n in row]
    real = len(flat)
    while real and flat[real - 1] < 0:
        real -= 1
    if any(n < 0 for n in flat[:real]):
        raise ValueError(
            "document_ids: negative ids are padding and may stand only at the end of the last row; pack the real tokens together first"
        )
    for row in rows:
        for column, number in enumerate(row):
            if total < real and (column == 0 or number != row[column - 1]):
                starts.append(total)
            total += 1
    return torch.tensor([*starts, real], dtype=torch.int32, device=document_ids.device)


def cu_seqlens_from_positions(position_ids: torch.Tensor, lengths: Sequence[int] | None = None) -> torch.Tensor:
    """Segments from position ids (S,) or (B, S): a segment starts at every row's start and at every 0.

    Zeros at the very end, behind a segment that counted up, can mean padding or documents of one token: no rule can tell, so they are
    taken as *one* padded segment at the end, as training frameworks do. Give `lengths` to say it exactly. Reads the ids on the host.
    """
    if lengths is not None:
        cu = cu_seqlens_from_lengths(lengths, position_ids.device)
        if int(cu[-1]) > position_ids.numel():
            raise ValueError(f"lengths: sum to {int(cu[-1])}, but there are {position_ids.numel()} positions")
        return cu
    rows = _rows_of_numbers("position_ids", position_ids)
    starts, total = [], 0
    for row in rows:
        tail = len(row)
        while tail > 1 and row[tail - 1] == 0 and row[tail - 2] == 0:
            tail -= 1
        for column, position in enumerate(row):
            if column == 0 or (position == 0 and column < tail):
                starts.append(total)
            total += 1
    return torch.tensor([*starts, total], dtype=torch.int32, device=position_ids.device)


def _rows_of_numbers(name: str, ids: torch.Tensor) -> list[list[int]]:
    """(S,) or (B, S) whole numbers, on the host."""
    whole_tensor(name, ids.flatten())
    if ids.dim() not in (1, 2):
        raise ValueError(f"{name}: shape (S,) or (B, S), got {tuple(ids.shape)}")
    return ids.tolist() if ids.dim() == 2 else [ids.tolist()]


def known_to_fit(call: AttentionCall) -> bool:
    """Whether dropping the padded slots of this call is known to change nothing, from declared forms alone. No device is read.

    The cases, with n real of Sk keys and m real of Sq queries in a row (the query at slot i + Sk - Sq must count i' + 1 + n - m real
    keys at or before it, i' its index among the real queries): without distances, always; lengths and starts alone, always, since they
    move the diagonal themselves; keys padded on the left, with queries unpadded or padded on the left; keys padded on the right with
    the same padding for the queries, or with one unpadded query at the end.
    """
    query, key = call.query_padding, call.key_padding
    if not (call.causal or call.window is not None or call.alibi_slopes is not None):
        return True
    if call.query_mask is None and call.key_mask is None:
        return True
    if call.key_lengths is not None or call.query_lengths is not None or call.key_starts is not None:
        return False
    query_form = "none" if call.query_mask is None else "any" if query is None else query.form
    key_form = "none" if call.key_mask is None else "any" if key is None else key.form
    if key_form in ("none", "left") and query_form in ("none", "left"):
        return True
    if key_form == "right" and query_form == "right":
        if query is key:
            return True
        return query.host_lengths is not None and query.host_lengths == key.host_lengths and query.shape == key.shape
    # The one query stands at the end of the row, not of its keys: how far away they are would change.
    far = call.window is not None or call.alibi_slopes is not None
    return key_form == "right" and query_form == "none" and call.query_length == 1 and not far


def padding_must_fit(spec: AttentionSpec) -> Reason | None:
    """The rule of a backend that drops padding: exact only where that moves no query against its keys (contract, "Visibility")."""
    if not (spec.query_mask or spec.key_mask or spec.key_lengths or spec.query_lengths or spec.key_starts) or spec.padding_fits_packing:
        return None
    forms = f"keys {spec.key_mask or 'unmasked'}, queries {spec.query_mask or 'unmasked'}"
    if spec.key_lengths or spec.key_starts or spec.query_lengths:
        asked = f"causal, window or alibi with lengths or starts beside masks ({forms})"
        remedy = "say the padding in one way: lengths and starts alone, or Padding alone"
    elif "any" in (spec.key_mask, spec.query_mask):
        asked = f"causal, window or alibi with padding ({forms}) that is not known to keep every distance when it is dropped"
        remedy = "declare it: attnreg.packing.Padding.from_lengths(..., side=...) for keys and queries; a bare mask is looked at where what packs is ready"
    else:
        asked = f"causal, window or alibi with padding ({forms}) that moves queries against keys when it is dropped"
        remedy = "give the same attnreg.packing.Padding as key_mask and query_mask, or key_lengths and query_lengths"
    what = Feature.KEY_MASK if spec.key_mask else Feature.QUERY_MASK if spec.query_mask else Feature.KEY_LENGTHS
    return Reason(what.value, asked, "padding whose tokens can be packed without moving", remedy)


def found_to_fit(call: AttentionCall) -> bool:
    """The same by looking at the masks: one copy to the host for each new pair of paddings, remembered on the key's."""
    if 0 in (call.batch, call.query_length, call.key_length):
        return True
    if call.step is not None and not call.step.settled:  # its lengths are not there yet
        return False
    key, query = call.key_padding, call.query_padding
    holes_matter = call.window is not None or call.alibi_slopes is not None
    lengths = call.key_lengths is not None or call.query_lengths is not None or call.key_starts is not None
    keeper = key or query
    question = (None if query is None else id(query), call.query_length, call.key_length, holes_matter)
    known_answer = None if lengths else keeper.fits.get(question)
    if known_answer is not None:
        return known_answer[0]
    rows = (call.batch, call.query_length)
    queries, keys = visibility.real_queries(call), visibility.real_keys(call)
    queries = queries.expand(rows) if queries is not None else torch.ones(rows, dtype=torch.bool, device=call.device)
    keys = keys if keys is not None else torch.ones((call.batch, call.key_length), dtype=torch.bool, device=call.device)
    answer = bool(fits_packing(queries, keys.expand(call.batch, -1), visibility.slots(call), holes_matter=holes_matter))
    if not lengths:
        # The query's padding is kept, so that its id stays its own; but not by itself, which only the garbage collector would free.
        keep(keeper.fits, question, (answer, None if query is keeper else query))
    return answer
