"""Tasks of users: documents that a TOML file names, and Python files that register a family.

    [documents.laws]
    file = "laws.jsonl"
    text = "body"

A Python file is run only if the user names it, as a task: `tost eval RUN mine.py`. It calls `register`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tost_lm.config import Section
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import ConfigError, DataError
from tost_lm.files import sha256_bytes
from tost_lm.inference.requests import disjoint_windows
from tost_lm.tasks.data_sets import SetFile, unpacked
from tost_lm.tasks.perplexity import RunningText
from tost_lm.tasks.registry import FAMILIES
from tost_lm.tasks.scored import Example, read_json_lines
from tost_lm.tasks.task import Family, Inputs, Measure, Measurement, Place, Row, Task
from tost_lm.user_files import RUNNING, explained_errors, run_user_file


class DocumentsConfig(Section):
    """The user's documents, task `NAME@documents`: bits per byte in disjoint windows after an end of text."""

    file: Path
    """JSON lines with a document each, compressed if the name ends in .gz."""
    text: str = "text"
    """Field of the text."""


class Documents(RunningText):
    headline, about = "bits_per_byte", "bits per byte of the user's documents"

    def __init__(self, name: str, settings: DocumentsConfig):
        self.name, self.settings = f"{name}@documents", settings

    def find_file(self, given: Mapping[str, Path], section: str = "sets") -> SetFile:
        path, setting = self.settings.file, f"documents.{self.name.split('@')[0]}.file"
        if not path.is_file():
            raise DataError(f"{setting} {path}: no such file; give JSON lines")
        return SetFile(path, sha256_bytes(unpacked(path)), None)

    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        key, found = self.settings.text, []
        for place, row in read_json_lines(path, f'JSON lines with "{key}"'):
            text = row.get(key) if isinstance(row, dict) else None
            if not isinstance(text, str) or not text.strip():
                raise DataError(f'{place}: no text under "{key}"; name its field, or remove the line')
            requests = tuple(disjoint_windows(tokenizer.encode_array(text), tokenizer.eot, window))
            found.append(Example(requests, {"words": len(text.split()), "bytes": len(text.encode())}))
        return found


def described(documents: Mapping[str, DocumentsConfig]) -> dict[str, Family]:
    """The families of documents that settings name, by name."""
    return {
        name: Family(name, [Documents(name, own)], sha256=sha256_bytes(own.text.encode()))
        for name, own in documents.items()
    }


@dataclass(frozen=True)
class OwnFamily(Family):
    """A family that a user's file registers. Each error of its tasks is one line."""

    file: Path = Path()

    def open(self, task: Task, inputs: Inputs) -> Measurement:
        explained = explained_errors(self.file, str(self.file))
        found = explained(super().open)(task, inputs)

        def prepare(model: Any) -> Measure:
            measure = explained(found.prepare)(model)

            def measured(model: Any, ranks: Any, place: Place | None) -> Row:
                results = measure(model, ranks, place)
                json.dumps(results if place else task.totals_of(results), allow_nan=False)  # it may not be JSON
                return results

            return explained(measured)

        return found._replace(prepare=prepare)


def register(family: Family) -> None:
    """Make a family known to this process; the file that the user names calls it.

    Raises:
        ConfigError: no such file is being run, the name of the family is taken, or a task lacks an attribute.
    """
    if not RUNNING:
        raise ConfigError(f"register({family.name}): its file is not named as a task; run tost eval RUN FILE.py")
    file, sha256 = RUNNING[-1]
    if family.name in FAMILIES and FAMILIES[family.name].sha256 != sha256:
        raise ConfigError(f"{file}: the name {family.name} is taken; choose another one")
    for task, name in product(family.tasks, ("name", "about", "headline")):
        if not hasattr(task, name):
            raise ConfigError(f"{file}: {type(task).__name__} has no {name}; set it")
    FAMILIES[family.name] = OwnFamily(**vars(family) | {"sha256": sha256, "file": file})


def run_file(path: Path) -> list[str]:
    """Run a Python file that the user has named; the names of the families that it registers. Raises as
    `run_user_file`."""
    missing = "registers no family; call tost_lm.tasks.own.register in it"
    return _registered(run_user_file(path, str(path), lambda sha256: bool(_registered(sha256)), missing))


def _registered(sha256: str) -> list[str]:
    return [family.name for family in FAMILIES.values() if family.sha256 == sha256]
