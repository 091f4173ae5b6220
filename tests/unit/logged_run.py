"""Steps of a run without a model, for tests of its loggers."""

from typing import Any

from pydantic import Field

from tost_lm.pretrain.metrics import Metrics
from tost_lm.pretrain.settings import PretrainConfig

SECRET = "planted-3f9a"
SETTINGS: dict[str, Any] = {
    "model": {"layers": 1, "heads": 1, "width": 4, "vocab_size": 8, "max_positions": 8},
    "data": {"folder": "shards"},
    "train": {"steps": 20, "global_batch_size": 4, "micro_batch_size": 2, "seq_len": 8},
    "run": {"name": "r", "log_interval": 1},
}


class WithSecret(PretrainConfig):
    hub: dict[str, str] = Field(default={"token": SECRET, "user": "planted-user"})


def settings_of(**run: Any) -> dict[str, Any]:
    return {**SETTINGS, "run": {**SETTINGS["run"], **run}}


def log_steps(metrics: Metrics, first: int, last: int, grad_norm: float = 0.5) -> None:
    """The loss of a step says in which launch it was trained; every fourth is followed by both measurements."""
    for step in range(first, last + 1):
        metrics.step(step, {"loss": 1000.0 * first + step, "lr": 1e-3, "grad_norm": grad_norm}, 1e9)
        if step % 4 == 0:
            metrics.validation(
                {"step": step, "loss": 2.5, "position_ends": [4, 8], "loss_by_position": [3.5, None], "tokens": 32}
            )
            figures = {"accuracy": step / 100, "accuracy_standard_error": 0.01}
            names = {"protocol": "a@b", "headline": "accuracy", "data_sha256": "a"}
            metrics.evaluation({"step": step, **names, **figures})
