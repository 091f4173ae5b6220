"""Training from token shards at a URL with a warm cache, compared with the same shards as local files.

    python -m benchmarks.storage

Runs of `tost train` of the recipe `demo` take turns, in the order local, URL, URL, local, …; the URL is file://, and a
first run fills the cache. A step's rate is that since the step before, so it contains the wait for data.
Output: a table, and all values in results/benchmarks/. With the defaults it takes about 4 minutes on 2 CPU cores.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import Field

from benchmarks import measure
from tost_lm.command_line import run_program
from tost_lm.config import Section
from tost_lm.errors import ConfigError
from tost_lm.files import read_rows

SHARDS = measure.CHECKOUT / "data/embedded/shards"


class StorageConfig(Section):
    """Length of the comparison."""

    rounds: int = Field(default=6, gt=1)
    """Runs of each kind."""
    steps: int = Field(default=40, gt=10)
    """Steps of a run; the first five are not timed."""


class StorageConfigs(Section):
    """Settings of `benchmarks.storage`."""

    storage: StorageConfig = Field(default_factory=StorageConfig)


def run(config: StorageConfigs, device: str) -> tuple[list[dict[str, Any]], str]:
    if not SHARDS.is_dir():
        raise ConfigError(f"{SHARDS}: does not exist; build it with tost prepare shards embedded")
    settings, kinds = config.storage, {"local": str(SHARDS), "URL": f"file://{SHARDS}"}
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".benchmark-") as folder:
        rate(kinds["URL"], Path(folder, "first"), Path(folder), settings.steps)
        for turn in range(settings.rounds):
            for kind in [*kinds][:: 1 if turn % 2 == 0 else -1]:
                home = Path(folder, f"{kind}_{turn}")
                rates[kind].append(rate(kinds[kind], home, Path(folder), settings.steps))
    ratios = [url / local for url, local in zip(rates["URL"], rates["local"], strict=True)]
    cell = {"tokens_per_second": rates, "ratios": ratios, **settings.model_dump()}
    rows = [{"token shards": kind, "tokens/s": f"{median(those):,.0f}"} for kind, those in rates.items()]
    low, high = measure.median_interval(ratios)
    text = (
        f"{measure.markdown_table(rows)}\n\nMedians of {settings.rounds} runs, each the median of its steps. URL to "
        f"local, run by run: {median(ratios):.3f} ({low:.3f} to {high:.3f})."
    )
    return [cell], text


def rate(shards: str, home: Path, folder: Path, steps: int) -> float:
    """Tokens per second of a new run, the median of its steps."""
    words = [
        f"data.folder={shards}", f"run.folder={home}", "run.name=timed", f"train.steps={steps}", "run.log_interval=1",
        "validation.interval=none", f"checkpoint.interval={steps}", "run.device=cpu", "run.loggers=[]",
    ]  # fmt: skip
    line = [sys.executable, "-m", "tost_lm.cli.main", "train", "demo", *words]
    environment = {**os.environ, "TOST_CACHE": str(folder / "cache")}
    subprocess.run(line, cwd=measure.CHECKOUT, env=environment, check=True, stdout=subprocess.PIPE)
    return median(row["tokens_per_second"] for row in read_rows(home / "timed/metrics.jsonl")[5:])


main = measure.benchmark("storage", run)

if __name__ == "__main__":
    run_program(main, name="benchmarks.storage", doc=__doc__ or "", positional="[CONFIG]", config=StorageConfigs)
