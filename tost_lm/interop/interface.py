"""The interface of a foreign checkpoint format."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.model import ModelConfig


class ForeignModel(NamedTuple):
    """The content of a foreign checkpoint."""

    config: ModelConfig
    weights: dict[str, Tensor]
    """float32, by our names."""
    iterations: int | None = None
    """Iterations of the training that saved it; None: it has no state of a training."""
    best_nats: float | None = None
    """Nats per token of that training's validation set; None: not measured."""
    left_out: tuple[str, ...] = ()
    """Parts of the source that the model does not have."""


class ForeignFormat(NamedTuple):
    """A foreign checkpoint format. Its functions raise CheckpointError, ConfigError and DataError as `tost_lm.load`."""

    title: str
    """In model cards."""
    model_types: tuple[str, ...]
    """In config.json of a folder of the Hugging Face library; empty: it is no such folder."""
    read: Callable[[Path], ForeignModel]
    read_config: Callable[[Path], ModelConfig]
    """The settings of a source; of a folder config.json is enough."""
    read_tokenizer: Callable[[Path], Tokenizer | None]
    """The tokenizer of a source; None if it has none."""
    write: Callable[[Path, Path, Path | None], list[str]] | None = None
    """Write a new folder from a checkpoint folder of ours, with other settings and files as in a third, if it is not
    None; returns lines to print."""
