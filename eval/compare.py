"""Models side by side with published figures, and which of them may be compared.

    python -m eval.compare runs/base runs/gpt2 > compared.md

Prints Markdown: a table for each protocol that eval.zero_shot has measured on any of the folders (a run, an export, a
Hugging Face model's folder, or runs/NAME of one from the hub). A figure may stand beside another when both are of the
same file, read in windows of the same length, and, where the measure is by token, cut into the same tokens.
"""

from pathlib import Path

from tost_lm.config import Section, run_program


class NoSettings(Section):
    """There are none."""


def main(paths: list[Path], config: NoSettings) -> None:
    from tost_lm.evaluation.side_by_side import side_by_side

    print(side_by_side(paths))


if __name__ == "__main__":
    run_program(main, name="eval.compare", doc=__doc__ or "", takes="RUN…", config=NoSettings)
