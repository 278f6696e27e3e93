"""flash-attn 2 (Dao, arXiv:2307.08691): the package `flash_attn` from 2.1, where causality became bottom-right.

What it can do came version by version; the table is `claims`. Windows are inclusive pairs with -1 for unlimited, slopes are float32, an empty
row's lse is +inf.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from packaging.version import Version

from ..backend import Backend, Output
from ..call import AttentionCall
from ..capabilities import EMULATED, NATIVE, Capabilities, Dims, Reason
from ..looked import traced, transforming
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
from .limits import no_early_window, rows_fit
from .order import FEW, rank_of

INSTALL = "pip install flash-attn --no-build-isolation"


class _Found:
    """Looked for once, when the claims or the reason missing are asked for; never under the compiler's eyes."""

    where: Library | Reason | None = None
    kernels: Kernels | None = None


def library() -> Library | Reason:
    if _Found.where is None:
        found = find(["flash-attn"], ["flash_attn.flash_attn_interface"], INSTALL, oldest="2.1")
        functions = ["flash_attn_func", "flash_attn_varlen_func"]
        if isinstance(found, Library) and kernels(found.version).reads_lengths:
            functions.append("flash_attn_with_kvcache")
        found = whole(found, functions, INSTALL)
        _Found.kernels = kernels(_version_of(found))
        _Found.where = found  # last, since another thread may ask meanwhile
    return _Found.where


def _version_of(found: Library | Reason) -> str:
    """The installed version; the newest known where there is none, so that explanations name what it could do."""
    return found.version if isinstance(found, Library) else "2.8.3"


def _version() -> str:
    return _version_of(library())


# ---------------------------------------------------------------------- the three functions


def _dense(call: AttentionCall, query, key, value) -> Result:
    spec = call.spec
    if not (spec.gradients or spec.dropout or spec.compiling or call.return_lse or call.sinks is not None) and _Found.kernels.reads_starts:
        # The same kernel by a shorter way: the other function is an operator of torch's library, which costs the host 70 us more.
        return _cached(call, query, key, value, None, None, None)
    result = library().module.flash_attn_func(query, key, value, **_options(call, key.shape[1]))
    if not isinstance(result, tuple):
        return result, None
    p = torch.arange(query.shape[1], device=call.device) + (key.shape[1] - query.shape[1])
    return result[0], _without_shift(call, result[1], p[None, None], key.shape[1])


def _segments(call: AttentionCall, query, key, value, cu_query, cu_key, longest_query, longest_key) -> Result:
    result = library().module.flash_attn_varlen_func(
        query, key, value, cu_query, cu_key, longest_query, longest_key, **_options(call, longest_key)
    )
    if not isinstance(result, tuple):
        return result, None
    if call.alibi_slopes is None:
        return result[0], result[1]
    row = torch.arange(query.shape[0], device=call.device)
    segment = (torch.searchsorted(cu_query, row, right=True, out_int32=True) - 1).clamp(0, cu_query.shape[0] - 2)
    p = cu_key[segment + 1] - cu_key[segment] - (cu_query[segment + 1] - row)
    return result[0], _without_shift(call, result[1], p[None], longest_key, segment)


def _cached(call: AttentionCall, query, keys, values, lengths, starts, table) -> Result:
    options = _options(call, call.key_length)
    wants_lse = options.pop("return_attn_probs", False)
    if wants_lse:
        options["return_softmax_lse"] = True
    if starts is not None:
        options["cache_leftpad"] = starts
    if table is not None:
        options["block_table"] = table
    elif query.shape[1] <= FEW and _Found.kernels.reads_starts and (numbers := _row_numbers(call)) is not None:
        # Says nothing new, and makes the library take the kernel that it takes for pages: its tiles are fit for few queries, and where the
        # rows already fill the card, so that keys aren't split, it is up to twice as fast.
        options["cache_batch_idx"] = numbers
    options.pop("deterministic", None)
    result = library().module.flash_attn_with_kvcache(query, keys, values, cache_seqlens=lengths, **options)
    if not wants_lse:
        return result, None
    real = lengths if starts is None else lengths - starts
    p = torch.arange(query.shape[1], device=call.device) + (real - query.shape[1])[:, None]
    return result[0], _without_shift(call, result[1], p[:, None], call.key_length)


_rows: dict[tuple[int, torch.device], torch.Tensor] = {}


def _row_numbers(call: AttentionCall) -> torch.Tensor | None:
    """0 to B - 1, (B,) int32, kept; None where a B is met first whose numbers can't be kept: inside of a graph, whose memory is its own, or
    where tensors are wrapped or fake."""
    known = call.query.shape[0], call.query.device
    numbers = _rows.get(known)
    if numbers is None and not (call.spec.capturing or traced(call.query) or transforming()):
        with torch.inference_mode(False):
            numbers = _rows[known] = torch.arange(known[0], dtype=torch.int32, device=known[1])
        if numbers.is_cuda:
            torch.cuda.current_stream(known[1]).synchronize()  # once, whatever stream reads them later
    return numbers


def _options(call: AttentionCall, longest_key: int) -> dict:
    """The keywords that this call needs, and no others: older versions don't know them."""
    options = {"softmax_scale": call.scale, "causal": call.causal}
    if call.window is not None:
        left, right = call.window
        # A side as long as the keys says nothing, and the kernel is told so: it would read a right side of 0 as causality besides.
        options["window_size"] = (-1 if left is None or left >= longest_key else left, 0 if call.causal else -1 if right is None else right)
    if call.softcap is not None:
        options["softcap"] = call.softcap
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes.detach().float().contiguous()
        # Rows of packed calls are segments of one batch row.
        options["alibi_slopes"] = slopes[0] if call.cu_seqlens is not None and slopes.dim() == 2 else slopes
    if call.dropout_p:
        options["dropout_p"] = call.dropout_p
    if call.deterministic and call.spec.gradients:
        options["deterministic"] = True
    if call.return_lse or call.sinks is not None:
        options["return_attn_probs"] = True
    return options


def _without_shift(call: AttentionCall, lse: torch.Tensor, p: torch.Tensor, longest_key: int, segment=None) -> torch.Tensor:
    """Takes back what the kernel adds under plain causality: it scores with slope * j, not slope * (j - p), which is slope * p more.

    p: slot of each query as the kernel counts it, (B or 1, 1, Sq), or (1, T) with `segment`, the slopes' row for each.
    """
    if call.alibi_slopes is None:
        return lse
    left, right = call.window or (None, None)
    plain = (left is None or left >= longest_key) and (call.causal or right == 0)
    if not plain:
        return lse
    slopes = call.alibi_slopes.detach().float()
    if segment is None:
        slopes = slopes[None, :, None] if slopes.dim() == 1 else slopes[:, :, None]
    elif slopes.dim() == 1 or call.cu_seqlens is not None:
        slopes = (slopes if slopes.dim() == 1 else slopes[0])[:, None]
    else:
        slopes = slopes[segment].T
    return lse - slopes * p


@functools.lru_cache(maxsize=64)
def kernels(version: str) -> Kernels:
    """What the functions of a version read and write: 2.3.4 began to write zeros where a segment has no key, or no query."""
    at_least = Version(version).__ge__
    reads = {"reads_lengths": at_least(Version("2.2.0")), "reads_starts": at_least(Version("2.6.1"))}
    return Kernels(_dense, _segments, _cached, **reads, fills_gaps=at_least(Version("2.3.4")))


def run_flash2(call: AttentionCall) -> Output:
    library()
    return run_flash(call, _Found.kernels)


# ---------------------------------------------------------------------- the claims


@functools.lru_cache(maxsize=64)
def claims(version: str) -> Capabilities:
    """What a version can do. From the package's tags, not its notes: a gate is the first one that computes it right, backward too."""
    at_least = Version(version).__ge__
    here = functools.partial(kernels, version)
    features = {
        Feature.CAUSAL: NATIVE,
        Feature.QUERY_MASK: NATIVE,
        Feature.KEY_MASK: NATIVE,
        Feature.KEY_LENGTHS: NATIVE,
        Feature.QUERY_LENGTHS: NATIVE,
        Feature.KEY_STARTS: NATIVE,
        Feature.PACKED: NATIVE,
        Feature.SCALE: NATIVE,
        Feature.DROPOUT: NATIVE,
        Feature.GROUPED_HEADS: NATIVE,
        Feature.VALUE_DIM: EMULATED("pads the smaller of head dim and value dim"),
        Feature.BACKWARD: NATIVE,
        Feature.CAPTURE: NATIVE,
    }
    gates = {
        "2.1.0": (Feature.UNEQUAL_LENGTHS,),
        "2.3.0": (Feature.WINDOW,),
        "2.4.2": (Feature.ALIBI,),
        "2.4.1": (Feature.DETERMINISTIC,),
        "2.5.0": (Feature.PAGED,),
        "2.6.0": (Feature.SOFTCAP, Feature.LSE, Feature.SINKS),
        "2.7.0": (Feature.COMPILE,),
    }
    for gate, gained in gates.items():
        if at_least(Version(gate)):
            features |= dict.fromkeys(gained, NATIVE)
    if Feature.SINKS in features:
        features[Feature.SINKS] = EMULATED("scales the result by its lse and the sink")

    def softcap(spec: AttentionSpec) -> Reason | None:
        if not spec.softcap:
            return None
        if spec.dropout:
            return Reason(Feature.SOFTCAP.value, "with dropout", "without: the kernel refuses both together")
        if spec.gradients and not at_least(Version("2.6.2")):
            return Reason(Feature.SOFTCAP.value, "with gradients", f"forward only in flash-attn {version}", "install flash-attn >= 2.6.2")
        return None

    return Capabilities(
        features=features,
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        head_dim=Dims(largest=256),
        value_dim=Dims(largest=256),
        smallest_capability=(8, 0),
        rules=(
            rows_fit, softcap, _lse_with_dropout, dropped_padding_must_fit(here), padding_needs_the_host(here), pages_rule(256), sinks_learn_in_the_kernel(here), no_early_window,
            _backward_memory,
        ),
    )  # fmt: skip


def _lse_with_dropout(spec: AttentionSpec) -> Reason | None:
    """The functions give an lse with all weights, Sq * Sk of them, and leave those out only where nothing is dropped."""
    if spec.dropout and (spec.return_lse or spec.sinks):
        return Reason(Feature.LSE.value, "with dropout (sinks need it too)", "without: the library would keep all weights beside it")
    return None


def _backward_memory(spec: AttentionSpec) -> Reason | None:
    """Cards with 100 KB of shared memory (8.6 to 8.9, 12.x) can't hold the backward of the largest head dims with dropout."""
    if spec.capability is None or not spec.gradients or not spec.dropout:
        return None
    small = (8, 6) <= spec.capability <= (8, 9) or spec.capability[0] == 12
    if small and max(spec.head_dim, spec.value_dim) > 224:
        return Reason(Feature.BACKWARD.value, f"head dim {spec.head_dim} with dropout on this card", "224 or less there")
    return None


def _missing() -> Reason | None:
    found = library()
    return found if isinstance(found, Reason) else None


def _notes(spec: AttentionSpec) -> Sequence[str]:
    return notes_for(spec, kernels(_version()))


flash2 = Backend(
    name="flash2",
    run=run_flash2,
    capabilities=lambda: claims(_version()),
    priority=rank_of("flash2"),
    missing=_missing,
    family="flash",
    notes=_notes,
    packs=True,
)
