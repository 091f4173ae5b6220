"""Models and tokenizers of whatever we or the authors' code wrote, and of GPT-2 in the Hugging Face library."""

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from tost_lm.data.tokenizers import Tokenizer, find_tokenizer, read_tokenizer
from tost_lm.errors import DataError
from tost_lm.interop.authors import read_authors
from tost_lm.interop.gpt2 import CONFIG, read_gpt2, read_gpt2_tokenizer
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.checkpoint import MANIFEST, find_checkpoint
from tost_lm.model.checkpoint import load as load_ours


class Foreign(NamedTuple):
    """A model that others wrote."""

    config: ModelConfig
    weights: dict[str, Tensor]
    """By our names, in float32."""
    trained: str
    """How far, in words behind a comma; empty where it does not say."""


def load(path: str | Path, device: str = "cpu") -> TostLM:
    """A model in evaluation mode: of a run folder (its newest valid checkpoint), a step folder, an export, a folder
    that `tost_lm.interop.hf` wrote, a ckpt.pt of the authors' code, or a folder with GPT-2.

    Raises:
        CheckpointError: there is none, or a file of it is damaged. Nothing that is in a file is run.
        ConfigError: the sizes of a model that others wrote do not go together.
    """
    foreign = read_foreign(Path(path))
    if foreign is None:
        return load_ours(path, device)
    model = TostLM(foreign.config)
    model.load_state_dict(foreign.weights)
    return model.to(device).eval()


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model that `load` takes.

    Raises:
        CheckpointError: there is no model.
        DataError: there is no tokenizer with it, or it is damaged; a ckpt.pt has none.
    """
    source = Path(path)
    if not _is_foreign(source):
        return read_tokenizer(find_tokenizer(find_checkpoint(source)))
    tokenizer = read_gpt2_tokenizer(source) if source.is_dir() else None
    if tokenizer is None:
        raise DataError(
            f"{source}: holds no tokenizer; python -m tost_lm.convert {source} convert.folder=FOLDER "
            "convert.gpt2=FOLDER makes a model folder with GPT-2's"
        )
    return tokenizer


def read_foreign(source: Path) -> Foreign | None:
    """The model in a ckpt.pt of the authors' code or in a folder with GPT-2; None: it is neither.

    Raises:
        CheckpointError: it is damaged, or of another kind.
        ConfigError: its sizes do not go together.
    """
    if not _is_foreign(source):
        return None
    if source.is_dir():
        return Foreign(*read_gpt2(source), trained="")
    config, weights, iterations, nats = read_authors(source)
    trained = "" if iterations is None else f" after {iterations:,} iterations"
    trained += "" if nats is None else f", {nats:.4f} nats per token of their validation set"
    return Foreign(config, weights, trained)


def _is_foreign(source: Path) -> bool:
    return source.is_file() or ((source / CONFIG).is_file() and not (source / MANIFEST).is_file())
