"""All results on test sets and held-out text in order of time: eval/results.jsonl, and as a table eval/results.md."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tost_lm.evaluation.data_sets import describe_published
from tost_lm.evaluation.report.markdown import table
from tost_lm.files import write_atomically

NAME = "results.jsonl"


def record(home: Path, results: dict[str, Any]) -> None:
    """Append the content of a protocol's results.json, without single examples, and write the table again."""
    path = home / "eval" / NAME
    facts = {key: value for key, value in results.items() if key in ("protocol", "identity", "commit", "seconds")}
    row = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **facts, "headline": results["headline"]}
    row |= {key: results[key] for key in ("window_tokens", "published_file", "model") if key in results}
    with path.open("a") as file:  # one write, which leaves the existing lines untouched
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
    header = ("protocol", "measure", "result", "examples", "test set file", "checkpoint", "tokenizer", "commit", "time")
    write_atomically(path.with_suffix(".md"), table(header, [_cells(row) for row in _readable(path)]) + "\n")


def format_result(headline: str, totals: dict[str, Any]) -> str:
    """A result as it is cited, with its standard error if there is one."""
    error = totals.get(f"{headline}_standard_error")
    form = ".2%" if headline.endswith("accuracy") else ",.4f" if totals[headline] < 10 else ",.2f"
    return f"{totals[headline]:{form}}" + ("" if error is None else f" ± {error:{form}}")


def _readable(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().split("\n"):
        with suppress(ValueError):
            yield json.loads(line)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    identity, totals = row["identity"], row["model"]
    return (
        row["protocol"],
        row["headline"].replace("_", " "),
        format_result(row["headline"], totals),
        f"{totals.get('examples', totals.get('documents', 0)):,}",
        describe_published(row["published_file"]) if "published_file" in row else "–",
        f"{identity['checkpoint']} {identity['checkpoint_sha256'][:12]}",
        identity["tokenizer_sha256"][:12],
        re.sub("^([0-9a-f]{12})[0-9a-f]*", r"\1", row["commit"] or "–"),
        row["time"],
    )
