"""`jax.nn.dot_product_attention` on the CPU, and its gradients by `jax.vjp` through torch's autograd.

JAX aligns causality and windows to the first key, gives the mean of the values where a row sees nothing, and makes NaN of a row whose
bias is -inf throughout. So whatever is not the plain triangle of equal lengths is a boolean mask here, a bias holds finite numbers only,
and rows that see nothing are known from the masks.

XLA compiles for each shape. Lengths are therefore padded to few sizes, and what is only a number (the scale, the length) is an argument
of the compiled function: a growing key cache compiles once for every 128 slots, not once for every token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from attnreg import EMULATED, NATIVE, AttentionCall, AttentionSpec, Backend, Capabilities, Feature, Reason, hookimpl, needs
from attnreg.visibility import added, cleaned, real_keys, real_queries, visible

NEGATIVE_INFINITY = float("-inf")


class Options(NamedTuple):
    """What is compiled into the function, beside the shapes."""

    causal: bool
    return_lse: bool


def padded_length(length: int) -> int:
    """The size that a length is compiled for: 16, 32, 64, then multiples of 128."""
    return -(-length // 128) * 128 if length > 64 else max(16, 1 << (length - 1).bit_length())


def run_jax(call: AttentionCall) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Maps the call to JAX's terms, runs it, and repairs the rows that see nothing."""
    query, key, value = call.query, call.key, call.value
    queries = real_queries(call) if call.spec.padded else None
    if call.spec.padded and not call.finite_padding:
        heads_first = (t.transpose(1, 2) for t in (query, key, value))
        query, key, value = (t.transpose(1, 2) for t in cleaned(*heads_first, queries, real_keys(call)))
    plain = call.causal and call.window is None and call.spec.equal_lengths and not call.spec.packed
    mask = visible(call.replaced(causal=False) if plain else call)
    bias = added(call, torch.float32)
    if call.bias is not None:
        hidden = bias == NEGATIVE_INFINITY
        mask = ~hidden if mask is None else mask & ~hidden
        bias = bias.masked_fill(hidden, 0.0)
    empty = _empty(call, mask, plain, queries)

    size = max(call.head_dim, call.value_dim)
    rows, columns = padded_length(call.query_length), padded_length(call.key_length)
    query = _padded(query, rows, size)
    key, value = _padded(key, columns, size), _padded(value, columns, size)
    bias = None if bias is None else _spread(call, bias, rows, columns, 0.0)
    mask = None if mask is None else _spread(call, mask, rows, columns, False)
    # Under plain causality the slots added come after every query; a mask hides them itself.
    lengths = None
    if columns != call.key_length and mask is None and not plain:
        lengths = torch.full((call.batch,), call.key_length, dtype=torch.int32)
    output, lse = _Attention.apply(Options(plain, call.return_lse), call.scale, query, key, value, bias, mask, lengths)

    output = output[:, : call.query_length, :, : call.value_dim]
    if empty is not None:
        output = output.masked_fill(empty.transpose(1, 2)[..., None], 0.0)
    if not call.return_lse:
        return output
    lse = lse[:, : call.query_length].transpose(1, 2)
    return output, lse if empty is None else lse.masked_fill(empty, NEGATIVE_INFINITY)


def _padded(tensor: torch.Tensor, length: int, size: int) -> torch.Tensor:
    """(B, S, H, D) with zeros up to (B, length, H, size); itself where it is so already."""
    rest = (length - tensor.shape[1], size - tensor.shape[3])
    return pad(tensor, (0, rest[1], 0, 0, 0, rest[0])) if any(rest) else tensor


def _spread(call: AttentionCall, tensor: torch.Tensor, rows: int, columns: int, fill: float | bool) -> torch.Tensor:
    """A mask or bias, full in all but the heads, so that fewer shapes are compiled, and padded. JAX keeps all scores anyway."""
    tensor = tensor.expand(call.batch, tensor.shape[1], call.query_length, call.key_length)
    return pad(tensor, (0, columns - call.key_length, 0, rows - call.query_length), value=fill)


def _empty(call: AttentionCall, mask: torch.Tensor | None, plain: bool, queries: torch.Tensor | None) -> torch.Tensor | None:
    """Rows that see nothing or are padding, (B or 1, Hq or 1, Sq or 1); None means none."""
    empty = None
    if mask is not None:
        if plain:
            mask = mask & torch.ones(call.query_length, call.key_length, dtype=torch.bool).tril()
        empty = ~mask.any(-1)
    if queries is None:
        return empty
    return ~queries[:, None, :] if empty is None else empty | ~queries[:, None, :]


# ---------------------------------------------------------------------- across the border


class _Attention(torch.autograd.Function):
    """JAX's function with JAX's gradients. The bias's is only computed when it is wanted."""

    @staticmethod
    def forward(ctx, options: Options, scale: float, query, key, value, bias, mask, lengths):
        ctx.options, ctx.scale = options, scale
        ctx.save_for_backward(query, key, value, bias, mask, lengths)
        result = _compiled(_attend, options)(scale, *map(_to_jax, (query, key, value, bias, mask, lengths)))
        output, lse = (None if array is None else torch.from_dlpack(array) for array in result)
        if lse is not None:
            ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(ctx, gradient, _of_lse):
        # `once_differentiable` would not do: asked for the gradient of an input alone, autograd never comes to the error that it leaves.
        if torch.is_grad_enabled():
            raise RuntimeError("backend jax has no second derivative: no create_graph=True through it; backend='reference' has one")
        with_bias = ctx.needs_input_grad[5]
        pull = _compiled(_gradients, ctx.options._replace(return_lse=False), with_bias)
        found = pull(ctx.scale, *map(_to_jax, ctx.saved_tensors), _to_jax(gradient))
        wanted = ctx.needs_input_grad[2:6]
        found = [torch.from_dlpack(g) if need else None for g, need in zip((*found, None), wanted)]
        return (None, None, *found, None, None)


def _to_jax(tensor: torch.Tensor | None) -> Any:
    """Shares a tensor's memory; one that is not compact is copied, since JAX knows no strides."""
    import jax.numpy as jnp

    if tensor is None:
        return None
    tensor = tensor.detach()
    if not tensor.is_contiguous() and not (tensor.dim() == 4 and tensor.transpose(1, 2).is_contiguous()):
        tensor = tensor.contiguous()
    return jnp.from_dlpack(tensor)


def _attend(options: Options, scale, query, key, value, bias, mask, lengths):
    import jax

    result = jax.nn.dot_product_attention(
        query, key, value, bias, mask, scale=scale, is_causal=options.causal, key_value_seq_lengths=lengths,
        implementation="xla", return_residual=options.return_lse,
    )  # fmt: skip
    return result if options.return_lse else (result, None)


def _gradients(options: Options, with_bias: bool, scale, query, key, value, bias, mask, lengths, gradient):
    import jax

    def output(query, key, value, *of_bias):
        return _attend(options, scale, query, key, value, *(of_bias or (bias,)), mask, lengths)[0]

    return jax.vjp(output, query, key, value, *((bias,) if with_bias else ()))[1](gradient)


@functools.lru_cache(maxsize=64)
def _compiled(function: Callable, *first: Any) -> Callable:
    import jax

    return jax.jit(functools.partial(function, *first))


# ---------------------------------------------------------------------- the claims


def _lse_unrounded(spec: AttentionSpec) -> Reason | None:
    if spec.return_lse and spec.dtype != torch.float32:
        return Reason(Feature.LSE.value, f"in {spec.dtype}", "with float32 inputs", "JAX rounds the lse to the dtype of the keys")
    return None


_MASK = EMULATED("a (B, Hq or 1, Sq, Sk) mask")


def _notes(spec: AttentionSpec) -> list[str]:
    notes = [
        "jax.nn.dot_product_attention through XLA: keeps all scores, memory grows with Sq * Sk",
        "compiles for each shape; lengths are padded to 16, 32, 64 or multiples of 128, in copies where they are none",
    ]
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
            Feature.WINDOW: _MASK,
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
