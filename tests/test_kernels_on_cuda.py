"""What `sdpa` and `cudnn` ask of torch's CUDA operators, without a GPU: the operators are stood in for, by torch in float32 on a CPU.

A stand-in refuses what the operator would misread (alignment, a mask's dtype and rows, head dims, grouped heads) and leaves what it leaves.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import attnreg
from attnreg.kernels import cudnn as cudnn_module
from attnreg.kernels import sdpa as sdpa_module
from attnreg.kernels.sdpa import kernel_for, roomy
from attnreg.spec import AttentionSpec

STEP = 4  # elements in 16 bytes of float32


def attended(query, key, value, hidden, bias, scale):
    """(B, H, S, D) with as many key heads; output and lse, empty rows 0 and `None` to be filled."""
    scores = scale * query @ key.transpose(-1, -2)
    scores = scores if bias is None else scores + bias
    scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
    empty = (scores == -math.inf).all(-1)
    weights = torch.softmax(scores.masked_fill(empty[..., None], 0.0), -1).masked_fill(empty[..., None], 0.0)
    return weights @ value, scores.logsumexp(-1), empty


def corner(queries, keys, shift, left=-1, right=0):
    position, slot = torch.arange(queries)[:, None] + shift, torch.arange(keys)[None]
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    hidden = hidden | (slot > position + right) if right >= 0 else hidden
    return hidden | (slot < position - left) if left >= 0 else hidden


def readable(*tensors):
    for tensor in tensors:
        assert tensor.stride(-1) == 1 and tensor.shape[-1] % STEP == 0 and tensor.storage_offset() % STEP == 0
        assert all(step % STEP == 0 for step, n in zip(tensor.stride()[:-1], tensor.shape) if n > 1)


def flash_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None,
):  # fmt: skip
    readable(query, key, value)
    assert query.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0 and (max_q, max_k) == (query.shape[1], key.shape[1])
    group = query.shape[2] // key.shape[2]
    query, key, value = query.transpose(1, 2), *(t.transpose(1, 2).repeat_interleave(group, 1) for t in (key, value))
    hidden = corner(max_q, max_k, max_k - max_q, window_size_left, 0 if is_causal else window_size_right)
    output, lse, empty = attended(query, key, value, hidden, None, scale)
    return output.transpose(1, 2), lse.masked_fill(empty, math.inf), None, None, None


def efficient(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    readable(query, key, value)
    assert query.shape[1] == key.shape[1] == value.shape[1] and 0 not in key.stride()
    if attn_bias is not None:
        assert attn_bias.dtype == query.dtype and attn_bias.shape == (*query.shape[:3], key.shape[2]) and attn_bias.stride(-1) == 1
        assert all(step % STEP == 0 for step in attn_bias.stride()[:3]) and attn_bias.storage_offset() % STEP == 0
    hidden = corner(query.shape[2], key.shape[2], 0) if is_causal else None
    if attn_bias is not None and attn_bias.requires_grad and is_causal:
        attn_bias.register_hook(lambda gradient: gradient.masked_fill(hidden, math.nan))  # left unwritten
    output, lse, empty = attended(query, key, value, hidden, attn_bias, scale)
    lse = torch.nn.functional.pad(lse.masked_fill(empty, math.inf), (0, -lse.shape[-1] % 32), value=math.inf)
    return output, lse if compute_log_sumexp else lse[:, :, :0], None, None


def cudnn_operator(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    readable(query, key, value)
    assert query.shape[-1] % 8 == 0 and value.shape[-1] % 8 == 0 and dropout_p == 0
    if attn_bias is not None:
        assert attn_bias.dtype == query.dtype and attn_bias.stride(-1) == 1 and attn_bias.shape[-1] == key.shape[2]
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    hidden = corner(query.shape[2], key.shape[2], 0) if is_causal else None  # top-left
    output, lse, _ = attended(query, key, value, hidden, attn_bias, scale)
    return output, lse[..., None] if compute_log_sumexp else None, None, None, 0, 0, None, None, None


@pytest.fixture(params=["flash", "efficient", "cudnn"])
def kernel(request, monkeypatch):
    """Backend "double": the CUDA way of `sdpa`, with whichever kernel fits as far as "flash" allows, or `cudnn`; on a CPU in float32."""
    operators = {
        "_flash_attention_forward": flash_forward,
        "_scaled_dot_product_efficient_attention": efficient,
        "_scaled_dot_product_cudnn_attention": cudnn_operator,
    }
    for name, double in operators.items():
        # torch's own modules, imported late, look for the overload.
        double.default = getattr(torch.ops.aten, name).default
        monkeypatch.setattr(torch.ops.aten, name, double)
    dtype = torch.bfloat16 if request.param == "flash" else torch.float32
    as_on_cuda = lambda spec: kernel_for(spec._replace(device="cuda", capability=(9, 0), dtype=dtype))
    monkeypatch.setattr(sdpa_module, "kernel_for", as_on_cuda)
    if request.param == "cudnn":
        claims = dataclasses.replace(cudnn_module.cudnn.claims, devices=("cpu",), dtypes=(torch.float32,))
        backend = dataclasses.replace(cudnn_module.cudnn, name="double", capabilities=claims, missing=lambda: None)
    else:
        backend = dataclasses.replace(sdpa_module.sdpa, name="double")
    attnreg.register(backend)
    yield request.param
    attnreg.unregister("double")


def make(queries=5, keys=5, heads=4, key_heads=2, dim=8, batch=2, value_dim=None, **options):
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, queries, heads, dim), (batch, keys, key_heads, dim), (batch, keys, key_heads, value_dim or dim))
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return {"query": query, "key": key, "value": value, **options}


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


REAL = torch.arange(7)[None] < torch.tensor([[5], [0]])
CASES = {
    "plain": make(),
    "causal": make(causal=True),
    "causal, more keys": make(3, 7, causal=True),
    "causal, more queries": make(7, 3, causal=True),
    "one query": make(1, 7, causal=True),
    "a window": make(7, 7, causal=True, window=(2, 0)),
    "a window on both sides": make(4, 7, window=(1, 2)),
    "key mask, causal": make(7, 7, causal=True, key_mask=REAL),
    "key lengths, one query": make(1, 7, causal=True, key_lengths=[3, 7]),
    "query mask": make(7, 7, causal=True, query_mask=REAL),
    "a mask": make(4, 6, mask=random(2, 1, 4, 6) > -0.2),
    "a mask of one column": make(4, 6, mask=random(2, 1, 4, 1) > -0.2),
    "a bias": make(5, 7, bias=random(1, 4, 5, 7), causal=True),
    "a bias that is a slice": make(5, 16, bias=random(1, 4, 5, 17)[..., 1:]),
    "alibi": make(5, 7, alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.1]), causal=True),
    "dims to pad": make(dim=5, causal=True),
    "value dim": make(dim=8, value_dim=12, causal=True),
    "sinks": make(5, 7, causal=True, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


@pytest.mark.parametrize("name", CASES)
def test_output_and_lse_are_those_of_the_reference(kernel, name):
    selection = attnreg.explain(**CASES[name], backend="double")
    if selection.chosen is None:
        assert kernel == "cudnn" and name == "sinks", str(selection)
        return
    ours, right = (attnreg.attention(**CASES[name], return_lse=True, backend=b) for b in ("double", "reference"))
    torch.testing.assert_close(ours[0], right[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours[1], right[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(attnreg.attention(**CASES[name], backend="double"), right[0], atol=1e-5, rtol=1e-5)


def test_a_finite_bias_beyond_the_dtype_hides_nothing(kernel):
    call = make(5, 7, bias=torch.full((1, 1, 5, 7), -1e300, dtype=torch.float64))
    ours, right = (attnreg.attention(**call, backend=b) for b in ("double", "reference"))
    torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-5)


ADDED = {"bias": random(1, 4, 5, 5), "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.1]), "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}


@pytest.mark.parametrize("name", ADDED)
def test_gradients_of_what_is_added_to_causal_scores(kernel, name):
    gradients = []
    for backend in ("double", "reference"):
        call = {**make(causal=True), name: ADDED[name].clone().requires_grad_()}
        if attnreg.explain(**call, backend=backend).chosen is None:
            pytest.skip(f"{kernel} has no gradient of {name}")
        attnreg.attention(**call, backend=backend).square().sum().backward()
        gradients.append(call[name].grad)
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["causal", "key mask, causal", "a mask", "a bias"])
def test_a_batch_past_the_limit_runs_in_parts(kernel, name, monkeypatch):
    # The stand-ins run on a CPU, where there is no limit: the parts are asked for by hand.
    function = {"flash": sdpa_module._flash, "efficient": sdpa_module._efficient, "cudnn": cudnn_module._cudnn}[kernel]
    if kernel == "flash" and name != "causal":
        pytest.skip("flash takes no mask")
    call = attnreg.AttentionCall(**CASES[name], return_lse=True)
    call.to_layout("bhsd")
    mask, causal = (None, True) if kernel == "flash" else sdpa_module.additive_mask(call, kernel)
    whole = function(call, call.query, call.key, call.value, mask, causal)
    monkeypatch.setattr(sdpa_module, "MOST_ROWS", 1)
    parts = sdpa_module._in_parts(function, call, call.query, call.key, call.value, mask, causal)
    for one, other in zip(whole, parts):
        torch.testing.assert_close(one, other)


def test_rows_of_a_mask_are_copied_only_where_they_must():
    aligned, slice_ = torch.zeros(1, 1, 3, 32), torch.zeros(1, 1, 3, 33)[..., 1:]
    assert roomy(aligned, 32) is aligned
    copied = roomy(slice_, 32)
    assert copied.stride(2) % STEP == 0 and copied.storage_offset() == 0 and torch.equal(copied, slice_)


def spec(**changes):
    half = {n: t.to(torch.bfloat16) for n, t in make(4, 4, dim=64).items()}
    return attnreg.explain(**half, causal=True).spec._replace(**{"device": "cuda", "capability": (9, 0), **changes})


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"gradients": ("query",), "key_mask": "left"}, "backward"),
        ({"gradients": ("query",), "window": (True, False)}, "backward"),
        ({"gradients": ("query",), "single_query": True}, "backward"),
        ({"capability": (10, 0), "key_heads": 4, "query_heads": 8}, "grouped_heads"),
        ({"capability": (8, 0), "head_dim": 192, "value_dim": 192}, "head_dim"),
        ({"head_dim": 264, "value_dim": 264}, "head_dim"),
        ({"deterministic": True}, "deterministic"),
        ({"dropout": True}, "dropout"),
        ({"packed": True}, "packed"),
        ({"capability": (7, 5)}, "capability"),
        ({"dtype": torch.float32}, "dtype"),
    ],
)
def test_what_cudnn_refuses_and_why(changes, what):
    claims = cudnn_module.cudnn.claims
    assert what in [reason.what for reason in claims.reasons_against(spec(**changes))]
    assert not claims.reasons_against(spec()) and not claims.reasons_against(spec(gradients=("query",)))


@pytest.mark.parametrize(("version", "largest"), [(None, 128), (91200, 128), (91900, 256), (92600, 256)])
def test_cudnn_takes_wide_heads_from_the_version_on_which_they_were_seen_to_be_right(monkeypatch, version, largest):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: version is not None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    dims = cudnn_module._capabilities().head_dim
    assert dims.takes(largest) and not dims.takes(largest + 8)


def test_cudnn_is_missing_with_its_reason(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "install a torch build for CUDA, with cuDNN" in str(cudnn_module._missing())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    assert "install a torch build for CUDA, with cuDNN" in str(cudnn_module._missing())
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    assert cudnn_module._missing() is None


def test_cudnn_comes_first_where_it_is_fastest():
    rank = cudnn_module.cudnn.rank
    assert rank(spec()) > sdpa_module.sdpa.rank(spec()) > rank(spec(key_mask="any"))
    assert rank(spec(capability=(8, 0))) < sdpa_module.sdpa.rank(spec())


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "flash"),
        ({"head_dim": 200, "value_dim": 200, "gradients": ("query",)}, "flash"),
        ({"head_dim": 200, "value_dim": 200, "gradients": ("query",), "capability": (8, 9)}, "efficient"),
        ({"head_dim": 256, "value_dim": 256, "gradients": ("query",), "capability": (12, 0)}, "flash"),
        ({"head_dim": 256, "value_dim": 256, "gradients": ("query",), "capability": (12, 0), "dropout": True}, "efficient"),
        ({"capability": (7, 5), "dtype": torch.float16}, "efficient"),
        ({"capability": (7, 5)}, "math"),
        ({"dtype": torch.float64}, "math"),
    ],
)
def test_which_kernel_sdpa_takes(changes, name):
    assert kernel_for(spec(**changes)) == name


def test_kernels_of_rocm_that_nobody_has_looked_at_are_not_taken(monkeypatch):
    asked = spec()
    assert kernel_for(asked) == "flash"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert kernel_for(asked) == "math"


def test_gradients_beside_a_huge_bias_go_to_math_alone():
    spec = AttentionSpec(
        "cuda", (9, 0), torch.bfloat16, 4, 4, 64, 64, bias=(True, True, True, True), bias_dtype=torch.bfloat16, gradients=("query",)
    )
    assert kernel_for(spec) == "efficient"
    assert kernel_for(spec._replace(huge_bias=True)) == "math"
    for name in ("xformers", "flex"):
        claims = attnreg.backends()[name].claims
        against = [[r for r in claims.reasons_against(s) if r.what == "bias"] for s in (spec, spec._replace(huge_bias=True))]
        assert not against[0]
        assert "finite numbers beyond 1e5" in str(*against[1])
