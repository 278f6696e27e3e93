"""Training and serving a Llama with padded batches and grouped heads, on a backend of one's choice, without patching the model.

    python examples/llama_training.py [backend]

The head layout is Llama-2-70B's, 64 query heads on 8 key heads, at a small width. Shown: the loss of every training step equals eager's;
padding on either side changes nothing for real tokens; a sequence fed in chunks equals one pass; and the mask that goes with a cache has
a column for every token, past and new - one for the new tokens only is an error.
"""

from __future__ import annotations

import sys

import torch
import transformers

from attnreg.integrations.transformers import check, register

STEPS = 4


def llama(implementation: str) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=512, intermediate_size=256, num_hidden_layers=2, num_attention_heads=64, num_key_value_heads=8, pad_token_id=0
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.set_attn_implementation(implementation)
    return model


def batch(padding: int) -> dict[str, torch.Tensor]:
    """Two rows of 16: the first padded at its end, the second at its start."""
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, 16 - padding :] = 0
    mask[1, :padding] = 0
    ids = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(padding)) * mask
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def losses(model: transformers.LlamaForCausalLM) -> list[float]:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    seen = []
    for step in range(STEPS):
        inputs = batch(padding=step)
        # A token is predicted from the one before it, so the first real one behind padding has nothing to be predicted from.
        real = inputs["attention_mask"].bool()
        behind_real = torch.nn.functional.pad(real[:, :-1], (1, 0), value=True)
        labels = inputs["input_ids"].masked_fill(~(real & behind_real), -100)
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def largest_difference(one: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> float:
    return float(((one - other) * mask[:, :, None]).abs().max())


@torch.no_grad()
def in_chunks(model: transformers.LlamaForCausalLM, inputs: dict[str, torch.Tensor], size: int = 4) -> torch.Tensor:
    past, parts = None, []
    for start in range(0, 16, size):
        new = slice(start, start + size)
        result = model(
            input_ids=inputs["input_ids"][:, new], position_ids=inputs["position_ids"][:, new],
            attention_mask=inputs["attention_mask"][:, : start + size], past_key_values=past, use_cache=True,
        )  # fmt: skip
        past = result.past_key_values
        parts.append(result.logits)
    return torch.cat(parts, 1)


def main(backend: str = "auto") -> dict[str, float]:
    register("attnreg_chosen", backend=None if backend == "auto" else backend)
    eager, model = llama("eager"), llama("attnreg_chosen")
    ran = {selection.chosen.name for selection in check(model, batch(0)).values()}
    print(f"64 query heads on 8 key heads, {len(ran)} backend at work: {', '.join(ran)}")
    found = {}

    expected, seen = losses(eager), losses(model)
    found["loss"] = max(abs(a - b) for a, b in zip(expected, seen))
    print(f"losses of {STEPS} steps on padded batches: {', '.join(f'{x:.4f}' for x in seen)}; against eager {found['loss']:.1e}")

    eager.eval(), model.eval()
    for padding in range(4):
        inputs = batch(padding)
        with torch.no_grad():
            one, other = eager(**inputs).logits, model(**inputs).logits
        found[f"masks {padding}"] = largest_difference(one, other, inputs["attention_mask"])
        print(f"{padding} padded at the end of row 0 and at the start of row 1: {found[f'masks {padding}']:.1e} against eager")

    inputs = batch(2)
    with torch.no_grad():
        whole = model(**inputs).logits
    found["chunks"] = largest_difference(in_chunks(model, inputs), whole, inputs["attention_mask"])
    found["steps"] = largest_difference(in_chunks(model, inputs, size=1), whole, inputs["attention_mask"])
    print(f"four chunks of four onto a cache: {found['chunks']:.1e} against one pass; sixteen single tokens: {found['steps']:.1e}")

    past = model(**inputs, use_cache=True).past_key_values
    try:
        model(input_ids=inputs["input_ids"][:, :1], attention_mask=torch.ones(2, 1, dtype=torch.long), past_key_values=past)
    except ValueError as error:
        print(f"a mask for the new token only: {error}")
    else:
        raise RuntimeError("a mask for the new token only was taken")
    if not max(found.values()) < 1e-3:
        raise RuntimeError(f"a difference is too large: {found}")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
