"""Reports of a run, or of several beside each other: Markdown, one self-contained HTML page, and their figures."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tost_lm.errors import ConfigError


def write_report(folder: Path, *, to_wandb: bool = False) -> Path:
    """Write report.md and report.html into a run folder or an export, and their figures into its eval/report/.

    Args:
        to_wandb: as `log_to_wandb`, below its eval/.

    Returns:
        The path of report.html.

    Raises:
        ConfigError: it is neither, or the report's packages are not installed; or as `log_to_wandb`.
        CheckpointError: the run has no valid checkpoint, or the export is damaged.
    """
    _require_packages()
    from tost_lm.evaluation.report.page import Page
    from tost_lm.evaluation.report.record import Evaluated, RunRecord, is_export
    from tost_lm.evaluation.report.run import all_sections, sections_of_export, title
    from tost_lm.evaluation.report.wandb_page import log_to_wandb

    if is_export(folder):
        name = folder.resolve().name
        page = Page(f"Export {name}", figures="eval/report")
        written = page.write(folder, sections_of_export(Evaluated(folder), page))
    else:
        run = RunRecord.read(folder)
        name = run.config["run"]["name"]
        page = Page(title(run), figures="eval/report")
        written = page.write(folder, all_sections(run, page))
    if to_wandb:
        log_to_wandb(name, folder / "eval", page.charts)
    return written


def write_comparison(folders: Sequence[Path], target: Path, *, to_wandb: bool = False) -> Path:
    """Write report.md and report.html of several runs into the folder `target`, and their figures into its figures/.

    Args:
        to_wandb: as `log_to_wandb`, in `target`.

    Returns:
        The path of report.html.

    Raises:
        ConfigError: one is no run folder, has no metrics or is there twice, `target` is a run folder itself, or the
            report's packages are not installed; or as `log_to_wandb`.
    """
    _require_packages()
    from tost_lm.evaluation.report.comparison import all_sections, title
    from tost_lm.evaluation.report.groups import grouped, read_runs
    from tost_lm.evaluation.report.page import Page
    from tost_lm.evaluation.report.wandb_page import log_to_wandb

    runs = read_runs(folders)
    if (target / "config.toml").exists():
        raise ConfigError(f"{target}: a run, which keeps the report of its own there; give another report.folder")
    page = Page(title(runs), figures="figures")
    written = page.write(target, all_sections(grouped(runs), page))
    if to_wandb:
        log_to_wandb(target.name, target, page.charts)
    return written


def _require_packages() -> None:
    for package in ("markdown_it", "matplotlib"):
        if not find_spec(package):
            raise ConfigError(f"the report needs {package}: pip install 'tost-lm[report]'")
