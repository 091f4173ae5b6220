"""Report of a run, or comparison of several runs.

    tost report runs/demo

Writes report.html (one self-contained page) and report.md with training, validation and all evaluation results. Each
figure is in eval/report/ as PNG and CSV. A model folder works like a run folder.

    tost report runs/small-seed0 runs/small-seed1 runs/large

Compares several runs, for example a run and its branches. Runs that differ only in the seed form a group, shown as mean
± standard error. The report is written to report.folder.
"""

from pathlib import Path
from typing import NoReturn

from tost_lm.command_line import run_program
from tost_lm.errors import ConfigError
from tost_lm.report.settings import ReportConfig


def main(paths: list[Path], config: ReportConfig) -> None:
    from tost_lm.report import write_comparison, write_report

    if len(paths) > 1:
        written = write_comparison(paths, config.report.folder_for(paths))
    elif config.report.folder is None:
        written = write_report(paths[0])
    else:
        raise ConfigError(f"report.folder needs several runs: {paths[0]}; leave it out or add runs")
    print(f"wrote {written}")


def run() -> NoReturn:
    run_program(main, name="tost report", doc=__doc__ or "", positional="RUN…", config=ReportConfig)
