"""The llm-foundry functions, called as its attention module calls them, against a plain formula in its terms."""

from __future__ import annotations

import math
import sys
import types

import pytest
import torch

from attnreg.integrations.llm_foundry import flash_attn_fn, register, scaled_multihead_dot_product_attention
from attnreg.nn import alibi_slopes

torch.manual_seed(0)
HEADS, KV_HEADS, DIM = 4, 2, 6


def flat(batch, length, heads):
    return torch.randn(batch, length, heads * DIM)


def inputs(batch=2, length=5):
    return flat(batch, length, HEADS), flat(batch, length, KV_HEADS), flat(batch, length, KV_HEADS)


def formula(query, key, value, allowed, bias=0.0, scale=None, softcap=None):
    """Flat in, flat out; `allowed` (S, T) or broadcastable to the scores."""
    q, k, v = (t.unflatten(2, (-1, DIM)).transpose(1, 2) for t in (query, key, value))
    k, v = k.repeat_interleave(HEADS // KV_HEADS, 1), v.repeat_interleave(HEADS // KV_HEADS, 1)
    scores = q @ k.transpose(2, 3) * (scale or 1 / math.sqrt(DIM))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = (scores + bias).masked_fill(~allowed, float("-inf"))
    return (torch.softmax(scores, -1).nan_to_num(0.0) @ v).transpose(1, 2).flatten(2)


def close(mine, right):
    torch.testing.assert_close(mine, right, atol=1e-5, rtol=1e-5)


def lower(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def attend(*tensors, **options):
    """As `GroupedQueryAttention.forward` calls its `attn_fn` for "torch"."""
    defaults = {
        "past_key_value": None, "softmax_scale": None, "attn_bias": None, "is_causal": True, "dropout_p": 0.0, "training": False,
        "needs_weights": False, "attn_logit_softcapping": None, "sliding_window_size": -1, "key_padding_mask": None,
    }  # fmt: skip
    return scaled_multihead_dot_product_attention(*tensors, n_heads=HEADS, kv_n_heads=KV_HEADS, **{**defaults, **options})


def attend_packed(query, key, value, mask=None, segments=None, **options):
    """As it does for "flash", with the padding info that the model makes: of a mask, or of lengths of segments within rows."""
    batch, length = query.shape[:2]
    past = options.get("past_key_value")
    whole = length + (past[0].shape[1] if past else 0)
    mask = torch.ones(batch, whole, dtype=torch.bool) if mask is None else mask
    told = {}
    for name, real in (("q", mask[:, -length:]), ("k", mask)):
        lengths = segments if segments is not None else real.sum(1)
        told[f"indices_{name}"] = real.flatten().nonzero().flatten()
        told[f"cu_seqlens_{name}"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        told[f"max_seqlen_{name}"] = int(lengths.max())
    told["indices_v"] = told["indices_k"].clone()
    defaults = {
        "past_key_value": None, "softmax_scale": None, "attn_bias": None, "is_causal": True, "dropout_p": 0.0, "training": False,
        "needs_weights": False, "attn_logit_softcapping": None, "sliding_window_size": -1, "should_repeat_kv_for_gqa": False,
        "alibi_slopes": None, "flash_attn_padding_info": told, "key_padding_mask": None,
    }  # fmt: skip
    return flash_attn_fn(query, key, value, n_heads=HEADS, kv_n_heads=KV_HEADS, **{**defaults, **options})


def test_flat_grouped_causal_softcap_scale():
    tensors = inputs()
    right = formula(*tensors, lower(5, 5), scale=0.3, softcap=2.0)
    for function in (attend, attend_packed):
        output, weights, past = function(*tensors, softmax_scale=0.3, attn_logit_softcapping=2.0)
        close(output, right)
        assert weights is None and past is None
    close(attend(*tensors, is_causal=False)[0], formula(*tensors, lower(5, 5) | True))


def test_window_counts_both_sides_and_not_the_query_itself():
    tensors = inputs()
    distance = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    for causal in (True, False):
        right = formula(*tensors, (distance <= 1) & (lower(5, 5) | (not causal)))
        for function in (attend, attend_packed):
            close(function(*tensors, sliding_window_size=1, is_causal=causal)[0], right)


def test_its_bias_of_a_longer_model_is_cut_to_its_end_and_its_masks_hide():
    tensors = inputs()
    slopes = alibi_slopes(HEADS)
    longer = (torch.arange(-8, 1)[None, :] * slopes[:, None])[None, :, None, :]
    right = formula(*tensors, lower(5, 5), bias=longer[..., -5:])
    close(attend(*tensors, attn_bias=longer)[0], right)
    # The model writes padding into the bias as the smallest number of its dtype.
    real = torch.tensor([[True] * 5, [False, False, True, True, True]])
    hidden = longer[..., -5:].masked_fill(~real[:, None, None, :], torch.finfo(torch.float32).min)
    right = formula(*tensors, lower(5, 5) & real[:, None, None, :], bias=longer[..., -5:])
    output = attend(*tensors, attn_bias=hidden, key_padding_mask=real)[0]
    close(output, right)
    assert (output[1, :2] == 0).all()


def test_padding_and_alibi_in_flash_form_equal_each_row_alone():
    tensors = inputs()
    slopes = alibi_slopes(HEADS)
    real = torch.tensor([[True] * 5, [False, False, True, True, True]])
    output, _, _ = attend_packed(*tensors, mask=real, alibi_slopes=slopes)
    alone = attend_packed(*(t[1:, 2:] for t in tensors), alibi_slopes=slopes)[0]
    close(output[1:, 2:], alone)
    bias = -slopes[:, None, None] * (torch.arange(5)[:, None] - torch.arange(5)).abs()
    close(output[:1], formula(*(t[:1] for t in tensors), lower(5, 5), bias=bias))
    assert (output[1, :2] == 0).all()


def test_sequence_ids_keep_documents_apart():
    tensors = inputs(1, 5)
    output, _, _ = attend_packed(*tensors, segments=torch.tensor([2, 3]))
    for part in (slice(0, 2), slice(2, 5)):
        close(output[:, part], attend_packed(*(t[:, part] for t in tensors))[0])


@pytest.mark.parametrize("function", [attend, attend_packed])
@pytest.mark.parametrize("steps", [(3, 1, 1), (2, 3), (5,)])
def test_cached_in_steps_equals_one_shot(function, steps):
    tensors = inputs()
    right = function(*tensors)[0]
    past, outputs, start = (), [], 0
    for size in steps:
        output, _, past = function(*(t[:, start : start + size] for t in tensors), past_key_value=past)
        outputs.append(output)
        start += size
    close(torch.cat(outputs, 1), right)
    keys, values = past
    if function is attend:
        assert keys.shape == (2, KV_HEADS, DIM, 5) and values.shape == (2, KV_HEADS, 5, DIM)
        close(keys[:, 1, :, 2], tensors[1].unflatten(2, (KV_HEADS, DIM))[:, 2, 1])
    else:
        assert torch.equal(keys, tensors[1]) and torch.equal(values, tensors[2])


def test_dropout_in_training_only():
    tensors = inputs()
    assert torch.equal(attend(*tensors, dropout_p=0.5)[0], attend(*tensors)[0])
    assert not torch.equal(attend(*tensors, dropout_p=0.5, training=True)[0], attend(*tensors)[0])


def test_what_can_not_be_honoured_is_an_error():
    tensors = inputs()
    with pytest.raises(NotImplementedError, match="needs_weights"):
        attend(*tensors, needs_weights=True)
    with pytest.raises(NotImplementedError, match="needs_weights"):
        attend_packed(*tensors, needs_weights=True)
    with pytest.raises(ValueError, match="key_padding_mask"):
        attend_packed(*tensors, key_padding_mask=torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="flash_attn_padding_info"):
        attend_packed(*tensors, flash_attn_padding_info=None)
    with pytest.raises(NotImplementedError, match="attn_bias"):
        attend_packed(*tensors, attn_bias=torch.zeros(1, 1, 1, 5))
    with pytest.raises(ValueError, match="sliding_window_size"):
        attend(*tensors, sliding_window_size=-2)
    with pytest.raises(ValueError, match="attn_bias"):
        attend(*tensors, attn_bias=torch.zeros(5, 5))
    with pytest.raises(TypeError, match=r"attn_bias: a floating tensor .* got torch.bool"):
        attend(*tensors, attn_bias=torch.ones(1, 1, 1, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="bias: each dimension"):
        attend(*tensors, attn_bias=torch.zeros(1, 1, 1, 4))


def test_a_past_of_the_other_layout_is_an_error():
    tensors = inputs()
    flash_past, torch_past = attend_packed(*tensors, past_key_value=())[2], attend(*tensors, past_key_value=())[2]
    with pytest.raises(ValueError, match="different layouts"):
        attend(*tensors, past_key_value=flash_past)
    with pytest.raises(ValueError, match="different layouts"):
        attend_packed(*tensors, past_key_value=torch_past, mask=torch.ones(2, 10, dtype=torch.bool))
    keys = torch.zeros(2, KV_HEADS, 7, DIM)  # as transformers keeps them: not transposed
    with pytest.raises(ValueError, match="different layouts"):
        attend(*tensors, past_key_value=(keys, keys))


class _Registry(dict):
    """As much of a catalogue registry as `register` uses: a later function of a name takes its place."""

    def register(self, name, func):
        self[name] = func


def test_register(monkeypatch):
    if "llmfoundry" not in sys.modules:
        monkeypatch.setitem(sys.modules, "llmfoundry", None)
        with pytest.raises(ImportError, match="llm-foundry is not installed"):
            register()
    registry = _Registry(torch="theirs", flash="theirs")
    package, module = types.ModuleType("llmfoundry"), types.ModuleType("llmfoundry.layers_registry")
    module.attention_implementations = registry
    monkeypatch.setitem(sys.modules, "llmfoundry", package)
    monkeypatch.setitem(sys.modules, "llmfoundry.layers_registry", module)
    register()
    assert registry == {"torch": "theirs", "flash": "theirs", "attnreg": scaled_multihead_dot_product_attention}
    register(replace={"torch", "flash"})
    assert registry["torch"] is scaled_multihead_dot_product_attention and registry["flash"] is flash_attn_fn
    for wrong in ("torch", {"triton"}):
        with pytest.raises(ValueError, match="replace"):
            register(replace=wrong)
