"""torch's own attention kernels, called by name: CPU flash; on CUDA flash and memory-efficient; math where those can't.

`torch.nn.functional.scaled_dot_product_attention` chooses among them by process-wide switches and falls back in silence. Here the
choice is `kernel_for`, a function of the spec that the explanation shows, and no switch is read or set. cuDNN is a backend of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import pad

from ..backend import Backend, Output
from ..call import AttentionCall
from ..capabilities import EMULATED, NATIVE, Capabilities, Reason, Support
from ..spec import AttentionSpec, Feature
from ..visibility import added, cleaned, real_keys, real_queries, structure
from .limits import MOST_ROWS, flash_lacks_memory, misreads_window
from .lse import NEGATIVE_INFINITY, with_empty_rows
from .order import rank_of

_HALF = (torch.float16, torch.bfloat16)


def kernel_for(spec: AttentionSpec) -> str:
    """Which of torch's kernels runs a spec: "cpu flash", "flash", "efficient" or "math".

    All but math have a backward that takes the weights from the lse. Rounding wipes log(n) out of that beside a huge bias, and rows whose n
    visible slots all have one get gradients n times too large: seen on CPUs and on an H200. Forward they are right.
    """
    if spec.device == "cpu":
        return "math" if spec.dropout or _learned(spec) or spec.huge_bias else "cpu flash"
    if spec.device != "cuda" or spec.dtype == torch.float64 or spec.huge_bias or torch.version.hip is not None:
        return "math"  # ROCm has other kernels under the same names, which nobody has looked at
    largest = max(spec.head_dim, spec.value_dim)
    unmasked = not (spec.key_mask or spec.key_lengths or spec.key_starts or spec.packed or spec.query_lengths)
    plain = unmasked and spec.mask is None and spec.bias is None and spec.alibi is None and not spec.sinks
    fast = plain and spec.dtype in _HALF and largest <= 256 and spec.capability >= (8, 0)
    if fast and not flash_lacks_memory(spec) and not misreads_window(spec):
        return "flash"
    if spec.dtype == torch.bfloat16 and spec.capability < (8, 0):
        return "math"
    return "efficient"


def _learned(spec: AttentionSpec) -> bool:
    """Whether what is added to the scores gets a gradient."""
    return any(name in spec.gradients for name in ("bias", "sinks", "alibi_slopes"))


def run_for(spec: AttentionSpec) -> Callable[[AttentionCall], Output]:
    """The fused CPU kernel itself where nothing need be done around it, else `run_sdpa`."""
    if cuts_to_window(spec):
        return _run_in_window
    if kernel_for(spec) != "cpu flash" or not _plain(spec) or needs_mask(spec):
        return run_sdpa
    causal = spec.causal and spec.equal_lengths

    def run_cpu_flash(call: AttentionCall) -> torch.Tensor:
        return torch._scaled_dot_product_flash_attention_for_cpu(call.query, call.key, call.value, 0.0, causal, scale=call.scale)[0]

    return run_cpu_flash


def _plain(spec: AttentionSpec) -> bool:
    return not spec.padded and spec.unit_stride and spec.head_dim == spec.value_dim and not spec.return_lse


def cuts_to_window(spec: AttentionSpec) -> bool:
    """Whether a lone query, which sits on the last slot, is given what its window shows and nothing to mask."""
    lone = spec.window is not None and spec.single_query and not spec.compiling
    return lone and kernel_for(spec) == "cpu flash" and _plain(spec) and not needs_mask(spec._replace(window=None))


def _run_in_window(call: AttentionCall) -> torch.Tensor:
    key, value, left = call.key, call.value, call.window[0]
    if left is not None and left < key.shape[2] - 1:
        key, value = key[:, :, -left - 1 :], value[:, :, -left - 1 :]
    return torch._scaled_dot_product_flash_attention_for_cpu(call.query, key, value, 0.0, False, scale=call.scale)[0]


def run_sdpa(call: AttentionCall) -> Output:
    """Runs the kernel that `kernel_for` names, in (B, H, S, D)."""
    spec = call.spec
    kernel = kernel_for(spec)
    plain = not spec.padded and spec.unit_stride and spec.head_dim == spec.value_dim
    if kernel == "cpu flash" and plain and not needs_mask(spec):
        output, lse = torch._scaled_dot_product_flash_attention_for_cpu(
            call.query, call.key, call.value, 0.0, call.causal and spec.equal_lengths, scale=call.scale
        )
        return (output, lse) if call.return_lse else output
    return run_around({"cpu flash": _cpu_flash, "flash": _flash, "efficient": _efficient, "math": _math}[kernel], call, kernel)


def run_around(function: Callable, call: AttentionCall, kernel: str) -> Output:
    """One dense kernel with what it needs around it: cleaned padding, tensors it can read, an additive mask, and empty rows set right.

    function(call, query, key, value, mask, causal) -> (output, lse), in (B, H, S, D), with `mask` as `additive_mask` makes it for `kernel`.
    """
    spec = call.spec
    query, key, value = call.query, call.key, call.value
    queries = real_queries(call) if spec.padded else None
    if not spec.finite_padding and spec.padded:
        query, key, value = cleaned(query, key, value, queries, real_keys(call))
    if _must_copy(spec, kernel):
        query, key, value = (t.clone(memory_format=torch.contiguous_format) for t in (query, key, value))
    mask, causal = (None, call.causal) if kernel == "flash" else additive_mask(call, kernel)
    if call.sinks is not None:
        key, value, mask = _with_sink_column(call, key, value, mask)
    if query.device.type == "cuda" and query.shape[0] > MOST_ROWS:
        output, lse = _in_parts(function, call, query, key, value, mask, causal)
    else:
        output, lse = function(call, query, key, value, mask, causal)
    if call.return_lse and mask is not None:
        # What the kernels write for an empty row differs: 0, -inf or +inf.
        lse = lse.masked_fill((mask == NEGATIVE_INFINITY).all(-1), NEGATIVE_INFINITY)
    if queries is not None:
        output = output.masked_fill(~queries[:, None, :, None], 0.0)
        lse = lse.masked_fill(~queries[:, None, :], NEGATIVE_INFINITY) if call.return_lse else None
    return (output, lse) if call.return_lse else output


# ---------------------------------------------------------------------- what stands around the kernels


def needs_mask(spec: AttentionSpec) -> bool:
    """Whether something must be written into a mask, besides causality that the kernel knows itself."""
    diagonal = spec.causal and not spec.equal_lengths and not spec.single_query
    written = spec.mask is not None or spec.bias is not None or spec.alibi is not None or spec.sinks or spec.window is not None
    return diagonal or written or spec.packed or _hides_keys(spec)


def _must_copy(spec: AttentionSpec, kernel: str) -> bool:
    """The kernels read 16 bytes at a time along a last dimension of stride 1; all but flash misread some broadcast (stride 0) keys."""
    step = 16 // spec.dtype.itemsize
    padded_anyway = spec.head_dim % step != 0 and spec.value_dim % step != 0
    return not spec.unit_stride or (not spec.aligned and not padded_anyway) or (spec.expanded and kernel != "flash")


def _in_parts(function: Callable, call: AttentionCall, query, key, value, mask, causal) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A batch too large for one launch, part by part."""
    parts = []
    for n in range(0, query.shape[0], MOST_ROWS):
        rows = slice(n, n + MOST_ROWS)
        part = mask if mask is None or mask.shape[0] == 1 else mask[rows]
        parts.append(function(call, query[rows], key[rows], value[rows], part, causal))
    outputs, lses = zip(*parts)
    return torch.cat(outputs), torch.cat(lses) if call.return_lse else None


def causality_is_written(spec: AttentionSpec, kernel: str) -> bool:
    """Whether the mask has to hold causality, which the kernel can't apply beside what else there is."""
    if not (spec.mask is not None or spec.bias is not None or spec.alibi is not None or spec.sinks or _hides_keys(spec)):
        return False
    # math and cutlass take a mask or causality; an lse needs the empty rows, which are read off the whole mask (cuDNN writes -inf there
    # itself); a sink adds a column. And in tiles that its own causality hides, the memory-efficient kernel leaves the gradient of a bias
    # unwritten, which is then whatever lay in that memory.
    return kernel in ("math", "cutlass") or (spec.return_lse and kernel != "cudnn") or spec.sinks or _learned(spec)


def _hides_keys(spec: AttentionSpec) -> bool:
    return bool(spec.key_mask or spec.key_lengths or spec.key_starts)


def additive_mask(call: AttentionCall, kernel: str) -> tuple[torch.Tensor | None, bool]:
    """The additive mask, as small as broadcasting allows, and whether the kernel's own causality is used beside it."""
    spec = call.spec
    causal = call.causal and spec.equal_lengths and call.window is None and not spec.packed and not causality_is_written(spec, kernel)
    whole = causal or (call.causal and spec.single_query and not spec.packed and call.window is None)
    allowed = [] if whole or (allowed := structure(call)) is None else [allowed[:, None]]
    if (keys := real_keys(call)) is not None:
        allowed.append(keys[:, None, None, :])
    if call.mask is not None:
        allowed.append(call.mask)
    dtype = torch.promote_types(call.query.dtype, torch.float32) if kernel == "cpu flash" else call.query.dtype
    mask = added(call, dtype)
    if mask is None and allowed and spec.single_query and not spec.compiling:
        # A decode step is short of launches: log(True) is 0 and log(False) is -inf, and a number a side would be one more each.
        part = allowed.pop(0)
        mask = torch.log(part, out=torch.empty(part.shape, dtype=dtype, device=call.device))
    for part in allowed:
        mask = torch.zeros((), dtype=dtype, device=call.device) if mask is None else mask
        mask = mask.masked_fill(~part, NEGATIVE_INFINITY) if mask.dim() == 4 else torch.where(part, mask, NEGATIVE_INFINITY)
    return mask, causal


def _with_sink_column(call: AttentionCall, key, value, mask) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One more key slot, of zeros, whose score is the sink: it takes part in the denominator and adds nothing to the output."""
    dtype = (
        mask.dtype
        if mask is not None
        else torch.promote_types(call.query.dtype, torch.float32)
        if call.device.type == "cpu"
        else call.query.dtype
    )
    if mask is None:
        mask = torch.zeros((1, 1, 1, call.key_length), dtype=dtype, device=call.device)
    shape = (mask.shape[0], call.query_heads, mask.shape[2])
    column = call.sinks.to(dtype)[None, :, None, None].expand(*shape, 1)
    mask = torch.cat([mask.expand(*shape, call.key_length), column], -1)
    return pad(key, (0, 0, 0, 1)), pad(value, (0, 0, 0, 1)), mask


def widened(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Zeros up to `size` in the last dimension, which then lies densely: `pad` keeps the order of what looks like an image to it, and the odd
    stride of a dimension of size 1 with it, but nothing of six dimensions does."""
    return tensor if tensor.shape[-1] == size else pad(tensor[None, None], (0, size - tensor.shape[-1]))[0, 0]


def _same_dims(query, key, value, multiple: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Head dims padded with zeros to one size; the scale stays that of the true one."""
    size = math.ceil(max(query.shape[3], value.shape[3]) / multiple) * multiple
    return tuple(widened(t, size) for t in (query, key, value))


# ---------------------------------------------------------------------- the kernels


def _cpu_flash(call: AttentionCall, query, key, value, mask, causal) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value = _same_dims(query, key, value)
    if mask is not None and mask.stride(-1) != 1:
        mask = mask.contiguous()
    output, lse = torch._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, attn_mask=mask, scale=call.scale)
    return output[..., : call.value_dim], lse


def _flash(call: AttentionCall, query, key, value, mask, causal) -> tuple[torch.Tensor, torch.Tensor]:
    """aten's flash-attention 2: bottom-right causality, windows on both sides, in (B, S, H, D)."""
    query, key, value = (t.transpose(1, 2) for t in _same_dims(query, key, value, 8))
    left, right = call.window or (None, None)
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, None, None, query.shape[1], key.shape[1], call.dropout_p, call.causal, False,
        scale=call.scale, window_size_left=-1 if left is None else left, window_size_right=0 if call.causal else -1 if right is None else right,
    )  # fmt: skip
    lse = with_empty_rows(lse) if call.return_lse else lse
    return output[..., : call.value_dim].transpose(1, 2), lse


def repeated_and_padded(call: AttentionCall, query, key, value) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For the CUTLASS kernel: as many key heads as query heads, head dims that fill 16 bytes."""
    group = call.query_heads // call.key_heads
    if group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    step = 16 // query.dtype.itemsize
    tensors = (widened(t, t.shape[3] + -t.shape[3] % step) for t in (query, key, value))
    # The kernel wants every stride a multiple, those of dimensions of size 1 too, which nothing steps along.
    return tuple(t.clone(memory_format=torch.contiguous_format) if any(n % step for n in t.stride()[:3]) else t for t in tensors)


def roomy(mask: torch.Tensor, keys: int) -> torch.Tensor:
    """A mask whose rows start at multiples of 16 bytes, with room for 16 elements at their end: the CUTLASS kernel reads whole rows of that."""
    step = 16 // mask.element_size()
    # Where a tensor starts, the compiler does not say.
    steps = [1] if torch.compiler.is_compiling() else [mask.stride(n) for n in range(3) if mask.shape[n] > 1] + [mask.storage_offset()]
    if keys % 16 or mask.stride(-1) != 1 or mask.shape[-1] != keys or any(n % step for n in steps):
        return pad(mask.expand(*mask.shape[:3], keys), (0, -keys % 16 or 16))[..., :keys]
    return mask


def _efficient(call: AttentionCall, query, key, value, mask, causal) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value = repeated_and_padded(call, query, key, value)
    if mask is not None:
        mask = roomy(mask, key.shape[2]).expand(query.shape[0], call.query_heads, query.shape[2], key.shape[2])
    needs_lse = call.return_lse or bool(call.spec.gradients)
    output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, needs_lse, call.dropout_p, causal, scale=call.scale
    )
    return output[..., : call.value_dim], lse[:, :, : query.shape[2]]


def _math(call: AttentionCall, query, key, value, mask, causal) -> tuple[torch.Tensor, None]:
    output, _ = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, mask, call.dropout_p, causal, scale=call.scale, enable_gqa=call.query_heads != call.key_heads
    )
    return output, None


# ---------------------------------------------------------------------- the claims


def _unequal(spec: AttentionSpec) -> Support:
    if kernel_for(spec) == "flash" or (spec.single_query and spec.window is None and spec.alibi is None) or cuts_to_window(spec):
        return NATIVE
    return EMULATED("a (B or 1, 1, Sq, Sk) mask for the diagonal")


def _window(spec: AttentionSpec) -> Support:
    return NATIVE if kernel_for(spec) == "flash" or cuts_to_window(spec) else EMULATED("a (B or 1, 1, Sq, Sk) mask")


def _grouped(spec: AttentionSpec) -> Support:
    kernel = kernel_for(spec)
    return EMULATED("repeats key and value heads") if kernel in ("efficient", "math") else NATIVE


def _dims(spec: AttentionSpec) -> Support:
    return NATIVE if kernel_for(spec) in ("efficient", "math") else EMULATED("pads the smaller of head dim and value dim")


def _lse_of_math(spec: AttentionSpec) -> Reason | None:
    if spec.return_lse and kernel_for(spec) == "math":
        return Reason(
            Feature.LSE.value,
            "with dropout, float64 on a GPU, a learned bias, or gradients beside a bias on a CPU",
            "only from torch's fused kernels",
        )
    return None


def _deterministic_backward(spec: AttentionSpec) -> Reason | None:
    if spec.deterministic and spec.gradients and spec.device == "cuda" and kernel_for(spec) != "math":
        return Reason(Feature.DETERMINISTIC.value, "with gradients on CUDA", "forward only, or on a CPU")
    return None


def _notes(spec: AttentionSpec) -> Sequence[str]:
    kernel = kernel_for(spec)
    notes = [f"torch's {kernel} kernel"]
    if kernel == "math":
        notes.append("keeps all scores: memory grows with Sq * Sk")
    if spec.padded and not spec.finite_padding:
        notes.append("cleans padding in copies of query, key and value; finite_padding=True spares them")
    if spec.causal and spec.equal_lengths and not spec.single_query and kernel != "flash" and causality_is_written(spec, kernel):
        notes.append("writes causality into the mask, (B or 1, 1, Sq, Sk) at least")
    if _must_copy(spec, kernel):
        notes.append("copies query, key and value, which the kernel can't read as they lie in memory")
    if spec.huge_bias:
        notes.append(
            "takes math for gradients beside a bias with huge finite numbers, or of unknown values; -inf says that a slot is not seen"
        )
    return notes


sdpa = Backend(
    name="sdpa",
    run=run_sdpa,
    run_for=run_for,
    capabilities=Capabilities(
        features={
            Feature.CAUSAL: NATIVE,
            Feature.UNEQUAL_LENGTHS: _unequal,
            Feature.WINDOW: _window,
            Feature.QUERY_MASK: NATIVE,
            Feature.KEY_MASK: NATIVE,
            Feature.MASK: NATIVE,
            Feature.BIAS: NATIVE,
            Feature.KEY_LENGTHS: NATIVE,
            Feature.QUERY_LENGTHS: NATIVE,
            Feature.KEY_STARTS: NATIVE,
            Feature.PACKED: EMULATED("a (1, 1, Sq, Sk) mask of the segments"),
            Feature.ALIBI: EMULATED("a (B or 1, Hq, Sq, Sk) bias"),
            Feature.SINKS: EMULATED("one more key slot, copies of key and value, and a (B or 1, Hq, Sq or 1, Sk + 1) mask"),
            Feature.SCALE: NATIVE,
            Feature.DROPOUT: NATIVE,
            Feature.LSE: NATIVE,
            Feature.GROUPED_HEADS: _grouped,
            Feature.VALUE_DIM: _dims,
            Feature.BACKWARD: NATIVE,
            Feature.BIAS_GRADIENT: NATIVE,
            Feature.SINKS_GRADIENT: NATIVE,
            Feature.ALIBI_GRADIENT: NATIVE,
            Feature.COMPILE: NATIVE,
            Feature.CAPTURE: NATIVE,
            Feature.DETERMINISTIC: NATIVE,
        },
        devices=("cpu", "cuda"),
        dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        rules=(_lse_of_math, _deterministic_backward),
    ),
    # On a CPU nothing else is near it.
    priority=lambda spec: rank_of("sdpa")(spec) if spec.device == "cuda" else 50,
    layout="bhsd",
    notes=_notes,
)
