"""Needles found by length: the recipe `recall` with three kinds of layers and three seeds, on two texts.

    make demo                                          # the corpora, tokenizer and shards of the recipe
    python -m experiments.needle_lengths needle_lengths.books=BOOKS.txt
    python docs/draw.py

Every model trains on texts of 256 tokens and reads lengths up to 64 times as long, in the text that it was trained on
and in BOOKS.txt, which it never saw. Each finished model is a file in results/needle_lengths and is not repeated. It
takes about 10 minutes a model on 2 CPU cores.
"""

import json
from pathlib import Path

from pydantic import Field, PositiveInt

from experiments.command import ROOT, call
from tost_lm.config import Section, run_program
from tost_lm.files import write_atomically
from tost_lm.inference.evaluated import read_result_file
from tost_lm.version import VERSION, git_commit

RESULTS = ROOT / "results/needle_lengths"
ROTARY = "model.softmax.rope_theta=1e4"
FORMS = {
    "delta rule and softmax attention": ["model.pattern=DA"],
    "softmax attention": ["model.pattern=A", ROTARY],
    "TSSA": ["model.pattern=T"],
}
"""The recipe's settings for the layers; without rotary embedding, attention alone does not know the order of tokens."""


class NeedleLengthsSettings(Section):
    """Models, lengths and texts."""

    books: Path
    """A UTF-8 file with a long text that no model was trained on."""
    seeds: int = Field(default=3, gt=0)
    """Models of each form."""
    lengths: list[PositiveInt] = Field(default=[256, 1024, 4096, 16384], min_length=1)
    """Tokens of the texts."""


class NeedleLengthsConfig(Section):
    """Settings of `python -m experiments.needle_lengths`."""

    needle_lengths: NeedleLengthsSettings


def main(_: Path | None, config: NeedleLengthsConfig) -> None:
    settings = config.needle_lengths
    texts = {"trained text": "heldout.shards=data/embedded/shards", "books": f"needle.haystack={settings.books}"}
    for seed in range(settings.seeds):
        for number, (form, words) in enumerate(FORMS.items()):
            name = f"needle_lengths_{number}_{seed}"
            path = RESULTS / f"{form.replace(' ', '-')}_{seed}.json"
            if path.is_file():
                continue
            train = ["tost", "train", "recall", *words, f"train.seed={seed}", f"run.name={name}", "launch.ranks=2"]
            call(train)
            found = {text: accuracies(name, source, settings.lengths) for text, source in texts.items()}
            versions = {"form": form, "seed": seed, "commit": git_commit(), "tost_lm": VERSION, "command": train}
            write_atomically(path, json.dumps(versions | {"choice_accuracy": found}, indent=1) + "\n")


def accuracies(name: str, source: str, lengths: list[int]) -> dict[str, float]:
    """The mean accuracy of a run's model over depths, by length."""
    call(["tost", "eval", f"runs/{name}", "needle", source, f"needle.lengths={lengths}"])
    found = read_result_file(ROOT / f"runs/{name}/eval/needle@words/results.json")
    assert found is not None
    cells: dict[str, list[float]] = {}
    for cell in found["cells"]:
        cells.setdefault(str(cell["length"]), []).append(cell["choice_accuracy"])
    return {length: sum(values) / len(values) for length, values in cells.items()}


if __name__ == "__main__":
    run_program(
        main, name="experiments.needle_lengths", doc=__doc__ or "", positional="[CONFIG]", config=NeedleLengthsConfig
    )
