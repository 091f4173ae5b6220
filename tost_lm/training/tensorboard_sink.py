"""Logs a run to TensorBoard. The JSONL files are the reference; TensorBoard gets the same rows."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from tost_lm.training.config import PretrainConfig
from tost_lm.training.loggers import Row
from tost_lm.training.redaction import redact_tree


class TensorBoardSink:
    """Event files of all launches in tensorboard/, of which TensorBoard shows each step once.

    The file of a launch tells TensorBoard to hide the later steps of earlier launches.
    """

    def __init__(self, config: PretrainConfig, kept: Mapping[int, Row], warn: Callable[[str], None]) -> None:
        """
        Args:
            kept: the values of earlier launches, by step; logged if there are no event files yet.
            warn: called with a line if TensorBoard fails; training continues without it.
        """
        from torch.utils.tensorboard import SummaryWriter

        folder = config.run_folder / "tensorboard"
        is_new = not any(folder.glob("events.out.tfevents.*"))
        self._warn, self._failed = warn, False
        self._writer: Any = SummaryWriter(folder, purge_step=None if is_new else max(kept, default=0) + 1)
        if is_new:
            settings = json.dumps(redact_tree(config.model_dump(mode="json")), indent=1)
            self._writer.add_text("settings", f"```\n{settings}\n```", 0)
            for row in kept.values():
                self.log(row)

    def log(self, row: Row) -> None:
        """Log the values of a step and write them to disk."""
        self._run(lambda: self._add(row))

    def close(self) -> None:
        """Close the event file."""
        self._run(self._writer.close)

    def _add(self, row: Row) -> None:
        for name, value in row.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def _run(self, action: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            action()
        except Exception as error:  # any error of its writing thread
            self._failed = True
            self._warn(f"TensorBoard failed ({error}); metrics.jsonl continues")
