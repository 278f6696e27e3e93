"""`import attnreg` stays small: no kernel library, no host, no tool of the tests or the command line."""

import json
import subprocess
import sys

HEAVY = ("flash_attn", "flash_attn_interface", "xformers", "flashinfer", "transformers", "diffusers", "hypothesis", "pytest", "typer", "rich", "jax", "onnxruntime", "torch._dynamo")  # fmt: skip
LOOK = (
    "import sys, time, json, torch; before = set(sys.modules); start = time.process_time(); import attnreg; "
    "print(json.dumps([time.process_time() - start, sorted(set(sys.modules) - before)]))"
)


def test_import_is_small_and_brings_no_kernel_library():
    answers = [json.loads(subprocess.check_output([sys.executable, "-c", LOOK], text=True)) for _ in range(2)]
    new = answers[0][1]
    assert "attnreg" in new, "the import was not seen"
    assert [name for name in new if name.startswith(HEAVY)] == []
    assert min(seconds for seconds, _ in answers) < 0.2, "promised: 60 ms; measured generously, on a loaded machine"
