"""What the plugins and the DLPack entry cost over calling the library directly, at s512, interleaved in one run.

Microseconds: the fastest and the median of many rounds, then the fastest in CPU time of all threads. On a machine that others use, the last
is the one to compare.
"""

from __future__ import annotations

import os
import statistics
import time

import attnreg_jax
import attnreg_onnxruntime
import jax
import numpy as np
import torch

import attnreg


def compared(rows: dict, rounds: int) -> None:
    """Times functions in turns, so that a busy machine harms all alike."""
    taken = {name: [] for name in rows}
    for function in rows.values():
        function()
    for _ in range(rounds):
        for name, function in rows.items():
            start, before = time.perf_counter(), time.process_time()
            function()
            taken[name].append((time.perf_counter() - start, time.process_time() - before))
    for name, each in taken.items():
        wall, processor = zip(*each)
        print(f"{name:28} {min(wall) * 1e6:10.1f} {statistics.median(wall) * 1e6:10.1f} {min(processor) * 1e6:10.1f}")


def main() -> None:
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; torch {torch.__version__}, jax {jax.__version__}")
    query, key, value = (torch.randn(1, 512, 8, 64) for _ in range(3))
    small = [torch.randn(1, 1, 1, 8) for _ in range(3)]
    attnreg.attention(query, key, value, causal=True, backend="onnxruntime")
    model = next(iter(attnreg_onnxruntime._sessions))
    named = {name: t.flatten(2) for name, t in (("query", query), ("key", key), ("value", value))}
    output = torch.empty_like(named["query"])
    arrays = [jax.numpy.from_dlpack(t) for t in (query, key, value)]
    attend = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla"))
    assert attnreg_jax.jax.reason_missing is None
    compared(
        {
            "onnxruntime directly": lambda: attnreg_onnxruntime._run(model, named, output),
            "onnxruntime by attnreg": lambda: attnreg.attention(query, key, value, causal=True, backend="onnxruntime"),
            "jax directly": lambda: attend(*arrays).block_until_ready(),
            "jax by attnreg": lambda: attnreg.attention(query, key, value, causal=True, backend="jax"),
        },
        rounds=60,
    )
    numpy = [t.numpy() for t in small]
    of_jax = [jax.numpy.asarray(np.asarray(t)) for t in numpy]
    compared(
        {
            "torch entry, one query": lambda: attnreg.attention(*small),
            "numpy entry, one query": lambda: attnreg.attention(*numpy),
            "jax entry, one query": lambda: attnreg.attention(*of_jax),
        },
        rounds=2000,
    )


if __name__ == "__main__":
    main()
