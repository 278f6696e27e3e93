"""What a whole model costs under each attention implementation of transformers, attnreg among them.

A random-weight Llama of 1B shape: prefill of a left-padded batch, decode steps, a training step, peak memory, and tokens per second of
generation, step by step and compiled with a static cache. All implementations in one run, interleaved, medians of wall time with the device
drained; the compiled ones one after the other, since each takes up to a minute to compile.

    python benchmarks/hosts.py                                # on a GPU, bounded by --seconds
    python benchmarks/hosts.py --phases decode,static         # generation alone
    python benchmarks/hosts.py --profile attnreg,eager        # where the host's time goes in a decode step
    python benchmarks/hosts.py --tiny                         # a smoke test on a CPU
"""

from __future__ import annotations

import argparse
import collections
import cProfile
import gc
import importlib.metadata
import json
import pstats
import statistics
import time
from collections.abc import Callable

import torch
import transformers

import attnreg
from attnreg.integrations.transformers import check, register

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
START = time.perf_counter()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a model of two layers and 64 dims, short rows")
    parser.add_argument("--seconds", type=float, default=300.0, help="no new round, phase or compilation starts after this many seconds")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds a phase")
    parser.add_argument(
        "--implementations", default="eager,sdpa,flex_attention,flash_attention_2,attnreg" if CUDA else "eager,sdpa,attnreg"
    )
    parser.add_argument(
        "--static",
        default="attnreg,sdpa,flex_attention,flash_attention_2,eager",
        help="those for compiled generation with a static cache, in turn",
    )
    parser.add_argument("--phases", default="prefill,training,decode,static", help="which of these to measure")
    parser.add_argument("--profile", default="", help="only profile the decode step of these implementations")
    return parser.parse_args()


def left() -> float:
    return OPTIONS.seconds - (time.perf_counter() - START)


def config() -> transformers.LlamaConfig:
    if OPTIONS.tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    else:
        sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
        heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    return transformers.LlamaConfig(
        **sizes, **heads, max_position_embeddings=8192, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=None
    )


def models(names: list[str]) -> dict[str, torch.nn.Module]:
    """One model for each implementation, all on the same weights. One that can't be made is left out, with a line that says why."""
    made: dict[str, torch.nn.Module] = {}
    weights = None
    for name in names:
        torch.manual_seed(0)
        try:
            with torch.device(DEVICE):
                settings = config()
                settings._attn_implementation = name
                model = transformers.LlamaForCausalLM(settings)
            model = model.to(torch.bfloat16 if CUDA else torch.float32).eval()
        except Exception as error:
            print(f"{name}: left out, {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        if weights is None:
            weights = model.state_dict()
        else:
            model.load_state_dict(weights, assign=True)
            model.tie_weights()
        made[name] = model
    return made


def left_padded(batch: int, size: int) -> dict[str, torch.Tensor]:
    """Rows of evenly spread lengths, from a twentieth of `size` to all of it: 52 % real tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 200, (batch, size), generator=generator)
    lengths = torch.linspace(size * 0.05, size, batch).long()
    mask = (torch.arange(size)[None] >= size - lengths[:, None]).long()
    return {"input_ids": (ids * mask).to(DEVICE), "attention_mask": mask.to(DEVICE)}


def drained() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


class Timings(dict):
    """Seconds by implementation, and what failed."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: dict[str, str] = {}

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(seconds) for name, seconds in self.items() if seconds}


def interleaved(runs: dict[str, Callable[[], None]], warm: int = 2) -> Timings:
    """Each run `warm` times untimed, then in turn, round after round."""
    found = Timings()
    for name, run in runs.items():
        try:
            for _ in range(warm):
                run()
            drained()
            found[name] = []
        except Exception as error:
            found.failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    for _ in range(OPTIONS.rounds):
        if left() < 0:
            break
        for name in found:
            start = drained()
            runs[name]()
            found[name].append(drained() - start)
    return found


def peak(run: Callable[[], None]) -> float:
    """GiB at the highest point of one run, weights included."""
    if not CUDA:
        return 0.0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() / 2**30


def prefill(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> Callable[[], object]:
    def run() -> object:
        with torch.inference_mode():
            return model(**inputs, use_cache=True, logits_to_keep=1).past_key_values

    return run


class Decoding:
    """Steps of one token for each row, onto a cache that grows."""

    steps = 4

    def __init__(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> None:
        self.model, self.cache, self.mask = model, prefill(model, inputs)(), inputs["attention_mask"]
        self.token = torch.full((self.mask.shape[0], 1), 7, device=DEVICE)

    def __call__(self) -> None:
        with torch.inference_mode():
            for _ in range(self.steps):
                self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], 1)
                result = self.model(input_ids=self.token, attention_mask=self.mask, past_key_values=self.cache, use_cache=True)
                self.token = result.logits[:, -1:].argmax(-1)


def training(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> Callable[[], None]:
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)

    def run() -> None:
        model.train()
        model(**inputs, labels=labels, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)
        model.eval()

    return run


def profiled(name: str, decoding: Decoding) -> None:
    """Where a decode step's time goes: on the host by Python function, and what is asked of the device."""
    decoding()
    enqueued, whole = [], []
    for _ in range(OPTIONS.rounds):
        start = drained()
        decoding()
        enqueued.append(time.perf_counter() - start)
        whole.append(drained() - start)
    host, wall = (statistics.median(seconds) * 1000 / Decoding.steps for seconds in (enqueued, whole))
    print(f"\n{name}: {wall:.2f} ms a step, of which the host is busy for {host:.2f}")
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * CUDA
    with torch.profiler.profile(activities=activities) as profile:
        decoding()
        drained()
    calls: collections.Counter[str] = collections.Counter()
    busy = 0.0
    for event in profile.events():
        calls[event.name] += 1
        if event.device_type != torch.autograd.DeviceType.CPU:
            busy += event.device_time
    asked = {n: c / Decoding.steps for n, c in calls.most_common() if n.startswith(("cudaLaunch", "cuLaunch", "cudaMem", "cudaStreamSync"))}
    operators = {n: c / Decoding.steps for n, c in calls.most_common(40) if n.startswith("aten::")}
    if CUDA:
        launches = sum(count for n, count in asked.items() if "Launch" in n)
        print(f"{name}: {launches:.0f} launches a step, kernels run for {busy / 1000 / Decoding.steps:.2f} ms a step; {asked}")
    print(f"{name}: operators a step, {operators}")
    profiler = cProfile.Profile()
    profiler.runcall(decoding)
    drained()
    print(f"{name}: {Decoding.steps} steps by own time")
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(40)


def static_generation(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> float:
    """Tokens per second of generate() with a static cache, compiled by transformers itself on a GPU; the prefill is subtracted."""
    short, long = (2, 6) if OPTIONS.tiny else (8, 72)
    cache = transformers.StaticCache(config=model.config, max_cache_len=inputs["input_ids"].shape[1] + long + 8)

    def seconds(tokens: int) -> float:
        cache.reset()
        start = drained()
        model.generate(**inputs, past_key_values=cache, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        return drained() - start

    for _ in range(2):
        seconds(short)
    pairs = [(seconds(short), seconds(long)) for _ in range(3)]
    steps = statistics.median(after for _, after in pairs) - statistics.median(before for before, _ in pairs)
    return inputs["input_ids"].shape[0] * (long - short) / steps


def main() -> None:
    register()
    phases = OPTIONS.phases.split(",")
    made = models((OPTIONS.profile or OPTIONS.implementations).split(","))
    batch, size, train = (2, 32, (2, 24)) if OPTIONS.tiny else (16, 2048, (4, 1024))
    inputs, training_inputs = left_padded(batch, size), left_padded(*train)
    if OPTIONS.profile:
        for name, model in made.items():
            profiled(name, Decoding(model, inputs))
        return
    columns: dict[str, dict[str, float]] = {}
    failures: dict[str, dict[str, str]] = {}

    def phase(title: str, runs: dict[str, Callable[[], object]], per: int = 1) -> None:
        if left() < 0:
            print(f"{title}: left out, no time left", flush=True)
            return
        timings = interleaved(runs)
        columns[title] = {name: seconds * 1000 / per for name, seconds in timings.medians().items()}
        failures[title] = timings.failed
        print(f"{time.perf_counter() - START:.0f} s: {title}: {columns[title]} {timings.failed or ''}", flush=True)

    prefills = {name: prefill(model, inputs) for name, model in made.items()}
    if "prefill" in phases:
        phase("prefill ms", prefills)
        columns["prefill peak GiB"] = {name: peak(run) for name, run in prefills.items() if name in columns.get("prefill ms", {})}
    if "training" in phases:
        phase("training step ms", {name: training(model, training_inputs) for name, model in made.items()})
    if "decode" in phases:
        decodings = {}
        for name, model in made.items():
            try:
                decodings[name] = Decoding(model, inputs)
            except Exception as error:
                failures.setdefault("prefill before decode", {})[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        phase("decode ms a step", decodings, Decoding.steps)
        columns["decode tokens/s"] = {name: batch * 1000 / ms for name, ms in columns.get("decode ms a step", {}).items()}
        if "attnreg" in decodings:
            decoding = decodings["attnreg"]
            grown = torch.cat([decoding.mask, torch.ones_like(decoding.mask[:, :1])], 1)
            ran = {
                "prefill": check(made["attnreg"], inputs),
                "decode": check(made["attnreg"], {"input_ids": decoding.token, "attention_mask": grown, "past_key_values": decoding.cache}),
            }
            for title, layers in ran.items():
                print(f"attnreg {title}: {next(iter(layers.values()))}\n", flush=True)
        del decodings
    if "static" in phases:
        title = "compiled static cache, tokens/s"
        columns[title], failures[title] = {}, {}
        for name in OPTIONS.static.split(","):
            if name not in made or left() < 0:
                continue
            # Alone in the compiler's cache, whose guards would else be gone through for every model before.
            torch._dynamo.reset()
            start = time.perf_counter()
            try:
                columns[title][name] = static_generation(made[name], inputs)
                print(f"{time.perf_counter() - START:.0f} s: {title}: {name} {columns[title][name]:.0f}", flush=True)
            except Exception as error:
                failures[title][name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
                print(f"{time.perf_counter() - START:.0f} s: {title}: {name} {failures[title][name]}", flush=True)
            print(f"  {time.perf_counter() - start:.0f} s with its compilation", flush=True)

    print(f"| attn_implementation | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name in made:
        cells = [f"{column[name]:.3g}" if name in column else "-" for column in columns.values()]
        print(f"| {name} | {' | '.join(cells)} |")
    for title, failed in failures.items():
        for name, why in failed.items():
            print(f"{title}: {name} failed, {why}")
    for title in ("prefill ms", "training step ms", "decode ms a step", "prefill peak GiB"):
        others = [value for name, value in columns.get(title, {}).items() if name != "attnreg"]
        if "attnreg" in columns.get(title, {}) and others and min(others) > 0:
            print(f"attnreg / best other, {title}: {columns[title]['attnreg'] / min(others):.3f}")
    device = torch.cuda.get_device_name() if CUDA else "CPU"
    flash = next((importlib.metadata.version(p) for p in ("flash-attn",) if _installed(p)), "none")
    print(
        f"\n{device}, torch {torch.__version__}, transformers {transformers.__version__}, flash-attn {flash}, attnreg {attnreg.__version__}; "
        f"b{batch} s{size} left-padded, training b{train[0]} s{train[1]}; {OPTIONS.rounds} rounds; {time.perf_counter() - START:.0f} s in all"
    )
    print(json.dumps({"columns": columns, "failures": failures}))


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    OPTIONS = arguments()
    main()
