"""Peak memory of a grouped causal CPU call at s4096, beside torch's own attention by hand, and how long `import attnreg` takes after torch.

    python benchmarks/memory.py

Each call runs in a fresh process. Its peak is that of the resident memory (Linux' VmHWM, which is reset before the call), less what was
resident before.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

SETUP = """
import torch, torch.nn.functional as F
import attnreg
torch.set_num_threads(1)
def made(size):
    return [torch.randn(1, size, heads, 128) for heads in (32, 8, 8)]
def raw(query, key, value):
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)
def ours(query, key, value):
    return attnreg.attention(query, key, value, causal=True)
def resident(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) / 1024
with torch.no_grad():
    FUNCTION(*made(64))
    tensors = made(4096)
    before = resident("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    FUNCTION(*tensors)
    print(resident("VmHWM") - before)
"""
IMPORT = "import time, torch; start = time.CLOCK(); import attnreg; print((time.CLOCK() - start) * 1e3)"


def answer(program: str) -> float:
    return float(subprocess.check_output([sys.executable, "-c", program], text=True))


def main() -> None:
    from host_cost import machine

    print(f"{machine()}, {time.strftime('%Y-%m-%d')}\n")
    raw, ours = (statistics.median(answer(SETUP.replace("FUNCTION", name)) for _ in range(3)) for name in ("raw", "ours"))
    print("| b1 s4096 hq32 hkv8 d128 float32, causal | peak above what was there, MiB | over raw |\n|---|---|---|")
    print(f"| raw sdpa | {raw:.1f} | |\n| attnreg | {ours:.1f} | {ours / raw - 1:+.1%} |\n")
    for clock in ("perf_counter", "process_time"):
        program = IMPORT.replace("CLOCK", clock)
        answer(program)  # the first run writes bytecode
        times = [answer(program) for _ in range(7)]
        print(f"`import attnreg` after torch, {clock}: best {min(times):.0f} ms, median {statistics.median(times):.0f} ms")


if __name__ == "__main__":
    main()
