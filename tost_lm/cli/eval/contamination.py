"""Contamination: 13-grams of words that test sets share with the training documents of a shard folder.

    tost eval contamination data/books/shards sets.lambada_openai=lambada_test.jsonl
    tost eval contamination data/books/shards sets.wikitext2=wiki.test.raw contamination.output=overlaps.jsonl

As in appendix C of the GPT-3 paper (arXiv 2005.14165), words are compared in lower case and without punctuation, and an
example overlaps if it shares one 13-gram with a training document. Prints the number of such examples of each test set
for which a file is given, and the largest overlaps. All matches are exact. The n-grams of the test sets and a document
for each process are in memory.
"""

import time
from pathlib import Path
from typing import NoReturn

from tost_lm.config import run_program
from tost_lm.errors import ConfigError
from tost_lm.evaluation.config import ContaminationConfig

SHOWN = 10
PROGRESS_SECONDS = 10.0


def main(folder: Path, config: ContaminationConfig) -> None:
    from tost_lm.data.processes import available_cores
    from tost_lm.data.shards import Shards
    from tost_lm.data.sources.messages import printable
    from tost_lm.evaluation.contamination import SPLIT, measure_contamination
    from tost_lm.evaluation.data_sets import find_set_file
    from tost_lm.evaluation.protocols import READERS
    from tost_lm.files import write_rows

    output = config.contamination.output
    given = [name for name, path in config.sets if path is not None]
    if not given:
        raise ConfigError(f"sets: no test set; give a file, for example sets.{next(iter(READERS))}=FILE")
    if unknown := [name for name in given if name not in READERS]:
        raise ConfigError(f"sets.{unknown[0]}: has no separate examples; leave it out, or give {', '.join(READERS)}")
    if output and output.exists():
        raise ConfigError(f"contamination.output {output}: exists already; give a new file")
    shards = Shards.open(folder)
    texts = {name: list(READERS[name](find_set_file(name, config.sets).path)) for name in given}
    total, printed = shards.manifest["splits"][SPLIT]["tokens"], time.monotonic()

    def report(read: int) -> None:
        nonlocal printed
        if time.monotonic() - printed > PROGRESS_SECONDS:
            printed = time.monotonic()
            print(f"{read:,} of {total:,} tokens", flush=True)

    result = measure_contamination(shards, texts, config.contamination.workers or available_cores(), report)
    print(f"{'test set':<18} {'examples':>9} {'of 13 words':>12} {'overlapping':>12}")
    for name, totals in result.totals.items():
        fraction = totals.overlapping / max(1, totals.checked)
        print(f"{name:<18} {totals.examples:>9,} {totals.checked:>12,} {totals.overlapping:>12,} ({fraction:.2%})")
    for overlap in result.overlaps[:SHOWN]:
        print(
            f"\n{overlap.set} example {overlap.example:,}: {overlap.found:,} of {overlap.ngrams:,} 13-grams; the most "
            f"frequent is in {overlap.documents:,} documents, first in {SPLIT} document {overlap.document:,}:\n"
            f"  {printable(overlap.text)}"
        )
    if output:
        write_rows(output, [overlap._asdict() for overlap in result.overlaps])
        print(f"\nwritten to {output}: {len(result.overlaps):,} overlapping examples")


def run() -> NoReturn:
    run_program(
        main,
        name="tost eval contamination",
        doc=__doc__ or "",
        positional="FOLDER",
        config=ContaminationConfig,
    )


if __name__ == "__main__":
    run()
