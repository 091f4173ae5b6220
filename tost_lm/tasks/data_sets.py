"""Test sets, and their files: given by the user, or downloaded from the Hugging Face hub and stored in the published
format.
"""

import gzip
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator

from tost_lm.errors import ConfigError, DataError, did_you_mean, first_line
from tost_lm.files import regular_file, sha256_bytes, write_atomically

DOWNLOADS = Path("data/test_sets")
HUB_TIMEOUT_S = 10.0
CONVERTED = "refs/convert/parquet"
"""The revision with the rows of a data set whose loading script no longer runs."""


class HubSource(NamedTuple):
    """A test set on the hub, and how its rows become the published file."""

    name: str
    subset: str | None
    split: str
    file: str
    text_of: Callable[[dict[str, Any]], str]
    """The text of a row."""
    revision: str | None = None


class SetFile(NamedTuple):
    """The file of a test set."""

    path: Path
    sha256: str
    """Hash of its unpacked content."""
    is_published: bool | None
    """Whether it is the published file, byte for byte; None: the hash of the published file is not known."""


DATA_SETS: "dict[str, DataSet]" = {}
"""By name: those of all tasks that are imported."""


@dataclass(frozen=True)
class DataSet:
    """A test set. The file of its task declares it, and `sets.NAME` gives its file in the published format, compressed
    if the name ends in .gz."""

    name: str
    description: str
    """The published file in words."""
    hub: HubSource | None = None
    """None: the hub does not have it."""
    sha256: str | None = None
    """Hash of the published file; None: not known."""
    bytes: int | None = None
    """Size of a published file whose hash is not known."""
    texts: Callable[[Path], Iterable[str]] | None = None
    """Reads the texts of the examples in a file. Raises DataError for another format. None: it has no separate ones."""

    def __post_init__(self) -> None:
        DATA_SETS[self.name] = self

    def find_file(self, given: Mapping[str, Path], section: str = "sets") -> SetFile:
        """The file that is given, or else one downloaded from the hub, now or earlier.

        Args:
            given: files by the name of the test set.
            section: of the settings `given`, for error messages.

        Raises:
            ConfigError: no file is given, and the hub does not have the set or cannot be reached.
            DataError: the file is missing, cannot be unpacked, or is the published file of another test set.
        """
        path, setting = given.get(self.name), f"{section}.{self.name}"
        if path is not None and not path.is_file():
            raise DataError(f"{setting} {path}: no such file; give {self.description}")
        path = path or self._download(setting)
        data = unpacked(path)
        sha256 = sha256_bytes(data)
        others = [one.name for one in DATA_SETS.values() if one.sha256 == sha256]
        if others and self.name not in others:
            raise DataError(f"{setting} {path}: the published file of {others[0]}; give {self.description}")
        same_size = (self.bytes or len(data)) == len(data)
        is_published = sha256 == self.sha256 if self.sha256 else None if same_size else False
        return SetFile(path, sha256, is_published)

    def _download(self, setting: str) -> Path:
        """The file made from the rows on the hub, now or earlier. Raises ConfigError, which asks for a file."""
        fix = f"give {setting}=FILE ({self.description})"
        if self.hub is None:
            raise ConfigError(f"{setting}: not set, and the hub does not have this test set; {fix}")
        path, hub = DOWNLOADS / self.hub.file, self.hub
        if path.is_file():
            return path
        print(f"downloading {self.name} from hub:{hub.name}", flush=True)
        try:
            text = "".join(map(hub.text_of, _rows(hub)))
        except Exception as error:  # the libraries raise their own errors and those of the network
            raise ConfigError(
                f"{setting}: not set, and hub:{hub.name} cannot be downloaded ({first_line(error)}); {fix}"
            ) from None
        write_atomically(path, text)
        return path


def _checked(given: dict[str, Path]) -> dict[str, Path]:
    for name in given:
        if name not in DATA_SETS:
            hint = did_you_mean(name, DATA_SETS)
            raise ValueError(f"sets.{name}: not a test set{hint}; choose from {', '.join(DATA_SETS)}")
    return given


Sets = Annotated[dict[str, Path], AfterValidator(_checked)]
"""Files by the names of test sets, of a setting `sets`."""


def unpacked(path: Path) -> bytes:
    """The content of a file, decompressed if its name ends in .gz. Raises DataError."""
    try:
        data = regular_file(path).read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        problem = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read: {problem}; download it again") from None


def _rows(hub: HubSource) -> Any:
    import datasets
    import huggingface_hub

    huggingface_hub.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    if not huggingface_hub.is_offline_mode():
        # One request without retries: without a network, load_dataset retries for half a minute.
        huggingface_hub.HfApi().dataset_info(hub.name, revision=hub.revision, timeout=HUB_TIMEOUT_S)
    return datasets.load_dataset(hub.name, hub.subset, split=hub.split, revision=hub.revision)
