"""attnreg against the same kernel called by hand, on a CUDA card: prefill, training, decode, and padded rows.

    python benchmarks/direct.py [--out FOLDER] [--only left_padded padded_training real_tokens decode dense]

Writes direct.json and direct.md. The padded rows compare with flash-attn 2 on input that is packed already, and with the dense-mask way;
`real_tokens` compares training on padding that stays in place with training that gathers, by how much is real, for `rows.FEW_REAL`.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib

import torch
import torch.nn.functional as F
from timing import interleaved, warmed
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnreg
from attnreg.kernels import rows as rows_module
from attnreg.kernels.flash3 import library as flash3
from attnreg.packing import Padding, pack


def heads_last(batch, size, keys, heads, key_heads, dim, gradients=False):
    shapes = ((batch, size, heads, dim), (batch, keys, key_heads, dim), (batch, keys, key_heads, dim))
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_(gradients) for s in shapes]


def kernels_by_hand() -> dict:
    """What is installed, as causal functions of (B, S, H, D) tensors."""
    ways = {}
    missing = {name: attnreg.backends()[name].reason_missing for name in ("flash2", "flash3", "flash4", "cudnn", "xformers")}
    if not missing["flash2"]:
        from flash_attn.flash_attn_interface import flash_attn_func as two

        ways["flash2"] = lambda q, k, v: two(q, k, v, causal=True)
    if not missing["flash3"]:
        three = flash3().module.flash_attn_func
        ways["flash3"] = lambda q, k, v: three(q, k, v, causal=True)
    if not missing["flash4"]:
        from flash_attn.cute import flash_attn_func as four

        ways["flash4"] = lambda q, k, v: four(q, k, v, causal=True)[0]

    if not missing["xformers"]:
        from xformers.ops import LowerTriangularMask, fmha

        def xformers(q, k, v):
            # It has no backward for grouped heads; who trains with it repeats them.
            k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) if t.requires_grad else t for t in (k, v))
            if k.shape[2] != q.shape[2]:
                group = q.shape[2] // k.shape[2]
                q = q.unflatten(2, (-1, group))
                k, v = (t[:, :, :, None].expand(-1, -1, -1, group, -1) for t in (k, v))
            result = fmha.memory_efficient_attention(q, k, v, LowerTriangularMask(), op=(fmha.flash.FwOp, fmha.flash.BwOp))
            return result if result.dim() == 4 else result.flatten(2, 3)

        ways["xformers"] = xformers

    def torchs(kernel, q, k, v):
        with sdpa_kernel(kernel):
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    ways["sdpa"] = functools.partial(torchs, SDPBackend.FLASH_ATTENTION)
    if not missing["cudnn"]:
        ways["cudnn"] = functools.partial(torchs, SDPBackend.CUDNN_ATTENTION)
    return ways


def pair(name, by_hand, ours, rows):
    """One row of both functions."""
    functions = {"direct": by_hand, "attnreg": ours}
    try:
        for function in functions.values():
            warmed(function)
            warmed(function)
        times = interleaved(functions, 0.5, most=100, least=10)
    except Exception as error:
        rows.append({"row": name, "error": f"{type(error).__name__}: {error}".splitlines()[0][:300]})
    else:
        rows.append({"row": name, **times, "ratio": times["attnreg"] / times["direct"]})
    print(rows[-1], flush=True)


def with_gradients(function, tensors):
    upstream = torch.randn_like(tensors[0])
    return lambda: torch.autograd.grad(function(*tensors), tensors, upstream)


def dense(rows) -> None:
    for batch, size, heads, key_heads, dim in ((2, 2048, 32, 8, 128), (2, 8192, 32, 8, 128), (4, 4096, 32, 32, 64), (1, 16384, 64, 8, 128)):
        for name, by_hand in kernels_by_hand().items():
            title = f"causal prefill b{batch} s{size} hq{heads} hkv{key_heads} d{dim}, {name}"
            _dense(title, name, by_hand, heads_last(batch, size, size, heads, key_heads, dim), rows)
            torch.cuda.empty_cache()


def _dense(title, name, by_hand, tensors, rows) -> None:
    def ours(*tensors):
        return attnreg.attention(*tensors, causal=True, backend=name)

    pair(title, lambda: by_hand(*tensors), lambda: ours(*tensors), rows)
    learned = [t.detach().requires_grad_() for t in tensors]
    pair(f"{title}, forward and backward", with_gradients(by_hand, learned), with_gradients(ours, learned), rows)


def decode(rows) -> None:
    if not attnreg.backends()["flash2"].reason_missing:
        for batch, keys in ((1, 32768), (32, 8192), (64, 1024)):
            _decode(batch, keys, rows)


def _decode(batch, keys, rows) -> None:
    from flash_attn import flash_attn_with_kvcache

    tensors = heads_last(batch, 1, keys, 32, 8, 128)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")

    def by_hand():
        return flash_attn_with_kvcache(*tensors, cache_seqlens=lengths, causal=True)

    measured = {"key_lengths": lengths, "causal": True, "finite_padding": True}
    pair(f"decode b{batch} kv{keys}, flash2", by_hand, lambda: attnreg.attention(*tensors, **measured, backend="flash2"), rows)
    pair(f"decode b{batch} kv{keys}, automatic against flash2", by_hand, lambda: attnreg.attention(*tensors, causal=True), rows)


def left_padded(rows) -> None:
    batch, size, heads, key_heads, dim = 16, 4096, 32, 8, 128
    real = torch.linspace(0.08, 0.96, batch).mul(size).int().tolist()
    padding = Padding.from_lengths(real, size, side="left", device="cuda")
    bare = padding.mask.clone()
    tensors = heads_last(batch, size, size, heads, key_heads, dim)
    rows.append({"row": f"left padded b{batch} s{size}: {sum(real) / (batch * size):.0%} real"})
    functions = {}
    packed = [pack(t, padding.packed) for t in tensors]
    cu, longest = padding.packed.cu_seqlens, padding.packed.max_seqlen
    if not attnreg.backends()["flash2"].reason_missing:
        from flash_attn import flash_attn_varlen_func

        by_hand = lambda *t: flash_attn_varlen_func(*t, cu, cu, longest, longest, causal=True)
        functions["flash-attn 2 on packed input"] = lambda: by_hand(*packed)
    masked = {"causal": True, "query_mask": padding, "key_mask": padding}
    keyed = {"causal": True, "key_mask": padding}
    for name in ("auto", "flash2", "flash3", "flash4", "varlen", "sdpa"):
        if name == "auto" or (name in attnreg.backends() and not attnreg.backends()[name].reason_missing):
            functions[f"attnreg {name}, declared"] = lambda name=name: attnreg.attention(*tensors, **masked, backend=name)
    functions["attnreg auto, keys declared"] = lambda: attnreg.attention(*tensors, **keyed)
    functions["attnreg auto, bare masks"] = lambda: attnreg.attention(*tensors, causal=True, query_mask=bare, key_mask=bare)
    seen = (bare[:, None, None, :] & torch.ones(size, size, dtype=torch.bool, device="cuda").tril()).contiguous()
    q, k, v = (t.transpose(1, 2) for t in tensors)
    functions["dense bool mask through torch, grouped"] = lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    repeated = lambda t: t.repeat_interleave(heads // key_heads, 1)
    functions["dense bool mask through torch, repeated"] = lambda: F.scaled_dot_product_attention(
        q, repeated(k), repeated(v), attn_mask=seen
    )
    _compare("left-padded prefill", functions, rows)


def padded_training(rows) -> None:
    batch, size = 16, 4096
    real = torch.linspace(0.08, 0.96, batch).mul(size).int().tolist()
    for side in ("left", "right"):
        padding = Padding.from_lengths(real, size, side=side, device="cuda")
        learned, functions = _trained(padding, (32, 8, 128))
        functions["one copy of query, key and value"] = lambda learned=learned: [t.detach().clone() for t in learned]
        measured = torch.tensor(real, dtype=torch.int32, device="cuda")
        known = {"declared": padding, "lengths on the device": Padding.from_lengths(measured, size, side=side)}
        for how, given in known.items():
            for name in ("auto", "flash2", "flash3", "varlen"):
                if name == "auto" or (name in attnreg.backends() and not attnreg.backends()[name].reason_missing):
                    functions[f"attnreg {name}, {how}"] = _training(given, name, learned)
        _compare(f"{side}-padded, forward and backward", functions, rows)
        del learned, functions
        torch.cuda.empty_cache()


def real_tokens(rows) -> None:
    """Training in place and gathered, by the part that is real: where they cross is what `rows.FEW_REAL` should be."""
    few = rows_module.FEW_REAL
    for batch, size, heads in ((16, 4096, (32, 8, 128)), (256, 256, (32, 8, 128)), (16, 4096, (16, 16, 64))):
        for part in (0.03, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0):
            spread = min(part / 2, 1 - part)
            real = torch.linspace(part - spread, part + spread, batch).mul(size).int().clamp(1, size).tolist()
            padding = Padding.from_lengths(real, size, side="left", device="cuda")
            learned, functions = _trained(padding, heads)
            for name in ("flash2", "varlen"):
                if not attnreg.backends()[name].reason_missing:
                    train = _training(padding, name, learned)
                    functions[f"{name} in place"] = lambda train=train: (setattr(rows_module, "FEW_REAL", 0.0), train())
                    functions[f"{name} gathered"] = lambda train=train: (setattr(rows_module, "FEW_REAL", 2.0), train())
            heading = f"training b{batch} s{size} hq{heads[0]} hkv{heads[1]} d{heads[2]}, {sum(real) / (batch * size):.0%} real"
            _compare(heading, functions, rows, seconds=0.4, memory=True)
            del learned, functions
            torch.cuda.empty_cache()
    rows_module.FEW_REAL = few


def _trained(padding, heads):
    """Tensors that learn, and the row of flash-attn 2 on packed input, if it is here."""
    learned, functions = heads_last(*padding.shape, padding.shape[1], *heads, gradients=True), {}
    if not attnreg.backends()["flash2"].reason_missing:
        from flash_attn import flash_attn_varlen_func

        cu, longest = padding.packed.cu_seqlens, padding.packed.max_seqlen
        packed = [pack(t.detach(), padding.packed).requires_grad_() for t in learned]
        by_hand = lambda *t: flash_attn_varlen_func(*t, cu, cu, longest, longest, causal=True)
        functions["flash-attn 2 on packed input"] = with_gradients(by_hand, packed)
    return learned, functions


def _training(padding, name, learned):
    masked = {"causal": True, "query_mask": padding, "key_mask": padding}
    return with_gradients(lambda *t: attnreg.attention(*t, **masked, backend=name), learned)


def _compare(title, functions, rows, seconds=3.0, memory=False) -> None:
    able, most = {}, {}
    for name, function in functions.items():
        try:
            warmed(function)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            function()
            most[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
            able[name] = function
        except Exception as error:
            rows.append({"row": f"{title}: {name}", "error": f"{type(error).__name__}: {error}".splitlines()[0][:300]})
            print(rows[-1], flush=True)
    times = interleaved(able, seconds, most=30, least=5)
    base = times.get("flash-attn 2 on packed input")
    for name, time in times.items():
        named = f"{title}: {name}" + (f", peak {most[name]:.0f} MiB" if memory else "")
        rows.append({"row": named, "attnreg": time, **({"ratio": time / base} if base else {})})
        print(rows[-1], flush=True)


def table(rows: list[dict]) -> str:
    lines = ["| | direct ms | ms | ratio |", "|---|---|---|---|"]
    for r in rows:
        cells = [f"{r[c]:.3f}" if c in r else "-" for c in ("direct", "attnreg", "ratio")]
        lines.append(f"| {r['row']} | " + (f"{r['error']} | - | - |" if "error" in r else " | ".join(cells) + " |"))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=".", help="folder for direct.json and direct.md")
    parts = {part.__name__: part for part in (left_padded, padded_training, real_tokens, decode, dense)}
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts), help="some of the parts; all by default")
    asked = parser.parse_args()
    folder = pathlib.Path(asked.out)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/direct.py needs a CUDA card")
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict] = []
    for part in asked.only:
        parts[part](rows)
        torch.cuda.empty_cache()
        (folder / "direct.json").write_text(
            json.dumps({"card": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, indent=1)
        )
        (folder / "direct.md").write_text(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, medians\n\n{table(rows)}\n"
        )


if __name__ == "__main__":
    main()
