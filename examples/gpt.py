"""A small decoder: trains on Python's own documentation strings, then generates for a left-padded batch from a cache.

python examples/gpt.py --positions rotary --seconds 60
"""

from __future__ import annotations

import argparse
import inspect
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import attnreg
from attnreg import attention

PAD = 0


class Block(nn.Module):
    """Grouped-query attention and an MLP, each on a residual stream."""

    def __init__(self, width: int, heads: int, key_heads: int, positions: str) -> None:
        super().__init__()
        self.heads, self.key_heads, self.dim, self.positions = heads, key_heads, width // heads, positions
        self.projection = nn.Linear(width, (heads + 2 * key_heads) * self.dim)
        self.output = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("slopes", 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads))

    def forward(self, x, position_ids, key_mask, cache):
        sizes = [self.heads, self.key_heads, self.key_heads]
        query, key, value = self.projection(self.norm(x)).unflatten(2, (-1, self.dim)).split(sizes, 2)
        if self.positions == "rotary":
            query, key = rotate(query, position_ids), rotate(key, position_ids)
        alibi = self.slopes if self.positions == "alibi" else None
        seen = attention(query, key, value, causal=True, key_mask=key_mask, alibi_slopes=alibi, cache=cache)
        x = x + self.output(seen.flatten(2))
        return x + self.mlp(x)


def rotate(x, position_ids):
    """Rotary positions (arXiv:2104.09864): halves of each head turn by the token's position."""
    half = x.shape[3] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = (position_ids[..., None] * frequency)[:, :, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], 3)


class GPT(nn.Module):
    def __init__(self, positions="rotary", layers=2, width=64, heads=4, key_heads=2, longest=256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        nn.init.normal_(self.embedding.weight, std=0.02)  # also the output's weight: logits start small
        self.learned = nn.Embedding(longest, width) if positions == "learned" else None
        self.blocks = nn.ModuleList(Block(width, heads, key_heads, positions) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens, key_mask=None, cache=None):
        """Logits (B, S, 256). `key_mask` (B, past + S), True for a real token."""
        positions = (cache or attnreg.DynamicCache()).positions(tokens.shape[1], key_mask).to(tokens.device)
        x = self.embedding(tokens)
        if self.learned is not None:
            x = x + self.learned(positions)
        for i, block in enumerate(self.blocks):
            x = block(x, positions, key_mask, None if cache is None else cache.layer(i))
        return self.norm(x) @ self.embedding.weight.T


def text() -> torch.Tensor:
    """Bytes of documentation that comes with Python."""
    modules = [argparse, inspect, time, *map(__import__, ("random", "pathlib", "collections", "decimal", "logging", "json"))]
    whole = "\n".join(inspect.getdoc(thing) or "" for m in modules for thing in [m, *(v for v in vars(m).values() if callable(v))])
    return torch.tensor(list(whole.encode("ascii", "ignore")))


def train(model: GPT, seconds: float, batch: int = 16, size: int = 64) -> float:
    """The mean loss of the last steps, in nats a byte."""
    data = text()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    start, losses = time.perf_counter(), []
    while (passed := time.perf_counter() - start) < seconds:
        at = torch.randint(len(data) - size - 1, (batch,))
        rows = torch.stack([data[i : i + size + 1] for i in at])
        loss = cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        done = int(30 * passed / seconds)
        print(f"\r[{'#' * done}{' ' * (30 - done)}] step {len(losses)} loss {losses[-1]:.3f}", end="", flush=True)
    print()
    return sum(losses[-20:]) / len(losses[-20:])


@torch.no_grad()
def generate(model: GPT, prompts: list[str], n: int, cached: bool = True) -> list[str]:
    """Greedy continuations of n bytes, for all prompts as one left-padded batch."""
    encoded = [list(p.encode()) for p in prompts]
    size = max(map(len, encoded))
    tokens = torch.tensor([[PAD] * (size - len(e)) + e for e in encoded])
    mask = torch.tensor([[False] * (size - len(e)) + [True] * len(e) for e in encoded])
    cache, new, made = (attnreg.DynamicCache() if cached else None), tokens, []
    for _ in range(n):
        logits = model(new if cached else tokens, mask, cache)
        new = logits[:, -1].argmax(-1, keepdim=True)
        made.append(new)
        tokens, mask = torch.cat([tokens, new], 1), torch.cat([mask, mask.new_ones(len(prompts), 1)], 1)
    return [bytes(row).decode("latin-1") for row in torch.cat(made, 1).tolist()]


def main(arguments: list[str] | None = None) -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", choices=("learned", "rotary", "alibi"), default="rotary")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--new", type=int, default=60)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = GPT(options.positions)
    print(f"loss {train(model, options.seconds):.3f}")
    prompts = ["Return ", "The argument must be a ", "If"]
    cached = generate(model, prompts, options.new)
    uncached = generate(model, prompts, options.new, cached=False)
    alone = [generate(model, [p], options.new)[0] for p in prompts]
    for prompt, continuation in zip(prompts, cached):
        print(repr(prompt + continuation))
    if not cached == uncached == alone:
        raise SystemExit("cached, uncached and lone generation differ")
    print("cached = uncached = each prompt alone, token for token")
    return cached


if __name__ == "__main__":
    main()
