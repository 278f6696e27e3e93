"""diffusers models on attnreg: an attention processor, since the registry of diffusers' own dispatcher is a closed enum.

    from attnreg.integrations.diffusers import apply
    apply(pipeline.unet)

It takes the place of the plain processors only. One that computes more (an adapter's, a joint one's) is an error, not a smaller answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..attention import attention

if TYPE_CHECKING:
    from diffusers.models.attention_processor import Attention

    from ..policy import Names

PLAIN = ("AttnProcessor", "AttnProcessor2_0", "XFormersAttnProcessor", "SlicedAttnProcessor", "AttnregProcessor")
"""diffusers' processors that compute plain attention and nothing else, by class name."""


class AttnregProcessor:
    """Plain attention of a diffusers `Attention` module, by `attnreg.attention`.

    backend: as in `attention`. layer: the module's name, for policies; `apply` fills it in.

    Heads may be grouped; `scale_qk=False` means a scale of 1 and `is_causal` is causal, as the module says (diffusers' own fused processor
    overlooks both).
    """

    def __init__(self, backend: Names | None = None, layer: str | None = None) -> None:
        self.backend, self.layer = backend, layer

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """hidden_states: (B, S, C) or (B, C, H, W). attention_mask: a bool mask (True = may be seen) or a bias; its last dimension is the
        key's length. Raises TypeError for any other argument."""
        check_arguments(args, kwargs)
        given = hidden_states
        if attn.spatial_norm is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        image = hidden_states.shape[2:] if hidden_states.dim() == 4 else None
        if image is not None:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)
        if attn.group_norm is not None:
            hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
        source = hidden_states
        if encoder_hidden_states is not None:
            source = attn.norm_encoder_hidden_states(encoder_hidden_states) if attn.norm_cross else encoder_hidden_states
        query = attn.to_q(hidden_states).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        key, value = (project(source).unflatten(2, (-1, query.shape[3])).transpose(1, 2) for project in (attn.to_k, attn.to_v))
        query = query if attn.norm_q is None else attn.norm_q(query)
        key = key if attn.norm_k is None else attn.norm_k(key)
        output = attention(
            query, key, value, **_mask(attention_mask, query, key), causal=attn.is_causal, scale=attn.scale, layout="bhsd",
            backend=self.backend, layer=self.layer,
        )  # fmt: skip
        output = output.transpose(1, 2).flatten(2)
        for step in attn.to_out:
            output = step(output)
        if image is not None:
            output = output.transpose(1, 2).unflatten(2, image)
        if attn.residual_connection:
            output = output + given
        return output / attn.rescale_output_factor


def apply(model: torch.nn.Module, backend: Names | None = None) -> int:
    """Puts every attention of a diffusers model on attnreg. Returns how many.

    Arguments that a processor does not know are dropped by diffusers with a warning; from here on they are a `TypeError`.
    Raises TypeError when a module's processor computes more than plain attention, or when the model has no attention that takes a
    processor; nothing is changed then. To go back: `model.set_attn_processor(AttnProcessor2_0())`, diffusers' own.
    """
    from diffusers.models.attention_processor import Attention

    found = {name: module for name, module in model.named_modules() if isinstance(module, Attention)}
    if not found:
        raise TypeError(
            f"model: with diffusers' Attention modules, {type(model).__name__} has none; its attention may call the dispatcher itself"
        )
    for name, module in found.items():
        processor = type(module.processor).__name__
        if processor not in PLAIN or module.added_kv_proj_dim is not None:
            raise TypeError(
                f"model: {name} runs {processor}, which computes more than plain attention; only {', '.join(PLAIN)} are replaced"
            )
    for name, module in found.items():
        module.set_processor(AttnregProcessor(backend, name))
        if _refuse_what_would_be_dropped not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_refuse_what_would_be_dropped, with_kwargs=True)
    return len(found)


def check_arguments(args: tuple, kwargs: dict[str, Any]) -> None:
    """TypeError for arguments of a processor that are not None and that nobody here reads."""
    unread = sorted(name for name, value in kwargs.items() if value is not None)
    if args or unread:
        what = ", ".join(unread) if unread else f"{len(args)} more positional arguments"
        raise TypeError(
            f"{what}: not taken by attnreg's processor; it would have been ignored. Remove it, or keep diffusers' own processor"
        )


def _refuse_what_would_be_dropped(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    if isinstance(module.processor, AttnregProcessor):
        taken = ("hidden_states", "encoder_hidden_states", "attention_mask", "temb")
        check_arguments((), {name: value for name, value in kwargs.items() if name not in taken})


def _mask(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> dict[str, torch.Tensor]:
    """A diffusers mask in 4-D, as `mask` or `bias`: (B, T), (B, 1 or S, T), (B * heads, 1 or S, T) or 4-D."""
    if mask is None:
        return {}
    batch, heads = query.shape[:2]
    if mask.dim() == 2:
        mask = mask[:, None, None]
    elif mask.dim() == 3:
        mask = mask[:, None] if mask.shape[0] == batch else mask.unflatten(0, (batch, heads))
    if mask.shape[-1] != key.shape[2]:
        raise ValueError(f"attention_mask: over {key.shape[2]} keys, got {mask.shape[-1]}; diffusers would have padded it")
    if mask.dtype == torch.bool:
        return {"mask": mask}
    if not mask.dtype.is_floating_point:
        raise TypeError(f"attention_mask: bool (True = may be seen) or a floating bias, got {mask.dtype}")
    return {"bias": mask.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, float("-inf"))}
