"""flash-attn 3 (arXiv:2407.08608), for Hopper: `flash_attn_interface`, or the forward-only build on PyPI, `fa3_fwd_interface`.

Much is left out of a build by switches, which the package writes down: `CONFIG["build_flags"]` of its config module.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..backend import Backend, Output
from ..call import AttentionCall
from ..capabilities import EMULATED, NATIVE, Capabilities, Dims, Reason, Support
from ..looked import traced
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
from .installed import Library, find, whole
from .limits import rows_fit
from .order import FEW, rank_of

INSTALL = "build flash-attention/hopper (python setup.py install), or pip install fa3-fwd for bfloat16 without a backward pass"
_SIZES = (64, 96, 128, 192, 256)
_FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
_INTERFACES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface", "fa3_fwd_interface")


class _Found:
    """Looked for once, when the claims or the reason missing are asked for."""

    where: Library | Reason | None = None
    flags: Mapping[str, bool] | None = {}
    operator: Callable | None = None
    asks_lse: bool = True
    kernels: Kernels | None = None


def library() -> Library | Reason:
    if _Found.where is None:
        found = whole(find(["flash-attn-3", "flashattn-hopper", "fa3-fwd"], _INTERFACES, INSTALL), _FUNCTIONS, INSTALL)
        if isinstance(found, Library):
            interface = found.module.__name__
            _Found.flags, _Found.operator = _build_flags(interface), _operator(interface)
            _Found.asks_lse = _asks_lse(found.module)
        _Found.kernels = kernels(tuple(sorted((_Found.flags or {}).items())))
        _Found.where = found  # last, since another thread may ask meanwhile
    return _Found.where


def _build_flags(interface: str) -> Mapping[str, bool] | None:
    """The switches of the build that `interface` belongs to; None for one from before 2025-12-04, which does not tell."""
    try:
        module = importlib.import_module(interface.replace("_interface", "_config"))
        return dict(module.CONFIG["build_flags"])
    except (ImportError, AttributeError, KeyError, TypeError):
        return None


def _operator(interface: str) -> Callable | None:
    """The operator that the library's functions call in the end; None if there is none that takes what `_inference` gives it."""
    try:
        operator = getattr(torch.ops, "fa3_fwd" if interface == "fa3_fwd_interface" else "flash_attn_3").fwd.default
    except AttributeError:
        return None
    return operator if {argument.name for argument in operator._schema.arguments} >= _GIVEN else None


def _asks_lse(module: Any) -> bool:
    """Whether the functions give the lse when asked: from 2025-08-29 on. Till 2025-07-11 they gave it always, in between never."""
    return "return_attn_probs" in inspect.signature(module.flash_attn_func).parameters


# ---------------------------------------------------------------------- the three functions


def _dense(call: AttentionCall, query, key, value) -> Result:
    spec = call.spec
    if spec.sizes is not None and spec.sizes[1] <= FEW and not spec.gradients:
        # The function for caches splits long keys over the card by itself, the other one never does.
        return _cached(call, query, key, value, None, None, None)
    if _reaches_operator(call):
        return _inference(call, query, key, value, num_splits=1)
    return _pair(library().module.flash_attn_func(query, key, value, **_options(call), **_request(call)))


def _segments(call: AttentionCall, query, key, value, cu_query, cu_key, longest_query, longest_key) -> Result:
    if _reaches_operator(call):
        return _inference(
            call, query, key, value, num_splits=1,
            cu_seqlens_q=cu_query.contiguous(), cu_seqlens_k=cu_key.contiguous(), max_seqlen_q=longest_query, max_seqlen_k=longest_key,
        )  # fmt: skip
    function = library().module.flash_attn_varlen_func
    return _pair(function(query, key, value, cu_query, cu_key, longest_query, longest_key, **_options(call), **_request(call)))


def _cached(call: AttentionCall, query, keys, values, lengths, starts, table) -> Result:
    if _reaches_operator(call):
        lengths, starts = (None if t is None else t.contiguous() for t in (lengths, starts))
        table = table if table is None or table.stride(-1) == 1 else table.contiguous()
        return _inference(call, query, keys, values, num_splits=0, seqused_k=lengths, leftpad_k=starts, page_table=table)
    options = _options(call)
    options["return_softmax_lse"] = _needs_lse(call)
    options.pop("deterministic", None)
    if starts is not None:
        options["cache_leftpad"] = starts
    if table is not None:
        options["page_table"] = table
    return _pair(library().module.flash_attn_with_kvcache(query, keys, values, cache_seqlens=lengths, **options))


_GIVEN = frozenset(
    ("softmax_scale", "is_causal", "window_size_left", "window_size_right", "softcap", "num_splits")
    + ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k", "leftpad_k", "page_table")
)


def _reaches_operator(call: AttentionCall) -> bool:
    """The functions wrap the operator for autograd and tracers, which costs the host three times what the operator itself does."""
    return _Found.operator is not None and not call.spec.gradients and not traced(call.query)


def _inference(call: AttentionCall, query, key, value, **given) -> Result:
    left, right = _window(call)
    options = {"window_size_left": left, "window_size_right": right, "softcap": call.softcap or 0.0}
    result = _Found.operator(query, key, value, softmax_scale=call.scale, is_causal=call.causal, **options, **given)
    return result[0], result[1]


def _pair(result) -> Result:
    """Some builds return the lse unasked (`_asks_lse`)."""
    return (result[0], result[1]) if isinstance(result, (tuple, list)) else (result, None)


def _options(call: AttentionCall) -> dict:
    options = {"softmax_scale": call.scale, "causal": call.causal}
    if call.window is not None:
        options["window_size"] = _window(call)
    if call.softcap is not None:
        options["softcap"] = call.softcap
    if call.deterministic and call.spec.gradients:
        options["deterministic"] = True
    return options


def _request(call: AttentionCall) -> dict:
    return {"return_attn_probs": True} if _needs_lse(call) and _Found.asks_lse else {}


def _needs_lse(call: AttentionCall) -> bool:
    return call.return_lse or call.sinks is not None


def _window(call: AttentionCall) -> tuple[int, int]:
    left, right = call.window or (None, None)
    return -1 if left is None else left, 0 if call.causal else -1 if right is None else right


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
    return run_flash(call, _Found.kernels)


# ---------------------------------------------------------------------- the claims


@functools.lru_cache(maxsize=16)
def kernels(flags: tuple[tuple[str, bool], ...]) -> Kernels:
    known = dict(flags)
    return Kernels(_dense, _segments, _cached, value_dim=lambda *dims: takes_dims(*dims, known), reads_whole_tiles=True)


def claims(flags: Mapping[str, bool] | None, asks_lse: bool = True) -> Capabilities:
    """What a build can do, by its switches (FLASHATTENTION_DISABLE_...). One too old to tell (None) left nothing out."""
    told, flags = flags is not None, flags or {}

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
    if told:
        # The file of switches and the functions that the compiler knows came together (flash-attention's #1769).
        features[Feature.COMPILE] = NATIVE
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
            rows_fit, dropped_padding_must_fit(here), padding_needs_the_host(here), pages_rule(1), sinks_learn_in_the_kernel(here),
            functools.partial(_deterministic, flags), functools.partial(_dims, flags), functools.partial(_lse_with_gradients, asks_lse),
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


def _lse_with_gradients(asks_lse: bool, spec: AttentionSpec) -> Reason | None:
    """Without gradients the operator gives it, or functions that give it always."""
    if asks_lse or not spec.return_lse or not spec.gradients:
        return None
    return Reason(
        Feature.LSE.value, "with gradients", "without: this build's functions can't be asked for it", "a build from 2025-08-29 on"
    )


def _missing() -> Reason | None:
    found = library()
    return found if isinstance(found, Reason) else None


def _claims_here() -> Capabilities:
    library()
    return claims(_Found.flags, _Found.asks_lse)


def _notes(spec: AttentionSpec) -> Sequence[str]:
    library()
    return notes_for(spec, _Found.kernels)


def _rank(spec: AttentionSpec) -> int:
    """Compiled, the function that splits the keys of a lone query over the card is out of reach: last, then."""
    return 1 if spec.compiling and spec.single_query else rank_of("flash3")(spec)


flash3 = Backend(
    name="flash3",
    run=run_flash3,
    capabilities=_claims_here,
    priority=_rank,
    missing=_missing,
    family="flash",
    notes=_notes,
    packs=True,
)
