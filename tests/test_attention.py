"""The repeated call: what is remembered, and that nothing stale is."""

import pytest
import torch

import attnreg

x, y, z = torch.randn(3, 1, 4, 2, 8)


@pytest.mark.parametrize("given", [(x, y, z), (x, y, y), (x, x, x), (x, x, y), (x, y, x)], ids=["xyz", "xyy", "xxx", "xxy", "xyx"])
def test_a_repeated_call_is_not_checked_again(given, monkeypatch):
    first = attnreg.attention(*given, causal=True)
    others = attnreg.attention(z, x, y, causal=True)
    monkeypatch.setattr(attnreg.AttentionCall, "__init__", None)
    assert torch.equal(attnreg.attention(*given, causal=True), first)
    with pytest.raises(TypeError):
        attnreg.attention(x, y, z[..., :4], causal=True)
    if len({id(t) for t in given}) == 3:
        assert torch.equal(attnreg.attention(z, x, y, causal=True), others)


def test_learned_terms_get_zero_gradients_where_there_are_no_keys():
    bias, sinks = torch.zeros(1, 1, 4, 1, requires_grad=True), torch.zeros(2, requires_grad=True)
    attnreg.attention(x, y[:, :0], y[:, :0], bias=bias[..., :0], sinks=sinks).sum().backward()
    assert bias.grad.eq(0).all() and sinks.grad.eq(0).all()
