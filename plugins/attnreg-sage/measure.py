"""How far the package's own kernels are off, run by Triton's interpreter on a CPU, in units of an exact backend's allowed error.

Needs `pip install triton==3.5.1` and `pip install --no-deps sageattention==1.0.6`, torch without CUDA, and minutes.
"""

from __future__ import annotations

import contextlib
import itertools
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

torch.cuda.device = lambda *_, **__: contextlib.nullcontext()

from sageattention import attn_qk_int8_per_block, attn_qk_int8_per_block_causal, attn_qk_int8_per_block_h96_causal  # noqa: E402
from sageattention.quant_per_block import per_block_int8  # noqa: E402
from sageattention.quant_per_block_hd96 import per_block_int8_hd96  # noqa: E402

import attnreg  # noqa: E402
from attnreg.conformance import numerics  # noqa: E402


def kernel(query, key, value, causal):
    """What `sageattn` does once it has found its tensors to be on a GPU."""
    of_96 = query.shape[3] == 96
    key = key - key.mean(1, keepdim=True)
    query_8, query_scale, key_8, key_scale = (per_block_int8_hd96 if of_96 else per_block_int8)(query, key, tensor_layout="NHD")
    module = attn_qk_int8_per_block_h96_causal if of_96 else attn_qk_int8_per_block_causal if causal else attn_qk_int8_per_block
    return module.forward(query_8, key_8, value.half(), query_scale, key_scale, tensor_layout="NHD", output_dtype=query.dtype)


def share(dtype, length, head_dim, largest, causal):
    """The largest error over the allowed one."""
    query, key, value = (torch.randn(1, length, heads, head_dim) for heads in (2, 1, 1))
    query, key, value = (t.to(dtype) for t in (query * largest, key, value))
    truth = attnreg.attention(query.double(), key.double(), value.double(), causal=causal, backend="reference")
    call = attnreg.AttentionCall(query, key, value, causal=causal)
    call.to_layout("bhsd")
    plain = numerics.largest_difference(numerics.run_plain(call).transpose(1, 2), truth)
    return numerics.largest_difference(kernel(query, key, value, causal), truth) / numerics.allowed(
        2, plain, dtype, numerics.largest(value)
    )


def main() -> None:
    torch.manual_seed(0)
    for causal, head_dim in ((True, 64), (True, 96), (True, 128), (False, 64)):
        for dtype, largest in itertools.product((torch.float16, torch.bfloat16), (1, 4)):
            shares = {length: share(dtype, length, head_dim, largest, causal) for length in (5, 9, 17, 64, 130)}
            print("causal" if causal else "full", head_dim, dtype, largest, {n: round(s, 1) for n, s in shares.items()}, flush=True)


if __name__ == "__main__":
    main()
