"""Figures of a report in wandb: each as an image and its data as a table."""

import io
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tost_lm.errors import ConfigError
from tost_lm.evaluation.report.charts import Chart


def log_to_wandb(name: str, folder: Path, charts: Mapping[str, Chart]) -> None:
    """Log to a separate wandb run in the group `name`, below `folder`; offline unless WANDB_MODE is set.

    Raises:
        ConfigError: wandb is not installed or does not start in the mode of WANDB_MODE.
    """
    if not find_spec("wandb"):
        raise ConfigError("report.wandb needs a package: wandb; run pip install wandb")
    import wandb
    from PIL import Image

    mode = os.environ.get("WANDB_MODE", "offline")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        run = wandb.init(
            project="tost_lm",
            name=f"{name} report",
            group=name,
            job_type="report",
            dir=folder,
            mode=mode,  # pyright: ignore[reportArgumentType]
            # The metadata would contain the command line and the repository's address.
            settings=wandb.Settings(silent=True, console="off", x_disable_meta=True, disable_git=True),
        )
    except (wandb.Error, ValueError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"WANDB_MODE={mode}: {why}; set WANDB_MODE to offline or disabled") from None
    shown: dict[str, Any] = {}
    for path, chart in charts.items():
        figure = Path(path).name
        shown[figure] = wandb.Image(Image.open(io.BytesIO(chart.files()["png"])))
        # wandb needs one type per column.
        cells: Any = [["" if cell is None else str(cell) for cell in row] for row in chart.rows]
        shown[f"{figure}_table"] = wandb.Table(columns=list(chart.header), data=cells)
    run.log(shown)
    run.finish()
    wandb.teardown()  # otherwise child processes look for its service
