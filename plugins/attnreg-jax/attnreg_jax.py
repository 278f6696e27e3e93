"""`jax.nn.dot_product_attention` on the CPU, and its gradients by `jax.vjp` through torch's autograd.

JAX aligns causality and windows to the first key, gives the mean of the values where a row sees nothing, and makes NaN of a row whose
bias is -inf throughout. So whatever is not the plain triangle or band of equal lengths is a boolean mask here, a bias holds finite
numbers only, and rows that see nothing are known from the masks.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from attnreg import EMULATED, NATIVE, AttentionCall, AttentionSpec, Backend, Capabilities, Feature, Reason, hookimpl, needs
from attnreg.visibility import added, cleaned, real_keys, real_queries, visible

NEGATIVE_INFINITY = float("-inf")
UNLIMITED = 2**30
"""A window's side that is not limited."""


class Options(NamedTuple):
    """What is compiled into the function, beside the shapes."""

    causal: bool
    window: tuple[int, int] | None
    scale: float
    return_lse: bool


def run_jax(call: AttentionCall) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Maps the call to JAX's terms, runs it, and repairs the rows that see nothing."""
    query, key, value = call.query, call.key, call.value
    queries = real_queries(call) if call.spec.padded else None
    if call.spec.padded and not call.finite_padding:
        heads_first = (t.transpose(1, 2) for t in (query, key, value))
        query, key, value = (t.transpose(1, 2) for t in cleaned(*heads_first, queries, real_keys(call)))
    if call.head_dim != call.value_dim:
        size = max(call.head_dim, call.value_dim)
        query, key, value = (pad(t, (0, size - t.shape[3])) for t in (query, key, value))

    equal = call.spec.equal_lengths and not call.spec.packed
    window = None
    if equal and call.window is not None:
        window = tuple(UNLIMITED if side is None else side for side in call.window)
    mask = visible(call.replaced(causal=False, window=None) if equal else call)
    bias = added(call, torch.float32)
    if call.bias is not None:
        hidden = bias == NEGATIVE_INFINITY
        mask = ~hidden if mask is None else mask & ~hidden
        bias = bias.masked_fill(hidden, 0.0)
    options = Options(call.causal and equal, window, call.scale, call.return_lse)
    output, lse = _Attention.apply(options, query, key, value, bias, None if mask is None else _full(call, mask))

    if call.head_dim != call.value_dim:
        output = output[..., : call.value_dim]
    empty = _empty(call, mask, equal)
    if queries is not None:
        empty = ~queries[:, None, :] if empty is None else empty | ~queries[:, None, :]
    if empty is not None:
        output = output.masked_fill(empty.transpose(1, 2)[..., None], 0.0)
    if not call.return_lse:
        return output
    lse = lse.transpose(1, 2)
    return output, lse if empty is None else lse.masked_fill(empty, NEGATIVE_INFINITY)


def _full(call: AttentionCall, mask: torch.Tensor) -> torch.Tensor:
    """JAX broadcasts the heads, and nothing else when it groups them."""
    return mask.expand(call.batch, mask.shape[1], call.query_length, call.key_length)


def _empty(call: AttentionCall, mask: torch.Tensor | None, equal: bool) -> torch.Tensor | None:
    """Rows that see nothing, (B or 1, Hq or 1, Sq or 1); None means none."""
    if mask is None:
        return None
    if equal and (call.causal or call.window is not None):
        band = visible(call.replaced(key_mask=None, key_starts=None, mask=None, query_mask=None))
        mask = mask & band
    return ~mask.any(-1)


# ---------------------------------------------------------------------- across the border


class _Attention(torch.autograd.Function):
    """JAX's function with JAX's gradients. The bias's is only computed when it is wanted."""

    @staticmethod
    def forward(ctx, options: Options, query, key, value, bias, mask):
        arrays = [_to_jax(t) for t in (query, key, value, bias, mask)]
        ctx.options = options
        ctx.shape_of_bias = None if bias is None else bias.shape
        ctx.save_for_backward(query, key, value, bias, mask)
        output, lse = _forward(options)(*arrays)
        output, lse = torch.from_dlpack(output), None if lse is None else torch.from_dlpack(lse)
        if lse is not None:
            ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient, _of_lse):
        arrays = [_to_jax(t) for t in ctx.saved_tensors]
        found = _backward(ctx.options)(*arrays, _to_jax(gradient))
        found = [torch.from_dlpack(g) if wanted else None for g, wanted in zip(found, ctx.needs_input_grad[1:5])]
        return (None, *found, None)


def _to_jax(tensor: torch.Tensor | None) -> Any:
    """Shares a tensor's memory; one that is not compact is copied, since JAX knows no strides."""
    import jax.numpy as jnp

    if tensor is None:
        return None
    tensor = tensor.detach()
    if not (tensor.is_contiguous() or tensor.transpose(1, 2).is_contiguous()):
        tensor = tensor.contiguous()
    return jnp.from_dlpack(tensor)


def _attend(options: Options, query, key, value, bias, mask):
    import jax

    result = jax.nn.dot_product_attention(
        query, key, value, bias, mask, scale=options.scale, is_causal=options.causal, local_window_size=options.window,
        implementation="xla", return_residual=options.return_lse,
    )  # fmt: skip
    return result if options.return_lse else (result, None)


@functools.lru_cache(maxsize=256)
def _forward(options: Options):
    import jax

    return jax.jit(functools.partial(_attend, options))


@functools.lru_cache(maxsize=256)
def _backward(options: Options):
    import jax

    options = options._replace(return_lse=False)

    def gradients(query, key, value, bias, mask, gradient):
        if bias is None:
            _, pull = jax.vjp(lambda *t: _attend(options, *t, None, mask)[0], query, key, value)
            return (*pull(gradient), None)
        _, pull = jax.vjp(lambda *t: _attend(options, *t, mask)[0], query, key, value, bias)
        return pull(gradient)

    return jax.jit(gradients)


# ---------------------------------------------------------------------- the claims


def _lse_unrounded(spec: AttentionSpec) -> Reason | None:
    if spec.return_lse and spec.dtype != torch.float32:
        return Reason(Feature.LSE.value, f"in {spec.dtype}", "with float32 inputs", "JAX rounds the lse to the dtype of the keys")
    return None


_MASK = EMULATED("a (B, Hq or 1, Sq, Sk) mask")


def _notes(spec: AttentionSpec) -> list[str]:
    notes = ["jax.nn.dot_product_attention through XLA: keeps all scores, memory grows with Sq * Sk; compiles for each shape"]
    if spec.padded and not spec.finite_padding:
        notes.append("cleans padding in copies of query, key and value; finite_padding=True spares them")
    return notes


jax = Backend(
    name="jax",
    run=run_jax,
    capabilities=Capabilities(
        features={
            Feature.CAUSAL: NATIVE,
            Feature.UNEQUAL_LENGTHS: _MASK,
            Feature.WINDOW: lambda spec: NATIVE if spec.equal_lengths and not spec.packed else _MASK,
            Feature.QUERY_MASK: NATIVE,
            Feature.KEY_MASK: _MASK,
            Feature.MASK: NATIVE,
            Feature.BIAS: NATIVE,
            Feature.KEY_LENGTHS: _MASK,
            Feature.QUERY_LENGTHS: NATIVE,
            Feature.KEY_STARTS: _MASK,
            Feature.PACKED: _MASK,
            Feature.ALIBI: EMULATED("a (B or 1, Hq, Sq, Sk) bias"),
            Feature.SCALE: NATIVE,
            Feature.LSE: NATIVE,
            Feature.GROUPED_HEADS: NATIVE,
            Feature.VALUE_DIM: EMULATED("pads the smaller of head dim and value dim"),
            Feature.BACKWARD: NATIVE,
            Feature.BIAS_GRADIENT: NATIVE,
            Feature.ALIBI_GRADIENT: NATIVE,
            Feature.DETERMINISTIC: NATIVE,
        },
        devices=("cpu",),
        dtypes=(torch.float32,),
        rules=(_lse_unrounded,),
    ),
    priority=5,
    missing=needs("jax>=0.10", "jaxlib>=0.10", remedy="pip install attnreg-jax[jax]"),
    notes=_notes,
)


@hookimpl
def attnreg_backends() -> list[Backend]:
    return [jax]
