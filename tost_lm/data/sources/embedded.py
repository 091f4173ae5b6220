"""The embedded corpus: the documentation and sources of the running Python."""

import importlib
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tost_lm.errors import DataError

NOT_EMBEDDED = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "lib2to3",
    "pydoc_data",  # read as topics
}  # fmt: skip


def embedded_texts() -> Iterator[str]:
    """Every document, always in the same order.

    Raises:
        DataError: this Python has no sources or documentation; raised while iterating.
    """
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        topics = {}
    for key in sorted(topics):
        yield topics[key]
    root = Path(sysconfig.get_paths()["stdlib"])
    sources: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - NOT_EMBEDDED
        sources += [Path(folder, name) for name in names if name.endswith(".py")]
    if not topics or not sources:
        raise DataError(
            f"corpus.source embedded: no sources or documentation of Python in {root}; use another Python, or set "
            "corpus.source to your own text"
        )
    for path in sorted(sources):
        try:
            with tokenize.open(path) as file:
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue
        yield text
