"""The model as a `PreTrainedModel` of the Hugging Face library, and its config.json.

Shapes as in `tost_lm.model`; K: number of columns with logits.
"""

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel, initialization
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from tost_lm.checkpointing.format import FORMAT, MANIFEST, MODEL, StoredTensors, flush_and_hash, read_model_config
from tost_lm.checkpointing.run_folder import find_checkpoint
from tost_lm.config import validate
from tost_lm.data.tokenizers import TOKENIZER_FILES, find_tokenizer, read_tokenizer
from tost_lm.errors import CheckpointError, ConfigError
from tost_lm.files import manifest_bytes, usual_mode, write_atomically
from tost_lm.inference.foreign_folder import weight_files
from tost_lm.interop.hf.cache import TostCache
from tost_lm.mixers.plugins import plugin_files
from tost_lm.model.block import Block, CheckpointWrapper, LMState, no_checkpoint
from tost_lm.model.config import PRESETS, ModelConfig
from tost_lm.model.lm import Head, TostLM
from tost_lm.model.streaming import to_running_dtype
from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.ops.initialization import Normal, matrix_std, own_values

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__annotations__ else "past_key_values"  # before transformers 5.24


@strict
class TostConfig(PreTrainedConfig):
    """The fields of `ModelConfig` that the model depends on, under their own names, and the library's fields.

    `hidden_size`, `num_hidden_layers`, `num_attention_heads` and `max_position_embeddings` are aliases of `width`,
    `layers`, `heads` and `context_length`, and `tie_word_embeddings` equals `tied_head`. Defaults are those of
    `ModelConfig`, at the size of tost-base.

    Raises:
        ConfigError: the settings are invalid.
    """

    model_type = "tost"
    keys_to_ignore_at_inference = [CACHE]  # noqa: RUF012, the library's
    attribute_map = {  # noqa: RUF012, the library's
        "hidden_size": "width",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "max_position_embeddings": "context_length",
    }

    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = True
    use_cache: bool = True

    if TYPE_CHECKING:

        def __init__(self, **fields: Any) -> None: ...

    def __post_init__(self, **kwargs: Any) -> None:
        named = {self.attribute_map.get(name, name): value for name, value in kwargs.items()}
        tree = {name: named.pop(name) for name in ModelConfig.model_fields if name in named}
        if not tree.get("preset"):
            tree = PRESETS["tost-base"] | tree
        if not self.tie_word_embeddings:
            tree.setdefault("tied_head", False)
        model = validate(ModelConfig, tree, "TostConfig")
        super().__post_init__(**named, **model.in_use())
        if model.tied_head and not self.tie_word_embeddings:
            raise ConfigError("tie_word_embeddings = False contradicts tied_head = True; leave one of them out")
        self.tie_word_embeddings = model.tied_head

    @classmethod
    def of(cls, model: ModelConfig, **others: Any) -> "TostConfig":
        """Build it from a `ModelConfig`; `others` are the library's fields."""
        return cls(**model.in_use(), **others)

    def to_model(self) -> ModelConfig:
        """The `ModelConfig`. Raises ConfigError."""
        tree = {name: getattr(self, name) for name in ModelConfig.model_fields if hasattr(self, name)}
        return validate(ModelConfig, tree, "TostConfig")


class HiddenStates(Head):
    """Returns hidden states in place of logits, so that the caller computes logits of some columns only."""

    def logits(self, x_BTC: Tensor, tied_VC: Tensor | None, tokens: int) -> Tensor:
        return x_BTC


class TostForCausalLM(PreTrainedModel, GenerationMixin):
    """A `TostLM` as `model`, whose head returns hidden states; if it is tied, the embedding is also `lm_head`."""

    config: TostConfig
    config_class = TostConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True
    _input_embed_layer = "embedding"
    accepts_loss_kwargs = True
    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}  # noqa: RUF012, the library's
    _keys_to_ignore_on_save = ["lm_head.weight"]  # noqa: RUF012, the library's

    def __init__(self, config: TostConfig) -> None:
        super().__init__(config)
        self.gradient_checkpointing = False
        model_config = config.to_model()
        self.model = TostLM(model_config, head=HiddenStates)
        if model_config.tied_head:
            self.lm_head = nn.Linear(model_config.width, model_config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        """The head as the library has it."""
        weight_VC = self.model.head.weight
        if weight_VC is None:
            return self.lm_head
        head = nn.Linear(*reversed(weight_VC.shape), bias=False, device="meta")
        head.weight = weight_VC
        return head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        if self.model.head.weight is None:
            self.lm_head = new_embeddings
        else:
            self.model.head.weight = new_embeddings.weight  # pyright: ignore[reportAttributeAccessIssue]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: TostCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        cache: TostCache | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, K, V], none in training with labels, the mean loss with labels, and the cache.

        Arguments are the library's. `labels` [B, T] are input_ids with −100 where no loss is counted, `logits_to_keep`
        the number of last columns with logits, 0 for all, or their indices [K]. Padding at any place, where
        `attention_mask` [B, columns of the cache + T] is 0, is skipped: positions count tokens only, and logits at
        padding are 0. A cache, `past_key_values` or `cache`, is updated in place.

        Raises:
            ConfigError: a row has more tokens than the model's positions.
            ValueError: the mask does not fit, the cache has other rows or another class, or an argument is unknown.
        """
        for name, value in others.items():
            if value is not None and value is not False:
                raise ValueError(f"TostForCausalLM does not support {name}: leave it out")
        cache = past_key_values if cache is None else cache
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = TostCache()
        if cache is not None and not isinstance(cache, TostCache):
            raise ValueError(f"past_key_values is a {type(cache).__name__}: give a TostCache, or leave it out")
        loss, x_BTC = self._read(input_ids, attention_mask, cache, labels, num_items_in_batch)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits: Any = self._logits(x_BTC[:, kept]) if labels is None or not self.training else None
        return CausalLMOutputWithPast(loss, logits, **dict[str, Any]({CACHE: cache}))

    def _logits(self, x_BKC: Tensor) -> Tensor:
        """[B, K, V] of hidden states."""
        weight_VC = self.model.head.weight
        return self.lm_head(x_BKC) if weight_VC is None else linear(x_BKC, weight_VC)

    def _read(
        self, tokens_BT: Tensor, mask: Tensor | None, cache: Any, labels_BT: Tensor | None, label_count: Any
    ) -> tuple[Tensor | None, Tensor]:
        """The loss and hidden states [B, T, C]; the cache is updated. With padding, the tokens are read as packed
        documents."""
        if labels_BT is not None:
            labels_BT = pad(labels_BT[:, 1:], (0, 1), value=IGNORED_LABEL)
        columns, state = (0, None) if cache is None else (cache.columns, cache.state)
        options = {"label_count": label_count, "output_state": cache is not None}
        real_BT = None if mask is None else _real_tokens(tokens_BT, mask, columns)
        if real_BT is None or real_BT.all():
            output = self.model(tokens_BT, labels_BT, state, **options)
            loss, x_BTC, state = output.loss, output.logits, to_running_dtype(output.state)
        else:
            loss, x_BTC, state = self._read_padded(tokens_BT, real_BT, labels_BT, state, options)
        if cache is not None:
            cache.state, cache.columns = state, columns + tokens_BT.shape[1]
        return loss, x_BTC

    def _read_padded(
        self, tokens_BT: Tensor, real_BT: Tensor, labels_BT: Tensor | None, state: LMState | None, options: Any
    ) -> tuple[Tensor | None, Tensor, LMState | None]:
        """The loss, hidden states, 0 at padding, and with a cache the state after the tokens."""
        if not real_BT.any(1).all():
            raise ValueError("attention_mask masks all tokens of a row; give each row a 1, and prompts in one call")
        offsets = pad(real_BT.sum(1).cumsum(0), (1, 0)).int()
        labels_1M = None if labels_BT is None else labels_BT[real_BT][None]
        output = self.model(tokens_BT[real_BT][None], labels_1M, state, offsets, **options)
        x_1MC = output.logits
        x_BTC = x_1MC.new_zeros(*real_BT.shape, x_1MC.shape[-1]).masked_scatter(real_BT[..., None], x_1MC)
        return output.loss, x_BTC, to_running_dtype(output.state)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *others: Any, **named: Any
    ) -> Any:
        mask_BT = model_kwargs.get("attention_mask")
        if mask_BT is not None and not mask_BT[:, -1].all():
            raise ValueError("attention_mask ends in padding, which generation cannot continue; pad on the left")
        if generation_config.use_cache is not False and model_kwargs.get(CACHE) is None:
            model_kwargs[CACHE] = TostCache()
        prepare: Any = super()._prepare_cache_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        return prepare(generation_config, model_kwargs, *others, **named)

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: CheckpointWrapper = checkpoint, every_n_layers: int = 1
    ) -> None:
        self.gradient_checkpointing = enable
        for n, block in enumerate(self.model.blocks):
            assert isinstance(block, Block)
            block.set_checkpoints(gradient_checkpointing_func if enable and n % every_n_layers == 0 else no_checkpoint)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The same distributions as in `TostLM`."""
        ends_branch = any(module is other for name, other in self.model.named_modules() if name.endswith(".out_proj"))
        std = matrix_std(self.model.config.init_std, self.model.config.layers, ends_branch)
        for name, value in own_values(module, std).items():
            parameter = getattr(module, name, None)
            if isinstance(parameter, Tensor) and isinstance(value, Normal):
                initialization.normal_(parameter, std=value.std)
            elif isinstance(parameter, Tensor):
                initialization.copy_(parameter, torch.as_tensor(value))

    @classmethod
    def from_run(cls, path: str | Path, device: str = "cpu") -> "TostForCausalLM":
        """The model of a run folder, a step folder or an export, in evaluation mode.

        It never generates ids beyond its tokenizer's vocabulary.

        Raises:
            CheckpointError, DataError: the checkpoint or its tokenizer cannot be read.
        """
        folder = find_checkpoint(Path(path))
        tokenizer = read_tokenizer(find_tokenizer(folder))
        eot, model_config = tokenizer.eot, read_model_config(folder)
        config = TostConfig.of(model_config, bos_token_id=eot, eos_token_id=eot, pad_token_id=eot)
        with torch.device("meta"):
            model: Any = cls(config)
        model.model.load_state_dict(dict(StoredTensors(folder, "model")), assign=True)
        model.tie_weights()
        model.generation_config.suppress_tokens = [*range(tokenizer.vocab_size, model_config.vocab_size)] or None
        return model.to(device).eval()

    def save_pretrained(
        self, save_directory: str | PathLike[str], is_main_process: bool = True, *others: Any, **named: Any
    ) -> None:
        """Write config.json, the weights in safetensors and a manifest, for `from_pretrained` and `tost_lm.load`.

        Args: as in the library.

        Raises:
            CheckpointError: the folder holds a checkpoint in another format.
        """
        folder = Path(save_directory)
        if (folder / MODEL).is_file():
            raise CheckpointError(f"{folder}: holds a checkpoint in another format; give another folder")
        super().save_pretrained(save_directory, is_main_process, *others, **named)
        if is_main_process:
            for name, text in plugin_files(self.model.config.pattern).items():
                (folder / name).write_bytes(text)
            for path in weight_files(folder):
                usual_mode(path)
            seal(folder)


def _real_tokens(tokens_BT: Tensor, mask: Tensor, columns: int) -> Tensor:
    """Whether each token is not padding, [B, T]. The mask also covers the `columns` before these."""
    rows, tokens = tokens_BT.shape
    if mask.shape != (rows, columns + tokens):
        raise ValueError(f"attention_mask must be {[rows, columns + tokens]}, got {list(mask.shape)}")
    return mask[:, columns:] != 0


def seal(folder: Path) -> None:
    """Write the manifest of the files that `tost_lm.load` needs."""
    found = [*weight_files(folder), *folder.glob("mixer_?.py")]
    names = {"config.json", *TOKENIZER_FILES, *(path.name for path in found)}
    entries = {name: flush_and_hash(folder / name) for name in sorted(names) if (folder / name).is_file()}
    write_atomically(folder / MANIFEST, manifest_bytes({"format": FORMAT, "files": entries}))
