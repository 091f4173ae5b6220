"""Causal language models of the Hugging Face library as baselines, with the same scorer as our own models.

Shape suffixes: B rows, T tokens, K positions whose logits are needed, V vocabulary.
"""

import copy
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from tost_lm.checkpointing.format import MANIFEST
from tost_lm.checkpointing.run_folder import local_model
from tost_lm.data.shards import Shards
from tost_lm.data.tokenizers import LosslessTokenizer, Tokenizer
from tost_lm.errors import CheckpointError, ConfigError, first_line, install_hint
from tost_lm.files import sha256_bytes, xxh3_file
from tost_lm.inference.evaluated import EvaluatedCheckpoint, home_of_url, open_valid
from tost_lm.inference.foreign_folder import CONFIG, SAFETENSORS, TORCH_FILE, read_settings, weight_files
from tost_lm.inference.generation import ForeignFacts
from tost_lm.model import LMOutput, LMState
from tost_lm.ops.cross_entropy import IGNORED_LABEL, logit_tile_tokens

if TYPE_CHECKING:
    from tost_lm.parallel.mesh import Mesh

POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
"""Names of the trained length in the configurations of models."""
NO_CODE = "give a causal language model of transformers, because code in a model folder is never run"


def find_evaluated(path: Path) -> EvaluatedCheckpoint:
    """The checkpoint of a run, step folder or export, or of a folder that `save_pretrained` wrote, also at a URL.

    Raises:
        CheckpointError: the path is none of these.
        ConfigError: transformers is not installed.
    """
    copy = local_model(path)
    if copy == path and not path.exists():
        wanted = "a run folder, a step folder, an export or a folder of a Hugging Face model"
        raise CheckpointError(f"{path}: no such folder; give {wanted}")
    if (copy / CONFIG).is_file() and not (copy / MANIFEST).is_file():
        read_settings(copy)
        print_only_errors()
        return HuggingFaceCheckpoint(copy, path if copy == path else home_of_url(path))
    return EvaluatedCheckpoint.find(path)


class HuggingFaceCheckpoint(EvaluatedCheckpoint):
    """A folder that `save_pretrained` wrote. Code in it is never run."""

    def tokenizer(self) -> "HuggingFaceTokenizer":
        transformers = transformers_library()
        with explained_rejection(self.checkpoint, NO_CODE):
            tokenizer = transformers.AutoTokenizer.from_pretrained(self.checkpoint, trust_remote_code=False)
        return HuggingFaceTokenizer(tokenizer, self.hashes()["tokenizer_sha256"])

    def load(self, device: str, mesh: "Mesh | None" = None) -> "HuggingFaceLM":
        """The model in evaluation mode. Raises CheckpointError, also when weights are missing or of other shapes."""
        if mesh is not None and mesh.tensor.size * mesh.sequence.size > 1:
            raise ConfigError(
                f"{self.checkpoint}: tensor and sequence parallelism do not support Hugging Face models; leave "
                "parallel.tensor and parallel.sequence out, and each rank scores its own examples"
            )
        library, folder, no_code = transformers_library(), self.checkpoint, {"trust_remote_code": False}
        stored_bytes = sum(file.stat().st_size for file in self._weight_files())
        with explained_rejection(folder, NO_CODE):
            config = library.AutoConfig.from_pretrained(folder, **no_code)
            with torch.device("meta"):
                empty = library.AutoModelForCausalLM.from_config(config, **no_code)
        count = sum(parameter.numel() for parameter in empty.parameters())
        if count > stored_bytes:  # the library would draw the missing ones
            raise CheckpointError(
                f"{folder}: its settings say {count:,} parameters, its weights have {stored_bytes:,} bytes; copy it "
                "again"
            )
        checked = {"output_loading_info": True, "ignore_mismatched_sizes": True, **no_code}
        with explained_rejection(folder, NO_CODE):
            model, info = library.AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, self.dtype), **checked
            )
        if missing := sorted(info["missing_keys"]):
            raise CheckpointError(
                f"{folder}: {len(missing)} weights of a causal language model are missing ({missing[0]}, …); give a "
                "complete folder"
            )
        for name, stored, wanted in sorted(info["mismatched_keys"])[:1]:
            raise CheckpointError(
                f"{folder}: {name} has shape {list(stored)}, its settings say {list(wanted)}; copy it again"
            )
        if torch.device(device).type == "cpu":
            for module in {sys.modules[type(layer).__module__] for layer in model.modules()}:
                vars(module).update(torch_forms(module))
        return HuggingFaceLM(model).to(device).eval()

    def open_shards(self, folder: str) -> Any:
        """The text of the shards in `folder`, with ids of this model's tokenizer."""
        if not folder:
            raise ConfigError(
                f"{self.checkpoint}: a Hugging Face model has no shards; give heldout.shards=FOLDER, or a text "
                "(needle.haystack=FILE, positions.file=FILE)"
            )
        return ShardsOfText(open_valid(Path(folder)), LosslessTokenizer(self.tokenizer(), str(self.checkpoint)))

    def hashes(self) -> dict[str, Any]:
        of_model = [f"{path.name} {xxh3_file(path)}" for path in [self.checkpoint / CONFIG, *self._weight_files()]]
        tokenizer = [f"{path.name} {xxh3_file(path)}" for path in sorted(self.checkpoint.glob("*")) if _tokenizes(path)]
        return {
            "checkpoint_sha256": sha256_bytes("\n".join(of_model).encode()),
            "tokenizer_sha256": sha256_bytes("\n".join(tokenizer).encode()),
        }

    def _weight_files(self) -> list[Path]:
        return weight_files(self.checkpoint, (SAFETENSORS, TORCH_FILE))


class ShardsOfText:
    """Shards whose text has ids of another tokenizer."""

    def __init__(self, shards: Shards, tokenizer: Tokenizer) -> None:
        self.folder, self.fingerprint, self.manifest = shards.folder, shards.fingerprint, shards.manifest
        self.texts, self._tokenizer = shards.texts, tokenizer

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def documents(self, split: str) -> Iterator[np.ndarray]:
        return map(self._tokenizer.encode_array, self.texts(split))

    def token_arrays(self, split: str) -> list[np.ndarray]:
        return [np.append(ids, self._tokenizer.eot) for ids in self.documents(split)]


class HuggingFaceTokenizer(Tokenizer):
    """A model's own tokenizer; special tokens in a text are plain text. `eot` is the token before a text: the beginning
    of sequence, or else the end."""

    def __init__(self, tokenizer: Any, sha256: str) -> None:
        self._tokenizer, self.sha256 = tokenizer, sha256
        self.vocab_size = len(tokenizer)
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if first is None:
            raise CheckpointError("the tokenizer has neither a beginning nor an end of sequence; add one to it")
        self.eot, self.stop = first, tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


class HuggingFaceLM(nn.Module):
    """A causal language model of the Hugging Face library with the interface of `TostLM`, for inference."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.name = model, "the model"
        found = [positions for name in POSITIONS if (positions := getattr(model.config, name, None))]
        if not found:
            raise ConfigError(
                f"{CONFIG} of this {model.config.model_type}: has no maximum length; add {POSITIONS[0]} to it"
            )
        # Without rotary embeddings, as in OLMo-Hybrid, attention reads any length.
        is_limited = getattr(model.base_model, "rotary_emb", True) is not None
        self.config = ForeignFacts(found[0], found[0] if is_limited else None, model.config.model_type)
        self._selects = "logits_to_keep" in inspect.signature(model.forward).parameters

    def empty_state(self, rows: int) -> LMState:
        return LMState((None,), (0,) * rows)

    def forward(self, tokens_BT: Tensor, labels: Tensor | None = None, state: LMState | None = None) -> LMOutput:
        """Arguments and results as in `TostLM`, but without a state if there are labels.

        `empty_state` is the state before any token; with it and labels there is a state.

        Raises:
            ConfigError: the rows are longer than the model's positions.
        """
        rows, tokens = tokens_BT.shape
        end = tokens + (state.positions[0] if state else 0)
        if (limit := self.config.position_limit) is not None and end > limit:
            raise ConfigError(f"{end} tokens are more than the model's positions ({limit}); shorten the text")
        if labels is not None and state is None:
            tiles = zip(*(x.split(self._rows_per_tile(labels)) for x in (tokens_BT, labels)), strict=True)
            nats_BT, is_top_BT = map(torch.cat, zip(*(self._score(*tile) for tile in tiles), strict=True))
            return LMOutput(None, nats_BT, is_top_BT, None, lambda: self.model(tokens_BT, use_cache=False).logits)
        last = self._continue(tokens_BT, state, 1 if labels is None else 0)
        after = LMState((last.past_key_values,), (end,) * rows)

        def whole_logits() -> Tensor:
            return last.logits if tokens == last.logits.shape[1] else self._continue(tokens_BT, state, 0).logits

        nats_BT, is_top_BT = (None, None) if labels is None else _nats_and_top(whole_logits(), labels)
        return LMOutput(None, nats_BT, is_top_BT, after, whole_logits)

    def _continue(self, tokens_BT: Tensor, state: LMState | None, kept: int) -> Any:
        """Logits of at least the last `kept` tokens (0: all), and the cache after them."""
        # The model changes a cache in place, but a state can be used again.
        past = copy.deepcopy(state.layers[0]) if state else None
        chosen = {"logits_to_keep": kept} if self._selects else {}
        return self.model(tokens_BT, past_key_values=past, use_cache=True, **chosen)

    def _rows_per_tile(self, labels_BT: Tensor) -> int:
        """Rows whose logits take no more memory than those of our models; allocating more for each batch costs time."""
        columns = int((labels_BT != IGNORED_LABEL).any(0).sum()) if self._selects else labels_BT.shape[1]
        return max(1, logit_tile_tokens(self.model.config.vocab_size, torch.float32) // max(1, columns))

    def _score(self, tokens_BT: Tensor, labels_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Nats, and whether labels are the most likely; computes only logits of labels, if the model allows."""
        columns_K = (labels_BT != IGNORED_LABEL).any(0).nonzero()[:, 0]
        chosen = {"logits_to_keep": columns_K} if self._selects else {}
        logits_BKV = self.model(tokens_BT, use_cache=False, **chosen).logits
        if not self._selects:
            logits_BKV = logits_BKV[:, columns_K]
        nats_BK, is_top_BK = _nats_and_top(logits_BKV, labels_BT[:, columns_K])
        nats_BT = torch.zeros_like(labels_BT, dtype=nats_BK.dtype).index_copy_(1, columns_K, nats_BK)
        is_top_BT = torch.zeros_like(labels_BT, dtype=torch.bool).index_copy_(1, columns_K, is_top_BK)
        return nats_BT, is_top_BT


def torch_forms(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The functions of a module of transformers that call the kernels of an installed package, on any device, as they
    are in PyTorch alone. The kernels of fla-core fail on a CPU."""
    functions = {name: function for name, function in vars(module).items() if inspect.isfunction(function)}
    return {name: inspect.unwrap(function) for name, function in functions.items() if hasattr(function, "__wrapped__")}


def _nats_and_top(logits_BKV: Tensor, labels_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Nats of each label, and whether no id has a larger logit; 0 and False for ignored labels."""
    counted_BK = labels_BK != IGNORED_LABEL
    nats_BK, is_top_BK = [], []
    for logits_KV, labels_K, counted_K in zip(
        logits_BKV, labels_BK, counted_BK, strict=True
    ):  # one row in float32 at a time
        logits_KV = logits_KV if logits_KV.dtype == torch.float64 else logits_KV.float()
        label_K = logits_KV.gather(1, labels_K.where(counted_K, 0)[:, None])[:, 0]
        nats_BK.append((logits_KV.logsumexp(1) - label_K).where(counted_K, 0))
        is_top_BK.append((label_K >= logits_KV.amax(1)) & counted_K)
    return torch.stack(nats_BK), torch.stack(is_top_BK)


def _tokenizes(path: Path) -> bool:
    return path.is_file() and ("token" in path.name or path.name.startswith(("vocab.", "merges.", "spiece")))


def transformers_library() -> Any:
    """The module transformers. Raises ConfigError if it is not installed."""
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"Hugging Face models need transformers; {install_hint('hf')}") from None
    return transformers


def print_only_errors() -> None:
    """For programs: transformers and what it imports print only errors in this process."""
    logging = transformers_library().logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message="Triton is not supported on current platform")  # of fla
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed else prints that it chose the CPU


@contextmanager
def explained_rejection(path: Path, fix: str) -> Iterator[None]:
    """Errors of transformers about a file or folder, for which it has no class, become one line."""
    try:
        yield
    except Exception as error:  # each architecture raises its own errors
        raise CheckpointError(f"{path}: transformers rejects it: {first_line(error)}; {fix}") from None
