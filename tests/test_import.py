"""`import attnreg` stays small: no kernel library, no host, no tool of the tests or the command line."""

import importlib.util
import json
import subprocess
import sys

import pytest

HEAVY = ("flash_attn", "flash_attn_interface", "xformers", "flashinfer", "transformers", "diffusers", "hypothesis", "pytest", "typer", "rich", "jax", "onnxruntime", "torch._dynamo")  # fmt: skip
LOOK = (
    "import sys, time, json, torch; before = set(sys.modules); start = time.process_time(); import attnreg; "
    "print(json.dumps([time.process_time() - start, sorted(set(sys.modules) - before)]))"
)

CALL = (
    "import sys, time, json, torch, attnreg; before = set(sys.modules); start = time.process_time(); "
    "query = torch.randn(1, 4, 2, 8); attnreg.attention(query, query, query, causal=True); seconds = time.process_time() - start; "
    "attnreg.backends(); print(json.dumps([seconds, sorted(set(sys.modules) - before)]))"
)


def test_import_is_small_and_brings_no_kernel_library():
    answers = [json.loads(subprocess.check_output([sys.executable, "-c", LOOK], text=True)) for _ in range(2)]
    new = answers[0][1]
    assert "attnreg" in new, "the import was not seen"
    assert [name for name in new if name.startswith(HEAVY)] == []
    assert min(seconds for seconds, _ in answers) < 0.2, "promised: 60 ms; measured generously, on a loaded machine"


def test_a_first_plain_call_brings_no_compiler():
    """Without CUDA, that is: torch's own varlen module, whose signature is read where it could run, imports the compiler."""
    here = [name for name in ("flash_attn", "flash_attn_interface", "xformers") if importlib.util.find_spec(name)]
    if here:
        pytest.skip(f"{', '.join(here)} is installed here, and imported to see whether it can be")
    code = f"import torch; torch.version.cuda = None; {CALL}"
    answers = [json.loads(subprocess.check_output([sys.executable, "-c", code], text=True)) for _ in range(2)]
    new = answers[0][1]
    assert "attnreg.kernels.sdpa" in new, "the call was not seen"
    heavy = ("torch._dynamo", "torch._inductor", "torch.onnx", "torch.distributed", "sympy")
    assert [name for name in new if name.startswith(heavy)] == []
    assert min(seconds for seconds, _ in answers) < 0.6, (
        "measured: 0.13 s; once 4 s, most of it torch._dynamo and the metadata of all packages"
    )


def test_the_suite_and_the_layers_are_there_when_asked_for():
    asked = "import attnreg, sys; early = 'attnreg.conformance' in sys.modules; print(early, attnreg.conformance.reproduce.__name__, attnreg.nn.Attention.__name__)"
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout.split()
    assert said == ["False", "reproduce", "Attention"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        importlib.import_module("attnreg").nothing  # noqa: B018
