"""attnreg.nn.Attention: equal to nn.MultiheadAttention with the same weights, and its own positions, grouped heads and errors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import attnreg
from attnreg.nn import Attention, alibi_slopes

torch.manual_seed(0)


def pair(**options):
    torch.manual_seed(1)
    theirs = nn.MultiheadAttention(24, 4, batch_first=True, **options)
    if theirs.in_proj_bias is not None:  # they start at zero, which would hide a mix-up
        nn.init.normal_(theirs.in_proj_bias)
        nn.init.normal_(theirs.out_proj.bias)
    return theirs, Attention.from_multihead_attention(theirs)


def close(mine, right):
    torch.testing.assert_close(mine, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_equals_multihead_attention_forward_and_backward(bias):
    theirs, mine = pair(bias=bias)
    x = torch.randn(3, 7, 24)
    x_theirs, x_mine = x.clone().requires_grad_(), x.clone().requires_grad_()
    right, _ = theirs(x_theirs, x_theirs, x_theirs, need_weights=False)
    output = mine(x_mine)
    close(output, right)
    right.square().sum().backward()
    output.square().sum().backward()
    close(x_mine.grad, x_theirs.grad)
    close(torch.cat([getattr(mine, n).weight.grad for n in ("query_proj", "key_proj", "value_proj")]), theirs.in_proj_weight.grad)


def test_equals_it_with_masks():
    theirs, mine = pair()
    x = torch.randn(2, 6, 24)
    padded = torch.tensor([[False] * 6, [False, False, False, True, True, True]])
    later = torch.ones(6, 6, dtype=torch.bool).triu(1)
    right, _ = theirs(x, x, x, key_padding_mask=padded, attn_mask=later, need_weights=False)
    close(mine(x, key_mask=~padded, causal=True), right)
    close(mine(x, key_mask=~padded, mask=~later[None, None]), right)
    added = torch.randn(6, 6)
    right, _ = theirs(x, x, x, attn_mask=added, need_weights=False)
    close(mine(x, bias=added[None, None]), right)
    output = mine(x, key_mask=~padded, query_mask=~padded)
    close(output[padded], mine.out_proj.bias.expand(3, -1))


def test_equals_it_across_with_other_sizes():
    theirs, mine = pair(kdim=10, vdim=14)
    query, key, value = torch.randn(2, 5, 24), torch.randn(2, 9, 10), torch.randn(2, 9, 14)
    right, _ = theirs(query, key, value, need_weights=False)
    close(mine(query, key, value), right)


def test_loads_its_state_dict_inside_a_model():
    theirs, _ = pair()
    model = nn.ModuleDict({"attention": Attention(24, 4)})
    state = {f"attention.{name}": tensor for name, tensor in theirs.state_dict().items()}
    model.load_state_dict(state)
    assert "attention.in_proj_weight" in state
    x = torch.randn(1, 4, 24)
    close(model["attention"](x), theirs(x, x, x, need_weights=False)[0])
    again = Attention(24, 4)
    again.load_state_dict(model["attention"].state_dict())
    close(again(x), model["attention"](x))


def test_what_it_can_not_be_is_an_error():
    with pytest.raises(ValueError, match="add_bias_kv"):
        Attention.from_multihead_attention(nn.MultiheadAttention(24, 4, add_bias_kv=True))
    with pytest.raises(ValueError, match="bias_k"):
        Attention(24, 4).load_state_dict(nn.MultiheadAttention(24, 4, add_bias_kv=True).state_dict())
    with pytest.raises(ValueError, match="kv_heads"):
        Attention(24, 4, kv_heads=3)
    with pytest.raises(ValueError, match="head_dim"):
        Attention(25, 4)
    with pytest.raises(ValueError, match="positions"):
        Attention(24, 4, positions="learned")
    with pytest.raises(ValueError, match="even"):
        Attention(20, 4, positions="rotary")
    with pytest.raises(ValueError, match="position_ids"):
        Attention(24, 4)(torch.randn(1, 3, 24), position_ids=torch.zeros(1, 3))
    with pytest.raises(ValueError, match="self attention"):
        Attention(24, 4, positions="rotary")(torch.randn(1, 3, 24), torch.randn(1, 3, 24))
    with pytest.raises(ValueError, match="goes with key"):
        Attention(24, 4)(torch.randn(1, 3, 24), None, torch.randn(1, 3, 24))
    with pytest.raises(TypeError, match="key_padding_mask"):
        Attention(24, 4)(torch.randn(1, 3, 24), key_padding_mask=None)


@pytest.mark.parametrize("positions", ["none", "rotary", "alibi"])
def test_padded_and_packed_tokens_are_each_prompt_alone(positions):
    layer = Attention(24, 4, kv_heads=2, positions=positions)
    first, second = torch.randn(1, 5, 24), torch.randn(1, 3, 24)
    alone = [layer(x, causal=True) for x in (first, second)]
    for side in ("left", "right"):
        room = torch.full((1, 2, 24), 7.0)
        padded = torch.cat([room, second] if side == "left" else [second, room], 1)
        mask = attnreg.Padding.from_lengths([5, 3], 5, side)
        output = layer(torch.cat([first, padded]), causal=True, key_mask=mask, query_mask=mask)
        close(output[0], alone[0][0])
        close(output[1][mask.mask[1]], alone[1][0])
    cu = torch.tensor([0, 5, 8], dtype=torch.int32)
    packed = torch.cat([first, second], 1)
    close(layer(packed, causal=True, cu_seqlens=(cu, cu)), torch.cat(alone, 1))
    close(layer(packed[0], causal=True, cu_seqlens=(cu, cu)), torch.cat(alone, 1)[0])


def test_rotary_depends_on_distances_only_and_follows_the_given_ids():
    layer = Attention(16, 2, positions="rotary").double()
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    ids = torch.arange(6)[None]
    torch.testing.assert_close(layer(x, position_ids=ids), layer(x))
    torch.testing.assert_close(layer(x, position_ids=ids + 9), layer(x), atol=1e-5, rtol=1e-5)
    assert (layer(x, position_ids=ids * 2) - layer(x)).abs().max() > 1e-3
    # The complex form of the paper, on one head.
    from attnreg.nn import rotated, rotation

    head = torch.randn(1, 6, 1, 8)
    turned = rotated(head, rotation(ids, 8))
    angle = ids[0, :, None] * 10000.0 ** (-torch.arange(4) / 4)
    right = torch.complex(head[0, :, 0, :4], head[0, :, 0, 4:]) * torch.exp(1j * angle)
    close(turned[0, :, 0], torch.cat([right.real, right.imag], -1))


def test_alibi_slopes_are_those_of_the_paper():
    close(alibi_slopes(8), torch.tensor([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]))
    close(alibi_slopes(3), torch.tensor([1 / 16, 1 / 256, 1 / 4]))
    layer = Attention(24, 4, positions="alibi")
    assert not [name for name in layer.state_dict() if "slopes" in name]
    x = torch.randn(1, 5, 24)
    q, k, v = (p(x).unflatten(2, (4, 6)) for p in (layer.query_proj, layer.key_proj, layer.value_proj))
    right = attnreg.attention(q, k, v, causal=True, alibi_slopes=torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256]))
    close(layer(x, causal=True), layer.out_proj(right.flatten(2)))


def test_policies_reach_it():
    layer = Attention(24, 4, backend="reference", layer="model.layers.0")
    x = torch.randn(1, 3, 24)
    output, lse = layer(x, return_lse=True)
    assert attnreg.last_selection().chosen.name == "reference" and lse.shape == (1, 4, 3) and output.shape == x.shape
    layer.backend = None
    with attnreg.using("sdpa"), attnreg.expect("sdpa"):
        layer(x)


def test_dropout_in_training_only():
    layer = Attention(24, 4, dropout=0.5)
    x = torch.randn(1, 9, 24)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("positions", ["none", "rotary", "alibi"])
def test_cached_in_steps_equals_each_prompt_alone(positions):
    caches = pytest.importorskip("attnreg.cache", reason="no caches yet")
    layer = Attention(24, 4, kv_heads=2, positions=positions)
    first, second = torch.randn(1, 6, 24), torch.randn(1, 4, 24)
    alone = [layer(x, causal=True) for x in (first, second)]
    whole = torch.cat([first, torch.cat([torch.full((1, 2, 24), 7.0), second], 1)])
    real = torch.tensor([[True] * 6, [False, False, True, True, True, True]])
    cache, outputs, start = caches.DynamicCache(1).layer(0), [], 0
    with torch.no_grad():
        for size in (3, 1, 2):
            part = slice(start, start + size)
            outputs.append(layer(whole[:, part], causal=True, cache=cache, key_mask=real[:, : start + size], query_mask=real[:, part]))
            start += size
    output = torch.cat(outputs, 1)
    close(output[0], alone[0][0])
    close(output[1, 2:], alone[1][0])


@pytest.mark.parametrize("positions", ["none", "rotary", "alibi"])
def test_packed_steps_with_a_cache_equal_each_prompt_alone(positions):
    layer = Attention(24, 4, kv_heads=2, positions=positions)
    first, second = torch.randn(6, 24), torch.randn(5, 24)
    alone = [layer(x[None], causal=True)[0] for x in (first, second)]
    cache, outputs, ends = attnreg.DynamicCache(1).layer(0), ([], []), (0, 0)
    with torch.no_grad():
        for sizes in ((2, 3), (1, 1), (3, 1)):
            starts, ends = ends, tuple(e + n for e, n in zip(ends, sizes))
            cu = torch.tensor([0, sizes[0], sum(sizes)], dtype=torch.int32)
            step = torch.cat([first[starts[0] : ends[0]], second[starts[1] : ends[1]]])
            for output, part in zip(outputs, layer(step, causal=True, cu_seqlens=(cu, cu), cache=cache).split(sizes)):
                output.append(part)
    for output, right in zip(outputs, alone):
        close(torch.cat(output), right)


def test_alibi_slopes_outlive_moves_and_dtypes():
    right = alibi_slopes(12)
    close(Attention(24, 12, positions="alibi").to(torch.bfloat16).slopes, right)
    layer = Attention(24, 12, positions="alibi", device="meta").to_empty(device="cpu")
    layer.load_state_dict(Attention(24, 12, positions="alibi").state_dict())
    close(layer.slopes, right)


def test_options_that_the_layer_gives_itself_are_refused():
    layer, tokens = Attention(16, 4, positions="alibi"), torch.randn(2, 4, 16)
    with pytest.raises(TypeError, match="layout"):
        layer(tokens, layout="bhsd")  # heads would be read as slots
    with pytest.raises(TypeError, match="alibi_slopes"):
        layer(tokens, alibi_slopes=torch.ones(4))


def test_rotary_positions_are_as_exact_as_the_model():
    torch.manual_seed(0)
    layer = Attention(8, 1, positions="rotary", dtype=torch.float64, backend="reference")
    torch.autograd.gradcheck(layer, torch.randn(1, 3, 8, dtype=torch.float64, requires_grad=True))


def test_parameters_are_reset_all():
    layer = Attention(8, 2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(7.0)
    layer.reset_parameters()
    assert not any((parameter == 7.0).any() for parameter in layer.parameters())
    assert not any(projection.bias.any() for projection in (layer.query_proj, layer.key_proj, layer.value_proj, layer.out_proj))
