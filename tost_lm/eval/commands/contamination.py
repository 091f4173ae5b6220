"""Contamination: 13-grams of words that test sets share with the training documents of a run or a shard folder.

    tost eval contamination runs/base sets.lambada_openai=lambada_test.jsonl
    tost eval contamination data/books/shards sets.wikitext2=wiki.test.raw contamination.output=overlaps.jsonl

As in appendix C of the GPT-3 paper (arXiv 2005.14165), words are compared in lower case and without punctuation, and an
example overlaps if it shares one 13-gram with a training document. Prints the number of such examples of each test set
for which a file is given, and the largest overlaps. All matches are exact. The n-grams of the test sets and a document
for each process are in memory.

For a run, each of its shard folders is searched. The counts and the largest overlaps are also written to
eval/contamination@SET/results.json, and tost report shows them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tost_lm.config import read_toml, run_program
from tost_lm.errors import ConfigError
from tost_lm.eval.settings import ContaminationConfig
from tost_lm.inference.protocol_names import contamination_protocol

if TYPE_CHECKING:
    from tost_lm.data.shards import Shards
    from tost_lm.eval.contamination import Contamination
    from tost_lm.eval.data_sets import SetFile
    from tost_lm.inference.subject import Subject

SHOWN = 10
PROGRESS_SECONDS = 10.0


def main(path: Path, config: ContaminationConfig) -> None:
    from tost_lm.data.shards import Shards
    from tost_lm.data.workers import available_cores
    from tost_lm.eval.contamination import measure_contamination
    from tost_lm.eval.data_sets import find_set_file
    from tost_lm.eval.protocols import READERS
    from tost_lm.files import require_writable, write_rows
    from tost_lm.inference.subject import Subject

    started, output = time.monotonic(), config.contamination.output
    given = [name for name, file in config.sets if file is not None]
    if not given:
        raise ConfigError(f"sets: no test set; give a file, for example sets.{next(iter(READERS))}=FILE")
    if unknown := [name for name in given if name not in READERS]:
        raise ConfigError(f"sets.{unknown[0]}: has no separate examples; leave it out, or give {', '.join(READERS)}")
    if output and output.exists():
        raise ConfigError(f"contamination.output {output}: exists already; give a new file")
    subject = Subject.find(path) if (path / "config.toml").is_file() else None
    if subject:
        require_writable(subject.results_path(contamination_protocol(given[0])))
    opened = [Shards.open(folder) for folder in (training_folders(path) if subject else [path])]
    files = {name: find_set_file(name, config.sets) for name in given}
    texts = {name: list(READERS[name](file.path)) for name, file in files.items()}
    workers = config.contamination.workers or available_cores()
    found = []
    for shards in opened:
        found.append((shards, measure_contamination(shards, texts, workers, progress_of(shards))))
        print_result(*found[-1])
    if output:
        rows = [{"shards": str(shards.folder), **one._asdict()} for shards, result in found for one in result.overlaps]
        write_rows(output, rows)
        print(f"\nwritten to {output}: {len(rows):,} overlapping examples")
    if subject:
        write_results(subject, files, found, started)


def training_folders(run: Path) -> list[Path]:
    """The shard folders that a run is trained on."""
    data = read_toml(run / "config.toml")["data"]
    return [Path(folder) for folder in data.get("mixture", [data.get("folder")])]


def progress_of(shards: "Shards") -> Callable[[int], None]:
    """Prints the number of tokens read so far, every few seconds."""
    from tost_lm.eval.contamination import SPLIT

    total, printed = shards.manifest["splits"][SPLIT]["tokens"], time.monotonic()

    def report(read: int) -> None:
        nonlocal printed
        if time.monotonic() - printed > PROGRESS_SECONDS:
            printed = time.monotonic()
            print(f"{shards.folder}: {read:,} of {total:,} tokens", flush=True)

    return report


def print_result(shards: "Shards", result: "Contamination") -> None:
    from tost_lm.errors import printable
    from tost_lm.eval.contamination import SPLIT

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


def write_results(
    subject: "Subject",
    files: "Mapping[str, SetFile]",
    found: "Sequence[tuple[Shards, Contamination]]",
    started: float,
) -> None:
    """Write results.json of each test set, for the report."""
    from tost_lm.version import VERSION

    for name, file in files.items():
        identity = {
            "tost_lm": VERSION,
            "data_sha256": file.sha256,
            "shards": {str(shards.folder): shards.fingerprint for shards, _ in found},
        }
        folders = [
            {
                "folder": str(shards.folder),
                **result.totals[name]._asdict(),
                "largest": [one._asdict() for one in result.overlaps if one.set == name][:SHOWN],
            }
            for shards, result in found
        ]
        results = {"file": str(file.path), "published_file": file.is_published, "folders": folders}
        subject.write_results(contamination_protocol(name), identity, started, results)


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
