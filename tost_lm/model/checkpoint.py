"""Model folders: weights, settings and tokenizer with a hash of every file; reading any checkpoint of ours.

A model folder (an export) holds model.safetensors, model.json, the tokenizer's file and manifest.json. A training
checkpoint is a model folder with the optimizer beside it, so everything that reads one reads the other.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tost_lm.config import validate
from tost_lm.errors import CheckpointError
from tost_lm.files import folder_aside, publish_folder, sha256_file
from tost_lm.model.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from tost_lm.model.lm import TostLM

FORMAT = "tost_lm.checkpoint.v1"


class TokenizerFile(Protocol):
    """What a checkpoint keeps of a tokenizer."""

    @property
    def file_name(self) -> str: ...
    @property
    def model_bytes(self) -> bytes: ...


def load(path: str | Path, device: str = "cpu") -> "TostLM":
    """The model of a run folder (its newest valid checkpoint), a step folder or an export, in evaluation mode.

    Raises:
        CheckpointError: there is none, or a file of it is not what its manifest says.
    """
    from safetensors.torch import load_file

    from tost_lm.model.lm import TostLM

    folder = find_checkpoint(Path(path))
    model = TostLM(read_model_config(folder))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.to(device).eval()


def read_model_config(folder: Path) -> ModelConfig:
    """The model settings of a checkpoint folder."""
    return validate(ModelConfig, json.loads((folder / "model.json").read_text()), where=str(folder / "model.json"))


def write_checkpoint(
    folder: Path,
    config: ModelConfig,
    weights: dict[str, "Tensor"],
    tokenizer: TokenizerFile,
    write_more: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write a model folder aside, hash it and rename it into place. `write_more(folder)` adds files to it."""
    from safetensors.torch import save_file

    aside = folder_aside(folder)
    save_file(weights, aside / "model.safetensors")
    (aside / "model.json").write_text(config.model_dump_json(indent=1))
    (aside / tokenizer.file_name).write_bytes(tokenizer.model_bytes)
    write_more(aside)
    hashes = {file.name: sha256_file(file) for file in sorted(aside.iterdir())}
    (aside / "manifest.json").write_text(json.dumps({"format": FORMAT, "sha256": hashes}, indent=1))
    publish_folder(aside, folder)


def find_checkpoint(path: Path, warn: Callable[[str], None] = print) -> Path:
    """The newest valid checkpoint folder that `path` (run folder, step folder or export) stands for.

    In a run folder a damaged checkpoint is passed over for the one before it; `warn` is told so.

    Raises:
        CheckpointError: there is none, or `path` itself is a damaged one.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such folder; give a run folder, a step folder or an export")
    if (path / "manifest.json").is_file():
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
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        hashes = manifest["sha256"] if manifest["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):
        hashes = None
    if not isinstance(hashes, dict):
        raise CheckpointError(f"{folder}: not a checkpoint (no manifest.json of format {FORMAT})")
    for name, expected in hashes.items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: missing")
        if sha256_file(folder / name) != expected:
            raise CheckpointError(f"{folder / name}: damaged (its SHA-256 is not the manifest's)")
