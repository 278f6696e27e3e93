"""Hypothesis strategies that draw whole calls, over every option of the contract but the cache, from a backend's own claims."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import torch
from hypothesis import strategies as st

from ..capabilities import Capabilities
from ..spec import AttentionSpec, Feature
from .cases import Case

SIZES = {
    "small": ((1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17), (1, 2, 3), (8, 4, 1, 3, 5, 12, 16, 20, 32)),
    "mixed": ((1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 65, 130, 300), (1, 2, 3), (8, 4, 1, 3, 5, 12, 16, 20, 32)),
    "few": ((8, 1, 5, 13, 16), (2,), (8,)),
    "compiled": ((33, 1, 9, 100, 200, 150, 300), (2, 3, 5), (64, 128, 36)),
    "large": ((1, 2, 7, 16, 33, 64, 65, 100, 127, 128, 129, 200, 257, 300), (1, 2, 3), (64, 8, 40, 72, 80, 96, 128, 136, 192, 256)),
}
"""By name: query and key lengths, batch sizes, head dims. Simplest first, for shrinking. "mixed" leaves a kernel's first tile now and then; "few"
is for backends that compile for each, "compiled" for those that compile for each kind of call (`kinds`)."""
_HEADS = {"few": ((2,), (2,)), "compiled": ((2,), (2, 4))}
"""Key heads, and groups of query heads."""
_MORE_DIMS = (64, 128, 16, 32, 256, 96, 192, 512)
_PADDED = (Feature.QUERY_MASK, Feature.KEY_MASK, Feature.KEY_LENGTHS, Feature.QUERY_LENGTHS, Feature.KEY_STARTS)
NOT_PACKED = frozenset((*_PADDED, Feature.PAGED))
_PAGE_SIZES = (16, 4, 1, 3, 64, 128, 256)
IMPLIED = {
    Feature.BIAS_GRADIENT: {Feature.BIAS, Feature.BACKWARD},
    Feature.SINKS_GRADIENT: {Feature.SINKS, Feature.BACKWARD},
    Feature.ALIBI_GRADIENT: {Feature.ALIBI, Feature.BACKWARD},
    Feature.LSE_GRADIENT: {Feature.LSE, Feature.BACKWARD},
}
"""What a feature can't be asked for without."""


def head_dims(claims: Capabilities, sizes: str) -> list[int]:
    """Head dims to draw from, those the backend takes."""
    known = [*SIZES[sizes][2], *_MORE_DIMS]
    taken = [n for n in known if claims.head_dim.takes(n)]
    if not taken:
        taken = [n for n in range(1, 1025) if claims.head_dim.takes(n)][:4]
    few = [n for n in taken if n in SIZES[sizes][2]]
    return few or taken[:4]


def page_shapes(claims: Capabilities, device: str, dtype: torch.dtype, dims: Sequence[int]) -> list[tuple[int, int]]:
    """(slots in a page, head dim) to draw from, those in which the backend has no reason against one query a row."""
    capability = torch.cuda.get_device_capability() if device == "cuda" and torch.cuda.is_available() else None
    plain = AttentionSpec(
        device, capability, dtype, 2, 2, 0, 0, equal_lengths=False, single_query=True, key_lengths=Feature.KEY_LENGTHS in claims.features
    )
    known = list(itertools.product(_PAGE_SIZES, dims))
    taken = [(n, d) for n, d in known if not claims.reasons_against(plain._replace(page_size=n, head_dim=d, value_dim=d))]
    return taken or known


@st.composite
def cases(
    draw: st.DrawFn,
    claims: Capabilities,
    *,
    device: str = "cpu",
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    require: Collection[Feature] = (),
    without: Collection[Feature] = (),
    sizes: str = "small",
    dense: bool = False,
    nothing: bool = True,
) -> Case:
    """One call. `require` is always asked for, claimed or not; nothing of `without` is; the rest sometimes, if claimed.

    dense: no strides of 0, so that every element can be changed on its own. nothing: sizes of 0 too.
    """
    required = set(require)
    for feature in require:
        required |= IMPLIED.get(feature, set())
    claimed = set(claims.features) - set(without)

    def on(feature: Feature) -> bool:
        return feature in required or (feature in claimed and draw(st.integers(0, 3)) == 3)

    lengths, batches, _ = SIZES[sizes]
    length = st.sampled_from(lengths)
    packed = not required & NOT_PACKED and on(Feature.PACKED)
    paged = not packed and on(Feature.PAGED)
    zero = nothing and draw(st.integers(0, 24)) == 24
    batch = 1 if packed else draw(st.sampled_from(batches))
    query_length, key_length = draw(length), draw(length)
    causal, window, alibi = on(Feature.CAUSAL), on(Feature.WINDOW), on(Feature.ALIBI)
    unequal = on(Feature.UNEQUAL_LENGTHS) or (paged and Feature.UNEQUAL_LENGTHS in claimed)
    dims, page_size = head_dims(claims, sizes), 0
    if paged:
        page_size, head_dim = draw(st.sampled_from(page_shapes(claims, device, dtypes[0], dims)))
        query_length = 1 if draw(st.booleans()) else query_length
        key_length += draw(st.integers(0, 2)) * page_size
    if Feature.UNEQUAL_LENGTHS in required:
        causal = causal or not (window or alibi)
        key_length += key_length == query_length
    elif not unequal and (causal or window or alibi):
        key_length = query_length
    if zero:
        which = draw(st.integers(0, 2))
        batch, query_length, key_length = (
            0 if which == n and not (packed and n == 0) else size for n, size in enumerate((batch, query_length, key_length))
        )
        if not unequal and (causal or window or alibi):
            query_length = key_length = min(query_length, key_length)

    head_dim = head_dim if paged else draw(st.sampled_from(dims))
    value_dim = head_dim
    if on(Feature.VALUE_DIM):
        others = [n for n in dims + [8, 12] if n != head_dim and claims.value_dim.takes(n)]
        value_dim = draw(st.sampled_from(others)) if others else head_dim + 8
    key_heads, groups = _HEADS.get(sizes, ((1, 2, 3), (2, 3, 4)))
    group = draw(st.sampled_from(groups)) if on(Feature.GROUPED_HEADS) else 1

    def padded(feature: Feature) -> bool:
        return not packed and on(feature)

    forms = st.sampled_from(("right", "left", "any"))
    key_mask = draw(forms) if padded(Feature.KEY_MASK) else None
    query_mask = draw(forms) if padded(Feature.QUERY_MASK) else None
    if query_mask and key_mask and query_length == key_length and draw(st.booleans()):
        query_mask = "keys"
    key_lengths, query_lengths = (
        padded(f) and (unequal or f in required or not (causal or window or alibi)) for f in (Feature.KEY_LENGTHS, Feature.QUERY_LENGTHS)
    )
    if paged and Feature.KEY_LENGTHS in claimed and (unequal or not (causal or window or alibi)):
        key_lengths = Feature.KEY_LENGTHS in required or draw(st.integers(0, 3)) < 3  # rows that differ are what such a cache is for
    pattern = st.tuples(*[st.booleans()] * 4)
    mask = draw(pattern) if on(Feature.MASK) else None
    bias = draw(pattern) if on(Feature.BIAS) else None
    side = st.sampled_from((1, 0, 2, 5))
    window_sides = draw(st.sampled_from(("left", "both") if causal else ("left", "both", "right"))) if window else None
    lse = on(Feature.LSE)
    sinks = on(Feature.SINKS)
    gradients: tuple[str, ...] = ()
    if on(Feature.BACKWARD):
        everything = ("query", "key", "value")
        gradients = draw(st.sampled_from((everything, ("query",), ("key",), ("value",), ("query", "value"), everything)))
        if paged:
            gradients = ("query",)
        for given, feature, name in (
            (bias, Feature.BIAS_GRADIENT, "bias"),
            (sinks or None, Feature.SINKS_GRADIENT, "sinks"),
            (alibi or None, Feature.ALIBI_GRADIENT, "alibi_slopes"),
        ):
            if given is not None and (feature in required or (feature in claimed and draw(st.booleans()))):
                gradients += (name,)
    lse_gradient = (
        lse and bool(gradients) and (Feature.LSE_GRADIENT in required or (Feature.LSE_GRADIENT in claimed and draw(st.booleans())))
    )
    strides = draw(st.sampled_from(("contiguous", "transposed", "sliced", "spread") + (() if dense else ("expanded",))))
    same_segments = packed and query_length == key_length and (not unequal or draw(st.booleans()))
    if packed and (causal or window or alibi) and Feature.UNEQUAL_LENGTHS not in claimed | required:
        same_segments = True
    return Case(
        seed=draw(st.integers(0, 9999)),
        device=device,
        dtype=str(draw(st.sampled_from([*dtypes, dtypes[0]]))).removeprefix("torch."),
        batch=batch,
        query_length=query_length,
        key_length=key_length,
        key_heads=draw(st.sampled_from(key_heads)),
        group=group,
        head_dim=head_dim,
        value_dim=value_dim,
        form=draw(st.sampled_from(("bshd", "bhsd", "rows") if packed else ("bshd", "bhsd", "flat"))),
        strides=strides,
        peaked=draw(st.booleans()),
        causal=causal,
        window=None
        if window_sides is None
        else (draw(side) if window_sides != "right" else None, draw(side) if window_sides != "left" else None),
        query_mask=query_mask,
        key_mask=key_mask,
        declared=draw(st.booleans()) if query_mask or key_mask else False,
        mask=mask,
        bias=bias,
        wide_bias=draw(st.booleans()) if bias is not None else False,
        holes=draw(st.booleans()) if mask is not None or bias is not None else False,
        key_lengths=key_lengths,
        query_lengths=query_lengths,
        key_starts=padded(Feature.KEY_STARTS),
        page_size=page_size,
        listed=draw(st.booleans()) if key_lengths or query_lengths else False,
        segments=draw(st.sampled_from((1, 2, 3, 5))) if packed else 0,
        same_segments=same_segments,
        tail=draw(st.sampled_from((0, 1, 3))) if packed else 0,
        max_seqlens=packed and draw(st.booleans()),
        alibi=draw(st.sampled_from(("heads", "rows"))) if alibi else None,
        softcap=draw(st.sampled_from((2.0, 0.5, 30.0))) if on(Feature.SOFTCAP) else None,
        sinks=sinks,
        scale=draw(st.sampled_from((0.1, 0.37, 1.3))) if on(Feature.SCALE) else None,
        dropout=0.3 if Feature.DROPOUT in required else 0.0,
        finite_padding=draw(st.integers(0, 3)) == 3,
        lse=lse,
        lse_gradient=lse_gradient,
        deterministic=on(Feature.DETERMINISTIC),
        gradients=gradients,
    )
