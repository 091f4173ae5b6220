"""Model folders: weights, settings and tokenizer with a hash of every file; reading any checkpoint of ours.

A model folder (an export) holds the weights in shards with an index, as Hugging Face names them, model.json, the
tokenizer's file and manifest.json. A training checkpoint is a model folder with the optimizer beside it, so everything
that reads one reads the other. A folder that `tost_lm.interop.hf` wrote is a model folder too: its settings lie in the
Hugging Face library's config.json, and its weights have "model." before their names.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tost_lm.config import validate
from tost_lm.errors import CheckpointError
from tost_lm.files import discard_aside, flush, folder_aside, manifest_bytes, publish_folder, xxh3_file
from tost_lm.model.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from tost_lm.model.lm import TostLM

FORMAT = "tost_lm.checkpoint.v2"
MANIFEST = "manifest.json"
MODEL = "model.json"
HUGGING_FACE_MODEL, HUGGING_FACE_PREFIX = "config.json", "model."

FileEntry = dict[str, Any]
"""What the manifest says of a file: {"bytes": its size, "xxh3": its XXH3-128 in hex}."""


class TokenizerFile(Protocol):
    """What a checkpoint keeps of a tokenizer."""

    @property
    def file_name(self) -> str: ...
    @property
    def model_bytes(self) -> bytes: ...


def load(path: str | Path, device: str = "cpu") -> "TostLM":
    """The model of a run folder (its newest valid checkpoint), a step folder, an export or a folder that
    `tost_lm.interop.hf` wrote, in evaluation mode.

    Raises:
        CheckpointError: there is none, or a file of it is not what its manifest says.
    """
    from tost_lm.model.lm import TostLM

    folder = find_checkpoint(Path(path))
    model = TostLM(read_model_config(folder))
    model.load_state_dict(dict(StoredTensors(folder, "model")))
    return model.to(device).eval()


def read_model_config(folder: Path) -> ModelConfig:
    """The model settings of a checkpoint folder."""
    path = folder / MODEL
    if path.is_file():
        return validate(ModelConfig, json.loads(path.read_text()), where=str(path))
    path = folder / HUGGING_FACE_MODEL
    tree = json.loads(path.read_text())
    return validate(ModelConfig, {name: tree[name] for name in ModelConfig.model_fields if name in tree}, str(path))


class StoredTensors(Mapping[str, "Tensor"]):
    """The tensors of a checkpoint folder's shards by name, each read from its file when it is asked for."""

    def __init__(self, folder: Path, kind: Literal["model", "optimizer"], framework: str = "pt") -> None:
        """`framework` "np" needs no torch and gives NumPy arrays."""
        from safetensors import safe_open

        shards = [name for name in read_entries(folder) if re.fullmatch(rf"{kind}(-.*)?\.safetensors", name)]
        files = [safe_open(folder / name, framework=framework) for name in shards]
        self._files = {
            name.removeprefix(HUGGING_FACE_PREFIX): (file, name)
            for file in files
            for name in file.keys()  # noqa: SIM118, it is no dict
        }

    def __getitem__(self, name: str) -> "Tensor":
        file, stored = self._files[name]
        return file.get_tensor(stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def shape(self, name: str) -> list[int]:
        """Of a tensor, which is not read."""
        file, stored = self._files[name]
        return file.get_slice(stored).get_shape()


def write_checkpoint(
    folder: Path,
    config: ModelConfig,
    weights: dict[str, "Tensor"],
    tokenizer: TokenizerFile,
    write_more: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write a model folder aside, hash it and rename it into place. `write_more(folder)` adds files to it.

    Raises:
        CheckpointError: the system refuses; nothing is left of it.
    """
    from safetensors import SafetensorError

    shard = shard_name("model", 0, 1)
    total_bytes = sum(tensor.nbytes for tensor in weights.values())
    try:
        aside = folder_aside(folder)
        write_tensors(aside / shard, weights)
        for name, content in describe(config, tokenizer, dict.fromkeys(weights, shard), total_bytes).items():
            (aside / name).write_bytes(content)
        write_more(aside)
        publish_checkpoint(aside, folder, {file.name: sealed(file) for file in aside.iterdir()})
    except (OSError, SafetensorError) as error:
        discard_aside(folder)
        raise CheckpointError(f"{folder}: cannot be written: {why_not_written(error)[1]}") from None


def why_not_written(error: Exception) -> tuple[int, str]:
    """The system's number of an error of a file's writer, 0 if there is none, and what it means."""
    found = re.search(r"os error (\d+)", str(error))  # safetensors' errors are no OSErrors
    number = (error.errno or 0) if isinstance(error, OSError) else int(found[1]) if found else 0
    return number, os.strerror(number) if number else str(error)


def shard_name(kind: Literal["model", "optimizer"], index: int, count: int) -> str:
    """The file name of one of so many shards, the first of index 0."""
    return f"{kind}-{index + 1:05d}-of-{count:05d}.safetensors"


def write_tensors(path: Path, tensors: dict[str, "Tensor"]) -> None:
    """Write a safetensors file while other threads go on: safetensors holds no lock on Python meanwhile."""
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})  # which transformers asks for
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets only the owner read it


def describe(
    config: ModelConfig, tokenizer: TokenizerFile, shard_of: Mapping[str, str], total_bytes: int
) -> dict[str, bytes]:
    """The files of a model folder but for the shards and the manifest.

    Args:
        shard_of: the file of each weight, by name.
        total_bytes: of all weights.
    """
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(shard_of.items()))}
    return {
        "model.safetensors.index.json": json.dumps(index, indent=1).encode(),
        MODEL: config.model_dump_json(indent=1).encode(),
        tokenizer.file_name: tokenizer.model_bytes,
    }


def sealed(path: Path) -> FileEntry:
    """Bring a file to disk; what the manifest is to say of it."""
    flush(path)
    return {"bytes": path.stat().st_size, "xxh3": xxh3_file(path)}


def publish_checkpoint(aside: Path, folder: Path, entries: Mapping[str, FileEntry]) -> None:
    """Write the manifest of a folder that is complete but for it, and rename the folder into its place."""
    files = {name: entries[name] for name in sorted(entries)}
    (aside / MANIFEST).write_bytes(manifest_bytes({"format": FORMAT, "files": files}))
    publish_folder(aside, folder)


def find_checkpoint(path: Path, warn: Callable[[str], None] = print) -> Path:
    """The newest valid checkpoint folder that `path` (run folder, step folder or export) stands for.

    In a run folder a damaged checkpoint is passed over for the one before it; `warn` is told so.

    Raises:
        CheckpointError: there is none, or `path` itself is a damaged one.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such folder; give a run folder, a step folder or an export")
    if (path / MANIFEST).is_file():
        verify_checkpoint(path)
        return path
    steps = step_folders(path)
    for step in reversed(steps):
        try:
            verify_checkpoint(step)
            return step
        except CheckpointError as error:
            warn(f"{error}; trying the checkpoint before it")
    reason = "none of its checkpoints is valid" if steps else "it holds no checkpoint"
    raise CheckpointError(f"{path}: not a checkpoint: {reason}")


def step_folders(run_folder: Path) -> list[Path]:
    """The checkpoints of a run, valid or not, oldest first."""
    return sorted((run_folder / "checkpoints").glob("step_" + "[0-9]" * 8))


def verify_checkpoint(folder: Path) -> None:
    """Check every file against the manifest. Raises CheckpointError naming the first that differs."""
    for name, entry in read_entries(folder).items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing")
        if path.stat().st_size != entry["bytes"]:
            raise CheckpointError(f"{path}: damaged ({path.stat().st_size:,} bytes instead of {entry['bytes']:,})")
        if xxh3_file(path) != entry["xxh3"]:
            raise CheckpointError(f"{path}: damaged (its XXH3 hash is not the manifest's)")


def read_entries(folder: Path) -> dict[str, FileEntry]:
    """What a checkpoint's manifest says of each other file. Raises CheckpointError unless it is as it was written."""
    try:
        data = (folder / MANIFEST).read_bytes()
    except OSError:
        raise CheckpointError(f"{folder}: not a checkpoint (it has no {MANIFEST})") from None
    try:
        manifest = json.loads(data)
        found = manifest["format"]
        manifest.pop("xxh3", None)
    except (ValueError, KeyError, TypeError):
        manifest = found = None
    if found != FORMAT and str(found).startswith("tost_lm.checkpoint."):
        raise CheckpointError(f"{folder / MANIFEST}: of format {found}, which this version does not read ({FORMAT})")
    if manifest is None or manifest_bytes(manifest) != data:
        raise CheckpointError(f"{folder / MANIFEST}: damaged (it is not as it was written)")
    return manifest["files"]
