"""Print what Muon gains over AdamW, seed by seed: nats at equal tokens, and tokens to equal loss.

PYTHONPATH=. python docs/equal_loss.py RUN…

The run folders have one length with AdamW, and several with Muon, one of them that of AdamW. Losses are those of the
last validation of a run. Between two lengths of Muon, the loss is taken to be linear in the logarithm of the tokens.
"""

import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev

from benchmarks.forms.tables import T_QUANTILES
from tost_lm.config import load_config
from tost_lm.files import read_rows
from tost_lm.markdown import table
from tost_lm.training import PretrainConfig

Losses = dict[str, dict[int, dict[int, float]]]
"""Last validation loss by optim.kind, seed and tokens."""


def read(folders: Sequence[Path]) -> Losses:
    losses: Losses = {"adamw": {}, "muon": {}}
    for folder in folders:
        config, last = load_config(PretrainConfig, folder / "config.toml"), read_rows(folder / "validation.jsonl")[-1]
        losses[config.optim.kind].setdefault(config.train.seed, {})[last["step"] * config.batch_tokens] = last["loss"]
    return losses


def tokens_to(loss: float, curve: dict[int, float]) -> float:
    """Tokens at which the curve has this loss; nan outside its range."""
    points = sorted(curve.items())
    for (few, high), (many, low) in pairwise(points):
        if high >= loss >= low:
            return few * (many / few) ** ((high - loss) / (high - low))
    return math.nan


def with_interval(values: Sequence[float]) -> str:
    """The mean with its 95 % t-interval."""
    return f"{mean(values):.3f} ± {T_QUANTILES[len(values)] * stdev(values) / math.sqrt(len(values)):.3f}"


def compare(folders: Sequence[Path]) -> str:
    """A Markdown row for each seed, and means."""
    losses, rows = read(folders), []
    for seed, of_adamw in sorted(losses["adamw"].items()):
        ((tokens, loss),) = of_adamw.items()
        curve = losses["muon"][seed]
        rows.append((loss, curve[tokens], curve[tokens] - loss, tokens_to(loss, curve) / tokens))
    cells = [[str(seed), *(f"{x:.3f}" for x in row)] for seed, row in zip(sorted(losses["adamw"]), rows, strict=True)]
    means = ["mean", *(with_interval(column) for column in zip(*rows, strict=True))]
    return table(("seed", "AdamW", "Muon", "difference", "fraction of tokens to equal loss"), [*cells, means])


if __name__ == "__main__":
    print(compare([Path(word) for word in sys.argv[1:]]))
