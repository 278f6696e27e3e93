"""Several documents in one row: loss and gradients equal those of the documents alone, and nothing leaks from one into another.

    python examples/sample_packing.py [backend]

A document of one token and trailing padding are among them, so the lengths are said explicitly. On a backend without packed rows the
mask of the documents is rebuilt; plain causality over the whole row, shown for comparison, gives another loss.
"""

from __future__ import annotations

import sys

import torch
import transformers

from attnreg.integrations.transformers import check, register
from attnreg.packing import cu_seqlens_from_lengths

LENGTHS = (5, 1, 8, 3)
PADDING = 3


def llama(implementation: str) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
        initializer_range=0.2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.set_attn_implementation(implementation)
    return model


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 64, (1, length), generator=generator) for length in LENGTHS]


def packed_row(rows: list[torch.Tensor], padding_token: int = 0) -> dict[str, torch.Tensor]:
    """All documents in one row, padding behind them, with positions that start anew and the lengths said explicitly."""
    cu = cu_seqlens_from_lengths(LENGTHS)
    positions = torch.cat([torch.arange(n) for n in (*LENGTHS, PADDING)])[None]
    ids = torch.cat([*rows, torch.full((1, PADDING), padding_token)], 1)
    longest = max(LENGTHS)
    explicit = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest}
    return {"input_ids": ids, "position_ids": positions, "use_cache": False, **explicit}


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The summed loss of predicting each next token of one document."""
    return torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")


def total_loss(logits: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
    parts = logits[:, : sum(LENGTHS)].split(LENGTHS, 1)
    return torch.stack([loss_of(part, ids) for part, ids in zip(parts, rows)]).sum()


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def main(backend: str = "auto") -> dict[str, float]:
    register("attnreg_chosen", backend=None if backend == "auto" else backend)
    model, rows = llama("attnreg_chosen"), documents()
    selection = next(iter(check(model, packed_row(rows)).values()))
    how = [text for text in selection.emulations if text.startswith("packed")] or ["packed: native"]
    print(f"{len(LENGTHS)} documents of {LENGTHS} tokens and {PADDING} of padding in one row, on {selection.chosen.name} ({how[0]})")
    found = {}

    logits = model(**packed_row(rows)).logits
    together = total_loss(logits, rows)
    alone = torch.stack([loss_of(model(input_ids=ids, use_cache=False).logits, ids) for ids in rows]).sum()
    found["loss"] = abs(float((together - alone).detach()))
    found["gradients"] = max(float((a - b).abs().max()) for a, b in zip(gradients(model, together), gradients(model, alone)))
    print(f"loss {together.item():.4f}; against the documents alone {found['loss']:.1e}, gradients {found['gradients']:.1e}")

    poisoned = [rows[0], rows[1], torch.full_like(rows[2], 63), rows[3]]
    other = model(**packed_row(poisoned, padding_token=42)).logits
    untouched = [part for n, part in enumerate((other - logits)[:, : sum(LENGTHS)].split(LENGTHS, 1)) if n != 2]
    found["leak"] = max(part.abs().max().item() for part in untouched)
    print(f"another third document and other padding change the rest by {found['leak']:.1e}")

    plain = total_loss(model(input_ids=torch.cat(rows, 1), use_cache=False).logits, rows)
    print(f"plain causality over the whole row would give a loss of {plain.item():.4f}")
    if not (found["loss"] < 1e-3 and found["gradients"] < 1e-3 and found["leak"] == 0.0):
        raise RuntimeError(f"packed documents are not what they are alone: {found}")
    if abs(float((plain - alone).detach())) < 1e-2:
        raise RuntimeError("this example could not tell documents from one long text")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
