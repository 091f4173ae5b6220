"""The corpus that any Python carries: its documentation and its sources."""

import importlib
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tost_lm.errors import DataError

NOT_EMBEDDED = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "lib2to3",
    "pydoc_data",  # the same text comes as topics
}  # fmt: skip


def embedded_texts() -> Iterator[str]:
    """Every document, always in the same order.

    Raises:
        DataError: this Python was installed without them; raised while iterating.
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
            f"{root}: this Python comes without its sources or documentation; use one that has them, "
            "or set corpus.source to text of your own"
        )
    for path in sorted(sources):
        try:
            with tokenize.open(path) as file:
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue
        yield text
