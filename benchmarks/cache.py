"""Cached decode against the best kernel on pre-cut tensors, in one run. Needs torch and attnreg only.

python benchmarks/cache.py          # the CPU's rows, and the GPU's where there is one
"""

from __future__ import annotations

import importlib
import platform
import statistics
import time

import torch
from timing import interleaved

from attnreg import DynamicCache, PagedCache, SlidingCache, StaticCache, attention, last_selection


def fill(layer, key, value) -> None:
    step = layer.prepare(key, value, None, (key.shape[1], None), None)
    layer.write(step)
    layer.commit(step)


def kinds_for(batch, past, room, key_heads, dim, dtype, device) -> dict:
    pages = batch * (-(-(past + room) // 256))
    return {
        "dynamic": (DynamicCache(1), {}),
        "static": (StaticCache(1, batch, past + room, key_heads, dim, dtype=dtype, device=device), {}),
        "paged": (PagedCache(1, batch, pages, 256, key_heads, dim, dtype=dtype, device=device), {}),
        "sliding": (SlidingCache(1, past), {"window": (past, None)}),
    }


@torch.no_grad()
def on_the_cpu(batch=4, past=2048, heads=8, key_heads=2, dim=64) -> None:
    """Decode steps in turns with torch's own attention on tensors cut to the past, so that a busy machine meets all alike."""
    random = lambda n, h: torch.randn(batch, n, h, dim)
    query, key, value = random(1, heads), random(past, key_heads), random(past, key_heads)
    new = random(1, key_heads), random(1, key_heads)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    functions = {"direct": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)}
    for name, (cache, options) in kinds_for(batch, past, 200, key_heads, dim, torch.float32, "cpu").items():
        fill(cache[0], key, value)
        functions[name] = lambda cache=cache, options=options: attention(query, *new, cache=cache[0], causal=True, **options)
    times = {name: [] for name in functions}
    for turn in range(105):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if turn >= 5:
                times[name].append(time.perf_counter() - start)
    took = {name: statistics.median(each) for name, each in times.items()}
    print(f"cpu, b{batch}, past {past}, heads {heads}/{key_heads}, d{dim}, float32: one decode step")
    for name, seconds in took.items():
        print(f"  {name:8} {seconds * 1e6:7.0f} us  {seconds / took['direct']:5.2f}x", flush=True)


# ---------------------------------------------------------------------- on a GPU


def chained(function, repeats: int = 50) -> float:
    """Milliseconds a call, of calls made one after the other as a decoder makes them: the host's time where it is the longer."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e3


def captured(function):
    """The function as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def kernels(query, key, value) -> dict:
    """Kernels called directly, on tensors cut to the past, that append nothing; only those that are here and take the call."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    found = {"torch sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)}
    lengths = torch.full((key.shape[0],), key.shape[1], dtype=torch.int32, device=key.device)
    for library in ("flash_attn", "flash_attn_interface"):
        try:
            function = importlib.import_module(library).flash_attn_with_kvcache
        except (ImportError, AttributeError):
            continue
        found[library] = lambda function=function: function(query, key, value, cache_seqlens=lengths, causal=True)
    return found


@torch.no_grad()
def on_a_gpu(batch, past, heads=32, key_heads=8, dim=128, dtype=torch.bfloat16) -> None:
    random = lambda n, h: torch.randn(batch, n, h, dim, device="cuda", dtype=dtype)
    query, key, value = random(1, heads), random(past, key_heads), random(past, key_heads)
    new = random(1, key_heads), random(1, key_heads)
    functions = kernels(query, key, value)
    direct, chosen, problems = list(functions), {}, []
    for name, (cache, _) in kinds_for(batch, past, 256, key_heads, dim, dtype, "cuda").items():
        if name in ("static", "paged"):
            fill(cache[0], key, value)
            functions[name] = lambda cache=cache: attention(query, *new, cache=cache[0], causal=True)
    for name in list(functions):
        try:
            functions[name]()
            chosen[name] = "" if name in direct else last_selection().chosen.name
        except Exception as error:
            problems.append(f"  {name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            del functions[name]
    device = interleaved(functions, seconds=2.0, most=40)
    host = {name: chained(function) for name, function in functions.items()}
    replays = {}
    for name in functions:
        if name != "paged":  # which pages are written, the host decides
            try:
                replays[name] = captured(functions[name])
            except Exception as error:
                problems.append(f"  {name}, captured: {type(error).__name__}: {str(error).splitlines()[0]}")
    graphs = interleaved(replays, seconds=2.0, most=40)
    best = min(device[name] for name in device if name in direct)
    best_graph = min((graphs[name] for name in graphs if name in direct), default=float("nan"))
    print(f"b{batch} past {past} heads {heads}/{key_heads} d{dim} {dtype}: milliseconds a step, and times the best direct kernel")
    print(f"  {'':22} {'on the card':>18} {'chained calls':>14} {'CUDA graph':>18}")
    for name in functions:
        graph = f"{graphs[name]:9.4f} {graphs[name] / best_graph:6.2f}x" if name in graphs else f"{'-':>17}"
        print(f"  {name:12} {chosen[name]:9} {device[name]:10.4f} {device[name] / best:6.2f}x {host[name]:14.4f}  {graph}", flush=True)
    print("\n".join(problems), end="\n" if problems else "")


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
    begun = time.perf_counter()
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {card}, {torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        for batch, past in ((1, 32768), (32, 8192), (64, 1024)):
            on_a_gpu(batch, past)
            torch.cuda.empty_cache()
    on_the_cpu()
    print("bytes allocated by appending one token:", {past: allocated(past) for past in (256, 2048)})
    appending()
    print(f"in {time.perf_counter() - begun:.0f} s")
