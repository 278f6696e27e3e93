"""flash-attn 3 (arXiv:2407.08608), for Hopper: `flash_attn_interface`, or the forward-only build on PyPI, `fa3_fwd_interface`.

Much is left out of a build by switches, which the package writes down: `CONFIG["build_flags"]` of its config module.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence

import torch

from ..backend import Backend, Output
from ..call import AttentionCall
from ..capabilities import EMULATED, NATIVE, Capabilities, Dims, Reason, Support
from ..spec import AttentionSpec, Feature
from .flash import (
    Kernels,
    Result,
    dropped_padding_must_fit,
    no_sink_gradients,
    notes_for,
    padding_needs_the_host,
    pages_rule,
    run_flash,
)  # fmt: skip
from .installed import Library, find
from .order import FEW, rank_of
from .sdpa import rows_fit

INSTALL = "build flash-attention/hopper (python setup.py install), or pip install fa3-fwd for bfloat16 without a backward pass"
_SIZES = (64, 96, 128, 192, 256)
_INTERFACES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface", "fa3_fwd_interface")


class _Found:
    """Looked for once, when the claims or the reason missing are asked for."""

    where: Library | Reason | None = None
    flags: Mapping[str, bool] | None = None


def library() -> Library | Reason:
    if _Found.where is None:
        _Found.where = find(["flash-attn-3", "flashattn-hopper", "fa3-fwd"], _INTERFACES, INSTALL)
        if isinstance(_Found.where, Library):
            _Found.flags = _build_flags(_Found.where.module.__name__)
    return _Found.where


def _build_flags(interface: str) -> Mapping[str, bool]:
    """The switches of the build that `interface` belongs to; a build too old to tell left nothing out."""
    try:
        module = importlib.import_module(interface.replace("_interface", "_config"))
        return dict(module.CONFIG["build_flags"])
    except (ImportError, AttributeError, KeyError, TypeError):
        return {}


# ---------------------------------------------------------------------- the three functions


def _dense(call: AttentionCall, query, key, value) -> Result:
    spec = call.spec
    if spec.sizes is not None and spec.sizes[1] <= FEW and not spec.gradients:
        # The function for caches splits long keys over the card by itself, the other one never does.
        return _cached(call, query, key, value, None, None, None)
    return _pair(library().module.flash_attn_func(query, key, value, **_options(call)))


def _segments(call: AttentionCall, query, key, value, cu_query, cu_key, longest_query, longest_key) -> Result:
    function = library().module.flash_attn_varlen_func
    return _pair(function(query, key, value, cu_query, cu_key, longest_query, longest_key, **_options(call)))


def _cached(call: AttentionCall, query, keys, values, lengths, starts, table) -> Result:
    options = _options(call)
    options["return_softmax_lse"] = options.pop("return_attn_probs", False)
    options.pop("deterministic", None)
    if starts is not None:
        options["cache_leftpad"] = starts
    if table is not None:
        options["page_table"] = table
    return _pair(library().module.flash_attn_with_kvcache(query, keys, values, cache_seqlens=lengths, **options))


def _pair(result) -> Result:
    """Builds from before 2025-08-29 return the lse unasked."""
    return (result[0], result[1]) if isinstance(result, (tuple, list)) else (result, None)


def _options(call: AttentionCall) -> dict:
    options = {"softmax_scale": call.scale, "causal": call.causal}
    if call.window is not None:
        left, right = call.window
        options["window_size"] = (-1 if left is None else left, 0 if call.causal else -1 if right is None else right)
    if call.softcap is not None:
        options["softcap"] = call.softcap
    if call.deterministic and call.spec.gradients:
        options["deterministic"] = True
    if call.return_lse or call.sinks is not None:
        options["return_attn_probs"] = True
    return options


def kernel_for(head_dim: int, flags: Mapping[str, bool]) -> int | None:
    """The head dim of the kernel that is run: the smallest of this build that holds it."""
    return next((size for size in _SIZES if head_dim <= size and not flags.get(f"FLASHATTENTION_DISABLE_HDIM{size}")), None)


def takes_dims(head_dim: int, value_dim: int, gradients: bool, flags: Mapping[str, bool]) -> bool:
    """The pairs that have a kernel of their own, forward; others are padded.

    The library asks which kernel for a head dim is there first, and for that of 64 or 192 then, which it has for other value dims.
    """
    if head_dim == value_dim:
        return True
    if gradients:
        return False
    kernel = kernel_for(head_dim, flags)
    if kernel == 64:
        return value_dim <= 64 or (value_dim <= 512 and not flags.get("FLASH_ATTENTION_DISABLE_HDIMDIFF64"))
    return kernel == 192 and head_dim > 128 and 96 < value_dim <= 128 and not flags.get("FLASH_ATTENTION_DISABLE_HDIMDIFF192")


def run_flash3(call: AttentionCall) -> Output:
    library()
    return run_flash(call, kernels(tuple(sorted((_Found.flags or {}).items()))))


# ---------------------------------------------------------------------- the claims


@functools.lru_cache(maxsize=16)
def kernels(flags: tuple[tuple[str, bool], ...]) -> Kernels:
    known = dict(flags)
    return Kernels(_dense, _segments, _cached, value_dim=lambda *dims: takes_dims(*dims, known), reads_whole_tiles=True)


def claims(flags: Mapping[str, bool]) -> Capabilities:
    """What a build can do, by its switches (FLASHATTENTION_DISABLE_...)."""

    def built(name: str) -> bool:
        return not flags.get(f"FLASHATTENTION_DISABLE_{name}", False)

    here = functools.partial(kernels, tuple(sorted(flags.items())))
    features = {
        Feature.CAUSAL: NATIVE,
        Feature.UNEQUAL_LENGTHS: NATIVE,
        Feature.QUERY_MASK: NATIVE,
        Feature.SCALE: NATIVE,
        Feature.LSE: NATIVE,
        Feature.SINKS: EMULATED("scales the result by its lse and the sink"),
        Feature.GROUPED_HEADS: NATIVE,
        Feature.VALUE_DIM: functools.partial(_value_dim, flags),
        Feature.CAPTURE: NATIVE,
        Feature.DETERMINISTIC: NATIVE,
    }
    if built("VARLEN"):
        features |= {
            Feature.KEY_MASK: NATIVE,
            Feature.KEY_LENGTHS: NATIVE,
            Feature.QUERY_LENGTHS: NATIVE,
            Feature.KEY_STARTS: NATIVE,
            Feature.PACKED: NATIVE,
        }
        if built("PAGEDKV"):
            features[Feature.PAGED] = NATIVE
    gained = {"LOCAL": Feature.WINDOW, "SOFTCAP": Feature.SOFTCAP, "BACKWARD": Feature.BACKWARD}
    features |= {feature: NATIVE for switch, feature in gained.items() if built(switch)}
    return Capabilities(
        features=features,
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16) if built("FP16") else (torch.bfloat16,),
        head_dim=Dims(largest=_largest(flags)),
        value_dim=Dims(largest=512),
        smallest_capability=(9, 0),
        largest_capability=(9, 0),
        rules=(
            rows_fit, dropped_padding_must_fit(here), padding_needs_the_host(here), pages_rule(1), no_sink_gradients,
            functools.partial(_deterministic, flags), functools.partial(_dims, flags),
        ),
    )  # fmt: skip


def _value_dim(flags: Mapping[str, bool], spec: AttentionSpec) -> Support:
    native = takes_dims(spec.head_dim, spec.value_dim, bool(spec.gradients), flags)
    return NATIVE if native else EMULATED("pads the smaller of head dim and value dim")


def _largest(flags: Mapping[str, bool], below: int = 257) -> int:
    return max((size for size in _SIZES if size < below and not flags.get(f"FLASHATTENTION_DISABLE_HDIM{size}")), default=0)


def _dims(flags: Mapping[str, bool], spec: AttentionSpec) -> Reason | None:
    largest = _largest(flags)
    if spec.value_dim <= largest or takes_dims(spec.head_dim, spec.value_dim, bool(spec.gradients), flags):
        return None
    wide = "; 512 with a head dim of 64 or less, forward" if takes_dims(64, 512, False, flags) else ""
    return Reason("value_dim", f"{spec.value_dim} with head dim {spec.head_dim}", f"{largest}{wide}")


def _deterministic(flags: Mapping[str, bool], spec: AttentionSpec) -> Reason | None:
    size = max(spec.head_dim, spec.value_dim)
    if spec.deterministic and spec.gradients and kernel_for(size, flags) == 256:
        return Reason(Feature.DETERMINISTIC.value, f"gradients with head dim {size}", f"{_largest(flags, 256)} or less")
    return None


def _missing() -> Reason | None:
    found = library()
    return found if isinstance(found, Reason) else None


def _claims_here() -> Capabilities:
    library()
    return claims(_Found.flags or {})


def _notes(spec: AttentionSpec) -> Sequence[str]:
    return notes_for(spec, kernels(tuple(sorted((_Found.flags or {}).items()))))


flash3 = Backend(
    name="flash3",
    run=run_flash3,
    capabilities=_claims_here,
    priority=rank_of("flash3"),
    missing=_missing,
    family="flash",
    notes=_notes,
    packs=True,
)
