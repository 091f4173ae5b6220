"""Loading of models and tokenizers: ours, and those of the Hugging Face library."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tost_lm.checkpointing.format import MANIFEST, read_model_config
from tost_lm.checkpointing.reading import load as load_ours
from tost_lm.checkpointing.run_folder import ADAPTER, FOREIGN_FOLDERS, find_checkpoint, local_model
from tost_lm.config import path_or_url
from tost_lm.data.tokenizers import Tokenizer, find_tokenizer, read_tokenizer
from tost_lm.errors import CheckpointError
from tost_lm.inference.foreign_folder import CONFIG, read_settings
from tost_lm.interop import MODULES
from tost_lm.model import ModelConfig, TostLM

if TYPE_CHECKING:
    from tost_lm.interop.public_form import PublicForm

OTHER_TOOLS = {
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), ("Qwen3.5 with experts", "ms-swift or Megatron-Bridge")),
    "qwen3_moe": ("Qwen3 with experts", "ms-swift or Megatron-Bridge"),
    "qwen3_next": ("Qwen3-Next, which has experts", "ms-swift or Megatron-Bridge"),
    "mixtral": ("Mixtral, which has experts", "ms-swift"),
    "kimi_linear": ("Kimi Linear, which has experts and latent attention", "flame, with fla"),
}
"""By `model_type`, models that no form reads, and what trains them."""


def load(path: str | Path, device: str = "cpu") -> TostLM:
    """Load a model in evaluation mode. Nothing in a file is run.

    Args:
        path: a run folder (its newest valid checkpoint), a step folder, an export, a folder that `tost_lm.interop.hf`
            wrote, or a folder of the Hugging Face library; also at a URL.

    Raises:
        CheckpointError: no such model, or a file is damaged.
        ConfigError: the sizes of a model of the Hugging Face library are inconsistent.
    """
    source = local_model(path_or_url("path", path))
    form = form_of(source)
    if form is None:
        return load_ours(source, device)
    found = form.read(source)
    with torch.device("meta"):
        model = TostLM(found.config)
    model.load_state_dict(found.weights, assign=True)
    return model.to(device).eval()


def read_config(path: Path) -> ModelConfig:
    """The settings of a model that `load` accepts. A folder of the Hugging Face library needs no weights.

    Raises as `load`.
    """
    form = form_of(path)
    return read_model_config(find_checkpoint(path)) if form is None else form.read_config(path)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model that `load` accepts.

    Raises:
        CheckpointError: no such model.
        DataError: the tokenizer is missing or damaged.
    """
    source = local_model(path_or_url("path", path))
    if form_of(source) is None:
        return read_tokenizer(find_tokenizer(find_checkpoint(source)))
    from tost_lm.interop.public_tokenizer import read_their_tokenizer

    return read_their_tokenizer(source)


def form_of(source: Path) -> "PublicForm | None":
    """The form of a folder of the Hugging Face library; None: it is no such folder.

    Raises:
        CheckpointError: no form has the `model_type` of the folder, or it has adapters.
    """
    if (source / ADAPTER).is_file():
        raise CheckpointError(f"{source / ADAPTER}: {FOREIGN_FOLDERS[ADAPTER]}")
    if not (source / CONFIG).is_file() or (source / MANIFEST).is_file():
        return None
    kind = read_settings(source).get("model_type")
    forms = [import_module(f"tost_lm.interop.{name}").FORM for name in MODULES]
    if found := next((one for one in forms if kind in one.model_types), None):
        return found
    if elsewhere := OTHER_TOOLS.get(str(kind)):
        what, tool = elsewhere
        raise CheckpointError(f"{source / CONFIG}: unsupported model_type: {kind!r} ({what}); train it with {tool}")
    known = ", ".join(name for one in forms for name in one.model_types)
    raise CheckpointError(f"{source / CONFIG}: unsupported model_type: {kind!r}; give a model with one of {known}")
