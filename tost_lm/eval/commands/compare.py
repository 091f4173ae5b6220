"""Results of several models side by side, with published results of test sets, and which of them are comparable.

    tost compare runs/base runs/gpt2 > compared.md

Prints Markdown: a table for each test set and each retrieval task that `tost eval` has measured for any of the folders
(a run, an export, a Hugging Face model's folder), and the effective lengths. Two results are comparable if they have
the same test file and window length and, for metrics per token, the same tokenization, or were asked the same
questions. Their difference is paired by example.
"""

from pathlib import Path
from typing import NoReturn

from tost_lm.command_line import run_program
from tost_lm.config import Section


def main(paths: list[Path], config: Section) -> None:
    from tost_lm.tasks.published import side_by_side

    print(side_by_side(paths))


def run() -> NoReturn:
    run_program(main, name="tost compare", doc=__doc__ or "", positional="RUN…", config=Section)
