"""What wandb and TensorBoard have in common: which of them is used, and the values of the JSONL files they show."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tost_lm.training.config import RunConfig

Row = Mapping[str, Any]
"""Values by name, with `step`; a value may be None."""


def loggers_in_use(run: RunConfig) -> list[str]:
    """`run.loggers`, without wandb if WANDB_MODE disables it."""
    return [name for name in run.loggers if name != "wandb" or os.environ.get("WANDB_MODE") != "disabled"]


def validation_values(row: Row) -> Row:
    """The values of a row of validation.jsonl."""
    losses = zip(row["position_ends"], row["loss_by_position"], strict=True)
    by_position = {f"validation/loss_by_position/{end}": loss for end, loss in losses}
    return {"step": row["step"], "validation/loss": row["loss"], **by_position}


def evaluation_values(row: Row) -> Row:
    """The headline of a row of evaluations.jsonl."""
    headline = row["headline"]
    return {"step": row["step"], f"evaluation/{row['protocol']}/{headline}": row[headline]}


def merge_by_step(metrics: Sequence[Row], validation: Sequence[Row], evaluations: Sequence[Row]) -> dict[int, Row]:
    """The values of all rows of the three files, in the order of their steps."""
    merged: dict[int, Row] = {}
    for row in [*metrics, *map(validation_values, validation), *map(evaluation_values, evaluations)]:
        merged[row["step"]] = {**merged.get(row["step"], {}), **row}
    return dict(sorted(merged.items()))
