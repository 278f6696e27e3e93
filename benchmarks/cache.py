"""Cached decode steps, on a CPU and on a GPU where there is one, in one run. Needs torch and attnreg only.

    python benchmarks/cache.py [--out FOLDER]

Writes cache.json and cache.md. On a GPU there are two yardsticks: the best kernel alone that reads lengths on the device, as a static cache
needs, and appends and counts nothing; and the same step by hand, which does both as well as calls to torch and the kernels can. Kernels on
tensors cut to the past are shown beside them.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import pathlib
import platform
import random
import statistics
import time
from collections.abc import Callable

import torch
from timing import chained, interleaved

import attnreg
from attnreg import DynamicCache, PagedCache, SlidingCache, StaticCache, attention, last_selection
from attnreg.kernels.flash2 import library as flash2
from attnreg.kernels.flash3 import library as flash3


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
def on_the_cpu(batch=4, past=2048, heads=8, key_heads=2, dim=64, turns=105) -> list[dict]:
    """Decode steps in turns with torch's own attention on tensors cut to as many keys, so that a busy machine meets all alike."""
    drawn = lambda n, h: torch.randn(batch, n, h, dim)
    query, key, value = drawn(1, heads), drawn(past + turns, key_heads), drawn(past + turns, key_heads)
    new = drawn(1, key_heads), drawn(1, key_heads)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    sdpa, seen, random_order = torch.nn.functional.scaled_dot_product_attention, [past], random.Random(0)

    def direct():
        seen[0] += 1
        return sdpa(q, k[:, :, : seen[0]], v[:, :, : seen[0]], enable_gqa=True)

    functions = {"direct": direct}
    for name, (cache, options) in kinds_for(batch, past, turns, key_heads, dim, torch.float32, "cpu").items():
        fill(cache[0], key[:, :past], value[:, :past])
        functions[name] = lambda cache=cache, options=options: attention(query, *new, cache=cache[0], causal=True, **options)
    times = {name: ([], []) for name in functions}
    for turn in range(turns):
        # In another order each time: a scheduler's slices are about as long as a turn, and would meet the same one again and again.
        for name in random_order.sample(list(functions), len(functions)):
            start, cpu = time.perf_counter(), time.process_time()
            functions[name]()
            if turn >= 5:
                times[name][0].append(time.perf_counter() - start)
                times[name][1].append(time.process_time() - cpu)
    rows = [
        {"row": name, "us": statistics.median(wall) * 1e6, "CPU us": statistics.median(cpu) * 1e6} for name, (wall, cpu) in times.items()
    ]
    print(
        f"cpu, b{batch}, past {past}, heads {heads}/{key_heads}, d{dim}, float32: one decode step, wall clock, and CPU time of all threads"
    )
    for row in rows:
        for kind in ("us", "CPU us"):
            row["x " + kind] = row[kind] / rows[0][kind]
        print(f"  {row['row']:8} {row['us']:7.0f} us {row['x us']:5.2f}x {row['CPU us']:9.0f} us {row['x CPU us']:5.2f}x", flush=True)
    return rows


# ---------------------------------------------------------------------- on a GPU

GROWING = "sdpa, cut, one key more each time"


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


def launches(function) -> list[str]:
    """The kernels and copies that one call puts on the card, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def libraries() -> dict[str, Callable]:
    """What is installed: `flash_attn_with_kvcache` of flash-attn 2 and 3, and flash-attn 4's functions, by name."""
    found = {}
    for name, library in (("flash2", flash2), ("flash3", flash3)):
        if not attnreg.backends()[name].reason_missing:
            found[name] = library().module.flash_attn_with_kvcache
    if not attnreg.backends()["flash4"].reason_missing:
        found["flash4"] = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    return found


def alone_cut(query, key, value) -> dict[str, Callable]:
    """Kernels called directly on tensors cut to the past, which append nothing; "growing" as a decoder has it, one key more each time."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    sdpa = functools.partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)
    seen = [k.shape[2] - 64]

    def growing():
        seen[0] = min(seen[0] + 1, k.shape[2])
        return sdpa(q, k[:, :, : seen[0]], v[:, :, : seen[0]])

    found = {"sdpa, cut": lambda: sdpa(q, k, v), GROWING: growing}
    if not attnreg.backends()["flash4"].reason_missing:
        flash4 = importlib.import_module("flash_attn.cute").flash_attn_func
        found["flash4, cut"] = lambda: flash4(query, key, value, causal=True)[0]
    return found


def alone(query, key, value, room: int) -> dict[str, Callable]:
    """Kernels called directly on a buffer with room, which read the rows' lengths on the device, as a static cache's must; they append
    nothing."""
    batch, past = key.shape[:2]
    key, value = (torch.nn.functional.pad(t, (0, 0, 0, 0, 0, room)) for t in (key, value))
    lengths = torch.full((batch,), past, dtype=torch.int32, device=key.device)
    rows = torch.arange(batch, dtype=torch.int32, device=key.device)
    found = {}
    for name, function in libraries().items():
        if name == "flash4":
            found["flash4, lengths"] = lambda function=function: function(query, key, value, seqused_k=lengths, causal=True)[0]
            continue
        found[f"{name}, lengths"] = functools.partial(function, query, key, value, cache_seqlens=lengths, causal=True)
        found[f"{name}, lengths, rows named"] = functools.partial(found[f"{name}, lengths"], cache_batch_idx=rows)
    return found


def alone_paged(query, key, value, room: int) -> dict[str, Callable]:
    """The same through a block table."""
    (keys, values), table = in_pages(key, value, room)
    lengths = torch.full((key.shape[0],), key.shape[1], dtype=torch.int32, device=key.device)
    found = {}
    for name, function in libraries().items():
        if name == "flash4":
            pages = {"seqused_k": lengths, "page_table": table}
            found["flash4, pages"] = lambda function=function, pages=pages: function(query, keys, values, causal=True, **pages)[0]
        else:
            pages = {"cache_seqlens": lengths, "block_table" if name == "flash2" else "page_table": table}
            found[f"{name}, pages"] = functools.partial(function, query, keys, values, causal=True, **pages)
    return found


def in_pages(key, value, room: int, size: int = 256) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Pools (pages, size, Hkv, D) with as many pages as the rows will need, and the table."""
    batch, past = key.shape[:2]
    each = -(-(past + room) // size)
    pad = (0, 0, 0, 0, 0, each * size - past)
    pools = tuple(torch.nn.functional.pad(t, pad).reshape(batch * each, size, *t.shape[2:]) for t in (key, value))
    return pools, torch.arange(batch * each, dtype=torch.int32, device=key.device).view(batch, each)


def by_hand(query, new, key, value, room: int) -> dict[str, Callable]:
    """The step of a static cache as a careful caller would write it: new tokens into a buffer with room, lengths on the device."""
    batch, past = key.shape[:2]

    def state():
        buffers = tuple(torch.nn.functional.pad(t, (0, 0, 0, 0, 0, room)) for t in (key, value))
        lengths = torch.full((batch,), past, dtype=torch.int32, device=key.device)
        place = torch.arange(batch, device=key.device) * (past + room) + past
        return buffers, tuple(t.flatten(0, 1) for t in buffers), lengths, place

    def appending_kernel(function):
        buffers, _, lengths, _ = state()

        def step():
            out = function(query, *buffers, k=new[0], v=new[1], cache_seqlens=lengths, causal=True)
            lengths.add_(1)
            return out

        return step

    def index_copy(kernel):
        buffers, flat, lengths, place = state()
        rows = tuple(t.squeeze(1) for t in new)

        def step():
            flat[0].index_copy_(0, place, rows[0])
            flat[1].index_copy_(0, place, rows[1])
            place.add_(1)
            lengths.add_(1)
            return kernel(*buffers, lengths)

        return step

    def masked():
        buffers, flat, _, place = state()
        rows = tuple(t.squeeze(1) for t in new)
        mask = torch.full((batch, 1, 1, past + room), float("-inf"), dtype=key.dtype, device=key.device)
        mask[..., :past] = 0.0
        flat_mask, (q, k, v) = mask.flatten(), (t.transpose(1, 2) for t in (query, *buffers))

        def step():
            flat[0].index_copy_(0, place, rows[0])
            flat[1].index_copy_(0, place, rows[1])
            flat_mask.index_fill_(0, place, 0.0)
            place.add_(1)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

        return step

    found = {"index_copy_, sdpa with a kept mask": masked()}
    for name, function in libraries().items():
        if name == "flash4":
            found["index_copy_, flash4"] = index_copy(lambda k, v, n, f=function: f(query, k, v, seqused_k=n, causal=True)[0])
        else:
            found[f"{name} appending"] = appending_kernel(function)
            found[f"index_copy_, {name}"] = index_copy(lambda k, v, n, f=function: f(query, k, v, cache_seqlens=n, causal=True))
    return found


def by_hand_paged(query, new, key, value, room: int) -> dict[str, Callable]:
    """The same through a block table, where kernels read one: as many pages as the row will need, taken beforehand."""
    batch, past = key.shape[:2]

    def state():
        pools, table = in_pages(key, value, room)
        lengths = torch.full((batch,), past, dtype=torch.int32, device=key.device)
        place = torch.arange(batch, device=key.device) * table.shape[1] * pools[0].shape[1] + past
        return pools, tuple(t.flatten(0, 1) for t in pools), lengths, place, table

    def step_of(name, function):
        pools, flat, lengths, place, table = state()
        rows = tuple(t.squeeze(1) for t in new)

        def appending_kernel():
            named = {"block_table" if name == "flash2" else "page_table": table}
            out = function(query, *pools, k=new[0], v=new[1], cache_seqlens=lengths, causal=True, **named)
            lengths.add_(1)
            return out

        def index_copy():
            flat[0].index_copy_(0, place, rows[0])
            flat[1].index_copy_(0, place, rows[1])
            place.add_(1)
            lengths.add_(1)
            return function(query, *pools, seqused_k=lengths, page_table=table, causal=True)[0]

        return index_copy if name == "flash4" else appending_kernel

    return {
        f"{name} appending, pages" if name != "flash4" else "index_copy_, flash4, pages": step_of(name, f)
        for name, f in libraries().items()
    }


TURNS = 40
"""Calls of each function in a column at most, beside two before them. Caches start half as many short of the past, and so hold it on average."""


@torch.no_grad()
def on_a_gpu(batch, past, heads=32, key_heads=8, dim=128, dtype=torch.bfloat16, room=3 * TURNS) -> dict:
    drawn = lambda n, h: torch.randn(batch, n, h, dim, device="cuda", dtype=dtype)
    query, key, value = drawn(1, heads), drawn(past, key_heads), drawn(past, key_heads)
    new = drawn(1, key_heads), drawn(1, key_heads)

    def made() -> dict[str, dict[str, Callable]]:
        """The functions, in groups, each with a state of its own as it is at the start."""
        begun = key[:, : -TURNS // 2], value[:, : -TURNS // 2]
        groups = {
            "alone, cut": alone_cut(query, key, value),
            "alone": alone(query, key, value, room),
            "alone, paged": alone_paged(query, key, value, room),
            "by hand": by_hand(query, new, *begun, room),
            "by hand, paged": by_hand_paged(query, new, *begun, room),
            "attnreg": {},
        }
        for name, (cache, _) in kinds_for(batch, past, room, key_heads, dim, dtype, "cuda").items():
            if name in ("static", "paged"):
                fill(cache[0], *begun)
                groups["attnreg"][name] = lambda cache=cache: attention(query, *new, cache=cache[0], causal=True)
        return groups

    groups = made()
    members = {group: list(functions) for group, functions in groups.items()}
    chosen, problems, steps = {}, [], {}
    columns = {"on the card": {}, "chained": chained({GROWING: groups["alone, cut"].pop(GROWING)}, rounds=1, repeats=5)}
    for functions in groups.values():
        for name, function in functions.items():
            try:
                function()
                torch.cuda.synchronize()
                chosen[name] = last_selection().chosen.name if functions is groups["attnreg"] else ""
                steps[name] = launches(function)
            except Exception as error:
                problems.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
    del groups, functions, function

    def fresh() -> dict[str, Callable]:
        torch.cuda.empty_cache()
        return {name: function for functions in made().values() for name, function in functions.items() if name in steps}

    columns["on the card"] = interleaved(fresh(), seconds=2.0, most=TURNS)
    columns["chained"] |= chained(fresh(), repeats=TURNS // 4)
    functions, replays = fresh(), {}
    for name in functions:
        if name != "paged":  # which pages are written, the host decides
            try:
                replays[name] = captured(functions[name])
            except Exception as error:
                problems.append(f"{name}, captured: {type(error).__name__}: {str(error).splitlines()[0]}")
    columns["in a CUDA graph"] = interleaved(replays, seconds=2.0, most=TURNS)

    def best(column, group):
        return min((columns[column][n] for n in members[group] if n in columns[column]), default=float("nan"))

    rows = []
    for group, names in members.items():
        for name in names:
            if not any(name in times for times in columns.values()):
                continue
            row = {"group": group, "row": name, "chosen": chosen.get(name, ""), "launches": steps.get(name, [])}
            for column, times in columns.items():
                if name in times:
                    paged = ", paged" if name == "paged" or group.endswith("paged") else ""
                    row[column] = {"ms": times[name], "x alone": times[name] / best(column, "alone" + paged)}
                    if not group.startswith("alone"):
                        row[column]["x by hand"] = times[name] / best(column, "by hand" + paged)
            rows.append(row)
    title = f"b{batch}, past {past}, heads {heads}/{key_heads}, d{dim}, {dtype}"
    print(f"{title}: milliseconds a step (times the best alone by lengths; times the best by hand)")
    for row in rows:
        print(f"  {row['row']:36} {row['chosen']:7} {len(row['launches']):3} launches  " + "  ".join(map(_cell, _cells(row))), flush=True)
    print("".join(f"  {problem}\n" for problem in problems), end="")
    return {"title": title, "rows": rows, "problems": problems}


_COLUMNS = ("on the card", "chained", "in a CUDA graph")


def _cells(row: dict) -> list[dict | None]:
    return [row.get(column) for column in _COLUMNS]


def _cell(cell: dict | None) -> str:
    if cell is None:
        return f"{'-':>24}"
    hand = f"; {cell['x by hand']:.2f}" if "x by hand" in cell else ""
    return f"{cell['ms']:.4f} ({cell['x alone']:.2f}{hand})".rjust(24)


def table(result: dict) -> str:
    """One GPU result as markdown."""
    lines = [
        f"{result['title']}: milliseconds a step (times the best kernel alone by lengths; times the best step by hand)\n",
        "| | | launches | " + " | ".join(_COLUMNS) + " |",
        "|---" * (3 + len(_COLUMNS)) + "|",
    ]
    for row in result["rows"]:
        name = row["row"] if not row["chosen"] else f"attnreg {row['row']} ({row['chosen']})"
        cells = " | ".join(_cell(cell).strip() for cell in _cells(row))
        lines.append(f"| {row['group']} | {name} | {len(row['launches'])} | {cells} |")
    lines += [f"\n{problem}" for problem in result["problems"]]
    return "\n".join(lines)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=".", help="folder for cache.json and cache.md")
    folder = pathlib.Path(parser.parse_args().out)
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    where = f"torch {torch.__version__}, Python {platform.python_version()}, {card}, {torch.get_num_threads()} threads"
    print(where)
    results = []
    if torch.cuda.is_available():
        for batch, past in ((1, 32768), (32, 8192), (64, 1024)):
            results.append(on_a_gpu(batch, past))
            torch.cuda.empty_cache()
        print(f"GPU part in {time.perf_counter() - begun:.0f} s")
    rows = on_the_cpu()
    (folder / "cache.json").write_text(json.dumps({"where": where, "gpu": results, "cpu": rows}, indent=1))
    cpu = [
        "One decode step on the CPU, microseconds\n",
        "| | wall clock | times direct | CPU time | times direct |",
        "|---|---|---|---|---|",
    ]
    cpu += [f"| {r['row']} | {r['us']:.0f} | {r['x us']:.2f} | {r['CPU us']:.0f} | {r['x CPU us']:.2f} |" for r in rows]
    (folder / "cache.md").write_text("\n\n".join([where, *map(table, results), "\n".join(cpu)]) + "\n")
    print("bytes allocated by appending one token:", {past: allocated(past) for past in (256, 2048)})
    appending()
    print(f"in {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
