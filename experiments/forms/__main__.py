"""Slot memory and other mixers: a run for each model, learning rate and seed, in the stages of experiments.forms.sweep.

    python -m experiments.forms
    python -m experiments.forms forms.tables=true

Every finished run is a file in experiments/forms/results, and is not repeated. A run in progress keeps its state in
runs/forms every ten minutes, and the same command resumes it. Two processes share the runs. Each run uses one thread.
Prepare the text first:

    tost prepare tokenizer corpus.source=BOOKS corpus.valid_fraction=0.1 tokenizer.path=runs/forms/1024.model \\
        tokenizer.vocab_size=1024 tokenizer.sample_bytes=10000000 shards.folder=runs/forms/shards-1024
    tost prepare shards corpus.source=BOOKS corpus.valid_fraction=0.1 tokenizer.path=runs/forms/1024.model \\
        tokenizer.vocab_size=1024 tokenizer.sample_bytes=10000000 shards.folder=runs/forms/shards-1024

Output: the tables of all finished runs, and the hours of one core that they took.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field

from experiments.forms.sweep import Result, Run, startable
from experiments.forms.tables import tables
from tost_lm.config import Section, run_program
from tost_lm.files import write_atomically

FOLDER = Path("experiments/forms/results")
T, BATCH, WIDTH = 512, 2, 128
"""Tokens of a sequence of text, sequences of a step, and channels."""


class FormsSection(Section):
    """Which runs, and where their state is kept."""

    tables: bool = False
    """Print the tables of the finished runs, and stop."""
    state: Path = Path("runs/forms")
    """Folder of the token shards, shards-1024, and of the state of runs in progress."""
    runs: int | None = Field(default=None, gt=0)
    """Stop after as many runs; unset: when none can start."""


class FormsConfig(Section):
    """Settings of `experiments.forms`."""

    forms: FormsSection = FormsSection()


def path_of(run: Run) -> Path:
    sizes = f"{run['pairs']}_{run['state']}" if "pairs" in run else f"{run['tokens'] / 1e6:g}M"
    return FOLDER / f"{run['stage']}_{sizes}_lr{run['lr']:g}_{run['name']}_{run['seed']}.json"


def finished() -> list[Result]:
    return [json.loads(path.read_bytes()) for path in sorted(FOLDER.glob("*.json"))]


def main(_: Path | None, config: FormsConfig) -> None:
    done = 0
    while not config.forms.tables and done != config.forms.runs:
        for run in startable(finished()):
            with claimed(config.forms.state / f"{path_of(run).stem}.lock") as is_ours:
                if is_ours and not path_of(run).exists():
                    measure(run, config.forms.state)
                    done += 1
                    break  # its result may have made others possible
        else:
            break
    print(tables(finished()))


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Whether this process has the lock of a run; another one may be measuring it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
        path.unlink()


def measure(run: Run, folder: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(run["seed"])
    print(path_of(run).stem, flush=True)
    result = (_recall if "pairs" in run else _text)(run, folder)
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_atomically(path_of(run), json.dumps({"run": run, **result}, indent=1) + "\n")
    shown = {key: round(value, 4) for key, value in result.items() if isinstance(value, float)}
    print(f"{path_of(run).stem}: {shown}", flush=True)


def _text(run: Run, folder: Path) -> dict[str, Any]:
    from experiments.forms import text
    from experiments.forms.catalog import forms_of
    from experiments.forms.lm import FormLM
    from experiments.training import train
    from tost_lm.data.shards import Shards
    from tost_lm.optim.settings import OptimConfig

    shards = folder / "shards-1024"
    forms = forms_of(run["name"], len(run["forms"]))
    model, steps = FormLM(forms, WIDTH, Shards.open(shards).vocab_size), run["tokens"] // (T * BATCH)
    loss_of = text.loss_of_windows(model, text.split_tokens(shards, "train"), steps, BATCH, T, run["seed"])
    optim = OptimConfig(lr=run["lr"], min_lr=run["lr"] / 10)
    trained = train(model, optim, steps, loss_of, folder / f"{path_of(run).stem}.pt")
    valid = text.split_tokens(shards, "valid")
    measured = text.measures(model, valid, T, is_screening=run["stage"] == "screen")
    return {**measured, **_sizes(model, forms), **trained}


def _recall(run: Run, folder: Path) -> dict[str, Any]:
    from experiments.forms import recall
    from experiments.forms.catalog import forms_of
    from experiments.forms.lm import FormLM
    from experiments.mqar import evaluate, loss_of_examples
    from experiments.training import train
    from tost_lm.optim.settings import OptimConfig

    mqar, forms = recall.settings(run["pairs"]), forms_of(run["name"], recall.LAYERS, run["state"])
    model = FormLM(forms, recall.WIDTH, mqar.vocab_size)
    loss_of = loss_of_examples(model, mqar, recall.BATCH, run["seed"])
    optim = OptimConfig(lr=run["lr"], min_lr=run["lr"] / 10, warmup_steps=150, weight_decay=0.0)
    saved = folder / f"{path_of(run).stem}.pt"
    trained = train(model, optim, recall.STEPS, loss_of, saved, lambda: recall.is_learned(model, mqar))
    at_lengths = recall.at_lengths(model, mqar) if run["stage"] == "hybrids-recall" else {}
    return {**evaluate(model, mqar, recall.BATCH), **at_lengths, **_sizes(model, forms), **trained}


def _sizes(model: Any, forms: list[Any]) -> dict[str, Any]:
    """Parameters, channels of the MLPs, and the numbers that decoding keeps for each layer; None: they grow."""
    return {
        "parameters": model.parameter_count(),
        "mlp_channels": model.hidden,
        "state_numbers": [form.state_numbers for form in forms],
        "tap_numbers": [form.tap_numbers for form in forms],
    }


if __name__ == "__main__":
    run_program(main, name="experiments.forms", doc=__doc__ or "", positional="[CONFIG]", config=FormsConfig)
