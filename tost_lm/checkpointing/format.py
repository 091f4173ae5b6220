"""Model folders: weights, settings and tokenizer, with a hash of every file.

A model folder (an export) holds the weights in safetensors shards with an index, as in the Hugging Face library,
model.json, the tokenizer's file (of a language model), the text of each plugin (mixer_E.py of letter E) and
manifest.json. A training checkpoint is a model folder with the optimizer state added, by parameter name, and files of
its run. So code that reads one reads the other. Every tensor of a checkpoint is whole and float32, so it resumes on any
parallel layout and ZeRO stage. A folder from `tost_lm.interop.hf` is a model folder as well. Its settings are in the
Hugging Face library's config.json, and the names of its weights start with "model.".
"""

import json
import math
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from tost_lm.config import Section, validate
from tost_lm.data.stages import StageRecord
from tost_lm.errors import CheckpointError, TrainingError, first_problem
from tost_lm.files import (
    flush,
    make_temp_folder,
    manifest_bytes,
    manifest_content,
    publish_folder,
    regular_file,
    remove_temp_folder,
    sha256_file,
    usual_mode,
    xxh3_file,
)
from tost_lm.mixers.plugins import VARIABLE, file_name, plugin_files, unknown_letters
from tost_lm.model.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from tost_lm.data.tokenizers import Tokenizer

FORMAT = "tost_lm.checkpoint.v2"
MANIFEST = "manifest.json"
MODEL = "model.json"
CARD = "README.md"
"""The model card; not in the manifest, so that it may be edited."""
SETTINGS, PROGRESS, RNG = "config.toml", "training.json", "rng.safetensors"
"""Files of a training checkpoint: the run's settings and progress, and the state of torch's generators."""
RNG_NAME = "torch.cpu"
"""The tensor in `RNG`."""
CONVERSION = "conversion.json"
"""The file of a converted model folder that records its source."""
HUGGING_FACE_MODEL, HUGGING_FACE_PREFIX = "config.json", "model."
GIVE = "give a run folder, a step folder or an export"
SHARD = re.compile(r"(model|optimizer)(?:-.*)?\.safetensors")
REPLACE = "delete the checkpoint or copy it again"

FileEntry = dict[str, Any]
"""A file in the manifest, as `_File`."""


class _File(Section):
    """Size and XXH3-128 in hex."""

    bytes: int = Field(ge=0, lt=1 << 63)
    xxh3: str = Field(pattern="^[0-9a-f]{32}$")


class _Manifest(Section):
    """The content of manifest.json without its own hash."""

    format: Literal["tost_lm.checkpoint.v2"]
    files: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")], _File]


@with_config(ConfigDict(extra="ignore", strict=True))  # 0.1.0 counted validations since the lowest loss
@dataclass(frozen=True)
class Progress:
    """The progress of a run after a step, the same on every rank; training.json of a checkpoint."""

    step: int
    """Steps so far; of a branch with those before it."""
    updates: int
    """Steps that the optimizer applied; the others were skipped."""
    skipped_in_a_row: int = 0
    """Steps skipped since the last applied one."""
    recent: tuple[tuple[float, float], ...] = ()
    """(loss, gradient norm) of the newest applied steps, oldest first, for the spike guard."""
    validation_loss: float | None = None
    """The newest one, in nats per token."""
    wandb_run_id: str = ""
    """Set on rank 0, which writes the file."""
    tokenizer_sha256: str = ""
    stages: tuple[StageRecord, ...] = ()
    """The stages of the run so far."""

    def in_stage(self, stage: StageRecord) -> "Progress":
        """The progress of a run that starts this stage: what belongs to a stage starts again."""
        return replace(self, stages=(*self.stages, stage), skipped_in_a_row=0, recent=(), validation_loss=None)

    def write(self, folder: Path) -> None:
        """Write training.json into a checkpoint folder. Floats are read back bit-exactly."""
        (folder / PROGRESS).write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, folder: Path) -> "Progress":
        """Read training.json of a checkpoint folder. Raises CheckpointError when another version wrote it."""
        path = folder / PROGRESS
        try:
            return TypeAdapter(cls).validate_json(regular_file(path).read_bytes())
        except (OSError, ValidationError):
            raise CheckpointError(f"{path}: written by another version; start a run under another run.name") from None

    def require_finite_validation(self, steps: int, run_folder: Path) -> None:
        """Raises TrainingError after the last of `steps` steps if the validation loss is not finite."""
        loss = self.validation_loss
        if self.step >= steps and loss is not None and not math.isfinite(loss):
            raise TrainingError(
                f"{run_folder}: the validation loss after the last step is {loss}, so the model is unusable; lower "
                "optim.lr and train under another run.name"
            )


def read_model_config(folder: Path) -> ModelConfig:
    """The settings of the language model in a checkpoint folder.

    Raises:
        CheckpointError: it needs a plugin that the user has not named.
        ConfigError: its settings are invalid, or the plugin that the user has named has another text.
    """
    path = folder / MODEL
    is_ours = path.is_file()
    path = path if is_ours else folder / HUGGING_FACE_MODEL
    tree = read_object(path)
    for letter in sorted(unknown_letters(str(tree.get("pattern", "")))):
        if (file := folder / file_name(letter)).is_file():
            raise CheckpointError(
                f"{folder}: its {letter} layers need the plugin {file.name} (SHA-256 {sha256_file(file)}), which is "
                f"stored there and is not run; read it and set {VARIABLE}={shlex.quote(str(file))}"
            )
    fields = tree if is_ours else {name: tree[name] for name in ModelConfig.model_fields if name in tree}
    return validate(ModelConfig, fields, str(path))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError if it has none."""
    try:
        return TypeAdapter(dict[str, Any]).validate_json(regular_file(path).read_bytes())
    except (OSError, ValidationError):
        raise CheckpointError(f"{path}: missing, or not a JSON object; {REPLACE}") from None


class StoredTensors(Mapping[str, "Tensor"]):
    """The tensors of a checkpoint folder's shards by name, each read from its file on access."""

    def __init__(self, folder: Path, kind: Literal["model", "optimizer"], backend: str = "mmap") -> None:
        """`backend` "pread" does not map the files into memory, where their pages would stay."""
        from safetensors import safe_open

        paths = [regular_file(folder / name) for name in shard_entries(folder, kind)]
        files = [safe_open(path, framework="pt", backend=backend) for path in paths]
        self._files = {
            name.removeprefix(HUGGING_FACE_PREFIX): (file, name)
            for file in files
            for name in file.keys()  # noqa: SIM118, not a dict
        }

    def __getitem__(self, name: str) -> "Tensor":
        file, stored = self._files[name]
        return file.get_tensor(stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def shapes(self) -> dict[str, list[int]]:
        """The shapes of all tensors by name, without reading them."""
        return {name: file.get_slice(stored).get_shape() for name, (file, stored) in self._files.items()}


def write_checkpoint(
    folder: Path,
    config: Section,
    weights: dict[str, "Tensor"],
    tokenizer: "Tokenizer | None",
    write_extra: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write a model folder under a temporary name, hash its files and rename it. `write_extra(folder)` adds files.

    Raises:
        CheckpointError: writing failed; the temporary folder is removed.
    """
    from safetensors import SafetensorError

    shard = shard_name("model", 0, 1)
    total_bytes = sum(tensor.nbytes for tensor in weights.values())
    try:
        temp = make_temp_folder(folder)
        write_tensors(temp / shard, weights)
        for name, content in metadata_files(config, tokenizer, dict.fromkeys(weights, shard), total_bytes).items():
            (temp / name).write_bytes(content)
        write_extra(temp)
        publish_checkpoint(
            temp, folder, {file.name: flush_and_hash(file) for file in temp.iterdir() if file.name != CARD}
        )
    except (OSError, SafetensorError) as error:
        remove_temp_folder(folder)
        raise CheckpointError(f"{folder}: cannot be written: {write_failure(error)[1]}") from None


def write_failure(error: Exception) -> tuple[int, str]:
    """errno of an error from writing a file (0 if unknown) and its meaning."""
    found = re.search(r"os error (\d+)", str(error))  # an error of safetensors is not an OSError
    number = (error.errno or 0) if isinstance(error, OSError) else int(found[1]) if found else 0
    return number, os.strerror(number) if number else str(error)


def shard_name(kind: Literal["model", "optimizer"], index: int, count: int) -> str:
    """The file name of shard `index` (from 0) of `count`."""
    return f"{kind}-{index + 1:05d}-of-{count:05d}.safetensors"


def write_tensors(path: Path, tensors: dict[str, "Tensor"]) -> None:
    """Write a safetensors file. Other threads continue, because safetensors releases the GIL."""
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})  # required by transformers
    usual_mode(path)


def metadata_files(
    config: Section, tokenizer: "Tokenizer | None", shard_of: Mapping[str, str], total_bytes: int
) -> dict[str, bytes]:
    """The contents of a model folder's files except the shards and the manifest, by name.

    Args:
        shard_of: the shard of each weight.
        total_bytes: size of all weights.
    """
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(shard_of.items()))}
    files = {
        "model.safetensors.index.json": json.dumps(index, indent=1).encode(),
        MODEL: config.model_dump_json(indent=1, exclude={"plugins"}).encode(),  # paths of this machine
        **plugin_files(getattr(config, "pattern", "")),
    }
    return files | ({tokenizer.file_name: tokenizer.model_bytes} if tokenizer else {})


def flush_and_hash(path: Path) -> FileEntry:
    """Flush a file to disk and return its manifest entry."""
    flush(path)
    return {"bytes": path.stat().st_size, "xxh3": xxh3_file(path)}


def publish_checkpoint(temp: Path, folder: Path, entries: Mapping[str, FileEntry]) -> None:
    """Write the manifest of a complete temporary folder and rename the folder to `folder`."""
    files = {name: entries[name] for name in sorted(entries)}
    (temp / MANIFEST).write_bytes(manifest_bytes({"format": FORMAT, "files": files}))
    publish_folder(temp, folder)


def verify_checkpoint(folder: Path, *, hash_shards: bool = True) -> None:
    """Check every file against the manifest. Raises CheckpointError that names the first difference.

    With `hash_shards = False` only the size of shards is checked: `tost_lm.checkpointing.reading` hashes what it reads.
    """
    for name, entry in read_entries(folder).items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; {REPLACE}")
        if path.stat().st_size != entry["bytes"]:
            sizes = f"{path.stat().st_size:,} bytes instead of {entry['bytes']:,}"
            raise CheckpointError(f"{path}: damaged, {sizes}; {REPLACE}")
        if (hash_shards or not SHARD.fullmatch(name)) and xxh3_file(path) != entry["xxh3"]:
            raise CheckpointError(other_hash(path))


def other_hash(path: Path) -> str:
    """The problem of a file whose hash is not that of the manifest."""
    return f"{path}: damaged, its XXH3 hash differs from the manifest; {REPLACE}"


def shard_entries(folder: Path, kind: Literal["model", "optimizer"]) -> dict[str, FileEntry]:
    """The shards of a checkpoint and their entries in the manifest."""
    entries = read_entries(folder)
    return {name: entry for name, entry in entries.items() if (found := SHARD.fullmatch(name)) and found[1] == kind}


def read_entries(folder: Path) -> dict[str, FileEntry]:
    """The files in a checkpoint's manifest. Raises CheckpointError if the manifest is missing, damaged or another."""
    path = folder / MANIFEST
    try:
        content = manifest_content(regular_file(path).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder}: not a checkpoint: it has no {MANIFEST}; {GIVE}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}; {REPLACE}") from None
    if content is None:
        raise CheckpointError(f"{path}: damaged, its hash differs from its content; {REPLACE}")
    try:
        return _Manifest.model_validate_json(content).model_dump()["files"]
    except ValidationError as error:
        raise CheckpointError(f"{path}: not {FORMAT} ({first_problem(error)}); {GIVE}") from None
