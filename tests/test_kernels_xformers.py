"""xformers: its own bias objects against the contract's visibility, slot by slot, and the adapter over a stand-in for its kernels.

Bias objects and input checks are xformers' own (they need no GPU); only the arithmetic is done here, from the materialised bias.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import math
import textwrap
import types
from pathlib import Path

import fresh
import pytest
import torch

import attnreg
from attnreg.kernels import xformers as module
from attnreg.visibility import visible

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies


def library():
    if importlib.util.find_spec("xformers") is None:
        pytest.skip("xformers is not installed")
    return module._import()[0]


def kept(bias, queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool) if bias is None else bias.materialize((queries, keys)) == 0


def make(queries=5, keys=5, heads=4, key_heads=4, dim=8, batch=1, value_dim=None, **options):
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, queries, heads, dim), (batch, keys, key_heads, dim), (batch, keys, key_heads, value_dim or dim))
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return {"query": query, "key": key, "value": value, **options}


def starts(lengths):
    return torch.tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)], dtype=torch.int32)


sides = st.none() | st.integers(0, 9)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(st.integers(1, 8), st.integers(1, 8), st.booleans(), st.none() | st.tuples(sides, sides))
def test_dense_bias_is_the_contract_slot_by_slot(queries, keys, causal, window):
    attn_bias = library().attn_bias
    call = attnreg.AttentionCall(**make(queries, keys), causal=causal, window=window)
    bias, seen = module.bias_for(call, attn_bias, queries, keys), visible(call)
    assert (bias is None) == (not causal and window in (None, (None, None)))
    # No visibility is all of it: a lone query and a lone key are causal and see each other.
    assert torch.equal(kept(bias, queries, keys), kept(None, queries, keys) if seen is None else seen[0, 0])


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=4), st.booleans(), st.none() | st.integers(0, 4)
)
def test_segments_are_the_contract_slot_by_slot(lengths, causal, left):
    attn_bias = library().attn_bias
    queries, keys = (list(side) for side in zip(*lengths))
    if causal:
        queries = [min(q, k) for q, k in zip(queries, keys)]
    hypothesis.assume(sum(queries) and sum(keys))
    cu = (starts(queries), starts(keys))
    window = (left, None) if causal and left is not None else None
    call = attnreg.AttentionCall(**make(sum(queries), sum(keys)), causal=causal, window=window, cu_seqlens=cu)
    bias = module.segments_for(call, attn_bias, queries, keys, torch.device("cpu"))
    assert torch.equal(kept(bias, sum(queries), sum(keys)), visible(call)[0, 0])


# ---------------------------------------------------------------------- the adapter over a stand-in for the kernels


def stand_in(fmha):
    """xformers with its own bias objects and checks, and the arithmetic in torch; as careless about empty rows as the kernels."""
    kernels = {fmha.flash.FwOp: "flash", fmha.cutlass.FwOp: "cutlass"}

    def compute(query, key, value, bias, p, scale, op, backward):
        inputs = fmha.common.Inputs(query=query, key=key, value=value, attn_bias=bias, p=p, scale=scale)
        inputs.validate_inputs()
        name, reasons = kernels[op], []
        assert type(bias) in op.SUPPORTED_ATTN_BIAS_TYPES, type(bias)
        if backward is not None:
            assert type(bias) in backward.SUPPORTED_ATTN_BIAS_TYPES and query.dim() == 4
        alignment = 8 if name == "flash" else 4
        for tensor in (query, value):
            fmha.common.check_lastdim_alignment_stride1(reasons, "tensor", tensor, alignment)
        if name == "flash":
            fmha.flash._check_needs_no_topleft(inputs, reasons)
            assert query.shape[-1] == value.shape[-1]
        else:
            assert query.dim() == 4
            fmha.cutlass._check_bias_alignment(reasons, bias)
        assert not reasons, reasons
        dims = "bqghd,bkghd->bghqk" if query.dim() == 5 else "bqhd,bkhd->bhqk"
        scores = scale * torch.einsum(dims, query, key)
        if isinstance(bias, torch.Tensor):
            scores = scores + bias
        elif bias is not None:
            scores = scores + bias.materialize((query.shape[1], key.shape[1]))
        empty = (scores == -math.inf).all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
        back = "bghqk,bkghd->bqghd" if query.dim() == 5 else "bhqk,bkhd->bqhd"
        lse = scores.logsumexp(-1).masked_fill(empty.squeeze(-1), math.inf)
        if name == "cutlass":
            lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
        return torch.einsum(back, weights, value), lse

    def attend(query, key, value, bias, p, scale, *, op):
        learns = query.requires_grad or key.requires_grad or value.requires_grad
        return compute(query, key, value, bias, p, scale, op[0], op[1] if learns else None)[0]

    def attend_with_lse(query, key, value, bias, p, scale, *, op):
        assert p == 0.0
        return compute(query, key, value, bias, p, scale, op, None)

    return types.SimpleNamespace(
        attn_bias=fmha.attn_bias,
        flash=fmha.flash,
        cutlass=fmha.cutlass,
        memory_efficient_attention=attend,
        memory_efficient_attention_forward_requires_grad=attend_with_lse,
    )


@pytest.fixture(params=["flash", "cutlass"])
def kernel(request, monkeypatch):
    """The adapter, for a CPU and float32; "flash" pretends that float32 is a half precision."""
    monkeypatch.setattr(module._Found, "fmha", stand_in(library()))
    if request.param == "flash":
        monkeypatch.setattr(module, "_HALF", (torch.float32,))
    claims = dataclasses.replace(module.xformers.claims, devices=("cpu",), dtypes=(torch.float32,))
    attnreg.register(dataclasses.replace(module.xformers, name="xformers_double", capabilities=claims, missing=lambda: None))
    yield request.param
    attnreg.unregister("xformers_double")


def packed(queries, keys, spare=0, **options):
    call = make(sum(queries) + spare, sum(keys) + spare, **options, cu_seqlens=(starts(queries), starts(keys)))
    if spare:
        for name in ("query", "key", "value"):
            call[name][:, -spare:] = math.nan
    return call


def rows(*patterns):
    return torch.tensor([[letter == "1" for letter in pattern] for pattern in patterns])


LEFT = rows("001111", "111111", "000000")
LIMITED = torch.full((1, 1, 1, 7), 0.0).masked_fill(torch.arange(7) == 3, -math.inf)
CASES = {
    "plain": make(),
    "causal": make(causal=True),
    "causal, more keys, grouped": make(3, 7, key_heads=2, batch=2, causal=True),
    "causal, more queries": make(7, 3, causal=True),
    "one query, grouped": make(1, 6, key_heads=1, batch=3, causal=True),
    "a window": make(7, 7, causal=True, window=(2, 0)),
    "a window on both sides": make(4, 7, window=(1, 2)),
    "a window open to the left": make(4, 7, window=(None, 1)),
    "segments": packed([2, 3], [4, 1]),
    "segments, causal, fewer keys": packed([2, 3, 1], [4, 1, 0], causal=True, key_heads=2),
    "segments, causal, a window": packed([2, 3, 1], [4, 2, 2], causal=True, window=(1, 0)),
    "segments and a window on both sides": packed([2, 3], [4, 2], window=(1, 1)),
    "right padding and a window on both sides": make(6, 6, batch=3, key_mask=LEFT.flip(1), query_mask=LEFT.flip(1), window=(2, 1)),
    "segments with a tail of NaN": packed([2, 3], [4, 3], spare=3, causal=True),
    "segments with a tail of NaN, longest given": packed([2, 4], [4, 3], spare=3, max_seqlens=(4, 4), causal=True),
    "segments without any key": packed([2, 1], [0, 0], spare=2),
    "left padding": make(6, 6, batch=3, causal=True, key_mask=LEFT, query_mask=LEFT),
    "right padding of keys, causal": make(6, 6, batch=3, causal=True, key_mask=LEFT.flip(1)),
    "lengths and starts": make(3, 6, batch=2, causal=True, key_lengths=[5, 2], query_lengths=[3, 1], key_starts=[1, 0]),
    "a mask": make(4, 6, batch=2, mask=torch.rand(2, 1, 4, 6, generator=torch.Generator().manual_seed(1)) > 0.4),
    "a bias, causal": make(7, 7, bias=torch.randn(1, 4, 7, 7, generator=torch.Generator().manual_seed(1)), causal=True),
    "a bias over keys alone": make(5, 7, bias=LIMITED, causal=True),
    "a bias that is a slice": make(5, 16, bias=torch.randn(1, 4, 5, 17, generator=torch.Generator().manual_seed(1))[..., 1:]),
    "a value dim": make(5, 6, value_dim=12, causal=True),
    "alibi": make(5, 7, alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.1]), causal=True),
    "a head dim to pad and a scale": make(dim=5, scale=0.3, causal=True),
}


@pytest.mark.parametrize("name", CASES)
def test_output_and_lse_are_those_of_the_reference(kernel, name):
    ours, right = (attnreg.attention(**CASES[name], return_lse=True, backend=b) for b in ("xformers_double", "reference"))
    torch.testing.assert_close(ours[0], right[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours[1], right[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_reference(kernel, name):
    gradients = []
    for backend in ("xformers_double", "reference"):
        call = dict(CASES[name])
        tensors = [call[n].clone().requires_grad_() for n in ("query", "key", "value")]
        call.update(zip(("query", "key", "value"), tensors))
        output = attnreg.attention(**call, backend=backend)
        weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        gradients.append(torch.autograd.grad((output * weight).sum(), tensors))
    for ours, right in zip(*gradients):
        torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-5)


def test_without_gradients_tensors_that_could_have_them_take_the_grouped_way(kernel):
    call = make(4, 6, key_heads=2, causal=True)
    right = attnreg.attention(**call, backend="reference")
    with torch.no_grad():
        call.update({n: call[n].requires_grad_() for n in ("query", "key", "value")})
        torch.testing.assert_close(attnreg.attention(**call, backend="xformers_double"), right, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------- the claims


def spec(**changes):
    half = {n: t.to(torch.bfloat16) for n, t in make(4, 4, dim=64).items()}
    return attnreg.explain(**half, causal=True).spec._replace(**{"device": "cuda", "capability": (9, 0), **changes})


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"deterministic": True}, "deterministic"),
        ({"compiling": True}, "compile"),
        ({"softcap": True}, "softcap"),
        ({"sinks": True}, "sinks"),
        ({"return_lse": True, "gradients": ("query",)}, "lse"),
        ({"return_lse": True, "dropout": True}, "lse"),
        ({"bias": (True, True, True, True), "gradients": ("query", "bias")}, "bias_gradient"),
        ({"window": (True, True), "causal": False, "equal_lengths": False}, "window"),
        ({"packed": True, "capturing": True}, "capture"),
        ({"key_mask": "left", "padding_fits_packing": True, "capturing": True}, "capture"),
        ({"capability": (10, 0), "mask": (True, True, True, True)}, "capability"),
        ({"capability": (7, 5)}, "dtype"),
        ({"dtype": torch.float64}, "dtype"),
    ],
)
def test_what_is_refused_and_why(changes, what):
    assert what in [reason.what for reason in module.xformers.claims.reasons_against(spec(**changes))]
    assert not module.xformers.claims.reasons_against(spec())


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({}, "flash"),
        ({"key_mask": "any", "padding_fits_packing": True}, "flash"),
        ({"key_mask": "any", "padding_fits_packing": False}, "cutlass"),
        ({"mask": (True, False, True, True)}, "cutlass"),
        ({"value_dim": 32}, "cutlass"),
        ({"head_dim": 320, "value_dim": 320}, "cutlass"),
        ({"dtype": torch.float32}, "cutlass"),
        ({"capability": (7, 5), "dtype": torch.float16}, "cutlass"),
    ],
)
def test_the_operator_is_named_by_the_spec(changes, kernel):
    assert module.kernel_for(spec(**changes)) == kernel


# ---------------------------------------------------------------------- environments


LOOK = """
import logging; logging.disable()
import torch
from attnreg.kernels import xformers
fmha, reason = xformers._import()
print(None if fmha is None else fmha.__name__, "|", reason)
"""


def distribution(folder, name, version, **files):
    notes = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    notes.mkdir(parents=True)
    (notes / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for path, text in files.items():
        file = folder.joinpath(*path.split("__")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    for package in (place for place in folder.rglob("*") if place.is_dir() and not place.name.endswith(".dist-info")):
        # flash-attn 4 brings no flash_attn/__init__.py.
        if package.name != "flash_attn":
            (package / "__init__.py").touch()


def look(folder):
    """What the adapter finds in a fresh interpreter with this folder before everything else."""
    return fresh.run(folder, LOOK, folder, Path(attnreg.__file__).parents[1]).strip().splitlines()[-1]


OPERATORS = """
class FwOp:
    @classmethod
    def is_available(cls): return True
BwOp = FwOp
"""
FMHA = "from . import attn_bias, common, cutlass, flash\n"
FAKE = {
    "xformers__ops__fmha__flash": OPERATORS,
    "xformers__ops__fmha__cutlass": OPERATORS,
    "xformers__ops__fmha__attn_bias": "",
    "xformers__ops__fmha__common": "_built_with_cuda = True\n",
}


def fake(folder, fmha=FMHA, **files):
    distribution(folder, "xformers", "0.0.99", **{**FAKE, **files})
    (folder / "xformers" / "ops" / "fmha" / "__init__.py").write_text(fmha)


def test_environment_whole(tmp_path):
    fake(tmp_path)
    assert look(tmp_path) == "xformers.ops.fmha | None"


def test_environment_built_for_another_cuda(tmp_path):
    library = """
    class Info: cuda_version = 1208
    class Failed(Exception): build_info = Info
    _cpp_library_load_exception = Failed()
    """
    common = "from ..._cpp_lib import _cpp_library_load_exception\n_built_with_cuda = False\n"
    fake(tmp_path, xformers___cpp_lib="", xformers__ops__fmha__common=common)
    (tmp_path / "xformers" / "_cpp_lib.py").write_text(textwrap.dedent(library))
    found = look(tmp_path)
    assert "missing" in found and "built for CUDA 12.8" in found and "install an xformers built for this torch" in found


def test_environment_without_operators(tmp_path):
    fake(tmp_path, **{f"xformers__ops__fmha__{n}": OPERATORS.replace("True", "False") for n in ("flash", "cutlass")})
    assert "none of flash and cutlass is available" in look(tmp_path)


def test_environment_front_for_mslk(tmp_path):
    fake(tmp_path, fmha="from mslk.attention.fmha import memory_efficient_attention\n")
    mslk = {name.replace("xformers__ops", "mslk__attention"): text for name, text in FAKE.items()}
    distribution(tmp_path, "mslk", "1.1.0", **mslk)
    (tmp_path / "mslk" / "attention" / "fmha" / "__init__.py").write_text(FMHA + "memory_efficient_attention = None\n")
    assert look(tmp_path) == "mslk.attention.fmha | None"


def test_environment_front_without_mslk(tmp_path):
    fake(tmp_path, fmha="from mslk.attention.fmha import memory_efficient_attention\n")
    found = look(tmp_path)
    assert "ModuleNotFoundError" in found and "install mslk" in found


TAKES_ANY_FLASH = """
import importlib.util
if importlib.util.find_spec("flash_attn"):
    import flash_attn
    import flash_attn.flash_attn_interface
"""


def test_environment_with_flash_attn_4_alone(tmp_path):
    fake(tmp_path, xformers__ops__fmha__flash=TAKES_ANY_FLASH + OPERATORS)
    distribution(tmp_path, "flash-attn-4", "4.0.0b36", flash_attn__cute__interface="")
    assert look(tmp_path) == "xformers.ops.fmha | None"


def test_environment_with_a_broken_flash_attn(tmp_path):
    fake(tmp_path, xformers__ops__fmha__flash=TAKES_ANY_FLASH + OPERATORS)
    distribution(tmp_path, "flash-attn", "2.8.3", flash_attn__flash_attn_interface="")
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c10')\n")
    assert look(tmp_path) == "xformers.ops.fmha | None"


TAKES_ANY_FLASH_3 = """
import importlib.util
if importlib.util.find_spec("flash_attn_3") and importlib.util.find_spec("flash_attn_3._C"):
    import flash_attn_3._C
"""


@pytest.mark.parametrize("broken", ["_C", "__init__"])
def test_environment_with_a_broken_flash_attn_3(tmp_path, broken):
    fake(tmp_path, xformers__ops__fmha__flash=TAKES_ANY_FLASH_3 + OPERATORS)
    distribution(tmp_path, "flash-attn-3", "3.0.0", flash_attn_3___C="")
    (tmp_path / "flash_attn_3" / f"{broken}.py").write_text("raise ImportError('undefined symbol: aoti_torch_dtype_float32')\n")
    assert look(tmp_path) == "xformers.ops.fmha | None"


def test_environment_with_a_flash_attn_it_refuses(tmp_path):
    raises = "raise ImportError('Requires Flash-Attention version >=2.7.1,<=2.8.4 but got 2.3.0.')\n"
    fake(tmp_path, xformers__ops__fmha__flash=raises)
    found = look(tmp_path)
    assert "Requires Flash-Attention" in found and "install a flash-attn that it takes" in found


def test_environment_absent(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    fmha, reason = module._import()
    assert fmha is None and reason.supported == "not installed" and "pip install xformers" in reason.remedy


def test_environment_flash_attn_4_alone_with_the_real_library(tmp_path):
    library()
    distribution(tmp_path, "flash-attn-4", "4.0.0b36", flash_attn__cute__interface="")
    assert look(tmp_path).startswith("xformers.ops.fmha | ")
