"""Write recall passages: lines of a text with secrets that stand in them several times.

    tost prepare passages configs/data/passages.toml
    tost prepare passages passages passages.text='books/*.txt' passages.count=100000

Writes passages.file, JSON lines for `tost prepare shards` with the same CONFIG. A model that trains on a mixture of
text and passages (data.mixture) learns to retrieve, which the task needle@keys of `tost eval` measures. The
same settings and text always give the same file.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from tost_lm.command_line import run_program
from tost_lm.data.passages import passages
from tost_lm.data.settings import CorpusConfig, DataPrepConfig
from tost_lm.data.sources import Document, parse, read_blocks
from tost_lm.errors import ConfigError, DataError
from tost_lm.files import regular_file, write_atomically

TEXT_CHARACTERS = 50_000_000
"""Characters of the text that are read, at most; they are held in memory."""
FEWEST_LINES = 100
"""Shorter documents are left out."""


def main(path: Path | None, config: DataPrepConfig) -> None:
    settings = config.passages
    if settings is None:
        raise ConfigError(f"{path or 'command line'}: passages.file: not set; set it to the file to write")
    texts = list(_lines_of_documents(settings.text))
    if not texts:
        raise DataError(f"passages.text {settings.text}: no document has {FEWEST_LINES} lines; give longer documents")
    settings.file.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps({"text": text}) + "\n" for text in passages(texts, settings))
    if settings.file.is_file() and regular_file(settings.file).read_bytes() == content.encode():
        print(f"reusing {settings.file}: the same {settings.count:,} passages")
        return
    write_atomically(settings.file, content)
    print(f"wrote {settings.file}: {settings.count:,} passages of {len(texts):,} documents")


def _lines_of_documents(source: str) -> Iterator[list[str]]:
    corpus, characters = CorpusConfig(source=source), 0
    for block in read_blocks(corpus):
        for row in parse(block, corpus):
            if isinstance(row, Document) and characters < TEXT_CHARACTERS:
                lines = [line for line in row.text.splitlines() if line.strip()]
                if len(lines) >= FEWEST_LINES:
                    characters += len(row.text)
                    yield lines
        if characters >= TEXT_CHARACTERS:
            return


def run() -> NoReturn:
    run_program(main, name="tost prepare passages", doc=__doc__ or "", positional="[CONFIG]", config=DataPrepConfig)
