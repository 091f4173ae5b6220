"""The report of a run: its losses, optimizer, speed, events, and what was measured of it.

    python -m eval.report runs/demo

Writes report.html, one self-contained page, and report.md, with each figure as PNG, PDF and CSV in eval/report/ (as
LaTeX, too, where it is a table); with report.wandb=true also to wandb. What was not evaluated yet is left open, with
the command that does it. Of a model folder it shows what was measured.

    python -m eval.report runs/small-seed0 runs/small-seed1 runs/large

Compares several: runs that differ in the seed alone are a group, shown as mean ± standard error; the settings in which
groups differ name them. It goes into a folder of its own, report.folder.
"""

from pathlib import Path

from tost_lm.config import run_program
from tost_lm.errors import ConfigError
from tost_lm.evaluation.config import ReportConfig


def main(paths: list[Path], config: ReportConfig) -> None:
    from tost_lm.evaluation.report import write_comparison, write_report

    if len(paths) > 1:
        written = write_comparison(paths, config.report.folder_for(paths), to_wandb=config.report.wandb)
    elif config.report.folder is None:
        written = write_report(paths[0], to_wandb=config.report.wandb)
    else:
        raise ConfigError(f"report.folder: is for several runs; the report of {paths[0]} lies in that folder itself")
    print(f"wrote {written}")


if __name__ == "__main__":
    run_program(main, name="eval.report", doc=__doc__ or "", takes="RUN…", config=ReportConfig)
