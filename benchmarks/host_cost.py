"""What a repeated small call costs on the host beyond torch's own attention: b1 s16 h8 d64, CPU, causal, forward only.

    python benchmarks/host_cost.py

Raw is `F.scaled_dot_product_attention` by hand, on transposed views of the same tensors, in the same run. Two numbers a row: the best
mean of a tight loop, and the median of single calls taken in turns, which a busy machine harms alike. transformers and diffusers are
measured where they are installed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import os
import pathlib
import platform
import re
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnreg import attention


def ways(layout: str) -> dict[str, Callable[[], torch.Tensor]]:
    """The same call in several hands. All take and give `layout`, as far as they can: transformers always gives (B, S, H, D)."""
    tensors = [torch.randn(1, 16, 8, 64) for _ in range(3)]
    if layout == "bhsd":
        query, key, value = (t.transpose(1, 2) for t in tensors)
        found = {
            "raw": lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True),
            "attnreg": lambda: attention(query, key, value, causal=True, layout="bhsd"),
        }

        def under_sdpa_kernel():
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    else:
        query, key, value = tensors

        def raw():
            q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

        def under_sdpa_kernel():
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return raw()

        found = {"raw": raw, "attnreg": lambda: attention(query, key, value, causal=True)}
    found["sdpa_kernel around sdpa"] = under_sdpa_kernel
    found.update(_transformers(query, key, value, layout))
    found.update(_diffusers(query, key, value, layout))
    right = found["raw"]()
    for name, function in found.items():
        out = function()
        out = out.transpose(1, 2) if name.startswith("transformers") and layout == "bhsd" else out
        torch.testing.assert_close(out, right, msg=lambda text, name=name: f"{name} computes something else: {text}")
    return found


def _transformers(query, key, value, layout) -> dict[str, Callable]:
    try:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
    except ImportError:
        return {}
    module = SimpleNamespace(num_key_value_groups=1, is_causal=True, training=False)
    if layout == "bhsd":
        return {"transformers' sdpa function": lambda: sdpa_attention_forward(module, query, key, value, None)[0]}

    def turned():
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return sdpa_attention_forward(module, q, k, v, None)[0]

    return {"transformers' sdpa function": turned}


def _diffusers(query, key, value, layout) -> dict[str, Callable]:
    try:
        from diffusers.models.attention_dispatch import dispatch_attention_fn
    except ImportError:
        return {}
    if layout == "bshd":
        return {"diffusers' dispatcher": lambda: dispatch_attention_fn(query, key, value, is_causal=True)}

    def turned():
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return dispatch_attention_fn(q, k, v, is_causal=True).transpose(1, 2)

    return {"diffusers' dispatcher": turned}


def tight(functions: dict[str, Callable], loops: int, repeats: int) -> dict[str, float]:
    """Microseconds a call: the best of `repeats` loops, the candidates' loops in turns."""
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(loops):
                function()
            best[name] = min(best[name], (time.perf_counter() - start) / loops * 1e6)
    return best


def in_turns(functions: dict[str, Callable], rounds: int) -> dict[str, float]:
    """Microseconds a call: the median of single calls, taken in turns."""
    taken: dict[str, list[int]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter_ns()
            function()
            taken[name].append(time.perf_counter_ns() - start)
    return {name: statistics.median(each) / 1e3 for name, each in taken.items()}


def machine() -> str:
    """The machine and the versions, in one line."""
    described = pathlib.Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", described.read_text()) if described.exists() else [platform.machine()]
    installed = {d.name: d.version for d in importlib.metadata.distributions()}
    libraries = [f"{name} {installed[name]}" for name in ("torch", "transformers", "diffusers", "attnreg") if name in installed]
    return f"{names[0]}, {os.cpu_count()} cores; Python {platform.python_version()}, {', '.join(libraries)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", type=int, default=40, help="calls in one tight loop: few, so that some loop runs undisturbed")
    parser.add_argument("--repeats", type=int, default=300, help="tight loops of each candidate; the best counts")
    parser.add_argument("--rounds", type=int, default=2000, help="single calls of each candidate, in turns")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}, {time.strftime('%Y-%m-%d')}\n")
    print("| layout | way | tight loop, us | over raw | in turns, us | over raw |\n|---|---|---|---|---|---|")
    with torch.no_grad():
        for layout in ("bshd", "bhsd"):
            functions = ways(layout)
            gc.disable()
            best, median = tight(functions, options.loops, options.repeats), in_turns(functions, options.rounds)
            gc.enable()
            for name in functions:
                cells = [
                    f"{best[name]:.1f}",
                    f"{best[name] - best['raw']:+.1f}",
                    f"{median[name]:.1f}",
                    f"{median[name] - median['raw']:+.1f}",
                ]
                print(f"| {layout} | {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
