"""flash-attn 4: `flash_attn.cute`, written in CuTe and compiled at the first call of each kind (seconds).

It shares the folder `flash_attn` with flash-attn 2, whose wheel also ships an older `flash_attn/cute`: the last one installed wins, so the
signature is looked at. Unlimited window sides are None, never -1; every call returns (output, lse or None).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence

import torch
from packaging.version import Version

from ..backend import Backend, Output
from ..call import AttentionCall
from ..capabilities import EMULATED, NATIVE, Capabilities, Dims, Reason, Support
from ..spec import AttentionSpec, Feature
from .flash import (
    Kernels,
    Result,
    dropped_padding_must_fit,
    notes_for,
    padding_needs_the_host,
    pages_rule,
    run_flash,
    sinks_learn_in_the_kernel,
)  # fmt: skip
from .installed import Library, find, without_parent
from .limits import rows_fit
from .order import rank_of

INSTALL = "pip install 'flash-attn-4[cu13]' (after flash-attn 2, whose files it shares)"
NEEDED = {
    "flash_attn_func": ("softmax_scale", "causal", "window_size", "learnable_sink", "softcap", "deterministic", "return_lse"),
    "flash_attn_varlen_func": (
        "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k", "page_table", "softmax_scale", "causal", "window_size",
        "learnable_sink", "softcap", "deterministic", "return_lse",
    ),
}  # fmt: skip
"""The arguments that `run` uses: a release that lacks one is refused."""


class _Found:
    """Looked for once, when the claims or the reason missing are asked for."""

    where: Library | Reason | None = None


def library() -> Library | Reason:
    if _Found.where is None:
        found = without_parent(find(["flash-attn-4"], ["flash_attn.cute"], INSTALL), "flash_attn.cute")
        _Found.where = _fitting(found) if isinstance(found, Library) else found
    return _Found.where


def _fitting(found: Library) -> Library | Reason:
    for name, arguments in NEEDED.items():
        function = getattr(found.module, name, None)
        there = inspect.signature(function).parameters if callable(function) else {}
        lacking = [a for a in arguments if a not in there]
        if lacking:
            text = f"flash_attn.cute has no {name}" if not there else f"flash_attn.cute's {name} lacks {', '.join(lacking)}"
            why = f"{text}: an old release, or the copy that flash-attn 2 brings"
            return Reason("missing", "flash-attn-4 with its own files", f"flash-attn-4 {found.version}; {why}", f"reinstall it: {INSTALL}")
    return found


# ---------------------------------------------------------------------- the three functions


def _dense(call: AttentionCall, query, key, value) -> Result:
    return library().module.flash_attn_func(query, key, value, **_options(call))[:2]


def _segments(call: AttentionCall, query, key, value, cu_query, cu_key, longest_query, longest_key) -> Result:
    return library().module.flash_attn_varlen_func(
        query, key, value, cu_seqlens_q=cu_query, cu_seqlens_k=cu_key, max_seqlen_q=longest_query, max_seqlen_k=longest_key, **_options(call)
    )[:2]  # fmt: skip


def _cached(call: AttentionCall, query, keys, values, lengths, starts, table) -> Result:
    options = _options(call)
    if table is not None:
        options["page_table"] = table
    return library().module.flash_attn_varlen_func(query, keys, values, seqused_k=lengths, **options)[:2]


def _options(call: AttentionCall) -> dict:
    options = {"softmax_scale": call.scale, "causal": call.causal}
    if call.window is not None:
        left, right = call.window
        options["window_size"] = (left, 0 if call.causal else right)
    if call.softcap is not None:
        options["softcap"] = call.softcap
    if call.deterministic and call.spec.gradients:
        options["deterministic"] = True
    native = call.sinks is not None and kernels(_version()).takes_sinks(call.spec)
    if native:
        options["learnable_sink"] = call.sinks.float() if call.sinks.dtype == torch.float64 else call.sinks
    if call.return_lse or (call.sinks is not None and not native):
        options["return_lse"] = True
    return options


def takes_dims(head_dim: int, value_dim: int, gradients: bool) -> bool:
    """Unequal ones are taken forward on a Hopper; with gradients grouped heads would not be, and elsewhere only some pairs."""
    return head_dim == value_dim or (not gradients and (head_dim, value_dim) == (192, 128))


@functools.lru_cache(maxsize=64)
def kernels(version: str) -> Kernels:
    """What the functions of a version read. The backward's parts round head dims up to multiples of 16 and of 32, and beyond one tile of
    queries don't find each other's sums where the two differ (4.0.0b36: `flash_bwd_sm90.py`, `flash_bwd_postprocess.py`)."""
    sinks = functools.partial(takes_sinks, learns=Version(version) >= Version("4.0.0b26"))
    return Kernels(
        _dense, _segments, _cached, reads_starts=False, value_dim=takes_dims, gradient_dims=32, reads_whole_tiles=True, takes_sinks=sinks
    )  # fmt: skip


def takes_sinks(spec: AttentionSpec, learns: bool) -> bool:
    """On Hopper and the first Blackwells, with gradients where the version has them. A lone query's are left to the lse, as in flash-attn 2
    and 3, which may split its keys: a native sink would come before them."""
    if spec.capability is not None and spec.capability[0] not in (9, 10, 11):
        return False
    if not spec.gradients:
        return not spec.single_query
    return learns and (spec.capability is None or spec.capability[0] == 9 or spec.head_dim <= 192)


def run_flash4(call: AttentionCall) -> Output:
    return run_flash(call, kernels(_version()))


# ---------------------------------------------------------------------- the claims


@functools.lru_cache(maxsize=64)
def claims(version: str) -> Capabilities:
    """What the library can do; the card decides more than the version does (`_by_card`)."""
    here = functools.partial(kernels, version)
    features = {
        Feature.CAUSAL: NATIVE,
        Feature.UNEQUAL_LENGTHS: NATIVE,
        Feature.WINDOW: NATIVE,
        Feature.QUERY_MASK: NATIVE,
        Feature.KEY_MASK: NATIVE,
        Feature.KEY_LENGTHS: NATIVE,
        Feature.QUERY_LENGTHS: NATIVE,
        Feature.KEY_STARTS: NATIVE,
        Feature.PACKED: NATIVE,
        Feature.PAGED: NATIVE,
        Feature.SOFTCAP: NATIVE,
        Feature.SINKS: lambda spec: NATIVE if here().takes_sinks(spec) else EMULATED("scales the result by its lse and the sink"),
        Feature.SINKS_GRADIENT: NATIVE,
        Feature.SCALE: NATIVE,
        Feature.LSE: NATIVE,
        Feature.GROUPED_HEADS: NATIVE,
        Feature.VALUE_DIM: _value_dim,
        Feature.BACKWARD: NATIVE,
        Feature.CAPTURE: NATIVE,
        Feature.DETERMINISTIC: NATIVE,
    }
    return Capabilities(
        features=features,
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        head_dim=Dims(largest=256),
        value_dim=Dims(largest=256),
        smallest_capability=(8, 0),
        largest_capability=(12, 1),
        rules=(
            rows_fit,
            dropped_padding_must_fit(here),
            padding_needs_the_host(here),
            pages_rule(1),
            _paged_dims,
            sinks_learn_in_the_kernel(here),
            _by_card,
            _dims_by_card,
        ),
    )


def _value_dim(spec: AttentionSpec) -> Support:
    native = takes_dims(spec.head_dim, spec.value_dim, bool(spec.gradients))
    return NATIVE if native else EMULATED("pads the smaller of head dim and value dim")


def _paged_dims(spec: AttentionSpec) -> Reason | None:
    """Pages of another size than a tile are read row by row, without a look at where the head dim ends."""
    if spec.page_size and spec.head_dim % 16:
        return Reason(Feature.PAGED.value, f"head dim {spec.head_dim}", "a multiple of 16")
    return None


def _by_card(spec: AttentionSpec) -> Reason | None:
    """What the library asserts for each architecture."""
    if spec.capability is None:
        return None
    major = spec.capability[0]
    if major == 8 and spec.gradients:
        return Reason(Feature.BACKWARD.value, "on a card of compute capability 8", "9.0 or newer")
    if major in (8, 12) and spec.page_size:
        return Reason(Feature.PAGED.value, f"on a card of compute capability {major}", "9.0 to 11")
    if major == 12 and spec.deterministic and spec.gradients:
        return Reason(Feature.DETERMINISTIC.value, "gradients on a card of compute capability 12", "9.0 to 11")
    return None


def _dims_by_card(spec: AttentionSpec) -> Reason | None:
    if spec.capability is None or spec.capability[0] == 9:
        return None
    size = max(spec.head_dim, spec.value_dim)
    pair = spec.capability[0] in (10, 11) and takes_dims(spec.head_dim, spec.value_dim, bool(spec.gradients)) and size in (192, 256)
    if size > 128 and not (pair and (size == 256 or spec.value_dim == 128)):
        return Reason("head_dim", str(size), "128 or less on this card")
    return None


def _missing() -> Reason | None:
    found = library()
    return found if isinstance(found, Reason) else None


def _version() -> str:
    """The installed version; the newest known where there is none, so that explanations name what it could do."""
    found = library()
    return found.version if isinstance(found, Library) else "4.0.0b36"


def _notes(spec: AttentionSpec) -> Sequence[str]:
    return [*notes_for(spec, kernels(_version())), "compiles a kernel at the first call of its kind (seconds)"]


flash4 = Backend(
    name="flash4",
    run=run_flash4,
    capabilities=lambda: claims(_version()),
    priority=rank_of("flash4"),
    missing=_missing,
    family="flash",
    notes=_notes,
    packs=True,
)
