"""torch's flex_attention: one kernel compiled for each kind of call, in which windows, soft caps, alibi and biases cost little.

It is always compiled: uncompiled, flex_attention keeps all scores. The first call of a kind takes seconds. Numbers such as a window's
width, a cap or a scale are tensors to the kernel, so that another value is not another kind. Only the forward pass exists on a CPU.
"""

from __future__ import annotations

import math
import os
import shutil
import types
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch

from ..backend import Backend, Output
from ..call import AttentionCall
from ..capabilities import EMULATED, NATIVE, Capabilities, Dims, Reason
from ..looked import traced, transforming
from ..spec import AttentionSpec, Feature
from ..visibility import cleaned, real_keys, real_queries
from .block_masks import SIZE, Pairs, element, number, placed, read_in_kernel, remembered_block_mask
from .limits import no_huge_bias, rows_fit
from .lse import NEGATIVE_INFINITY, beside_sinks
from .order import rank_of
from .sdpa import widened

SMALLEST_ON_CUDA = 16
"""The smallest head dim of the CUDA kernel."""
SMALLEST_ON_CPU = 24
"""Below it torch's compiled product with the keys takes them by sixteens: at head dims 8 and 16, and 8 keys left over, it writes past its
buffer and the numbers are wrong (torch 2.13)."""
SCORES_WORTH_COMPILING = 2**24
"""From how many scores on, B * Hq * Sq * Sk, the reference on a CPU takes seconds too, at every call."""


def run_flex(call: AttentionCall, attend: Callable | None = None) -> Output:
    """Runs the compiled kernel, in (B, H, S, D).

    attend: what computes, in place of the compiled `_attend`. Tests give an uncompiled one.
    """
    spec = call.spec
    query, key, value = call.query, call.key, call.value
    if not spec.gradients:
        # On a CPU the kernel refuses tensors that could need a gradient, even where none is recorded.
        query, key, value = query.detach(), key.detach(), value.detach()
    queries = real_queries(call) if spec.padded else None
    if spec.padded and not spec.finite_padding:
        query, key, value = cleaned(query, key, value, queries, real_keys(call))
    if not spec.unit_stride or not spec.aligned:
        query, key, value = (tensor.clone(memory_format=torch.contiguous_format) for tensor in (query, key, value))
    if spec.device == "cuda":
        query, key, value = (_at_least(tensor, SMALLEST_ON_CUDA) for tensor in (query, key, value))
    elif spec.device == "cpu":
        query, key = (_at_least(tensor, SMALLEST_ON_CPU) for tensor in (query, key))
    needs_lse = call.return_lse or call.sinks is not None
    # The default scale is a constant of the head dim. Any other one is a number that the kernel reads.
    constant = 1.0 if spec.scale else 1.0 / math.sqrt(call.head_dim)
    # A tile of a float32 bias is 64 KiB: more than one in flight beside the keys' does not fit a card's shared memory.
    wide = spec.device == "cuda" and spec.bias is not None and ("bias" in spec.gradients or call.bias.dtype.itemsize > 2)
    tuning = {"num_stages": 1} if wide else {}
    if _too_many_for_one_tile(call):
        tuning["FORCE_USE_FLEX_ATTENTION"] = True
    output, lse = (attend or _attend_for(call))(
        query, key, value, score_change(call, queries), remembered_block_mask(call), constant, spec.query_heads != spec.key_heads, needs_lse,
        tuning or None,
    )  # fmt: skip
    output = output[..., : call.value_dim]
    if call.sinks is not None:
        share, lse = beside_sinks(lse, call.sinks)
        output = output * share[..., None].to(output.dtype)
    if queries is not None:
        output = output.masked_fill(~queries[:, None, :, None], 0.0)
        lse = lse.masked_fill(~queries[:, None, :], NEGATIVE_INFINITY) if call.return_lse else None
    return (output, lse) if call.return_lse else output


def _too_many_for_one_tile(call: AttentionCall) -> bool:
    """Up to 127 queries go to torch's kernel for decoding, which puts those of a group of heads into one tile. Beyond a block of the mask it
    finds no configuration, and fails to compile."""
    group = call.spec.query_heads // max(call.spec.key_heads, 1)
    return call.spec.device == "cuda" and group > 1 and call.query_length > SIZE // group


def score_change(call: AttentionCall, queries: torch.Tensor | None) -> Callable | None:
    """The score_mod: what happens to a score before the masks. The tensors are read in the kernel, element by element.

    queries: real queries, (B or 1, Sq), None for all; the bias of the others may hold NaN, which would reach the gradients of keys.
    """
    spec = call.spec
    scale = number(call.scale, torch.float32, call.device) if spec.scale else None
    softcap = number(call.softcap, torch.float32, call.device) if spec.softcap else None
    slopes, bias = call.alibi_slopes, call.bias
    queries = None if spec.finite_padding or bias is None or queries is None else read_in_kernel(queries)
    pair = Pairs(**placed(call)) if slopes is not None else Pairs()
    learned = "bias" in spec.gradients
    if learned:
        # Gradients of a broadcast bias add up element by element, which half precision would spoil. Each query and key reads one of its own:
        # torch 2.11's compiler can't write the gradient of what a whole row or column of a tile shares.
        bias = read_in_kernel(bias.float()).expand(-1, -1, call.query_length, call.key_length)
    elif bias is not None:
        bias = read_in_kernel(bias.detach().float() if bias.dtype == torch.float64 else bias.detach())
    if slopes is not None:
        slopes = read_in_kernel(slopes.detach().float())
    if scale is None and softcap is None and slopes is None and bias is None:
        return None

    def changed(score, b, h, i, j):
        if scale is not None:
            score = score * scale
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            slope = slopes[h] if slopes.dim() == 1 else slopes[b, h]
            score = score - slope * (pair.slot(b, i) - j).abs()
        if bias is not None:
            added = element(bias, b, h, i, j, own=2 if learned else 0)
            score = score + (added if queries is None else torch.where(element(queries, b, i), added, 0.0))
        return score

    return changed


def _at_least(tensor: torch.Tensor, size: int) -> torch.Tensor:
    return widened(tensor, max(size, tensor.shape[3]))


# ---------------------------------------------------------------------- the compiled kernels


def _attend(query, key, value, score_mod, block_mask, scale, grouped, needs_lse, tuning) -> tuple[torch.Tensor, torch.Tensor | None]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention  # brings the compiler along

    if not needs_lse:
        return flex_attention(query, key, value, score_mod, block_mask, scale, grouped, kernel_options=tuning), None
    output, aux = flex_attention(
        query, key, value, score_mod, block_mask, scale, grouped, kernel_options=tuning, return_aux=AuxRequest(lse=True)
    )
    return output, aux.lse


_compiled: dict[tuple, Callable] = {}
LIMIT = 512
"""How many kinds stay compiled before all are forgotten: on a CPU every size may be a kind."""


def _attend_for(call: AttentionCall) -> Callable:
    """`_attend`, compiled for calls of this kind.

    Each kind gets a code object of its own, since the compiler counts compilations by code object and gives up after a few.
    What it would compile anew for anyhow is part of the kind: sizes of 1, one block, whole blocks; and every size, if need be.
    """
    spec = call.spec
    if spec.compiling or traced(call.query) or transforming():
        return _attend
    lengths = (call.query_length, call.key_length)
    kind = (
        spec._replace(sizes=None, aligned=True, expanded=False, deterministic=False, padding_fits_packing=False),
        call.batch == 1,
        tuple(n <= SIZE for n in lengths),
        tuple(n % SIZE == 0 for n in lengths),
        _too_many_for_one_tile(call),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
    )
    apart = _apart(spec)
    if apart:
        kind += (call.batch, lengths)
    found = _compiled.get(kind)
    if found is None:
        if len(_compiled) >= LIMIT:
            _compiled.clear()
        code = _attend.__code__.replace(co_name=f"flex_attend_{len(_compiled)}")
        found = _compiled.setdefault(
            kind, torch.compile(types.FunctionType(code, globals()), fullgraph=True, dynamic=False if apart else None)
        )
    return found


def _apart(spec: AttentionSpec) -> bool:
    """Whether each size is compiled on its own: in torch's CPU kernel, sizes that are symbols must not be those of a tensor that the mods read.

    Its template puts the block's size where the name of such a symbol is the same or begins alike: that is no C++, or finds indices out of bounds.
    """
    return spec.device == "cpu" and (spec.padded or spec.mask is not None or spec.bias is not None or spec.alibi == "rows")


# ---------------------------------------------------------------------- the claims


def _forward_only_on_a_cpu(spec: AttentionSpec) -> Reason | None:
    if spec.device == "cpu" and spec.gradients:
        return Reason(Feature.BACKWARD.value, "gradients of " + ", ".join(spec.gradients), "forward only on a CPU", "call it under no_grad")
    return None


def _no_lse_on_a_cpu(spec: AttentionSpec) -> Reason | None:
    for feature, asked in ((Feature.LSE, spec.return_lse), (Feature.SINKS, spec.sinks)):
        if spec.device == "cpu" and asked:
            return Reason(feature.value, "yes", "only on CUDA: the compiled CPU kernel writes no log-sum-exp")
    return None


def _not_inside_a_compiled_cpu_region(spec: AttentionSpec) -> Reason | None:
    if spec.device == "cpu" and spec.compiling:
        return Reason(
            Feature.COMPILE.value,
            "yes",
            "only on CUDA: torch's compiler can't join its CPU kernel with what follows it",
            "call it outside the compiled region",
        )
    return None


def _learned_bias_on_cuda(spec: AttentionSpec) -> Reason | None:
    if spec.deterministic and "bias" in spec.gradients:
        return Reason(Feature.DETERMINISTIC.value, "with a gradient of bias", "without: that gradient is added up in any order")
    return None


def _no_compiler(spec: AttentionSpec) -> Reason | None:
    if spec.device == "cpu" and not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")):
        return Reason("missing", "a C++ compiler", "none found", "install g++, or name one in CXX")
    if spec.device == "cuda" and find_spec("triton") is None:
        return Reason("missing", "triton", "not installed", "pip install triton")
    return None


def _priority(spec: AttentionSpec) -> int:
    """On a CPU only when no other kernel can, and behind the reference too while that needs less time than compiling does."""
    if spec.device == "cuda":
        return rank_of("flex")(spec)
    batch, query_length, key_length = spec.sizes or (1, SCORES_WORTH_COMPILING, 1)
    return -50 if batch * spec.query_heads * query_length * key_length >= SCORES_WORTH_COMPILING else -150


def _notes(spec: AttentionSpec) -> Sequence[str]:
    notes = [f"compiles a kernel at the first call of a {'kind and size' if _apart(spec) else 'kind'}, which takes seconds"]
    if spec.device == "cuda" and min(spec.head_dim, spec.value_dim) < SMALLEST_ON_CUDA:
        notes.append(f"pads head dims below {SMALLEST_ON_CUDA} in copies of query, key and value")
    if spec.device == "cpu" and spec.head_dim < SMALLEST_ON_CPU:
        notes.append(f"pads head dims below {SMALLEST_ON_CPU} in copies of query and key")
    if spec.padded and not spec.finite_padding:
        notes.append("cleans padding in copies of query, key and value; finite_padding=True spares them")
    if not spec.unit_stride:
        notes.append("copies query, key and value, whose last dimension is not contiguous")
    return notes


flex = Backend(
    name="flex",
    run=run_flex,
    capabilities=Capabilities(
        features={
            Feature.CAUSAL: NATIVE,
            Feature.UNEQUAL_LENGTHS: NATIVE,
            Feature.WINDOW: NATIVE,
            Feature.QUERY_MASK: NATIVE,
            Feature.KEY_MASK: NATIVE,
            Feature.MASK: NATIVE,
            Feature.BIAS: NATIVE,
            Feature.KEY_LENGTHS: NATIVE,
            Feature.QUERY_LENGTHS: NATIVE,
            Feature.KEY_STARTS: NATIVE,
            Feature.PACKED: NATIVE,
            Feature.ALIBI: NATIVE,
            Feature.SOFTCAP: NATIVE,
            Feature.SINKS: EMULATED("rescales the output by its log-sum-exp"),
            Feature.SCALE: NATIVE,
            Feature.LSE: NATIVE,
            Feature.GROUPED_HEADS: NATIVE,
            Feature.VALUE_DIM: NATIVE,
            Feature.BACKWARD: NATIVE,
            Feature.BIAS_GRADIENT: NATIVE,
            Feature.SINKS_GRADIENT: NATIVE,
            Feature.LSE_GRADIENT: NATIVE,
            Feature.COMPILE: NATIVE,
            Feature.DETERMINISTIC: NATIVE,
        },
        devices=("cpu", "cuda"),
        dtypes=(torch.float16, torch.bfloat16, torch.float32),
        head_dim=Dims(largest=256),
        value_dim=Dims(largest=256),
        smallest_capability=(8, 0),
        rules=(
            rows_fit,
            no_huge_bias,
            _forward_only_on_a_cpu,
            _no_lse_on_a_cpu,
            _not_inside_a_compiled_cpu_region,
            _learned_bias_on_cuda,
            _no_compiler,
        ),
    ),
    priority=_priority,
    layout="bhsd",
    notes=_notes,
)
