"""The files of test sets: given by the user, or fetched from the Hugging Face hub and kept in the published format."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tost_lm.errors import ConfigError, DataError
from tost_lm.evaluation.zero_shot_config import DataSetsConfig
from tost_lm.files import sha256_bytes, write_whole

FETCHED = Path("data/test_sets")

Rows = Iterable[dict[str, Any]]


class HubSet(NamedTuple):
    """Where the hub has a test set, and how its rows become the file that is published."""

    name: str
    subset: str | None
    split: str
    revision: str | None
    file: str
    to_text: Callable[[Rows], Iterator[str]]


class SetFile(NamedTuple):
    """A test set as it is read."""

    path: Path
    sha256: str
    """Of its content, unpacked."""
    source: str
    """`published`: the published file, byte for byte; `hub:NAME`: made of that; `other`: not the published one;
    `unverified`: the published one's hash is not known here."""


def _lines_of_wikitext(rows: Rows) -> Iterator[str]:
    return (row["text"] or " \n" for row in rows)


def _json_lines(rows: Rows) -> Iterator[str]:
    return (json.dumps({"text": row["text"]}) + "\n" for row in rows)


def _lines_of_ptb(rows: Rows) -> Iterator[str]:
    return (f" {row['sentence'].strip()} \n" for row in rows)


def _stories_of_cbt(rows: Rows) -> Iterator[str]:
    for row in rows:
        for number, sentence in enumerate(row["sentences"], start=1):
            yield f"{number} {sentence}\n"
        yield f"21 {row['question']}\t{row['answer']}\t\t{'|'.join(row['options'])}\n\n"


CONVERTED = "refs/convert/parquet"
"""Where the hub keeps what a dataset's loading script gave."""

HUB_SETS = {
    "wikitext2": HubSet("Salesforce/wikitext", "wikitext-2-raw-v1", "test", None, "wiki2.test.raw", _lines_of_wikitext),
    "wikitext103": HubSet(
        "Salesforce/wikitext", "wikitext-103-raw-v1", "test", None, "wiki103.test.raw", _lines_of_wikitext
    ),
    "lambada_openai": HubSet("EleutherAI/lambada_openai", "default", "test", None, "lambada_openai.jsonl", _json_lines),
    "lambada_standard": HubSet("cimec/lambada", None, "test", None, "lambada_standard.jsonl", _json_lines),
    "ptb": HubSet("ptb-text-only/ptb_text_only", None, "test", CONVERTED, "ptb.test.txt", _lines_of_ptb),
    "cbt_cn": HubSet("cam-cst/cbt", "CN", "validation", None, "cbtest_CN_valid_2000ex.txt", _stories_of_cbt),
    "cbt_ne": HubSet("cam-cst/cbt", "NE", "validation", None, "cbtest_NE_valid_2000ex.txt", _stories_of_cbt),
}

PUBLISHED_SHA256 = {
    "wikitext2": "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
    "wikitext103": "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
    "lambada_openai": "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226",
}
"""SHA-256 of the files as published; the test text of WikiText-103 is that of WikiText-2."""


def find_set_file(data_set: str, given: DataSetsConfig, section: str = "sets") -> SetFile:
    """The file of a test set: the one that is given, in this section of the settings, else one fetched from the hub,
    now or earlier.

    Raises:
        ConfigError: none is given, and the hub has none or cannot be reached.
        DataError: the one given is not there, or cannot be unpacked.
    """
    path: Path | None = getattr(given, data_set)
    if path is not None and not path.is_file():
        raise DataError(f"{section}.{data_set} {path}: no such file")
    hub = HUB_SETS.get(data_set)
    if path is None:
        path = FETCHED / hub.file if hub and (FETCHED / hub.file).is_file() else fetch(f"{section}.{data_set}", hub)
    sha256, published = sha256_bytes(unpacked(path)), PUBLISHED_SHA256.get(data_set)
    source = "published" if sha256 == published else "other" if published else "unverified"
    if source == "unverified" and hub and path == FETCHED / hub.file:
        source = f"hub:{hub.name}"
    return SetFile(path, sha256, source)


def fetch(setting: str, hub: HubSet | None) -> Path:
    """Read a test set's rows from the hub and write its file. Raises ConfigError, which asks for the setting."""
    data_set = setting.rpartition(".")[2]
    what = f"{data_set} needs a file: give {setting}=FILE ({DataSetsConfig.model_fields[data_set].description})"
    if hub is None:
        raise ConfigError(what)
    print(f"fetching {data_set} from hub:{hub.name}", flush=True)
    try:
        import datasets

        rows: Any = datasets.load_dataset(hub.name, hub.subset, split=hub.split, revision=hub.revision)
        text = "".join(hub.to_text(rows))
    except Exception as error:  # the library raises its own, the hub client's and the network's errors alike
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"{what}; hub:{hub.name} cannot be had: {lines[0]}") from None
    write_whole(FETCHED / hub.file, text)
    return FETCHED / hub.file


def unpacked(path: Path) -> bytes:
    """What a file holds, or holds in gzip where its name ends in .gz. Raises DataError."""
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
