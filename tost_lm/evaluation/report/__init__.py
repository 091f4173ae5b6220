"""Reports of a run, or of several beside each other: Markdown, one self-contained HTML page, and their figures."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tost_lm.errors import ConfigError


def write_report(folder: Path) -> Path:
    """Write report.md and report.html into a run folder, and their figures into its eval/report/.

    Returns:
        The path of report.html.

    Raises:
        ConfigError: it is no run folder, or the report's packages are not installed.
        CheckpointError: the run has no valid checkpoint.
    """
    _require_packages()
    from tost_lm.evaluation.report.page import Page
    from tost_lm.evaluation.report.record import RunRecord
    from tost_lm.evaluation.report.run import all_sections, title

    run = RunRecord.read(folder)
    page = Page(title(run), figures="eval/report")
    return page.write(folder, all_sections(run, page))


def write_comparison(folders: Sequence[Path], target: Path) -> Path:
    """Write report.md and report.html of several runs into the folder `target`, and their figures into its figures/.

    Returns:
        The path of report.html.

    Raises:
        ConfigError: one is no run folder, has no metrics or is there twice, `target` is a run folder itself, or the
            report's packages are not installed.
    """
    _require_packages()
    from tost_lm.evaluation.report.comparison import all_sections, title
    from tost_lm.evaluation.report.groups import grouped, read_runs
    from tost_lm.evaluation.report.page import Page

    runs = read_runs(folders)
    if (target / "config.toml").exists():
        raise ConfigError(f"{target}: a run, which keeps the report of its own there; give another report.folder")
    page = Page(title(runs), figures="figures")
    return page.write(target, all_sections(grouped(runs), page))


def _require_packages() -> None:
    for package in ("markdown_it", "matplotlib"):
        if not find_spec(package):
            raise ConfigError(f"the report needs {package}: pip install 'tost-lm[report]'")
