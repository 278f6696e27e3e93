"""xformers' `memory_efficient_attention`: its flash operator with bias objects, its CUTLASS operator with tensors.

Of its many bias classes only those that mean exactly what a call asks are used: the bottom-right ones (`LowerTriangularMask` and
`BlockDiagonalCausalMask` are top-left), and a window that counts the query itself where the class does. The operator is always named, never
left to xformers' own dispatch.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from ..backend import Backend, Output
from ..call import AttentionCall
from ..capabilities import EMULATED, NATIVE, Capabilities, Reason, Support
from ..packing import padding_must_fit
from ..spec import AttentionSpec, Feature
from .flash import refuse_second
from .limits import flash_lacks_memory, no_early_window, no_huge_bias, rows_fit
from .lse import with_empty_rows
from .order import rank_of
from .rows import Rows, rows_of
from .sdpa import repeated_and_padded, roomy, run_around, widened
from .varlen import padding_needs_the_host

_HALF = (torch.float16, torch.bfloat16)


def kernel_for(spec: AttentionSpec) -> str:
    """Which of its operators runs a spec: "flash" or "cutlass"."""
    added = spec.mask is not None or spec.bias is not None or spec.alibi is not None
    segments = spec.padded and spec.window is not None and not spec.causal  # no bias object of rows has a window on both sides
    fits = spec.dtype in _HALF and spec.head_dim == spec.value_dim and spec.head_dim <= 256 and not segments
    loose = padding_must_fit(spec) is not None
    lacking = spec.capability is not None and (spec.capability < (8, 0) or flash_lacks_memory(spec))
    return "cutlass" if added or not fits or loose or lacking else "flash"


# ---------------------------------------------------------------------- the library


class _Found:
    fmha: ModuleType | None = None
    reason: Reason | None = None
    asked = False


def find() -> Reason | None:
    """Imports the library, once. Returns why it can't be used, or None."""
    if not _Found.asked:
        if torch.version.cuda is None:
            _Found.reason = Reason("missing", "CUDA", f"torch {torch.__version__} without it", "install a torch build for CUDA")
        else:
            _Found.fmha, _Found.reason = _import()
        _Found.asked = True  # last, since another thread may ask meanwhile
    return _Found.reason


def _import() -> tuple[ModuleType | None, Reason | None]:
    try:
        version = importlib.metadata.version("xformers")
    except importlib.metadata.PackageNotFoundError:
        return None, Reason("missing", "xformers", "not installed", "pip install xformers, of a version that takes this torch")
    named = f"xformers {version}"
    try:
        with _broken_libraries_hidden():
            fmha = importlib.import_module("xformers.ops.fmha")
    except Exception as error:
        remedy = "install an xformers built for this torch"
        if "mslk" in str(error):
            remedy = "install mslk, which this xformers is a front for"
        elif "lash-" in str(error):
            remedy = "install a flash-attn that it takes, or none"
        return None, Reason("missing", named, f"its import raised {type(error).__name__}: {error}", remedy)
    return _checked(fmha, named)


def _checked(fmha: ModuleType, named: str) -> tuple[ModuleType | None, Reason | None]:
    """The module that has the operators (xformers' own, or the package it is a front for), if they can run here."""
    if not all(hasattr(fmha, name) for name in ("flash", "cutlass", "attn_bias")):
        try:
            fmha = importlib.import_module("mslk.attention.fmha")
        except Exception as error:
            reason = Reason(
                "missing", named, f"a front for mslk, whose import raised {type(error).__name__}: {error}", "install mslk for this torch"
            )
            return None, reason
    common = sys.modules.get(f"{fmha.__name__}.common")
    if not getattr(common, "_built_with_cuda", True):
        library = sys.modules.get("xformers._cpp_lib")
        cause = getattr(library, "_cpp_library_load_exception", None)
        info = getattr(cause, "build_info", None)
        built = f"built for CUDA {_cuda_version(info)}" if info is not None else "without its compiled library"
        remedy = "install an xformers built for this torch"
        if info is not None and torch.version.cuda is not None:
            remedy += (
                f", or the CUDA {_cuda_version(info)} runtime that it loads (pip install nvidia-cuda-runtime-cu12, and libcudart.so.12 on "
                "LD_LIBRARY_PATH)"
            )
        return fmha, Reason("missing", f"{named} with CUDA", f"{built}; torch {torch.__version__} has CUDA {torch.version.cuda}", remedy)
    if not fmha.flash.FwOp.is_available() and not fmha.cutlass.FwOp.is_available():
        return fmha, Reason(
            "missing", f"an operator of {named}", "none of flash and cutlass is available with this torch", "see xformers.info"
        )
    return fmha, None


def _cuda_version(info: Any) -> str:
    """Its build notes say 1208 for 12.8."""
    number = info.cuda_version
    return f"{number // 100}.{number % 100}" if isinstance(number, int) else str(number)


_IMPORTED = {"flash_attn": "flash_attn.flash_attn_interface", "flash_attn_3": "flash_attn_3._C"}
"""What xformers imports of a package as soon as that is there."""


@contextlib.contextmanager
def _broken_libraries_hidden() -> Iterator[None]:
    """Hides the packages of flash-attn 2 and 3 from `find_spec` while xformers is imported, where their kernels can't be: they are broken, or
    only flash-attn 4's half of flash-attn 2's package is there. xformers takes a package's mere existence for the library, and dies of it.
    """
    find_spec = importlib.util.find_spec
    hidden = set()
    for package, module in _IMPORTED.items():
        if find_spec(package) is not None:
            try:
                importlib.import_module(module)
            except Exception:  # a broken library may raise anything
                hidden.add(package)
    if hidden:
        importlib.util.find_spec = lambda name, package=None: None if name in hidden else find_spec(name, package)
    try:
        yield
    finally:
        importlib.util.find_spec = find_spec


# ---------------------------------------------------------------------- running it


def run_xformers(call: AttentionCall) -> Output:
    """Runs the operator that `kernel_for` names, in (B, S, H, D)."""
    if kernel_for(call.spec) == "flash":
        return _flash(call)
    call.to_layout("bhsd")
    result = run_around(_cutlass, call, "cutlass")
    return (result[0].transpose(1, 2), result[1]) if call.return_lse else result.transpose(1, 2)


def bias_for(call: AttentionCall, attn_bias: Any, queries: int, keys: int) -> Any:
    """The bias object of `queries` and `keys` dense slots that means what the call's causality and window mean; None for no mask."""
    left, right = call.window or (None, None)
    if call.causal:
        bias = attn_bias.LowerTriangularFromBottomRightMask()
        # This window counts the query's own slot.
        return bias if left is None else bias.make_local_attention(left + 1)
    if left is None and right is None:
        return None
    # These two don't count it; an unlimited side is one that no slot is far enough for.
    far = queries + keys
    return attn_bias.LocalAttentionFromBottomRightMask(far if left is None else left, far if right is None else right)


def segments_for(call: AttentionCall, attn_bias: Any, queries: Sequence[int], keys: Sequence[int], device: torch.device) -> Any:
    """The same for packed segments of these lengths. Under causality no segment may have more queries than keys."""
    blocks = attn_bias.BlockDiagonalMask.from_seqlens(list(queries), list(keys), device=device)
    if not call.causal:
        return blocks
    left = call.window[0] if call.window else None
    return blocks.make_causal_from_bottomright() if left is None else blocks.make_local_attention_from_bottomright(left + 1)


def _flash(call: AttentionCall) -> Output:
    spec, fmha = call.spec, _Found.fmha
    if not spec.padded:
        bias = bias_for(call, fmha.attn_bias, call.query_length, call.key_length)
        return _run(call, call.query, call.key, call.value, bias)
    rows = rows_of(call)
    if rows.empty:
        return rows.nothing(call)
    rows, lengths = _seeing(call, rows)
    if rows.empty:
        return rows.nothing(call)
    bias = segments_for(call, fmha.attn_bias, *lengths, call.device)
    if max(lengths[0]) == 1 and 0 in lengths[0]:
        # For one query a segment the kernel lays the heads of a group side by side, and then counts on every segment having that query.
        bias.q_seqinfo.max_seqlen = 2
    result = _run(call, *(t[None] for t in (rows.query, rows.key, rows.value)), bias)
    if not call.return_lse:
        return rows.restored(result.squeeze(0))
    return rows.restored(result[0].squeeze(0)), rows.restored_lse(result[1].squeeze(0))


def _seeing(call: AttentionCall, rows: Rows) -> tuple[Rows, tuple[list[int], list[int]]]:
    """Rows up to the last segment, and segment lengths on the host; under causality without the queries before a segment's first key.

    Those see nothing, and xformers takes no segment that has them.
    """
    queries, keys = rows.lengths
    if queries is None or keys is None:
        starts = torch.cat([rows.cu_query, rows.cu_key]).tolist()
        n = rows.cu_query.shape[0]
        queries, keys = ([b - a for a, b in zip(side, side[1:])] for side in (starts[:n], starts[n:]))
    total = (sum(queries), sum(keys))
    kept = [min(q, k) for q, k in zip(queries, keys)] if call.causal else queries
    if kept == queries:
        if rows.indices is None:
            rows = rows._replace(query=rows.query[: total[0]], real=None)
    else:
        places, start = [], 0
        for length, few in zip(queries, kept):
            places += range(start + length - few, start + length)
            start += length
        places = torch.tensor(places, dtype=torch.int64, device=call.device)
        indices = places if rows.indices is None else rows.indices[places]
        rows = rows._replace(query=rows.query.index_select(0, places), indices=indices, real=None)
    return rows._replace(key=rows.key[: total[1]], value=rows.value[: total[1]]), (kept, keys)


def _run(call: AttentionCall, query, key, value, bias) -> Output:
    """The flash operator over (B, S, H, D) tensors."""
    spec, flash = call.spec, _Found.fmha.flash
    if query.shape[-1] % 8:
        query, key, value = (widened(t, t.shape[-1] + -t.shape[-1] % 8) for t in (query, key, value))
    elif not (spec.unit_stride and spec.aligned):
        query, key, value = (t.clone(memory_format=torch.contiguous_format) for t in (query, key, value))
    group = call.query_heads // call.key_heads
    if spec.gradients:
        # Grouped heads have no backward.
        key, value = (t.repeat_interleave(group, 2) if group > 1 else t for t in (key, value))
        if query.shape != key.shape and query.stride(-2) == query.shape[-1] + key.shape[-1] + value.shape[-1]:
            # By that stride xformers takes the three for slices of one tensor, and gives all gradients the query's shape.
            query = query.clone(memory_format=torch.contiguous_format)
    else:
        query, key, value = (t.detach() for t in (query, key, value))
        if group > 1:
            query = query.unflatten(2, (call.key_heads, group))
            key, value = (t.unsqueeze(3).expand(-1, -1, -1, group, -1) for t in (key, value))
    result = _attend(call, query, key, value, bias, flash)
    output, lse = result if call.return_lse else (result, None)
    output = (output.flatten(2, 3) if output.dim() == 5 else output)[..., : call.value_dim]
    if lse is None:
        return output
    lse = lse.flatten(1, 2) if lse.dim() == 4 else lse
    return output, with_empty_rows(lse)


def _cutlass(call: AttentionCall, query, key, value, mask, causal) -> tuple[torch.Tensor, torch.Tensor | None]:
    fmha = _Found.fmha
    query, key, value = repeated_and_padded(call, query, key, value)
    bias = None
    if mask is not None:
        bias = roomy(mask, key.shape[2]).expand(query.shape[0], call.query_heads, query.shape[2], key.shape[2])
    elif causal:  # equal lengths
        bias = fmha.attn_bias.LowerTriangularFromBottomRightMask()
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    if not call.spec.gradients:
        query, key, value = (t.detach() for t in (query, key, value))
    result = _attend(call, query, key, value, bias, fmha.cutlass)
    output, lse = result if call.return_lse else (result, None)
    # The lse is padded to a multiple of 32 rows.
    return output[..., : call.value_dim].transpose(1, 2), None if lse is None else lse[:, :, : call.query_length]


def _attend(call: AttentionCall, query, key, value, bias, kernel) -> Output:
    fmha = _Found.fmha
    if call.return_lse:
        return fmha.memory_efficient_attention_forward_requires_grad(query, key, value, bias, 0.0, call.scale, op=kernel.FwOp)
    output = fmha.memory_efficient_attention(query, key, value, bias, call.dropout_p, call.scale, op=(kernel.FwOp, kernel.BwOp))
    if call.spec.gradients and not call.spec.compiling and output.requires_grad:
        output.register_hook(refuse_second)
    return output


# ---------------------------------------------------------------------- the claims


def _early_window(spec: AttentionSpec) -> Reason | None:
    return no_early_window(spec) if kernel_for(spec) == "flash" else None


def _lse_with_gradients(spec: AttentionSpec) -> Reason | None:
    if spec.return_lse and (spec.gradients or spec.dropout):
        return Reason(Feature.LSE.value, "with gradients or dropout", "without: the function that gives an lse is outside autograd")
    return None


def _cutlass_card(spec: AttentionSpec) -> Reason | None:
    if spec.capability is not None and spec.capability > (9, 0) and kernel_for(spec) == "cutlass":
        return Reason("capability", ".".join(map(str, spec.capability)), "up to 9.0 for masks, float32 and value dims (CUTLASS)")
    return None


def _old_card(spec: AttentionSpec) -> Reason | None:
    if spec.capability is not None and spec.capability < (8, 0) and spec.dtype == torch.bfloat16:
        return Reason("dtype", "bfloat16 below compute capability 8.0", "float16 or float32 there")
    return None


def _host_lengths(spec: AttentionSpec) -> Reason | None:
    if spec.packed and spec.capturing and kernel_for(spec) == "flash":
        return Reason(Feature.CAPTURE.value, "packed rows", "dense ones: the bias object needs segment lengths on the host")
    return padding_needs_the_host(spec) if kernel_for(spec) == "flash" else None


def _if_cutlass(cost: str, otherwise: Support = NATIVE):
    emulated = EMULATED(cost)
    return lambda spec: emulated if kernel_for(spec) == "cutlass" else otherwise


def _unequal(spec: AttentionSpec) -> Support:
    alone = spec.single_query and spec.window is None and spec.alibi is None
    return NATIVE if kernel_for(spec) == "flash" or alone else EMULATED("a (B or 1, 1, Sq, Sk) mask for the diagonal")


def _causal(spec: AttentionSpec) -> Support:
    mixed = spec.mask is not None or spec.bias is not None or spec.alibi is not None or spec.padded
    return EMULATED("written into the mask, (B or 1, 1, Sq, Sk)") if mixed and kernel_for(spec) == "cutlass" else NATIVE


def _grouped(spec: AttentionSpec) -> Support:
    return EMULATED("repeats key and value heads") if spec.gradients or kernel_for(spec) == "cutlass" else NATIVE


def _notes(spec: AttentionSpec) -> Sequence[str]:
    kernel = kernel_for(spec)
    notes = [f"xformers' {kernel} operator"]
    if kernel == "flash" and spec.packed:
        notes.append("reads cu_seqlens on the host")
    elif kernel == "flash" and spec.padded:
        notes.append("reads segment lengths on the host, unless attnreg.Padding knows them")
    if kernel == "cutlass" and spec.padded and not spec.finite_padding:
        notes.append("cleans padding in copies of query, key and value; finite_padding=True spares them")
    if spec.head_dim % 8:
        notes.append("pads head dims, in copies")
    return notes


_PACKS = _if_cutlass("an additive mask for the padding", EMULATED("gathers the real tokens, and scatters the result"))

xformers = Backend(
    name="xformers",
    run=run_xformers,
    capabilities=Capabilities(
        features={
            Feature.CAUSAL: _causal,
            Feature.UNEQUAL_LENGTHS: _unequal,
            Feature.WINDOW: _if_cutlass("a (B or 1, 1, Sq, Sk) mask"),
            Feature.QUERY_MASK: _if_cutlass("zeroes rows of the output", EMULATED("gathers the real tokens, and scatters the result")),
            Feature.KEY_MASK: _PACKS,
            Feature.MASK: NATIVE,
            Feature.BIAS: NATIVE,
            Feature.KEY_LENGTHS: _PACKS,
            Feature.QUERY_LENGTHS: _PACKS,
            Feature.KEY_STARTS: _PACKS,
            Feature.PACKED: _if_cutlass("a (1, 1, Sq, Sk) mask of the segments"),
            Feature.ALIBI: EMULATED("a (B or 1, Hq, Sq, Sk) bias"),
            Feature.SCALE: NATIVE,
            Feature.DROPOUT: NATIVE,
            Feature.LSE: NATIVE,
            Feature.GROUPED_HEADS: _grouped,
            Feature.VALUE_DIM: NATIVE,
            Feature.BACKWARD: NATIVE,
            Feature.CAPTURE: NATIVE,
        },
        devices=("cuda",),
        # Not float32: on an H200 CUTLASS was up to twice the allowed error away in 3 of some 1,500 such calls, all with a mask or a bias.
        dtypes=(torch.float16, torch.bfloat16),
        rules=(rows_fit, no_huge_bias, _early_window, _lse_with_gradients, _cutlass_card, _old_card, _host_lengths),
    ),
    priority=rank_of("xformers"),
    missing=find,
    notes=_notes,
    packs=True,
)
