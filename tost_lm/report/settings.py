"""Settings of `tost report`."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from tost_lm.config import Section

NAME_CHARACTERS = 100


class PagesConfig(Section):
    """Output of a report."""

    folder: Path | None = None
    """Folder of a report of several runs; default: reports/A-B-C with the names of the run folders, or reports/A-and-9-more. The report of one run is in its folder."""

    def folder_for(self, runs: Sequence[Path]) -> Path:
        names = [run.resolve().name for run in runs]
        short, long = "-".join(names), f"{names[0]}-and-{len(names) - 1}-more"
        return self.folder or Path("reports") / (short if len(short) <= NAME_CHARACTERS else long)


class ReportConfig(Section):
    """Settings of `tost report`."""

    report: PagesConfig = Field(default_factory=PagesConfig)
