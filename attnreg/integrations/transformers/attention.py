"""The attention function: one call of a transformers layer as one call of `attnreg.attention`. What can't be honoured is an error."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ... import attention as attnreg_attention
from ... import last_selection, policy
from ...select import Selection
from .layers import layer_of
from .masks import HostMask

Result = tuple[torch.Tensor, torch.Tensor | None]

# What travels through the layers' **kwargs and concerns other parts of a model: positions are already in query and key, the cache has
# been updated, flags choose what the model returns.
IGNORED = frozenset(
    [
        "position_ids",
        "use_cache",
        "cache_position",
        "past_key_value",
        "past_key_values",
        "return_dict",
        "labels",
        "num_items_in_batch",
        "shift_labels",
        "output_hidden_states",
        "output_router_logits",
        "encoder_hidden_states",
        "layer_idx",
        "logits_to_keep",
        "return_loss",
    ]
)


class _Recorder(threading.local):
    arrived: dict[str, Selection] | None = None


_recorder = _Recorder()


@contextlib.contextmanager
def recording(arrived: dict[str, Selection]) -> Iterator[None]:
    """Writes down what runs in each layer, in this thread."""
    outer, _recorder.arrived = _recorder.arrived, arrived
    try:
        yield
    finally:
        _recorder.arrived = outer


def attention_function(backend: policy.Names | None) -> Callable[..., Result]:
    """The function that is registered with transformers, bound to a backend or, with None, to the policy in force."""

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: HostMask | torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        cu_seq_lens_k: torch.Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        output_attentions: bool | None = None,
        deterministic: bool | None = None,
        **others: Any,
    ) -> Result:
        for name, given in others.items():
            if given is not None and name not in IGNORED:
                raise TypeError(
                    f"{name}: {type(module).__name__} passes this argument to its attention, and attnreg does not know what it means there; "
                    "it is refused rather than dropped. Leave this model on its own attention, or report the argument"
                )
        sinks = s_aux if sinks is None else sinks
        options: dict[str, Any] = {
            "layout": "bhsd",
            "scale": scaling,
            "softcap": softcap,
            "sinks": None if sinks is None else sinks.reshape(-1),
            "dropout_p": dropout if module.training else 0.0,
            "deterministic": True if deterministic else None,
            # A model's padding went through its own layers: it is finite where the model is. Static caches start as zeros.
            "finite_padding": True,
            "backend": backend,
            # Named only where a policy asks, so that the layers of a forward are one repeated call.
            "layer": layer_of(module) if policy.process.layers else None,
        }
        width = key.shape[2]
        segments = _segments(attention_mask, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        if isinstance(attention_mask, HostMask):
            key, value = _from_host_mask(attention_mask, key, value, sliding_window, options)
        elif attention_mask is None:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            options["causal"] = bool(causal)
            options["window"] = _window(sliding_window, bool(causal))
        elif attention_mask.dim() == 2:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            options.update(causal=bool(causal), window=_window(sliding_window, bool(causal)), key_mask=attention_mask.bool())
        else:
            # A mask that is written out says everything, causality and window too.
            attention_mask = attention_mask[..., : key.shape[2]]
            if not attention_mask.dtype.is_floating_point and attention_mask.dtype != torch.bool:
                raise TypeError(
                    f"attention_mask: a 4-D mask is bool (True = may attend) or added to the scores, got {attention_mask.dtype}; give mask.bool()"
                )
            name = "mask" if attention_mask.dtype == torch.bool else "bias"
            options[name] = attention_mask if name == "mask" else _additive(attention_mask)
        if position_bias is not None:
            position_bias = position_bias[..., : key.shape[2]]
            options["bias"] = position_bias if options.get("bias") is None else position_bias + options["bias"]
        if segments is not None:
            query, key, value = _in_one_row(query, key, value, options, segments)

        output = attnreg_attention(query, key, value, **options)
        if _recorder.arrived is not None and not torch.compiler.is_compiling():
            _recorder.arrived[layer_of(module) or f"layer {len(_recorder.arrived)}"] = last_selection()
        weights = _weights(query, key, options, width) if output_attentions else None
        output = output if options["layout"] == "bshd" else output.transpose(1, 2)
        if segments is not None and attention_mask is not None and isinstance(attention_mask, HostMask):
            output = output.unflatten(1, (-1, attention_mask.query_length)).squeeze(0)
        return output.contiguous(), weights

    return attend


def _from_host_mask(
    mask: HostMask, key: torch.Tensor, value: torch.Tensor, sliding_window: int | None, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Puts what the mask says into the options, and leaves away the spare room of a static cache."""
    if key.shape[2] < mask.key_length and key.shape[0] == mask.batch and not mask.causal:
        raise ValueError(f"attention_mask: made for {mask.key_length} keys, but the layer hands over {key.shape[2]}")
    options["causal"] = mask.causal
    options["window"] = mask.window or _window(sliding_window, mask.causal)
    mask.look()
    options["key_mask"], options["query_mask"] = mask.key_mask, mask.query_mask
    if not mask.causal:
        return key, value
    used = mask.query_slot + mask.query_length
    if isinstance(used, torch.Tensor) and used.device.type == "cpu" and not torch.compiler.is_compiling():
        used = int(used)
    if isinstance(used, torch.Tensor):
        options["key_lengths"] = used.to(device=key.device, dtype=torch.int32).reshape(1).expand(key.shape[0])
        return key, value
    if used < key.shape[2]:
        key, value = key[:, :, :used], value[:, :, :used]
        if mask.key_mask is not None and mask.key_mask.shape[1] > used:
            options["key_mask"] = mask.key_mask[:, :used]
    return key, value


def _window(size: int | None, causal: bool) -> tuple[int, int | None] | None:
    """transformers' sliding_window counts the query itself, to both sides where attention is bidirectional."""
    if size is None:
        return None
    return (size - 1, None if causal else size - 1)


def _additive(mask: torch.Tensor) -> torch.Tensor:
    """A floating mask as a bias. transformers hides a slot by finfo.min, sometimes with something added to it: not seen is -inf."""
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return mask.masked_fill(hidden, float("-inf"))


def _segments(
    mask: Any, cu_query: torch.Tensor | None, cu_key: torch.Tensor | None, longest_query: int | None, longest_key: int | None
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[int, int] | None] | None:
    """cu_seqlens and max_seqlens of packed rows: as the caller gave them, else from the documents that the mask carries."""
    if (cu_query is None) != (cu_key is None):
        raise ValueError("cu_seq_lens_q, cu_seq_lens_k: both or neither")
    if cu_query is not None:
        if mask is not None and (not isinstance(mask, HostMask) or mask.key_mask is not None):
            raise ValueError(
                "cu_seq_lens_q: packed rows have no padding to mask, but an attention_mask came with them; give one of the two "
                "(flattened batches have no attention_mask)"
            )
        pair = (cu_query, cu_query if cu_key is cu_query else cu_key)
        known = longest_query is not None and longest_key is not None
        return pair, (int(longest_query), int(longest_key)) if known else None
    if isinstance(mask, HostMask) and mask.documents is not None:
        cu, longest = mask.segments()
        return (cu, cu), (longest, longest)
    return None


def _in_one_row(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any], segments: Any) -> tuple:
    """Rows laid one behind the other, (1, B * S, H, D), as packed segments are taken."""
    options.update(layout="bshd", cu_seqlens=segments[0], max_seqlens=segments[1])
    return tuple(t.transpose(1, 2).flatten(0, 1).unsqueeze(0) for t in (query, key, value))


_warned: set[str] = set()


def _weights(query: torch.Tensor, key: torch.Tensor, options: dict[str, Any], width: int) -> torch.Tensor:
    """output_attentions=True: the weights, (B, Hq, Sq, Sk), before dropout, as the reference's output for one-hot values."""
    if "cu_seqlens" in options:
        raise ValueError(
            "output_attentions: not with packed rows; give the documents as rows of their own, or use attn_implementation='eager'"
        )
    if "weights" not in _warned:
        _warned.add("weights")
        warnings.warn(
            "output_attentions=True: attnreg computes the weights a second time with its reference, in float64, with memory for all scores; "
            "the outputs still come from the chosen backend",
            stacklevel=3,
        )
    slots = key.shape[2]
    one_hot = torch.eye(slots, dtype=query.dtype, device=query.device).expand(key.shape[0], key.shape[1], slots, slots)
    weights = attnreg_attention(query, key, one_hot, **{**options, "backend": "reference", "dropout_p": 0.0})
    return torch.nn.functional.pad(weights, (0, width - slots))
