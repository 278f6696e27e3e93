"""diffusers models of random weights on attnreg, against diffusers' own processors."""

from __future__ import annotations

import copy

import pytest
import torch

import attnreg
from attnreg.integrations import diffusers as integration

pytest.importorskip("diffusers", reason="diffusers is not installed")
from diffusers import DiTTransformer2DModel, UNet2DConditionModel
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0, JointAttnProcessor2_0


def unet():
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=12, attention_head_dim=4,
    ).eval()  # fmt: skip


def close(mine, right):
    torch.testing.assert_close(mine, right, atol=2e-5, rtol=2e-5)


def test_a_unet_with_text_of_different_lengths_equals_its_own():
    model = unet()
    native, mine = copy.deepcopy(model), copy.deepcopy(model)
    assert integration.apply(mine) == sum(isinstance(m, Attention) for m in model.modules()) > 4
    sample, text = torch.randn(2, 4, 8, 8), torch.randn(2, 7, 12)
    text_mask = torch.ones(2, 7)
    text_mask[1, 4:] = 0
    close(mine(sample, 3, text).sample, native(sample, 3, text).sample)
    outputs = [m(sample, 3, text, encoder_attention_mask=text_mask).sample for m in (mine, native)]
    close(*outputs)
    mine.set_attn_processor(AttnProcessor2_0())  # the way back that `apply` names
    assert "set_attn_processor(AttnProcessor2_0())" in integration.apply.__doc__
    assert torch.equal(mine(sample, 3, text).sample, native(sample, 3, text).sample)
    assert (outputs[0] - native(sample, 3, text).sample).abs().max() > 1e-4
    for output in outputs:
        output.square().sum().backward()
    for one, other in zip(mine.parameters(), native.parameters()):
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, atol=1e-3, rtol=1e-3)


def test_a_diffusion_transformer_equals_its_own():
    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10,
    ).eval()  # fmt: skip
    sample, options = torch.randn(2, 4, 8, 8), {"timestep": torch.tensor([3, 7]), "class_labels": torch.tensor([1, 2])}
    right = model(sample, **options).sample
    integration.apply(model)
    close(model(sample, **options).sample, right)
    with attnreg.using("reference"):
        model(sample, **options)
        assert attnreg.last_selection().chosen.name == "reference"


def module(**options):
    torch.manual_seed(0)
    made = Attention(query_dim=16, heads=4, dim_head=4, processor=AttnProcessor(), **options)
    return made, lambda: made.set_processor(integration.AttnregProcessor())


@pytest.mark.parametrize("shape", [(2, 9), (2, 1, 9), (2, 5, 9), (8, 5, 9), (2, 1, 1, 9), (2, 4, 5, 9)])
@pytest.mark.parametrize("kind", ["bool", "bias"])
def test_masks_of_every_shape(shape, kind):
    attn, ours = module(cross_attention_dim=12)
    ours()
    x, y = torch.randn(2, 5, 16), torch.randn(2, 9, 12)
    mask = torch.rand(shape) < 0.6
    mask[..., 0] = True
    whole = (mask[:, None, None] if mask.dim() == 2 else mask.view(2, -1, *shape[-2:]) if mask.dim() == 3 else mask).expand(2, 4, 5, 9)
    q, k, v = (p(t).unflatten(2, (4, 4)).transpose(1, 2) for p, t in ((attn.to_q, x), (attn.to_k, y), (attn.to_v, y)))
    scores = (q @ k.transpose(2, 3) / 2).masked_fill(~whole, float("-inf"))
    right = attn.to_out[0]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    given = mask if kind == "bool" else torch.zeros(shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    close(attn(x, encoder_hidden_states=y, attention_mask=given), right)


@pytest.mark.parametrize(
    "options",
    [
        {"norm_num_groups": 4, "residual_connection": True, "rescale_output_factor": 2.0},
        {"qk_norm": "layer_norm"},
        {"scale_qk": False},
        {"cross_attention_dim": 16, "cross_attention_norm": "layer_norm"},
        {"upcast_attention": True, "upcast_softmax": True, "bias": True, "out_bias": False},
    ],
)
def test_what_stands_around_attention_is_kept(options):
    attn, ours = module(**options)
    x = torch.randn(2, 16, 3, 3) if "norm_num_groups" in options else torch.randn(2, 9, 16)
    more = {"encoder_hidden_states": torch.randn(2, 4, 16)} if "cross_attention_dim" in options else {}
    if "qk_norm" in options:
        attn.set_processor(AttnProcessor2_0())  # the older one overlooks these norms, this one overlooks scale_qk
    right = attn(x, **more)
    ours()
    close(attn(x, **more), right)


def test_grouped_heads_and_causality_that_its_own_overlooks():
    torch.manual_seed(0)
    attn = Attention(query_dim=16, heads=4, kv_heads=2, dim_head=4, is_causal=True, processor=integration.AttnregProcessor())
    x = torch.randn(1, 6, 16)
    right = attn(x)
    x[:, 5] += 1
    close(attn(x)[:, :5], right[:, :5])


def test_dropped_arguments_are_errors():
    attn, _ = module()
    integration.apply(torch.nn.ModuleList([attn]))
    x = torch.randn(1, 3, 16)
    for dropped in ("image_rotary_emb", "ip_adapter_masks", "scale", "gligen"):
        with pytest.raises(TypeError, match=dropped):
            attn(x, **{dropped: torch.ones(1)})
    with pytest.raises(TypeError, match="1 more positional"):
        attn.processor(attn, x, None, None, None, 1.0)
    with pytest.raises(ValueError, match="would have padded"):
        attn(x, attention_mask=torch.ones(1, 1, 2, dtype=torch.bool))
    with pytest.raises(TypeError, match="int64"):
        attn(x, attention_mask=torch.ones(1, 1, 3, dtype=torch.int64))
    attn(x, scale=None)
    attn.set_processor(AttnProcessor2_0())
    attn(x, gligen=torch.ones(1))


def test_what_is_more_than_plain_attention_is_left_alone():
    joint = Attention(query_dim=16, heads=4, dim_head=4, added_kv_proj_dim=16, context_pre_only=False, processor=JointAttnProcessor2_0())
    plain, _ = module()
    with pytest.raises(TypeError, match="JointAttnProcessor2_0"):
        integration.apply(torch.nn.ModuleList([plain, joint]))
    assert isinstance(plain.processor, AttnProcessor)
    with pytest.raises(TypeError, match="has none"):
        integration.apply(torch.nn.Linear(2, 2))
