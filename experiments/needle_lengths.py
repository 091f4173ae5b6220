"""Train the model of the recipe `recall` with three kinds of layers, and find needles beyond the trained length.

    make demo                                    (once: the corpora embedded and passages)
    python -m experiments.needle_lengths BOOKS.txt
    python docs/draw.py

BOOKS.txt is any text that no model has seen. Trainings are in runs/needle_lengths, results in results/needle_lengths, a
file for each form and seed; one that exists is not measured again.
"""

import json
import sys
from pathlib import Path
from typing import Any

from experiments.commands import ROOT, run_tost
from tost_lm.errors import DataError
from tost_lm.files import sha256_file, write_atomically
from tost_lm.inference.evaluated import EvaluatedCheckpoint, read_result_file
from tost_lm.tasks.needle import NAME
from tost_lm.version import VERSION, git_commit

RESULTS, RUNS = ROOT / "results/needle_lengths", "runs/needle_lengths"
FORMS = {
    "delta": ["model.pattern=DA"],
    "tssa": ["model.pattern=TA"],
    "softmax": ["model.pattern=A", "model.softmax.rope_theta=1e4"],
}
"""Two layers: of the delta rule and of softmax without positions, as in the recipe; TSSA in place of the delta rule;
softmax with a rotary embedding."""
SEEDS = range(3)
LENGTHS, SAMPLES, DEPTHS = [256, 1024, 4096, 16384], 10, [0.0, 0.5, 1.0]


def main(books: Path) -> None:
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
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]).resolve())
