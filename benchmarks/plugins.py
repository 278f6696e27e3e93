"""What the plugins and the DLPack entry cost over calling the library directly, at s512, interleaved in one run: medians in microseconds."""

from __future__ import annotations

import statistics
import time

import attnreg_jax
import attnreg_onnxruntime
import jax
import numpy as np
import torch

import attnreg

ROUNDS = 30


def compared(rows: dict) -> None:
    """Times functions in turns, so that a busy machine harms all alike."""
    taken = {name: [] for name in rows}
    for function in rows.values():
        function()
    for _ in range(ROUNDS):
        for name, function in rows.items():
            start = time.perf_counter()
            function()
            taken[name].append(time.perf_counter() - start)
    for name, seconds in taken.items():
        print(f"{name:28} {statistics.median(seconds) * 1e6:10.1f}")


def main() -> None:
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
        }
    )
    numpy = [t.numpy() for t in small]
    of_jax = [jax.numpy.asarray(np.asarray(t)) for t in numpy]
    compared(
        {
            "torch entry, one query": lambda: attnreg.attention(*small),
            "numpy entry, one query": lambda: attnreg.attention(*numpy),
            "jax entry, one query": lambda: attnreg.attention(*of_jax),
        }
    )


if __name__ == "__main__":
    main()
