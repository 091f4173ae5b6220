"""The checkpoint that is evaluated, and its results in `<run or export>/eval/<task>/results.json`.

A result records the checkpoint (hash of its manifest), the text (fingerprint of the shards), the settings and the
version of this package. It is reused while these are the same. Its last key is a hash, so that a result which was
edited is not shown.
"""

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tost_lm.checkpointing.format import SETTINGS
from tost_lm.checkpointing.run_folder import find_checkpoint
from tost_lm.config import Section, leaves, read_toml
from tost_lm.data.tokenizers import Tokenizer, find_tokenizer, read_tokenizer
from tost_lm.errors import ConfigError, DataError
from tost_lm.files import (
    manifest_bytes,
    manifest_content,
    regular_file,
    require_writable,
    sha256_file,
    write_atomically,
)
from tost_lm.remote import RemotePath, as_path
from tost_lm.version import VERSION, git_commit

if TYPE_CHECKING:
    from tost_lm.data.shards import Shards
    from tost_lm.inference.generation import LanguageModel
    from tost_lm.parallel.mesh import Mesh

SAMPLE = "sample"
"""The folder of a generated text."""


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """A checkpoint, the folder of its results, its run or else the export itself, and the dtype of its products."""

    checkpoint: Path
    home: Path
    dtype: Literal["float32", "bfloat16"] = "float32"

    @classmethod
    def find(cls, path: Path) -> "EvaluatedCheckpoint":
        """That of a run folder, a step folder or an export, also at a URL. Raises CheckpointError."""
        checkpoint = find_checkpoint(path)
        if isinstance(path, RemotePath):
            return cls(checkpoint, home_of_url(path))
        if path != checkpoint:
            return cls(checkpoint, path)
        run = path.absolute().parent.parent
        in_run = path.absolute().parent == run / "checkpoints" and (run / "config.toml").is_file()
        return cls(checkpoint, run if in_run else checkpoint)

    def tokenizer(self) -> Tokenizer:
        """Raises DataError when the tokenizer is missing or damaged."""
        return read_tokenizer(find_tokenizer(self.checkpoint))

    def load(self, device: str, mesh: "Mesh | None" = None) -> "LanguageModel":
        """The model in evaluation mode, with a mesh a copy of it on tensor and sequence ranks; all of them call it.

        Raises:
            CheckpointError: the model cannot be loaded.
            ConfigError: the heads or the vocabulary cannot be divided evenly.
        """
        import torch

        from tost_lm.checkpointing.reading import load, load_on_ranks

        model = load(self.checkpoint, device) if mesh is None else load_on_ranks(self.checkpoint, mesh)
        return model.to(getattr(torch, self.dtype))

    def hashes(self) -> dict[str, Any]:
        """Hashes that identify the checkpoint and its tokenizer."""
        return {
            "checkpoint_sha256": sha256_file(self.checkpoint / "manifest.json"),
            "tokenizer_sha256": sha256_file(find_tokenizer(self.checkpoint)),
        }

    def open_shards(self, folder: str) -> "Shards":
        """The shards in `folder`, or the training shards of the run if it is empty.

        Raises:
            ConfigError: it is empty, and the checkpoint has no run or the run was trained on a mixture.
            DataError: it is not a shard folder, is damaged, has another tokenizer than the checkpoint, or has no
                held-out documents.
        """
        recorded = next((one for one in (self.home / SETTINGS, self.checkpoint / SETTINGS) if one.is_file()), self.home)
        if not folder and not recorded.is_file():
            raise ConfigError(f"{self.home}: not a run folder, so it has no shards; give heldout.shards=FOLDER")
        if not folder:
            data = read_toml(recorded)["data"]
            if "mixture" in data:
                raise ConfigError(
                    f"{self.home}: trained on a mixture of {', '.join(data['mixture'])}; choose one with "
                    "heldout.shards=FOLDER"
                )
            folder = data["folder"]
        shards = open_valid(as_path(folder))
        tokenizer = find_tokenizer(self.checkpoint)
        if sha256_file(tokenizer) != shards.manifest["tokenizer"]["sha256"]:
            raise DataError(
                f"{shards.folder}: made with another tokenizer than {tokenizer}; "
                "give shards made with that one (heldout.shards=FOLDER)"
            )
        return shards

    def identity(self, settings: Section | None, shards: "Shards | None") -> dict[str, Any]:
        """Everything that a result depends on. It does not depend on the ranks, [launch] and [parallel]."""
        step = re.fullmatch(r"step_(\d+)", self.checkpoint.name)
        return {
            "tost_lm": VERSION,
            "checkpoint": self.checkpoint.name,
            **self.hashes(),
            "step": int(step[1]) if step else None,
            "dtype": self.dtype,
            "shards": str(shards.folder) if shards else None,
            "shards_fingerprint": shards.fingerprint if shards else None,
            "settings": settings.model_dump(mode="json", exclude={"launch", "parallel"}) if settings else None,
        }

    def results_path(self, task: str) -> Path:
        return results_path(self.home, task)

    def reusable(self, task: str, identity: dict[str, Any]) -> dict[str, Any] | None:
        """Existing results with this identity, reported on stdout; else None. Results of another one are named, except
        for samples, which each prompt replaces.

        Raises:
            ConfigError: there are none, and new ones could not be written.
        """
        path = self.results_path(task)
        try:
            results = read_result_file(path)
        except (ConfigError, OSError):
            print(f"{path} is damaged or was edited, and will be replaced")
            results = None
        if results and results["identity"] == identity:
            print(f"reusing {path} (same checkpoint, text and settings)")
            return results
        if results and task != SAMPLE:
            print(f"{path} has another {differing(results['identity'], identity)} and will be replaced")
        require_writable(path)
        return None

    def cited_results(self) -> list[dict[str, Any]]:
        """The results with a headline or an effective length that were measured on exactly this checkpoint, by task.

        Raises:
            ConfigError: as `read_result_file`.
        """
        checkpoint_sha256 = sha256_file(self.checkpoint / "manifest.json")
        found = [read_result_file(path) or {} for path in sorted(self.home.glob("eval/*/results.json"))]
        cited = [results for results in found if results.keys() & {"headline", "effective_length"}]
        return [results for results in cited if results["identity"]["checkpoint_sha256"] == checkpoint_sha256]

    def write_results(self, task: str, identity: dict[str, Any], started: float, results: dict[str, Any]) -> None:
        """Write results.json; `started` is the time.monotonic() at which the evaluation began.

        Results that are cited have a `headline`, the name of the cited total in `model`.
        """
        whole = {
            "protocol": task,
            "identity": identity,
            "commit": git_commit(),
            "seconds": time.monotonic() - started,
            **results,
        }
        path = self.results_path(task)
        write_result_file(path, whole)
        print(f"wrote {path}")


def open_valid(folder: Path) -> "Shards":
    """Shards with held-out documents. Raises DataError if the folder has none, or they are damaged."""
    from tost_lm.data.shards import Shards

    shards = Shards.open(folder)
    if not shards.entries("valid"):
        raise DataError(f"{folder}: its valid split is empty; give shards with one (heldout.shards=FOLDER)")
    shards.verify("valid")
    return shards


def describe_published(is_published: bool | None) -> str:
    """Whether a test set is its published file, in words."""
    return {True: "published file", False: "not the published file", None: "hash unknown"}[is_published]


def differing(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The names of the facts in which two identities differ."""
    first, second = dict(leaves(one)), dict(leaves(other))
    return ", ".join(name for name in first | second if first.get(name, ...) != second.get(name, ...))


def home_of_url(url: Path) -> Path:
    """The folder for the results of a model at a URL."""
    return Path("runs") / re.sub(r"[^\w.-]+", "--", str(url))


def results_path(home: Path, task: str) -> Path:
    """The results.json of a run or an export."""
    return home / "eval" / task / "results.json"


def write_result_file(path: Path, results: dict[str, Any]) -> None:
    """Write a results.json, or a cell of one, with its hash. Raises ValueError if a number is not finite."""
    write_atomically(path, manifest_bytes(results))


def read_result_file(path: Path) -> dict[str, Any] | None:
    """A file of `write_result_file`, without its hash; None: it does not exist.

    Raises:
        ConfigError: it is damaged or was edited.
        OSError: it cannot be read.
    """
    try:
        content = manifest_content(regular_file(path).read_bytes())
    except FileNotFoundError:
        return None
    if content is None:
        raise ConfigError(
            f"{path}: damaged or edited, its hash differs from its content; remove it and run the evaluation again"
        )
    return json.loads(content)


def pick_device() -> Literal["cuda", "cpu"]:
    """`cuda` if a GPU is available."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
