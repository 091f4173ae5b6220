"""Reports of one run or of several runs: Markdown, a self-contained HTML page, and figures."""

from collections.abc import Sequence
from pathlib import Path

from tost_lm.errors import ConfigError


def write_report(folder: Path) -> Path:
    """Write report.md and report.html into a run folder or model folder, and the figures into its eval/report/.

    Returns the path of report.html.

    Raises:
        ConfigError: `folder` is neither, or a package is not installed.
        CheckpointError: the run has no valid checkpoint, or the model folder is damaged.
    """
    from tost_lm.page import Page, require_packages
    from tost_lm.report.record import RunRecord, is_export
    from tost_lm.report.run import export_sections, run_sections
    from tost_lm.tasks.evaluated_model import EvaluatedModel

    require_packages()
    if is_export(folder):
        page = Page(f"Model {folder.resolve().name}", figures="eval/report")
        return page.write(folder, export_sections(EvaluatedModel(folder), page))
    run = RunRecord.read(folder)
    page = Page(f"Run {run.config['run']['name']}", figures="eval/report")
    return page.write(folder, run_sections(run, page))


def write_comparison(folders: Sequence[Path], target: Path) -> Path:
    """Write report.md and report.html of several runs into the folder `target`, and the figures into its figures/.

    Returns the path of report.html.

    Raises:
        ConfigError: a folder is not a run folder, has no metrics or is listed twice; `target` is a run folder; or a
            package is not installed.
    """
    from tost_lm.page import Page, require_packages
    from tost_lm.report.comparison import comparison_sections
    from tost_lm.report.record import group_runs, read_runs

    require_packages()
    runs = read_runs(folders)
    if (target / "config.toml").exists():
        raise ConfigError(f"report.folder is a run folder: {target}; choose another folder")
    page = Page(f"Comparison of {len(runs)} runs", figures="figures")
    return page.write(target, comparison_sections(group_runs(runs), page))
