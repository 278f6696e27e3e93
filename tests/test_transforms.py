"""What torch's function transforms meet: vmap and forward-mode derivatives are refused, backward mode is taken, once."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import attnreg
from attnreg.kernels import block_masks

BACKENDS = pytest.mark.parametrize("backend", ["reference", "sdpa"])


def tensors(*more):
    random = torch.Generator().manual_seed(0)
    return [torch.randn(*more, 2, 5, 2, 8, generator=random) for _ in range(3)]


def attend(query, key, value, backend, **options):
    return attnreg.attention(query, key, value, causal=True, backend=backend, **options)


@pytest.fixture(params=["new", "repeated"])
def how(request):
    """A call of the same shapes is remembered before, or not."""
    return request.param


@BACKENDS
def test_vmap_is_refused(backend, how):
    for name, dims in (("query", (0, None, None)), ("key", (None, 0, None)), ("value", (None, None, 0))):
        plain = tensors()
        given = [torch.stack([t, t, t]) if d == 0 else t for t, d in zip(plain, dims)]
        if how == "repeated":
            attend(*plain, backend), attend(*plain, backend)
        with pytest.raises(TypeError, match=rf"{name}: .*vmap.* fold the mapped dimension into the batch"):
            vmap(lambda q, k, v: attend(q, k, v, backend), dims)(*given)


@BACKENDS
def test_vmap_over_a_bias_is_refused(backend, how):
    call, bias = tensors(), torch.zeros(1, 1, 5, 5)
    if how == "repeated":
        attend(*call, backend, bias=bias), attend(*call, backend, bias=bias)
    with pytest.raises(TypeError, match=r"bias: .*vmap"):
        vmap(lambda bias: attend(*call, backend, bias=bias))(torch.stack([bias, bias]))


@BACKENDS
def test_gradients_of_single_samples_by_vmap_are_refused(backend):
    query, key, value = tensors()
    with pytest.raises(TypeError, match=r"query: .*vmap"):
        vmap(grad(lambda q: attend(q[None], key[:1], value[:1], backend).sum()))(query)


@BACKENDS
def test_forward_mode_is_refused(backend, how):
    query, key, value = tensors()
    if how == "repeated":
        attend(query, key, value, backend), attend(query, key, value, backend)
    with pytest.raises(TypeError, match=r"query: .*forward-mode.* torch.func.vjp"):
        jvp(lambda q: attend(q, key, value, backend), (query,), (query,))
    with pytest.raises(TypeError, match=r"key: .*forward-mode"):
        jvp(lambda k: grad(lambda q: attend(q, k, value, backend).sum())(query), (key,), (key,))
    with forward_ad.dual_level():
        attend(query, key, value, backend), attend(query, key, value, backend)
        with pytest.raises(TypeError, match=r"value: .*forward-mode"):
            attend(query, key, forward_ad.make_dual(value, value), backend)
    attend(query, key, value, backend)


@BACKENDS
def test_backward_mode_by_functions_is_that_of_autograd(backend, how):
    query, key, value = tensors()
    weights = torch.randn(query.shape, generator=torch.Generator().manual_seed(1))
    loss = lambda query: (weights * attend(query, key, value, backend)).sum()
    leaf = query.clone().requires_grad_()
    if how == "repeated":
        loss(query), loss(leaf)
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(grad(loss)(query), expected)
    torch.testing.assert_close(vjp(lambda q: attend(q, key, value, backend), query)[1](weights)[0], expected)


def test_second_derivatives_are_the_references_alone():
    query, key, value = (t.double().requires_grad_() for t in tensors())
    assert torch.autograd.gradgradcheck(lambda *call: attend(*call, "reference"), (query[:1], key[:1], value[:1]))
    output = attend(query, key, value, "sdpa")
    (first,) = torch.autograd.grad(output.pow(2).sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match=r"derivative for .* is not implemented"):
        (output.sum() + first.pow(2).sum()).backward()


@pytest.mark.parametrize("how", ["fake", "grad", "make_fx"])
def test_flex_leaves_nothing_of_a_traced_call_behind(how):
    """No fake tensor goes into a compiled kernel, and no fake or wrapped block mask into the next call."""
    pytest.importorskip("torch.nn.attention.flex_attention")
    query = torch.randn(1, 130, 2, 16)

    def attend(query):
        with torch.no_grad():
            return attnreg.attention(query, query, query, causal=True, window=(40, None), backend="flex")

    block_masks._plain.clear()
    if how == "fake":
        with FakeTensorMode():
            assert attend(torch.randn(1, 130, 2, 16)).shape == query.shape
    elif how == "grad":
        with pytest.raises(Exception):  # noqa: B017 - a transform of flex's own is torch's matter
            grad(lambda q: attend(q).sum())(query)
    else:
        make_fx(attend, tracing_mode="fake")(query)
    assert not block_masks._plain
    wanted = attnreg.attention(query, query, query, causal=True, window=(40, None), backend="reference")
    torch.testing.assert_close(attend(query), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"key_lengths": torch.tensor([2, 5])},
        {"cu_seqlens": (torch.tensor([0, 2, 5]),) * 2},
        {"cu_seqlens": (torch.tensor([0, 2, 5]),) * 2, "max_seqlens": (3, 3)},
    ],
    ids=["lengths", "packed", "packed, longest known"],
)  # fmt: skip
def test_no_fake_number_is_read(options):
    batch = 1 if "cu_seqlens" in options else 2
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        query = torch.randn(batch, 5, 2, 16)
        options = {
            n: tuple(map(mode.from_tensor, t)) if n == "cu_seqlens" else t if n == "max_seqlens" else mode.from_tensor(t)
            for n, t in options.items()
        }
        assert attnreg.attention(query, query, query, causal=True, backend="reference", **options).shape == query.shape
