"""Report section of contamination: examples of test sets whose text is in the training documents."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tost_lm.data.shards import Shards
from tost_lm.errors import DataError
from tost_lm.evaluation.config import DataSetsConfig, protocol_of
from tost_lm.evaluation.data_sets import describe_published
from tost_lm.evaluation.report.record import EvaluatedModel
from tost_lm.markdown import table

SHOWN = 3  # overlaps of a test set in a shard folder
CHARACTERS = 200  # of the text of an overlap
CHANGED = " (missing or changed)"


def contamination(run: EvaluatedModel) -> str:
    """Counts of each test set and its largest overlaps; empty without results."""
    found = {name: results for name in DataSetsConfig.model_fields if (results := run.results(protocol_of(name)))}
    if not found:
        return ""
    counts, overlaps = [], []
    for name, results in found.items():
        fingerprints = results["identity"]["shards"]
        for row in results["folders"]:
            shards = row["folder"] + ("" if _is_current(row["folder"], fingerprints) else CHANGED)
            fraction = f"{row['overlapping']:,} ({row['overlapping'] / max(1, row['checked']):.2%})"
            file = describe_published(results["published_file"])
            counts.append((name, file, shards, f"{row['examples']:,}", f"{row['checked']:,}", fraction))
            overlaps += [(name, row["folder"], *_cells(overlap)) for overlap in row["largest"][:SHOWN]]
    paragraphs = [
        "## Contamination",
        table(("test set", "file", "shards", "examples", "of 13 words", "overlapping"), counts),
        "An example overlaps if it shares 13 successive words (a 13-gram) with a training document. Case and "
        "punctuation do not count. Percentages are of the examples of at least 13 words.",
    ]
    if any(CHANGED in row[2] for row in counts):
        paragraphs.append(
            f"**Shards have changed or are missing.** To search them again, run `tost eval contamination {run.folder} "
            "sets.NAME=FILE`."
        )
    if overlaps:
        paragraphs += [
            f"Largest overlaps, at most {SHOWN} of each test set and shard folder, with the 13-gram that most training "
            "documents contain:",
            table(("test set", "shards", "example", "13-grams found", "documents", "most frequent 13-gram"), overlaps),
        ]
    return "\n\n".join(paragraphs)


def _cells(overlap: Mapping[str, Any]) -> tuple[str, ...]:
    text = overlap["text"]
    return (
        f"{overlap['example']:,}",
        f"{overlap['found']:,} of {overlap['ngrams']:,}",
        f"{overlap['documents']:,}",
        text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]} …",
    )


def _is_current(folder: str, fingerprints: Mapping[str, str]) -> bool:
    try:
        return Shards.open(Path(folder)).fingerprint == fingerprints[folder]
    except DataError:
        return False
