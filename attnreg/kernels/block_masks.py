"""Block masks for flex_attention: which tiles of 128 x 128 scores hold something to see, found without ever forming the scores' square.

torch's own `create_block_mask` evaluates every (query, key) pair. Here each condition of the contract's "Visibility" is asked of whole
blocks, by the smallest and largest slot, segment and so on in them. That never calls a visible pair hidden; a block is called full only
if all conditions are met everywhere in it, and the pairs of all other blocks are asked one by one by `visible_pair` in the kernel.
Nothing reads a device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import library as operators
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from ..call import AttentionCall
from ..looked import traced, transforming
from ..visibility import real_keys, real_queries, segments, slots

SIZE = 128
"""Queries and keys in a block; torch's kernels take multiples of their own tiles, and 128 is one of all of them."""

_OF_BLOCKS = tuple(f"{full}{side}_{what}" for full in ("", "full_") for side in ("kv", "q") for what in ("num_blocks", "indices"))
"""What a block mask says of its blocks: how many each row of blocks has, and which."""

_FAR = 2**31 - 1
_LIMIT = 64


class Pairs(NamedTuple):
    """What decides whether query i sees key j, as small tensors that the kernel reads. None where nothing depends on it."""

    shift: torch.Tensor | int | None = None
    """Query i sits at slot i + shift: () for all rows, or (B,)."""
    places: torch.Tensor | None = None
    """Packed rows: the slot of each query, (Sq,)."""
    causal: bool = False
    left: torch.Tensor | int | None = None
    right: torch.Tensor | int | None = None
    keys: torch.Tensor | None = None
    """Real keys, (B or 1, Sk)."""
    query_segments: torch.Tensor | None = None
    key_segments: torch.Tensor | None = None
    mask: torch.Tensor | None = None

    @property
    def see_all(self) -> bool:
        """Whether every query sees every key. Asked part by part: torch 2.11's compiler can't compare tuples that hold tensors."""
        return not self.causal and all(part is None for part in (self.left, self.right, self.keys, self.query_segments, self.mask))

    def slot(self, b: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        if self.places is not None:
            return self.places[i]
        return i + (self.shift[b] if isinstance(self.shift, torch.Tensor) and self.shift.dim() else self.shift)


def number(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor | float:
    """A value as a tensor without dimensions: another value of it needs no new compilation. Filled on the device, so nothing is copied.

    Inside somebody else's compiled region it stays a number: the compiler would fold the tensor, which the CPU kernel can't read then.
    """
    if torch.compiler.is_compiling():
        return value
    return torch.full((), value, dtype=dtype, device=device)


@operators.custom_op("attnreg::settled", mutates_args=())
def _settled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


@_settled.register_fake
def _(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


_settled.register_autograd(lambda context, gradient: gradient)


def read_in_kernel(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as the compiled kernel may read it.

    Inside somebody else's compiled region one that is computed there is copied by an operator that the compiler doesn't look into. For CUDA
    torch's would write what computes it into the kernel, and fail where that reads a buffer which has no layout yet; and it would choose the
    strides, where the kernel counts on those of a block mask to be contiguous, and reads past the end from the second row of the batch on.
    """
    return _settled(tensor) if torch.compiler.is_compiling() else tensor


def element(tensor: torch.Tensor, *index: torch.Tensor, own: int = 0) -> torch.Tensor:
    """tensor[index], where dimensions of size 1 stand for every index, but for the last `own` ones."""
    shared = len(index) - own
    return tensor[tuple(0 if n == 1 and dim < shared else at for dim, (n, at) in enumerate(zip(tensor.shape, index)))]


def placed(call: AttentionCall) -> dict[str, torch.Tensor]:
    """Where the queries sit: `shift` or `places` of `Pairs`."""
    if call.cu_seqlens is not None:
        return {"places": read_in_kernel(slots(call)[0].int())}
    if call.key_lengths is None and call.query_lengths is None:
        return {"shift": number(call.key_length - call.query_length, torch.int32, call.device)}
    shift = slots(call)[:, 0].int()
    # The shift of a lone row is one number, since torch's compiler can't write the CPU kernel that reads it by its row.
    return {"shift": read_in_kernel(shift[0] if shift.shape[0] == 1 else shift)}


def pairs(call: AttentionCall) -> Pairs:
    """What visibility depends on in this call. Tensors of the call itself are held as aliases, so that nothing keeps the originals alive."""
    # A single query sits on the last key: causality hides nothing from it.
    found: dict[str, Any] = {"causal": call.causal and not (call.query_length == 1 and call.cu_seqlens is None)}
    if found["causal"] or call.window is not None:
        found |= placed(call)
    left, right = call.window or (None, None)
    # A window wider than the longest row is no narrower for being cut to what 32 bits hold.
    found["left"] = None if left is None else number(min(left, _FAR // 4), torch.int32, call.device)
    found["right"] = None if right is None else number(min(right, _FAR // 4), torch.int32, call.device)
    if (keys := real_keys(call)) is not None:
        found["keys"] = read_in_kernel(keys.detach())
    if call.cu_seqlens is not None:
        cu_query, cu_key = call.cu_seqlens
        found["query_segments"] = read_in_kernel(segments(cu_query, torch.arange(call.query_length, device=call.device)).int())
        found["key_segments"] = read_in_kernel(segments(cu_key, torch.arange(call.key_length, device=call.device)).int())
    if call.mask is not None:
        found["mask"] = read_in_kernel(call.mask.detach())
    return Pairs(**found)


def visible_pair(pair: Pairs) -> Callable:
    """The mask_mod: whether query i of row b and head h sees key j."""

    def sees(b, h, i, j):
        parts = []
        if pair.causal or pair.left is not None or pair.right is not None:
            slot = pair.slot(b, i)
            if pair.causal:
                parts.append(j <= slot)
            if pair.left is not None:
                parts.append(j >= slot - pair.left)
            if pair.right is not None:
                parts.append(j <= slot + pair.right)
        if pair.keys is not None:
            parts.append(element(pair.keys, b, j))
        if pair.query_segments is not None:
            parts.append(pair.query_segments[i] == pair.key_segments[j])
        if pair.mask is not None:
            parts.append(element(pair.mask, b, h, i, j))
        seen = parts[0]
        for part in parts[1:]:
            seen = seen & part
        return seen

    return sees


def block_mask(call: AttentionCall) -> Any:
    """torch's BlockMask for a call, or None where everything is visible."""
    from torch.nn.attention.flex_attention import BlockMask

    pair = pairs(call)
    if pair.see_all:
        return None
    some, every = _blocks(call, pair)
    mask = BlockMask.from_kv_blocks(
        *_ordered(some & ~every),
        *_ordered(some & every),
        BLOCK_SIZE=(SIZE, SIZE),
        mask_mod=visible_pair(pair),
        seq_lengths=(call.query_length, call.key_length),
    )
    for name in _OF_BLOCKS:
        setattr(mask, name, read_in_kernel(getattr(mask, name)))
    return mask


def _blocks(call: AttentionCall, pair: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks with possibly something to see, and blocks seen wholly: (B or 1, Hq or 1, query blocks, key blocks) bool each."""
    device, query_length, key_length = call.device, call.query_length, call.key_length
    queries = real_queries(call)
    if queries is None:
        queries = torch.ones((1, query_length), dtype=torch.bool, device=device)
    # Padded queries get zeros whatever they see, so a block is judged by its real ones only.
    some = _tiles(queries, False).any(-1)[:, :, None]
    # As in torch's own, a block that sticks out over the end is never full.
    rows = torch.arange(1, some.shape[1] + 1, device=device) * SIZE <= query_length
    first = torch.arange(0, key_length, SIZE, device=device)
    last = first + SIZE - 1
    every = rows[:, None] & (last < key_length)
    if pair.causal or pair.left is not None or pair.right is not None:
        slot = slots(call)
        low = _tiles(torch.where(queries, slot, _FAR), _FAR).amin(-1)[:, :, None]
        high = _tiles(torch.where(queries, slot, -_FAR), -_FAR).amax(-1)[:, :, None]
        if pair.causal:
            some, every = some & (first <= high), every & (last <= low)
        if pair.left is not None:
            some, every = some & (last >= low - pair.left), every & (first >= high - pair.left)
        if pair.right is not None:
            some, every = some & (first <= high + pair.right), every & (last <= low + pair.right)
    if pair.keys is not None:
        tiles = _tiles(pair.keys, False)
        some, every = some & tiles.any(-1)[:, None], every & tiles.all(-1)[:, None]
    if pair.query_segments is not None:
        query_low, query_high = (_bounds(pair.query_segments, fn)[:, None] for fn in (torch.amin, torch.amax))
        key_low, key_high = (_bounds(pair.key_segments, fn) for fn in (torch.amin, torch.amax))
        some = some & (query_low <= key_high) & (key_low <= query_high)
        every = every & (query_low == query_high) & (key_low == key_high) & (query_low == key_low)
    some, every = some[:, None], every[None, None] if every.dim() == 2 else every[:, None]
    if pair.mask is not None:
        some, every = some & _pooled(pair.mask, torch.any), every & _pooled(pair.mask, torch.all)
    shape = (max(some.shape[0], every.shape[0]), max(some.shape[1], every.shape[1]), rows.shape[0], first.shape[0])
    return some.expand(shape), every.expand(shape)


def _tiles(tensor: torch.Tensor, filling: float | bool) -> torch.Tensor:
    """(..., S) as (..., blocks, SIZE), filled up at the end."""
    return pad(tensor, (0, -tensor.shape[-1] % SIZE), value=filling).unflatten(-1, (-1, SIZE))


def _bounds(numbers: torch.Tensor, fn: Callable) -> torch.Tensor:
    """Smallest or largest of each block of (S,) numbers that never decrease: the end is filled with the last."""
    whole = numbers[torch.arange(-(-numbers.shape[0] // SIZE) * SIZE, device=numbers.device).clamp(max=numbers.shape[0] - 1)]
    return fn(whole.unflatten(0, (-1, SIZE)), -1)


def _pooled(mask: torch.Tensor, fn: Callable) -> torch.Tensor:
    """any or all over the blocks of a 4-D mask; dimensions of 1 stay."""
    for dim in (3, 2):
        if mask.shape[dim] != 1:
            mask = fn(_tiles(mask.transpose(dim, 3), False), -1).transpose(dim, 3)
    return mask


def _ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks each row of blocks has, and which: those first, in order."""
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()


# ---------------------------------------------------------------------- made once, not once a layer

_TENSORS = ("query_mask", "key_mask", "mask", "key_lengths", "query_lengths", "key_starts")
_plain: dict[tuple, Any] = {}
_by_tensor = WeakTensorKeyDictionary()


class _Made(NamedTuple):
    versions: tuple[int, ...]
    others: tuple[weakref.ref, ...]
    made: Any


def remembered_block_mask(call: AttentionCall) -> Any:
    """`block_mask`, made once for all layers that ask with the same sizes and the same, unchanged mask tensors.

    Masks of sizes alone are kept in a small table, least recently used out first. Those of tensors live as long as the first of them.
    While a call is traced, transformed or captured nothing is remembered: a mask would be fake, wrapped, or the graph's own.
    """
    if call.spec.compiling or call.spec.capturing or traced(call.query) or transforming():
        return block_mask(call)
    cuda = call.device.type == "cuda"
    question = (
        call.query_length, call.key_length, call.batch, call.causal, call.window, call.device,
        torch.is_inference_mode_enabled(), cuda and torch.cuda.current_stream(call.device).cuda_stream,
    )  # fmt: skip
    tensors = {name: call.lengths_given.get(name, getattr(call, name)) for name in _TENSORS}
    if call.cu_seqlens is not None:
        tensors["cu_query"], tensors["cu_key"] = call.cu_seqlens
    names = tuple(name for name, tensor in tensors.items() if tensor is not None)
    given = tuple(tensors[name] for name in names)
    if not given:
        made = _plain.pop(question, None) or (block_mask(call),)
        _plain[question] = made
        if len(_plain) > _LIMIT:
            _plain.pop(next(iter(_plain)), None)
        return made[0]
    if any(tensor.is_inference() for tensor in given):
        return block_mask(call)  # such tensors count no versions: a change in place could not be seen
    keeper, others = given[0], given[1:]
    versions = tuple(tensor._version for tensor in given)
    answers = _by_tensor.get(keeper)
    if answers is None:
        answers = _by_tensor[keeper] = {}
    found = answers.get((names, question))
    if found is None or found.versions != versions or any(ref() is not tensor for ref, tensor in zip(found.others, others)):
        if len(answers) >= _LIMIT:
            answers.clear()
        found = answers[names, question] = _Made(versions, tuple(map(weakref.ref, others)), block_mask(call))
    return found.made
