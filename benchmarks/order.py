"""Measures every able backend over a grid of calls on a CUDA card, and what the automatic choice loses against the best of them.

    python benchmarks/order.py --without reference,flex,xformers [--out FOLDER] [--seconds 170]

Writes order.json, and order.md, which is docs/order.md. The automatic choice is timed as one more column, "auto", of the same interleaved
run; regret is its time over the best of the row. In rows of a growing cache each call sees one key more than the call before it, whichever
backend that was: what a kernel does anew for a new shape is paid by each of them, as a decoder pays it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import json
import math
import pathlib
import re
import time
from collections.abc import Callable

import torch
from timing import chained, interleaved, warmed

import attnreg
from attnreg.packing import Padding

SHORT = 0.1
"""Milliseconds on the card below which the host may be what a caller waits for."""
NEAR = 1.5
"""Backends that take the card up to so many times as long as the fastest are called one after the other too, in short rows."""
ROOM = 1024
"""Slots behind a growing cache's first keys: one for each call of a row, warming up included."""


def grid() -> list[dict]:
    """Name, sizes, dtype, mode and options of every call."""
    calls = []

    def add(kind, batch, queries, keys, heads, dim, *, dtype="bfloat16", backward=False, grows=False, **options):
        calls.append(
            {"kind": kind, "batch": batch, "queries": queries, "keys": keys, "heads": heads[0], "key_heads": heads[1], "dim": dim,
             "dtype": dtype, "backward": backward, "grows": grows, "options": options}
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
        add("decode", batch, 1, keys, heads, dim, grows=True, **causal)
        if keys <= 8192:  # what a static cache does: one buffer, one shape, and the rows' lengths beside it
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
    add("window decode", 16, 1, 8192, gqa, 128, grows=True, causal=True, window=(1023, None))
    add("softcap", 2, 2048, 2048, gqa, 128, causal=True, softcap=50.0)
    add("softcap", 2, 2048, 2048, gqa, 256, causal=True, softcap=50.0)
    add("softcap training", 2, 2048, 2048, gqa, 128, backward=True, causal=True, softcap=50.0)
    add("softcap decode", 16, 1, 4096, gqa, 256, grows=True, causal=True, softcap=50.0)
    groups = (64, 8)
    for window in (None, (127, None)):
        add("sinks" if window is None else "sinks, window", 2, 4096, 4096, groups, 64, causal=True, window=window, sinks=True)
    add("sinks, window, training", 2, 4096, 4096, groups, 64, backward=True, causal=True, window=(127, None), sinks=True)
    add("sinks decode", 8, 1, 4096, groups, 64, grows=True, causal=True, sinks=True)
    add("sinks decode, lengths", 8, 1, 4096, groups, 64, lengths=True, causal=True, sinks=True)
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
        # Evenly between 0.3 and 1; a lone row's in the middle, 0.65, not at an end.
        used = (torch.arange(batch) + 0.5) / batch * 0.7 + 0.3
        options |= {"key_lengths": used.mul(keys).int().cuda(), "finite_padding": True}

    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-1.0, 1.0, entry["heads"], device="cuda", dtype=dtype)

    def make(length, heads):
        tensor = torch.randn(batch, length, heads, dim, device="cuda", dtype=dtype, generator=generator)
        return tensor.requires_grad_(entry["backward"])

    keys += ROOM if entry["grows"] else 0
    return (make(queries, entry["heads"]), make(keys, entry["key_heads"]), make(keys, entry["key_heads"])), options


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def growing(tensors: Tensors, first: int) -> Callable[[], Tensors]:
    """Query, key and value of the next call: one slot more each time, of a buffer that stays where it is."""
    query, key, value = tensors
    slots = itertools.count(first)

    def following() -> Tensors:
        used = next(slots)
        if used > key.shape[1]:
            raise RuntimeError(f"more than {ROOM} calls of one row: raise ROOM")
        return query, key[:, :used], value[:, :used]

    return following


def runner(following: Callable[[], Tensors], options: dict, backend: str | None, backward: bool) -> Callable[[], object]:
    if not backward:
        return lambda: attnreg.attention(*following(), **options, backend=backend)
    tensors = following()
    upstream = torch.randn_like(tensors[0])
    return lambda: torch.autograd.grad(attnreg.attention(*tensors, **options, backend=backend), tensors, upstream)


def too_large(entry: dict) -> bool:
    """Backends that keep all scores, or a mask for each, are not tried where those would take more than 20 GB."""
    return entry["batch"] * entry["heads"] * entry["queries"] * entry["keys"] * 4 > 20e9


def measured(entry: dict, seconds: float, without: set[str]) -> dict:
    tensors, options = prepared(entry)
    following = growing(tensors, entry["keys"] + 1) if entry["grows"] else lambda: tensors
    now = following()
    selection = attnreg.explain(*now, **options)
    chosen = selection.chosen.name if selection.chosen else None
    able = [n for n in ([chosen] if chosen else []) + list(selection.able) if n not in without]
    functions, failed = {}, {}
    for name in able:
        own = attnreg.explain(*now, **options, backend=name)
        quadratic = any("Sk)" in text or "scores" in text for text in (*own.emulations, *own.notes))
        if quadratic and too_large(entry):
            failed[name] = "left out: would keep all scores"
            continue
        function = runner(following, options, name, entry["backward"])
        try:
            if warmed(function) > 400:
                failed[name] = "left out: over 400 ms"
                continue
            functions[name] = function
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            torch.cuda.synchronize()
    if chosen in functions:
        functions["auto"] = runner(following, options, None, entry["backward"])
        warmed(functions["auto"])
    times = interleaved(functions, seconds, least=9) if functions else {}
    auto = times.pop("auto", None)
    best = min(times.values(), default=None)
    called = {}
    if auto is not None and best < SHORT:
        near = [name for name in times if times[name] < NEAR * best or name == chosen]
        called = chained({name: functions[name] for name in (*near, "auto")}, rounds=4, repeats=20)
    called_auto = called.pop("auto", None)
    return {
        **entry, "chosen": chosen, "times": times, "auto": auto, "failed": failed, "emulations": list(selection.emulations),
        "regret": None if auto is None else auto / min(auto, best), "regret_by_columns": times[chosen] / best if chosen in times else None,
        "called": called, "called_auto": called_auto, "regret_called": called_auto and called_auto / min(called_auto, *called.values()),
    }  # fmt: skip


# ---------------------------------------------------------------------- the page


def title_of(r: dict) -> str:
    dtype = {"bfloat16": "bf16", "float16": "fp16"}[r["dtype"]]
    keys = f"k{r['keys']}{'+' if r['grows'] else ''}"
    return f"{r['kind']} b{r['batch']} q{r['queries']} {keys} h{r['heads']}/{r['key_heads']} d{r['dim']} {dtype}"


def table(results: list[dict]) -> str:
    """A row for each call; backends stand in the order of how often they are the fastest."""
    best = [min(r["times"].values(), default=math.nan) for r in results]
    wins = {n: sum(r["times"].get(n) == least for r, least in zip(results, best)) for r in results for n in r["times"]}
    names = sorted(wins, key=lambda n: (-wins[n], n))
    lines = ["| call | " + " | ".join(names) + " | auto | chosen | regret | one after the other |", "|---" * (len(names) + 5) + "|"]
    for r, least in zip(results, best):
        cells = [
            "-" if n not in r["times"] else f"**{r['times'][n]:.3f}**" if r["times"][n] == least else f"{r['times'][n]:.3f}" for n in names
        ]
        auto, regret = ("-", "-") if r["auto"] is None else (f"{r['auto']:.3f}", f"{r['regret']:.2f}")
        called = {"auto": r["called_auto"], **dict(sorted(r["called"].items(), key=lambda pair: pair[1]))} if r["called"] else {}
        waited = ", ".join(f"{name} {time:.3f}" for name, time in called.items())
        lines.append(f"| {title_of(r)} | " + " | ".join(cells) + f" | {auto} | {r['chosen']} | {regret} | {waited} |")
    return "\n".join(lines)


def mean(regrets: list[float]) -> float:
    return math.exp(sum(map(math.log, regrets)) / len(regrets)) if regrets else math.nan


def summary(results: list[dict]) -> dict:
    """Geometric means and the worst of the regret, measured and computed from the columns, and the mean of each kind of call."""
    known = [r for r in results if r["regret"]]
    called = [r["regret_called"] for r in known if r["regret_called"]]
    kinds = dict.fromkeys(r["kind"] for r in known)
    return {
        "calls": len(known),
        "mean": mean([r["regret"] for r in known]),
        "worst": max((r["regret"] for r in known), default=math.nan),
        "worst_call": title_of(max(known, key=lambda r: r["regret"])) if known else None,
        "mean_by_columns": mean([r["regret_by_columns"] for r in known]),
        "worst_by_columns": max((r["regret_by_columns"] for r in known), default=math.nan),
        "called": len(called),
        "mean_called": mean(called),
        "worst_called": max(called, default=math.nan),
        "kinds": {kind: mean([r["regret"] for r in known if r["kind"] == kind]) for kind in kinds},
    }


def versions() -> str:
    cudnn = torch.backends.cudnn.version() or 0
    found = [f"torch {torch.__version__}", f"cuDNN {cudnn // 10000}.{cudnn // 100 % 100}"]
    for package in ("flash-attn", "flash-attn-3", "fa3-fwd", "flash-attn-4", "xformers"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def page(results: list[dict], without: str) -> str:
    s = summary(results)
    over = [f"{kind} {regret:.3f}" for kind, regret in s["kinds"].items() if regret >= 1.005]
    return f"""# The automatic order on CUDA

Made by `python benchmarks/order.py --without {without}` on one {torch.cuda.get_device_name()} with {versions()},
{datetime.date.today()}: milliseconds on the card, medians of interleaved calls. "-" is not able, or not claimed. A row repeats one call. Where its
keys have a plus, it does not: each call sees one key more than the call before it, as those of a growing cache do. A kernel that makes a plan
for every new shape then makes one for every call. Rows with lengths are what a static cache does: one shape, however many tokens it holds.
The last column is of calls below {SHORT} ms: milliseconds a call where nothing else keeps the card busy and the host's time is waited for too.

"auto" is the automatic choice, by the rule in `attnreg/kernels/order.py`, timed in the same run as a column of its own, and regret its time over the
best of the row. Over {s["calls"]} calls its geometric mean is {s["mean"]:.3f}, the worst {s["worst"]:.2f} ({s["worst_call"]}). Computed from the chosen backend's
column instead, without the noise between two columns of one kernel: {s["mean_by_columns"]:.3f}, worst {s["worst_by_columns"]:.2f}. One after the other, over {s["called"]}
calls: {s["mean_called"]:.3f}, worst {s["worst_called"]:.2f}. Kinds of calls that lose half a per cent or more on the card: {", ".join(over) or "none"}.

{table(results)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=".", help="folder for order.json and order.md")
    parser.add_argument("--seconds", type=float, default=170.0, help="about how long it may take; nine rounds a call are made in any case")
    parser.add_argument("--without", default="reference", help="backends to leave out, with commas between")
    parser.add_argument("--only", default="", help="only calls whose title, the first cell of a row, matches this regular expression")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/order.py needs a CUDA card")
    entries = [e for e in grid() if re.search(arguments.only, title_of(e))]
    results, start = [], time.perf_counter()
    folder = pathlib.Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    for number, entry in enumerate(entries):
        left = arguments.seconds - (time.perf_counter() - start)
        results.append(measured(entry, max(left, 0.0) / (len(entries) - number) * 0.7, set(arguments.without.split(","))))
        r = results[-1]
        regret = None if r["regret"] is None else round(r["regret"], 3)
        print(
            f"{number + 1}/{len(entries)} {time.perf_counter() - start:.0f} s",
            title_of(r),
            r["chosen"],
            regret,
            r["times"],
            r["failed"],
            flush=True,
        )
        torch.cuda.empty_cache()
        # Written as it goes, so that an interrupted run leaves what it has measured.
        head = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "attnreg": attnreg.__version__, **summary(results)}
        (folder / "order.json").write_text(json.dumps({**head, "results": results}, indent=1))
        (folder / "order.md").write_text(page(results, arguments.without))
    print({name: value for name, value in head.items() if name != "results"})


if __name__ == "__main__":
    main()
