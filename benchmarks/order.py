"""Measures every able backend over a grid of calls on a CUDA card, and what the automatic choice loses against the best of them.

    python benchmarks/order.py [--out FOLDER] [--seconds 240]

Writes order.json and order.md. Regret is the time of the chosen backend over that of the best able one.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import time

import torch
from timing import interleaved, warmed

import attnreg
from attnreg.packing import Padding


def grid() -> list[dict]:
    """Name, sizes, dtype, mode and options of every call."""
    calls = []

    def add(kind, batch, queries, keys, heads, dim, *, dtype="bfloat16", backward=False, **options):
        calls.append(
            {"kind": kind, "batch": batch, "queries": queries, "keys": keys, "heads": heads[0], "key_heads": heads[1], "dim": dim,
             "dtype": dtype, "backward": backward, "options": options}
        )  # fmt: skip

    mha, gqa, mqa = (32, 32), (32, 8), (8, 1)
    causal = {"causal": True}
    for heads in (mha, gqa, mqa):
        for dim in (64, 80, 96, 128, 256):
            add("prefill", 2, 2048, 2048, heads, dim, **causal)
    for batch, size, heads, dim in ((16, 128, gqa, 128), (8, 512, gqa, 64), (8, 512, mha, 128), (1, 8192, gqa, 128), (1, 32768, mqa, 128), (4, 1024, mha, 64)):  # fmt: skip
        add("prefill", batch, size, size, heads, dim, **causal)
        add("prefill", batch, size, size, heads, dim, dtype="float16", **causal)
    for size, heads, dim in ((512, mha, 64), (2048, gqa, 128), (2048, mha, 80), (1024, gqa, 96)):
        add("encoder", 4, size, size, heads, dim)
    for heads, dim in ((mha, 64), (gqa, 64), (mha, 80), (gqa, 96), (gqa, 128), (mha, 128), (mqa, 128), (gqa, 256)):
        add("training", 2, 2048, 2048, heads, dim, backward=True, **causal)
    add("training", 1, 8192, 8192, gqa, 128, backward=True, **causal)
    add("training", 2, 2048, 2048, gqa, 128, dtype="float16", backward=True, **causal)
    add("training", 8, 512, 512, mha, 64, backward=True)
    for batch, keys, heads, dim in (
        (1, 1024, gqa, 128), (1, 32768, gqa, 128), (8, 4096, gqa, 128), (32, 8192, gqa, 128), (64, 1024, gqa, 128), (8, 4096, mha, 64),
        (16, 2048, mqa, 256), (4, 8192, gqa, 96),
    ):  # fmt: skip
        add("decode", batch, 1, keys, heads, dim, **causal)
        if keys <= 8192:
            add("decode, lengths", batch, 1, keys, heads, dim, lengths=True, **causal)
    for batch, queries, keys, heads, dim in ((1, 512, 8192, gqa, 128), (4, 128, 4096, gqa, 128), (2, 16, 4096, gqa, 128), (1, 2048, 16384, mqa, 64), (4, 256, 2048, mha, 80)):  # fmt: skip
        add("chunked", batch, queries, keys, heads, dim, **causal)
    for heads, dim in ((gqa, 128), (mha, 64)):
        add("left padded", 8, 2048, 2048, heads, dim, padding="left", **causal)
        add("right padded", 8, 2048, 2048, heads, dim, padding="right", **causal)
        add("packed", 8, 2048, 2048, heads, dim, padding="packed", **causal)
        add("left padded training", 4, 2048, 2048, heads, dim, padding="left", backward=True, **causal)
        add("packed training", 4, 2048, 2048, heads, dim, padding="packed", backward=True, **causal)
    for size, heads, dim in ((4096, gqa, 128), (8192, gqa, 64)):
        add("window", 2, size, size, heads, dim, causal=True, window=(1023, None))
    add("window training", 2, 4096, 4096, gqa, 128, backward=True, causal=True, window=(1023, None))
    add("window decode", 16, 1, 8192, gqa, 128, causal=True, window=(1023, None))
    add("softcap", 2, 2048, 2048, gqa, 128, causal=True, softcap=50.0)
    add("softcap", 2, 2048, 2048, gqa, 256, causal=True, softcap=50.0)
    add("softcap training", 2, 2048, 2048, gqa, 128, backward=True, causal=True, softcap=50.0)
    add("softcap decode", 16, 1, 4096, gqa, 256, causal=True, softcap=50.0)
    return calls


def prepared(entry: dict):
    """Tensors and options of a grid entry, on the card."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    dtype, dim = getattr(torch, entry["dtype"]), entry["dim"]
    batch, queries, keys = entry["batch"], entry["queries"], entry["keys"]
    options = dict(entry["options"])
    padding = options.pop("padding", None)
    real = torch.linspace(0.1, 0.95, batch).mul(queries).int().tolist()
    if padding == "packed":
        cu = torch.tensor([0, *real], device="cuda").cumsum(0, dtype=torch.int32)
        options |= {"cu_seqlens": (cu, cu), "max_seqlens": (max(real), max(real))}
        batch, queries, keys = 1, sum(real), sum(real)
    elif padding:
        declared = Padding.from_lengths(real, queries, side=padding, device="cuda")
        options |= {"key_mask": declared, "query_mask": declared, "finite_padding": True}
    if options.pop("lengths", False):
        options |= {"key_lengths": torch.linspace(0.3, 1.0, batch).mul(keys).int().cuda(), "finite_padding": True}

    def make(length, heads):
        tensor = torch.randn(batch, length, heads, dim, device="cuda", dtype=dtype, generator=generator)
        return tensor.requires_grad_(entry["backward"])

    return (make(queries, entry["heads"]), make(keys, entry["key_heads"]), make(keys, entry["key_heads"])), options


def runner(tensors, options, backend: str, backward: bool):
    if not backward:
        return lambda: attnreg.attention(*tensors, **options, backend=backend)
    upstream = torch.randn_like(tensors[0])
    return lambda: torch.autograd.grad(attnreg.attention(*tensors, **options, backend=backend), tensors, upstream)


def too_large(entry: dict) -> bool:
    """Backends that keep all scores, or a mask for each, are not tried where those would take more than 20 GB."""
    return entry["batch"] * entry["heads"] * entry["queries"] * entry["keys"] * 4 > 20e9


def measured(entry: dict, seconds: float, without: set[str]) -> dict:
    tensors, options = prepared(entry)
    selection = attnreg.explain(*tensors, **options)
    able = [n for n in ([selection.chosen.name] if selection.chosen else []) + list(selection.able) if n not in without]
    functions, failed = {}, {}
    for name in able:
        own = attnreg.explain(*tensors, **options, backend=name)
        quadratic = any("Sk)" in text or "scores" in text for text in (*own.emulations, *own.notes))
        if quadratic and too_large(entry):
            failed[name] = "left out: would keep all scores"
            continue
        function = runner(tensors, options, name, entry["backward"])
        try:
            if warmed(function) > 400:
                failed[name] = "left out: over 400 ms"
                continue
            functions[name] = function
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            torch.cuda.synchronize()
    times = interleaved(functions, seconds) if functions else {}
    chosen = selection.chosen.name if selection.chosen else None
    regret = times[chosen] / min(times.values()) if chosen in times else None
    return {**entry, "chosen": chosen, "times": times, "failed": failed, "regret": regret, "emulations": list(selection.emulations)}


def table(results: list[dict]) -> str:
    names = sorted({n for r in results for n in r["times"]})
    lines = ["| call | " + " | ".join(names) + " | chosen | regret |", "|---" * (len(names) + 3) + "|"]
    for r in results:
        title = f"{r['kind']} b{r['batch']} q{r['queries']} k{r['keys']} h{r['heads']}/{r['key_heads']} d{r['dim']} {r['dtype']}"
        best = min(r["times"].values(), default=math.nan)
        cells = [
            ("-" if n not in r["times"] else f"**{r['times'][n]:.3f}**" if r["times"][n] == best else f"{r['times'][n]:.3f}") for n in names
        ]
        regret = "-" if r["regret"] is None else f"{r['regret']:.3f}"
        lines.append(f"| {title} | " + " | ".join(cells) + f" | {r['chosen']} | {regret} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=".", help="folder for order.json and order.md")
    parser.add_argument("--seconds", type=float, default=240.0, help="about how long the measuring may take, compilation not counted")
    parser.add_argument("--without", default="reference", help="backends to leave out, with commas between")
    parser.add_argument("--only", default="", help="only calls whose kind contains this")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/order.py needs a CUDA card")
    entries = [e for e in grid() if arguments.only in e["kind"]]
    share = arguments.seconds / len(entries)
    results, start = [], time.perf_counter()
    folder = pathlib.Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    for number, entry in enumerate(entries):
        results.append(measured(entry, share * 0.7, set(arguments.without.split(","))))
        r = results[-1]
        print(
            f"{number + 1}/{len(entries)} {time.perf_counter() - start:.0f} s",
            r["kind"],
            r["chosen"],
            r["regret"],
            r["times"],
            r["failed"],
            flush=True,
        )
        torch.cuda.empty_cache()
        # Written as it goes, so that an interrupted run leaves what it has measured.
        regrets = [r["regret"] for r in results if r["regret"]]
        mean = math.exp(sum(map(math.log, regrets)) / len(regrets)) if regrets else math.nan
        head = {
            "card": torch.cuda.get_device_name(), "torch": torch.__version__, "attnreg": attnreg.__version__, "calls": len(results),
            "regret_geometric_mean": mean, "regret_worst": max(regrets, default=math.nan),
        }  # fmt: skip
        (folder / "order.json").write_text(json.dumps({**head, "results": results}, indent=1))
        title = f"{head['card']}, torch {head['torch']}, attnreg {head['attnreg']}: milliseconds, medians. "
        title += f"Regret of the automatic choice over {len(regrets)} calls: geometric mean {mean:.4f}, worst {head['regret_worst']:.3f}."
        (folder / "order.md").write_text(f"{title}\n\n{table(results)}\n")
    print(title)


if __name__ == "__main__":
    main()
