"""TensorBoard: event files of all launches in RUN/tensorboard, of which it shows each step once.

The file of a launch tells TensorBoard to hide the later steps of earlier launches.
"""

import json
from typing import Any

from tost_lm.pretrain.loggers import LoggedLaunch, Logger, Row


class TensorBoardLogger(Logger):
    package, extra = "tensorboard", "tensorboard"

    def __init__(self, launch: LoggedLaunch, settings: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(launch.folder / "tensorboard", purge_step=launch.first_step + 1)
        self._writer.add_text("settings", f"```\n{json.dumps(launch.config, indent=1)}\n```", launch.first_step)

    def log(self, row: Row) -> None:
        """Write the values of a step to disk."""
        for name, value in row.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


LOGGER = TensorBoardLogger
