"""From a case to the tensors and options of its call, and back from what a backend returned."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..cache.protocol import Pages, Step
from ..call import AttentionCall
from ..packing import Padding, cu_seqlens_from_lengths
from .cases import Case


class Values(NamedTuple):
    """What a case's seed makes. Query, key, value and `output_gradient` are dense, (B, S, H, D)."""

    tensors: dict[str, torch.Tensor]
    """The floating tensors by argument name."""
    options: dict[str, Any]
    """Masks, lengths and segments."""
    output_gradient: torch.Tensor
    lse_gradient: torch.Tensor

    def changed(self, **tensors: torch.Tensor) -> Values:
        return self._replace(tensors={**self.tensors, **tensors})


class PagedLayer:
    """A layer of a paged cache that is only read, as `cache=` takes it: rows' pages lie anywhere in the pool.

    What it shows is finite, as a cache promises: places past a row's end, and page 0 in the gaps of the table. Pages that no row holds are
    NaN, and stand in the columns of the table beyond those that are shown.
    """

    def __init__(self, case: Case, key: torch.Tensor, value: torch.Tensor, lengths: list[int] | torch.Tensor | None) -> None:
        """key, value: (B, Sk, Hkv, D). lengths: each row's, None for Sk."""
        rows, slots = key.shape[:2]
        width = max(-(-slots // case.page_size), 1)
        random = torch.Generator().manual_seed(case.seed + 3)
        lengths = None if lengths is None else torch.as_tensor(lengths, device="cpu")
        table = 1 + torch.randperm(rows * width + 2, generator=random)
        nobody, table = table[:2].expand(rows, -1), table[2:].view(rows, width)
        if lengths is not None:
            used = (lengths + case.page_size - 1) // case.page_size
            table = table.masked_fill(torch.arange(width) >= used[:, None], 0)
        self.tensors = []
        for tensor in (key, value):
            pool = torch.full((rows * width + 3, case.page_size, *tensor.shape[2:]), float("nan"))
            spare = torch.randn(rows, width * case.page_size - slots, *tensor.shape[2:], generator=random)
            whole = torch.cat([tensor.detach().cpu().to(pool.dtype), 50 * spare], 1)
            pool[table] = whole.unflatten(1, (width, case.page_size))
            pool[0] = 50 * torch.randn(pool.shape[1:], generator=random)
            self.tensors.append(pool.to(tensor))
        table = torch.cat([table, nobody], 1).to(case.device, torch.int32)
        lengths = None if lengths is None else lengths.to(case.device, torch.int32)
        self.tensors += [table] if lengths is None else [table, lengths]
        self._step = Step(None, None, slots, lengths, Pages(*self.tensors[:2], table[:, :width], slots))

    def prepare(self, *new: Any) -> Step:
        return self._step

    def slots(self, n_new: int) -> int:
        return self._step.slots


class Result(NamedTuple):
    """What a backend returned, in canonical form."""

    output: torch.Tensor
    """(B, Sq, Hq, Dv)"""
    lse: torch.Tensor | None
    gradients: dict[str, torch.Tensor]


def values(case: Case) -> Values:
    """Makes every tensor from the seed, on the CPU first, so that a case means the same on every device."""
    random = torch.Generator().manual_seed(case.seed)
    dtype, device = getattr(torch, case.dtype), case.device

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    def chance(probability: float, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=random) < probability

    def numbers(largest: int, count: int) -> list[int]:
        return torch.randint(0, largest + 1, (count,), generator=random).tolist()

    batch, queries, keys, heads = case.batch, case.query_length, case.key_length, case.query_heads
    tensors = {
        # A scale of its own already gives large scores; larger ones would only measure how float32 rounds them.
        "query": normal(batch, queries, heads, case.head_dim) * (4 if case.peaked and case.scale is None else 1),
        "key": normal(batch, keys, case.key_heads, case.head_dim),
        "value": normal(batch, keys, case.key_heads, case.value_dim),
    }
    if case.strides == "expanded":
        tensors = {name: tensor[:1].expand(tensor.shape) for name, tensor in tensors.items()}
    output_gradient = normal(batch, queries, heads, case.value_dim)
    lse_gradient = normal(batch, heads, queries)

    options: dict[str, Any] = {}
    paddings = {}
    for name, form, size in (("key_mask", case.key_mask, keys), ("query_mask", case.query_mask, queries)):
        if form == "keys":
            options[name] = options["key_mask"]
        elif form is not None:
            lengths = numbers(size, batch)
            if form in ("left", "right"):
                padding = Padding.from_lengths(lengths, size, form, device)
            else:
                bits = chance(0.7, batch, size) & ~chance(0.15, batch, 1)
                padding = Padding.from_mask(bits.to(device)) if case.declared else Padding(bits.to(device), "any")
            paddings[name] = padding
            options[name] = padding if case.declared else padding.mask
    whole = (batch, heads, queries, keys)
    if case.mask is not None:
        shape = [size if full else 1 for size, full in zip(whole, case.mask)]
        bits = chance(0.7, *shape)
        if case.holes:
            bits &= ~chance(0.2, *shape[:3], 1)
        options["mask"] = bits.to(device)
    if case.bias is not None:
        shape = [size if full else 1 for size, full in zip(whole, case.bias)]
        bias = normal(*shape)
        if case.holes:
            bias[chance(0.2, *shape) | chance(0.1, *shape[:3], 1)] = float("-inf")
        tensors["bias"] = bias
    for name, given, size in (
        ("key_lengths", case.key_lengths, keys),
        ("query_lengths", case.query_lengths, queries),
        ("key_starts", case.key_starts, keys),
    ):
        if given:
            lengths = numbers(size, batch)
            kind = torch.int64 if case.seed % 2 else torch.int32
            options[name] = lengths if case.listed else torch.tensor(lengths, dtype=kind, device=device)
    if case.segments:
        sides = [_segments(numbers, case.segments, queries - min(case.tail, queries))]
        sides.append(sides[0] if case.same_segments else _segments(numbers, case.segments, keys - min(case.tail, keys)))
        cu = [cu_seqlens_from_lengths(lengths, device) for lengths in sides]
        options["cu_seqlens"] = (cu[0], cu[0] if case.same_segments else cu[1])
        if case.max_seqlens:
            options["max_seqlens"] = (max(sides[0]), max(sides[1]))
    if case.alibi is not None:
        tensors["alibi_slopes"] = 0.05 + normal(*((heads,) if case.alibi == "heads" else (batch, heads))).abs() / 2
    if case.sinks:
        tensors["sinks"] = normal(heads)
    wide = ("sinks", "alibi_slopes") + (("bias",) if case.wide_bias else ())
    tensors = {n: t.to(device, torch.promote_types(dtype, torch.float32) if n in wide else dtype) for n, t in tensors.items()}
    return Values(tensors, options, output_gradient.to(device, dtype), lse_gradient.to(device, torch.promote_types(dtype, torch.float32)))


def arrange(case: Case, given: Values, dtype: torch.dtype | None = None) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The arguments of the call, laid out as the case says, and the leaf tensors that collect its gradients.

    dtype: computes in another one than the case's, as the ground truth does.
    """
    leaves, arguments = {}, dict(given.options)
    tensors = given.tensors
    if case.page_size:
        lengths = arguments.pop("key_lengths", None)
        arguments.update(key=None, value=None, cache=PagedLayer(case, tensors["key"], tensors["value"], lengths))
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("key", "value")}
    for name, tensor in tensors.items():
        tensor = tensor.detach() if dtype is None else tensor.detach().to(dtype)
        leaf, view = _stored(case.strides, tensor) if name in ("query", "key", "value") else (tensor.clone(), lambda t: t)
        leaf.requires_grad_(name in case.gradients)
        leaves[name] = leaf
        tensor = view(leaf)
        if name in ("query", "key", "value"):
            if case.form == "bhsd":
                tensor = tensor.transpose(1, 2)
            elif case.form == "flat":
                tensor = tensor.flatten(2)
            elif case.form == "rows":
                tensor = tensor.squeeze(0)
        arguments[name] = tensor
    if case.form == "flat":
        arguments["n_heads"], arguments["n_kv_heads"] = case.query_heads, case.key_heads
    arguments["layout"] = "bhsd" if case.form == "bhsd" else "bshd"
    for name in ("causal", "window", "softcap", "scale", "finite_padding"):
        arguments[name] = getattr(case, name)
    arguments["dropout_p"], arguments["return_lse"], arguments["deterministic"] = case.dropout, case.lse, case.deterministic
    return arguments, leaves


def checked(case: Case, given: Values | None = None, dtype: torch.dtype | None = None) -> AttentionCall:
    """The case as a checked call."""
    arguments, _ = arrange(case, values(case) if given is None else given, dtype)
    return AttentionCall(**arguments)


def canonical(case: Case, output: torch.Tensor) -> torch.Tensor:
    """An output in the case's form, as (B, Sq, Hq, Dv)."""
    if case.form == "bhsd":
        return output.transpose(1, 2)
    if case.form == "flat":
        return output.unflatten(2, (case.query_heads, case.value_dim))
    return output.unsqueeze(0) if case.form == "rows" else output


def _stored(strides: str, tensor: torch.Tensor):
    """A leaf that holds the tensor in memory as `strides` says, and the view that shows it as (B, S, H, D)."""
    if strides == "transposed":
        return tensor.transpose(1, 2).contiguous(), lambda t: t.transpose(1, 2)
    if strides == "expanded":
        return tensor[:1].clone(), lambda t: t.expand(tensor.shape)
    if strides == "sliced":
        leaf = tensor.new_zeros(tensor.shape[0], tensor.shape[1] + 2, tensor.shape[2] + 1, tensor.shape[3] + 3)
        view = lambda t: t[:, 1:-1, 1:, 1:-2]
    elif strides == "spread":
        leaf = tensor.new_zeros(*tensor.shape[:3], 2 * tensor.shape[3])
        view = lambda t: t[..., ::2]
    else:
        return tensor.clone(memory_format=torch.contiguous_format), lambda t: t
    view(leaf).copy_(tensor)
    return leaf, view


def _segments(numbers, count: int, total: int) -> list[int]:
    """Lengths of `count` segments, zeros among them, that fill `total` rows."""
    cuts = sorted(numbers(total, count - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total])]
