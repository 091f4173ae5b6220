"""The report of a run: what it is, its loss, held-out score, needle grid and a generated text, with their hashes.

    python -m eval.report runs/demo

Writes report.html, one self-contained page, and report.md with its pictures in eval/report/. What was not
evaluated yet is left open, with the command that does it.
"""

from pathlib import Path

from tost_lm.config import run_program
from tost_lm.evaluation.config import ReportConfig


def main(path: Path, config: ReportConfig) -> None:
    from tost_lm.evaluation.report import write_report

    print(f"wrote {write_report(path)}")


if __name__ == "__main__":
    run_program(main, name="eval.report", doc=__doc__ or "", takes="RUN", config=ReportConfig)
