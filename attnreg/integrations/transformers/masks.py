"""The mask function: what transformers tells it, kept as facts in place of a dense mask.

transformers describes a mask as a function of positions, a padding mask and two offsets. Causality, windows and packed documents are
recognised in that function and become options of a call; whatever is not recognised becomes a dense bool mask, so nothing is lost.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import masking_utils

from ... import packing
from ...looked import readable

Offset = int | torch.Tensor


class Pattern(NamedTuple):
    """A mask function in the words of `attnreg.attention`."""

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    documents: torch.Tensor | None = None
    """(B, S) integers: a query sees keys with its own number only."""
    by_position: bool = False
    """Distances are counted in position ids, which within one document is counting slots."""


class HostMask:
    """What a layer needs to know about its mask. It stands where transformers expects a (B, 1, Sq, Sk) mask, and holds none.

    query_slot: the key slot on which the first query sits: a number, or a 0-d tensor where a static cache keeps it on the device.
    key_length: the number of key slots that the host will hand over; those past the last query's slot are spare room.
    key_mask: (B, Sk) bool, True for a real token, or None. query_mask is the same tensor where queries and keys are the same tokens.
    """

    ndim = 4

    def __init__(
        self,
        pattern: Pattern,
        batch: int,
        query_length: int,
        key_length: int,
        query_slot: Offset,
        key_mask: torch.Tensor | None,
        query_mask: torch.Tensor | None,
    ) -> None:
        self.causal, self.window, self.documents = pattern.causal, pattern.window, pattern.documents
        self.batch, self.query_length, self.key_length = batch, query_length, key_length
        self.query_slot = query_slot
        self.key_mask, self.query_mask = key_mask, query_mask
        self._looked = False
        self._segments: tuple[torch.Tensor, int] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.batch, 1, self.query_length, self.key_length)

    def to(self, device: Any = None, *args: Any, **kwargs: Any) -> HostMask:
        """On another device, as hosts that spread a model over several do. A dtype says nothing here and is passed over."""
        device = kwargs.get("device", device)
        if device is None or isinstance(device, torch.dtype):
            return self
        moved = object.__new__(HostMask)
        moved.__dict__.update({n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in self.__dict__.items()})
        if self.query_mask is self.key_mask:
            moved.query_mask = moved.key_mask
        moved._segments, moved._looked = None, False
        return moved

    def look(self) -> None:
        """Leaves the padding mask away where it hides nothing. Once a forward, as transformers' own masks do it, and what is found stays known
        of the mask, so that no layer looks again. While the compiler traces or a graph is captured there is nothing to see."""
        if self.key_mask is None or self._looked or not readable(self.key_mask):
            return
        self._looked = True
        if all(n == self.key_mask.shape[1] for n in packing.Padding.from_mask(self.key_mask).host_lengths):
            self.key_mask = self.query_mask = None

    def segments(self) -> tuple[torch.Tensor, int]:
        """The documents of all rows, laid one behind the other: cu_seqlens and the longest. Two copies to the host, once a forward."""
        if self._segments is None:
            starts = torch.ones_like(self.documents, dtype=torch.bool)
            starts[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
            total = self.documents.numel()
            cu = torch.nn.functional.pad(starts.flatten().nonzero().flatten(), (0, 1), value=total).to(torch.int32)
            self._segments = (cu, int(cu.diff().max()))
        return self._segments

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(
            f"a model took attnreg's mask for a tensor, in {getattr(function, '__name__', function)}: it computes attention with code of its "
            "own and never calls transformers' attention interface, so attnreg can't reach it; leave it on attn_implementation='eager'"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"attnreg hands masks through this model without building them, but the model asks its mask for {name!r}; "
            "give the model a 4-D attention_mask, or leave it on its own attention"
        )


def host_mask(
    batch_size: int,
    kv_length: int,
    q_length: int | None = None,
    q_offset: Offset = 0,
    kv_offset: int = 0,
    mask_function: Any = masking_utils.causal_mask_function,
    attention_mask: Any = None,
    **others: Any,
) -> HostMask | torch.Tensor:
    """The mask function that is registered with transformers. Reads no tensor's values, so it neither waits for a device nor breaks a graph.

    Query i stands at position q_offset + i, key slot j at kv_offset + j; `attention_mask` (B, positions) bool covers positions from 0.
    """
    if isinstance(attention_mask, HostMask):
        # generate() makes the masks ahead of a compiled forward, which then asks again.
        return attention_mask
    if q_length is None:
        # transformers 4: positions of the queries, on the device. On a CPU they can be read; elsewhere the offset stays a tensor.
        positions = others["cache_position"]
        q_length, q_offset = positions.shape[0], positions[0]
        if positions.device.type == "cpu" and not torch.compiler.is_compiling():
            q_offset = int(q_offset)
        asked = {"cache_position": positions}
    else:
        asked = {"q_length": q_length, "q_offset": q_offset}
    pattern = None if others.get("use_vmap") else recognise(mask_function)
    slot = q_offset - kv_offset
    if pattern is not None and pattern.window is not None and not pattern.causal and slot != kv_length - q_length:
        pattern = None
    if pattern is None:
        others = {n: v for n, v in others.items() if n not in ("allow_is_causal_skip", "allow_is_bidirectional_skip", "cache_position")}
        return masking_utils.sdpa_mask(
            batch_size=batch_size,
            kv_length=kv_length,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            **asked,
            **others,
        )
    keys = kv_length if isinstance(slot, torch.Tensor) or not pattern.causal else min(slot + q_length, kv_length)
    key_mask = query_mask = None
    if attention_mask is not None:
        if pattern.causal and not isinstance(slot, torch.Tensor) and attention_mask.shape[1] < q_offset + q_length:
            raise ValueError(
                f"attention_mask: one column for every token so far, past and new, {q_offset + q_length} in all; got {attention_mask.shape[1]}"
            )
        key_mask = _lasting(_columns(attention_mask, kv_offset, keys))
        same_tokens = pattern.causal or not _may_cross(others.get("config"))
        if same_tokens and not isinstance(slot, torch.Tensor) and slot == 0 and q_length == keys:
            query_mask = key_mask
    return HostMask(pattern, batch_size, q_length, kv_length, slot, key_mask, query_mask)


def recognise(function: Any) -> Pattern | None:
    """A mask function of transformers as a `Pattern`; None for anything else, which then has to be written out densely.

    Composed functions are closures; while the compiler traces, those can't be looked into.
    """
    pattern = _pattern(function)
    # Positions that restart without documents to separate them: not a distance between slots.
    return None if pattern is None or (pattern.by_position and pattern.documents is None) else pattern


def _pattern(function: Any) -> Pattern | None:
    if function is masking_utils.causal_mask_function:
        return Pattern(causal=True)
    if function is getattr(masking_utils, "bidirectional_mask_function", None):
        return Pattern()
    if torch.compiler.is_compiling() or getattr(function, "__module__", None) != masking_utils.__name__ or not function.__closure__:
        return None
    given = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__)))
    maker = function.__qualname__.partition(".")[0]
    if maker == "sliding_window_overlay":
        return Pattern(window=(given["sliding_window"] - 1, None))  # theirs counts the query itself
    if maker == "sliding_window_bidirectional_overlay":
        return Pattern(window=(given["sliding_window"], given["sliding_window"]))
    if maker == "packed_sequence_mask_function":
        return Pattern(documents=given["packed_sequence_mask"])
    if maker == "remap_positions_for_packed_sequence":
        inner = _pattern(given["mask_function"])
        return None if inner is None else inner._replace(by_position=True)
    if maker == "and_masks":
        return _all(_pattern(part) for part in given["mask_functions"])
    return None


def _all(parts: Any) -> Pattern | None:
    whole = Pattern()
    for part in parts:
        if part is None:
            return None
        if (whole.window and part.window) or (whole.documents is not None and part.documents is not None):
            return None
        whole = Pattern(
            whole.causal or part.causal,
            whole.window or part.window,
            part.documents if whole.documents is None else whole.documents,
            whole.by_position or part.by_position,
        )
    return whole


def _columns(attention_mask: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """`count` columns from `start`; positions that the mask does not cover are spare room. The tensor itself where it is the same."""
    attention_mask = attention_mask if attention_mask.dtype == torch.bool else attention_mask.bool()
    missing = start + count - attention_mask.shape[1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return attention_mask if start == 0 and missing >= 0 else attention_mask[:, start : start + count]


def _lasting(mask: torch.Tensor) -> torch.Tensor:
    """The mask as a tensor that is looked at once, not in each layer: one made under inference_mode counts no versions, so what was found in
    it can't be remembered."""
    if torch.compiler.is_compiling() or not mask.is_inference():
        return mask
    with torch.inference_mode(False):
        return mask.clone()


def _may_cross(config: Any) -> bool:
    """Whether a bidirectional mask of this model may be one of cross attention, whose queries are other tokens than its keys."""
    if config is None or getattr(config, "is_encoder_decoder", False):
        return True
    return any("cross" in name and value for name, value in vars(config).items())
