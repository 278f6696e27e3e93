"""Cached decode against the best kernel on pre-cut tensors, in one run. Needs torch and attnreg only.

python benchmarks/cache.py          # the CPU's rows, and the GPU's where there is one
"""

from __future__ import annotations

import platform
import statistics
import time

import torch

from attnreg import DynamicCache, PagedCache, SlidingCache, StaticCache, attention, last_selection


def seconds(function, device: str, repeats: int = 30) -> float:
    for _ in range(5):
        function()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def direct(query, key, value, device):
    """torch's own attention on tensors cut to the past; on CUDA the faster of its default and its flash kernel."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    run = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    best = seconds(run, device)
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        return best
    return best if device == "cpu" else min(best, seconds(lambda: flash_attn_with_kvcache(query, key, value), device))


def rows(device, dtype, batch, past, heads, key_heads, dim) -> None:
    random = lambda n, h: torch.randn(batch, n, h, dim, device=device, dtype=dtype)
    query, key, value = random(1, heads), random(past, key_heads), random(past, key_heads)
    new = random(1, key_heads), random(1, key_heads)
    pages = batch * (past // 256 + 2)
    kinds = {
        "dynamic": (DynamicCache(1), {}),
        "static": (StaticCache(1, batch, past + 64, key_heads, dim, dtype=dtype, device=device), {}),
        "paged": (PagedCache(1, batch, pages, 256, key_heads, dim, dtype=dtype, device=device), {}),
        "sliding": (SlidingCache(1, past), {"window": (past, None)}),
    }
    with torch.no_grad():
        raw = direct(query, key, value, device)
        print(f"{device} b{batch} past {past} heads {heads}/{key_heads} d{dim} {dtype}: direct {raw * 1e6:.0f} us", flush=True)
        for name, (cache, options) in kinds.items():
            attention(random(past, heads), key, value, cache=cache[0], causal=True, **({"window": (past, None)} if options else {}))
            step = lambda cache=cache, options=options: attention(query, *new, cache=cache[0], causal=True, **options)
            took = seconds(step, device)
            print(f"  {name:8} {took * 1e6:9.0f} us  {took / raw:5.2f}x  {last_selection().chosen.name}", flush=True)
            if name == "static" and device == "cuda":
                print(f"  captured {captured(step, cache) * 1e6:9.0f} us  {captured(step, cache) / raw:5.2f}x", flush=True)


def captured(step, cache) -> float:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return seconds(graph.replay, "cuda")


def appending(total: int = 32768, step: int = 4096) -> None:
    """Microseconds a token, in stretches: constant if appending is amortised."""
    cache, token = DynamicCache(1), torch.randn(1, 1, 2, 64)
    layer = cache[0]
    for begin in range(0, total, step):
        start = time.perf_counter()
        for _ in range(step):
            new = layer.prepare(token, token, None, None, None)
            layer.write(new)
            layer.commit(new)
        print(f"  dynamic, tokens {begin:6} on: {(time.perf_counter() - start) / step * 1e6:.1f} us a token", flush=True)


def allocated(past: int) -> dict[str, int]:
    """Bytes that appending one token allocates, counted by torch's profiler."""
    counts = {}
    key = torch.randn(1, past, 2, 64)
    kinds = {
        "static": StaticCache(1, 1, past + 8, 2, 64),
        "paged": PagedCache(1, 1, past // 16 + 8, 16, 2, 64),
        "sliding": SlidingCache(1, 64),
    }
    for name, cache in kinds.items():
        window = (64, None)
        attention(key.repeat(1, 1, 2, 1)[:, :1], key, key, cache=cache[0], window=window)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            step = cache[0].prepare(key[:, :1], key[:, :1], None, window, None)
            cache[0].write(step)
            cache[0].commit(step)
        counts[name] = sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())
    return counts


if __name__ == "__main__":
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {card}, {torch.get_num_threads()} threads")
    rows("cpu", torch.float32, 4, 2048, 8, 2, 64)
    print("bytes allocated by appending one token:", {past: allocated(past) for past in (256, 2048)})
    appending()
    if torch.cuda.is_available():
        for batch, past in ((1, 32768), (32, 8192), (64, 1024)):
            rows("cuda", torch.bfloat16, batch, past, 32, 8, 128)
