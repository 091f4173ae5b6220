"""Train the model of the recipe recall with four kinds of layers, and find needles beyond the trained length.

    make demo                                    (once: the corpora embedded and passages)
    python -m experiments.needle_lengths needle_lengths.books=BOOKS.txt
    python docs/draw.py

BOOKS.txt is any text that no model has seen. Trainings are in runs/needle_lengths, results in results/needle_lengths, a
file for each form and seed; one that exists is not measured again.
"""

import json
from pathlib import Path
from typing import Any

from pydantic import Field

from experiments.commands import ROOT, run_tost
from tost_lm.command_line import run_program
from tost_lm.config import Section
from tost_lm.errors import DataError
from tost_lm.files import sha256_file, write_atomically
from tost_lm.inference.evaluated import EvaluatedCheckpoint, read_result_file
from tost_lm.tasks.needle import NAME
from tost_lm.version import VERSION, git_commit

RESULTS, RUNS = ROOT / "results/needle_lengths", "runs/needle_lengths"
FORMS = {
    "delta": ["model.pattern=DA"],
    "delta-alone": ["model.pattern=D"],
    "tssa": ["model.pattern=TA", "model.tssa.denom_bias=head"],
    "softmax": ["model.pattern=A", "model.softmax.rope_theta=1e4"],
}
"""Two layers: of the delta rule and of softmax without positions, as in the recipe; of the delta rule alone; TSSA in
place of the delta rule; softmax with a rotary embedding."""
SEEDS = range(3)
LENGTHS, SAMPLES, DEPTHS = [256, 1024, 4096, 16384], 10, [0.0, 0.5, 1.0]


class NeedleLengthsSettings(Section):
    """The second text."""

    books: Path
    """A UTF-8 file that no model has seen."""


class NeedleLengthsConfig(Section):
    """Settings of `python -m experiments.needle_lengths`."""

    needle_lengths: NeedleLengthsSettings = Field(default_factory=dict, validate_default=True)


def main(_: Path | None, config: NeedleLengthsConfig) -> None:
    books = config.needle_lengths.books.resolve()
    if not books.is_file():
        raise DataError(f"{books}: no such file; give a UTF-8 text of {LENGTHS[-1]:,} tokens or more")
    for seed in SEEDS:
        for form, settings in FORMS.items():
            path = RESULTS / f"{form}_{seed}.json"
            if not path.is_file():
                versions = {"form": form, "seed": seed, "commit": git_commit(), "tost_lm": VERSION}
                result = versions | {"books_sha256": sha256_file(books)} | measured(form, settings, seed, books)
                write_atomically(path, json.dumps(result, indent=1) + "\n")


def measured(form: str, settings: list[str], seed: int, books: Path) -> dict[str, Any]:
    """Train a model, and find needles in the text that its corpus holds out and in books."""
    name = f"{form}_{seed}"
    command = ["train", "recall", *settings, f"train.seed={seed}", f"run.folder={RUNS}", f"run.name={name}"]
    run_tost(*command)
    texts = {"heldout": "heldout.shards=data/embedded/shards", "books": f"needle.haystack={books}"}
    grid = [f"needle.lengths={LENGTHS}", f"needle.samples={SAMPLES}", f"needle.depths={DEPTHS}"]
    cells = {}
    for text, words in texts.items():
        run_tost("eval", f"{RUNS}/{name}", "needle", words, *grid)
        found = read_result_file(EvaluatedCheckpoint.find(ROOT / RUNS / name).results_path(NAME))
        assert found
        cells[text] = [cell for cell in found["cells"] if cell["length"] in LENGTHS]
    return {"command": ["tost", *command], **cells}


if __name__ == "__main__":
    run_program(
        main,
        name="experiments.needle_lengths",
        doc=__doc__ or "",
        positional="[CONFIG]",
        config=NeedleLengthsConfig,
    )
