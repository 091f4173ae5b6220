"""Files of test sets: given by the user, or downloaded from the Hugging Face hub and stored in the published format."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tost_lm.errors import ConfigError, DataError
from tost_lm.eval.settings import DataSetsConfig
from tost_lm.files import regular_file, sha256_bytes, write_atomically

DOWNLOADS = Path("data/test_sets")
HUB_TIMEOUT_S = 10.0

Rows = Iterable[dict[str, Any]]


class HubSet(NamedTuple):
    """A test set on the hub, and how its rows become the published file."""

    name: str
    subset: str | None
    split: str
    revision: str | None
    file: str
    to_text: Callable[[Rows], Iterator[str]]


class SetFile(NamedTuple):
    """The file of a test set."""

    path: Path
    sha256: str
    """Hash of its unpacked content."""
    is_published: bool | None
    """Whether it is the published file, byte for byte; None: the hash of the published file is not known."""


def _lines_of_wikitext(rows: Rows) -> Iterator[str]:
    return (row["text"] or " \n" for row in rows)


def _json_lines(rows: Rows) -> Iterator[str]:
    return (json.dumps({"text": row["text"]}) + "\n" for row in rows)


def _whole_rows(rows: Rows) -> Iterator[str]:
    return (json.dumps(row) + "\n" for row in rows)


def _lines_of_ptb(rows: Rows) -> Iterator[str]:
    return (f" {row['sentence'].strip()} \n" for row in rows)


def _stories_of_cbt(rows: Rows) -> Iterator[str]:
    for row in rows:
        for number, sentence in enumerate(row["sentences"], start=1):
            yield f"{number} {sentence}\n"
        yield f"21 {row['question']}\t{row['answer']}\t\t{'|'.join(row['options'])}\n\n"


CONVERTED = "refs/convert/parquet"
"""The revision with the rows of a data set whose loading script no longer runs."""

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
    "hellaswag": HubSet("Rowan/hellaswag", None, "validation", None, "hellaswag_val.jsonl", _whole_rows),
    "arc_easy": HubSet("allenai/ai2_arc", "ARC-Easy", "test", None, "arc_easy_test.jsonl", _whole_rows),
    "arc_challenge": HubSet("allenai/ai2_arc", "ARC-Challenge", "test", None, "arc_challenge_test.jsonl", _whole_rows),
    "piqa": HubSet("baber/piqa", None, "validation", None, "piqa_validation.jsonl", _whole_rows),
}

PUBLISHED_SHA256 = {
    "wikitext2": "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
    "wikitext103": "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
    "lambada_openai": "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226",
}
"""SHA-256 of published files. WikiText-103 has the test text of WikiText-2."""

PUBLISHED_BYTES = {"owt": 2 * 4_434_897, "enwik8": 100_000_000, "text8": 100_000_000}
"""Sizes of published files whose hash is not known."""

PUBLISHED_LINES = {"hellaswag": 10_042, "arc_easy": 2_376, "arc_challenge": 1_172, "piqa": 1_838}
"""Numbers of lines of published files whose hash is not known."""


def find_set_file(data_set: str, given: DataSetsConfig, section: str = "sets") -> SetFile:
    """The file of a test set that is given, or else one downloaded from the hub, now or earlier.

    Args:
        section: of the settings `given`, for error messages.

    Raises:
        ConfigError: no file is given, and the hub does not have the set or cannot be reached.
        DataError: the file is missing, cannot be unpacked, or is the published file of another test set.
    """
    path: Path | None = getattr(given, data_set)
    if path is not None and not path.is_file():
        raise DataError(f"{section}.{data_set} {path}: no such file; give {describe_file(data_set)}")
    path = path or _download(data_set, section)
    data = unpacked(path)
    sha256 = sha256_bytes(data)
    others = [name for name, published in PUBLISHED_SHA256.items() if published == sha256]
    if others and data_set not in others:
        raise DataError(
            f"{section}.{data_set} {path}: the published file of {others[0]}; give {describe_file(data_set)}"
        )
    known, size, lines = PUBLISHED_SHA256.get(data_set), len(data), data.rstrip().count(b"\n") + 1
    same_size = (PUBLISHED_BYTES.get(data_set, size), PUBLISHED_LINES.get(data_set, lines)) == (size, lines)
    is_published = sha256 == known if known else None if same_size else False
    return SetFile(path, sha256, is_published)


def unpacked(path: Path) -> bytes:
    """The content of a file, decompressed if its name ends in .gz. Raises DataError."""
    try:
        data = regular_file(path).read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        problem = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read: {problem}; download it again") from None


def describe_file(data_set: str) -> str:
    """The file of a test set in words, for error messages that ask for it."""
    return str(DataSetsConfig.model_fields[data_set].description).rstrip(".").partition(";")[0]


def _download(data_set: str, section: str) -> Path:
    """The file made from a test set's rows on the hub, now or earlier. Raises ConfigError, which asks for a file."""
    setting, hub = f"{section}.{data_set}", HUB_SETS.get(data_set)
    fix = f"give {setting}=FILE ({describe_file(data_set)})"
    if hub is None:
        raise ConfigError(f"{setting}: not set, and the hub does not have this test set; {fix}")
    if (DOWNLOADS / hub.file).is_file():
        return DOWNLOADS / hub.file
    print(f"downloading {data_set} from hub:{hub.name}", flush=True)
    try:
        text = "".join(hub.to_text(_rows(hub)))
    except Exception as error:  # the libraries raise their own errors and those of the network
        problem = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{setting}: not set, and hub:{hub.name} cannot be downloaded ({problem}); {fix}") from None
    write_atomically(DOWNLOADS / hub.file, text)
    return DOWNLOADS / hub.file


def _rows(hub: HubSet) -> Any:
    import datasets
    import huggingface_hub

    huggingface_hub.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    if not huggingface_hub.is_offline_mode():
        # One request without retries: without a network, load_dataset retries for half a minute.
        huggingface_hub.HfApi().dataset_info(hub.name, revision=hub.revision, timeout=HUB_TIMEOUT_S)
    return datasets.load_dataset(hub.name, hub.subset, split=hub.split, revision=hub.revision)
