"""Contamination: 13-grams of words that test sets share with the training documents of a run or a shard folder.

    python -m experiments.contamination runs/base sets.lambada_openai=lambada_test.jsonl
    python -m experiments.contamination data/books/shards sets.ptb=ptb.test.txt contamination.output=overlaps.jsonl

As in appendix C of the GPT-3 paper (arXiv 2005.14165), words are compared in lower case and without punctuation, and an
example overlaps if it shares one 13-gram with a training document. Prints the number of such examples of each test set
for which a file is given, and the largest overlaps. All matches are exact. The n-grams of the test sets and a document
for each process are in memory. For a run, each of its shard folders is searched.
"""

import time
from collections.abc import Callable
from pathlib import Path

from pydantic import Field

from experiments.contamination.search import SPLIT, Contamination, measure_contamination
from tost_lm.command_line import run_program
from tost_lm.config import Section, read_toml
from tost_lm.data.shards import Shards
from tost_lm.data.workers import available_cores
from tost_lm.errors import ConfigError, printable
from tost_lm.files import write_rows
from tost_lm.tasks.data_sets import DATA_SETS, Sets
from tost_lm.tasks.registry import FAMILIES  # noqa: F401, declares the test sets

SHOWN = 10
PROGRESS_SECONDS = 10.0


class OverlapConfig(Section):
    """Where the training text is read and the result is written."""

    output: Path | None = None
    """New file of JSON lines with every example that overlaps; unset: only the largest overlaps are printed."""
    workers: int | None = Field(default=None, gt=0)
    """Number of processes; unset: all cores. The result does not depend on it."""


class ContaminationConfig(Section):
    """Settings of `experiments.contamination`."""

    contamination: OverlapConfig = Field(default_factory=OverlapConfig)
    sets: Sets = Field(default_factory=dict)
    """The files of test sets by name, in their published format."""


def main(path: Path, config: ContaminationConfig) -> None:
    output = config.contamination.output
    readers = {name: data_set.texts for name, data_set in DATA_SETS.items() if data_set.texts}
    if not config.sets:
        raise ConfigError(f"sets: no test set; give a file, for example sets.{next(iter(readers))}=FILE")
    if unknown := [name for name in config.sets if name not in readers]:
        raise ConfigError(f"sets.{unknown[0]}: has no separate examples; leave it out, or give {', '.join(readers)}")
    if output and output.exists():
        raise ConfigError(f"contamination.output {output}: exists already; give a new file")
    opened = [Shards.open(folder) for folder in training_folders(path)]
    texts = {name: list(readers[name](DATA_SETS[name].find_file(config.sets).path)) for name in config.sets}
    workers = config.contamination.workers or available_cores()
    rows = []
    for shards in opened:
        result = measure_contamination(shards, texts, workers, progress_of(shards))
        print_result(shards, result)
        rows += [{"shards": str(shards.folder), **overlap._asdict()} for overlap in result.overlaps]
    if output:
        write_rows(output, rows)
        print(f"\nwritten to {output}: {len(rows):,} overlapping examples")


def training_folders(path: Path) -> list[Path]:
    """The shard folders that a run is trained on, or the shard folder itself."""
    if not (path / "config.toml").is_file():
        return [path]
    data = read_toml(path / "config.toml")["data"]
    return [Path(folder) for folder in data.get("mixture", [data.get("folder")])]


def progress_of(shards: Shards) -> Callable[[int], None]:
    """Prints the number of tokens read so far, every few seconds."""
    total, printed = shards.manifest["splits"][SPLIT]["tokens"], time.monotonic()

    def report(read: int) -> None:
        nonlocal printed
        if time.monotonic() - printed > PROGRESS_SECONDS:
            printed = time.monotonic()
            print(f"{shards.folder}: {read:,} of {total:,} tokens", flush=True)

    return report


def print_result(shards: Shards, result: Contamination) -> None:
    print(f"{shards.folder}:\n{'test set':<18} {'examples':>9} {'of 13 words':>12} {'overlapping':>12}")
    for name, totals in result.totals.items():
        fraction = totals.overlapping / max(1, totals.checked)
        print(f"{name:<18} {totals.examples:>9,} {totals.checked:>12,} {totals.overlapping:>12,} ({fraction:.2%})")
    for overlap in result.overlaps[:SHOWN]:
        print(
            f"\n{overlap.set} example {overlap.example:,}: {overlap.found:,} of {overlap.ngrams:,} 13-grams; the most "
            f"frequent is in {overlap.documents:,} documents, first in {SPLIT} document {overlap.document:,}:\n"
            f"  {printable(overlap.text)}"
        )


if __name__ == "__main__":
    run_program(
        main, name="experiments.contamination", doc=__doc__ or "", positional="FOLDER", config=ContaminationConfig
    )
