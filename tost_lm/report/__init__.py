"""Reports of one run or of several runs: Markdown, a self-contained HTML page, and figures."""

from collections.abc import Sequence
from pathlib import Path

from tost_lm.errors import ConfigError


def write_report(folder: Path, *, to_wandb: bool = False) -> Path:
    """Write report.md and report.html into a run folder or model folder, and the figures into its eval/report/.

    `to_wandb` also logs the figures to wandb, below eval/.
    Returns the path of report.html.

    Raises:
        ConfigError: `folder` is neither, or a package is not installed; or as `log_to_wandb`.
        CheckpointError: the run has no valid checkpoint, or the model folder is damaged.
    """
    from tost_lm.page import Page, log_to_wandb, require_packages
    from tost_lm.report.record import RunRecord, is_export
    from tost_lm.report.run import export_sections, run_sections
    from tost_lm.tasks.sections import EvaluatedModel

    require_packages()
    if is_export(folder):
        name = folder.resolve().name
        page = Page(f"Model {name}", figures="eval/report")
        written = page.write(folder, export_sections(EvaluatedModel(folder), page))
    else:
        run = RunRecord.read(folder)
        name = run.config["run"]["name"]
        page = Page(f"Run {name}", figures="eval/report")
        written = page.write(folder, run_sections(run, page))
    if to_wandb:
        log_to_wandb(name, folder / "eval", page.charts)
    return written


def write_comparison(folders: Sequence[Path], target: Path, *, to_wandb: bool = False) -> Path:
    """Write report.md and report.html of several runs into the folder `target`, and the figures into its figures/.

    `to_wandb` also logs the figures to wandb, in `target`. Returns the path of report.html.

    Raises:
        ConfigError: a folder is not a run folder, has no metrics or is listed twice; `target` is a run folder; a
            package is not installed; or as `log_to_wandb`.
    """
    from tost_lm.page import Page, log_to_wandb, require_packages
    from tost_lm.report.comparison import comparison_sections
    from tost_lm.report.record import group_runs, read_runs

    require_packages()
    runs = read_runs(folders)
    if (target / "config.toml").exists():
        raise ConfigError(f"report.folder is a run folder: {target}; choose another folder")
    page = Page(f"Comparison of {len(runs)} runs", figures="figures")
    written = page.write(target, comparison_sections(group_runs(runs), page))
    if to_wandb:
        log_to_wandb(target.name, target, page.charts)
    return written
