"""Tables of the Long-Range Arena: the plan of the models, and their results beside controls and published results."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tost_lm.eval.small_models import Result
from tost_lm.extra.lra.experiment import Variant, variants
from tost_lm.extra.lra.settings import BAG_OF_TOKENS, LraConfig
from tost_lm.extra.lra.tasks import Task
from tost_lm.markdown import table

LRA_PAPER = "LRA paper (arXiv 2011.04006)"
S4_PAPER = "S4 paper (arXiv 2111.00396)"
TOST_PAPER = "ToST paper (arXiv 2412.17810)"
TASKS = ("listops", "text", "retrieval", "image", "pathfinder")
PUBLISHED = {
    ("Transformer", LRA_PAPER): (36.37, 64.27, 57.46, 42.44, 71.40),
    ("S4", S4_PAPER): (59.60, 86.82, 90.90, 88.65, 94.20),
    ("ToST", TOST_PAPER): (37.25, 66.75, 79.46, 46.62, 69.41),
}
"""Published accuracies of `TASKS` on the test split, in percent. Sizes and trainings are others."""


def plan_table(config: LraConfig, task: Task, rows: Sequence[Mapping[str, Any]]) -> str:
    """The planned trainings: a row for each mixer, and the sizes of the data and of all trainings below."""
    cells = [
        (str(row["mixer"]), f"{row['parameters']:,}", f"{row['mlp_width']:,}", f"{row['flops']:.2e}") for row in rows
    ]
    header = ("mixer", "parameters", "MLP channels", "FLOPs of a training")
    lra, of_each = config.lra, len(config.lra.learning_rates) + len(config.lra.seeds) - 1
    flops = sum(row["flops"] for row in rows)
    total = len(lra.pretraining) * of_each * flops
    examples = " / ".join(f"{len(split.labels):,}" for split in (task.train, task.valid, task.test))
    lines = [
        f"{config.data.task}: {examples} examples, {task.mean_tokens:,.0f} tokens per document on average.",
        f"{len(variants(config)) * of_each:,} trainings of {config.train.steps:,} steps of {config.train.batch_size} "
        f"examples: each model at the learning rates {_listed(lra.learning_rates)} with seed {lra.seeds[0]}, then at "
        f"the best one with {len(lra.seeds) - 1} other seeds.",
    ]
    if True in lra.pretraining:
        total += len(lra.seeds) * flops * config.pretraining.steps / config.train.steps
        count = len(lra.mixers) * len(lra.seeds)
        lines.append(f"{count} self-pretrainings of {config.pretraining.steps:,} steps.")
    return f"{table(header, cells)}\n\n{' '.join(lines)} Together {total:.2e} FLOPs."


def results_table(config: LraConfig, task: Task, results: Mapping[Variant, Sequence[Result]]) -> str:
    """A row for each model with the mean over its seeds, the difference to the bag of tokens of the same seeds, and
    published results."""
    bag = results.get(Variant(BAG_OF_TOKENS, False))
    rows = []
    for variant in variants(config):
        of_seeds = results[variant]
        lowest = min(result["accuracy"] for result in of_seeds)
        rows.append(
            (
                variant.mixer,
                "yes" if variant.pretrained else "no",
                f"{of_seeds[0]['identity']['lr']:g}",
                _mean_and_error(accuracies(of_seeds), of_seeds[0]["accuracy_standard_error"], ".2%"),
                f"{lowest:.2%}",
                "" if bag is None else _above(of_seeds, bag),
                f"{of_seeds[0]['parameters']:,}",
                f"{np.mean([result['seconds'] for result in of_seeds]):,.0f}",
            )
        )
    header = (
        "mixer", "self-pretrained", "learning rate", "test accuracy", "lowest of seeds", "above bag of tokens",
        "parameters", "seconds of training",
    )  # fmt: skip
    number = TASKS.index(config.data.task)
    published = [(model, f"{values[number]:.2f}%", source) for (model, source), values in PUBLISHED.items()]
    seeds = len(config.lra.seeds)
    over = "seeds" if seeds > 1 else "examples"
    return (
        f"{table(header, rows)}\n\n{seeds} seed{'s' if seeds > 1 else ''}; ± is the standard error over {over}; the "
        f"difference is taken seed by seed. The most frequent class of the training split has "
        f"{task.majority_accuracy:.2%}. N is the bag of tokens.\n\nPublished at full size, not comparable with reduced "
        f"data or other sizes:\n\n{table(('model', 'test accuracy', 'source'), published)}"
    )


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def accuracies(results: Sequence[Result]) -> np.ndarray:
    return np.array([result["accuracy"] for result in results])


def _above(results: Sequence[Result], bag: Sequence[Result]) -> str:
    if results is bag:
        return ""
    difference = accuracies(results) - accuracies(bag)
    return _mean_and_error(difference, None, "+.2%")


def _mean_and_error(values: np.ndarray, error_of_one: float | None, form: str) -> str:
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else error_of_one
    return f"{values.mean():{form}}" + ("" if error is None else f" ± {error:.2%}")
