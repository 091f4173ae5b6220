"""The model as a `PreTrainedModel` of the Hugging Face library for inference, and its config.json.

Shapes as in `tost_lm.model`; K: number of columns with logits.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from tost_lm.checkpointing.format import StoredTensors, read_model_config
from tost_lm.checkpointing.run_folder import find_checkpoint
from tost_lm.config import validate
from tost_lm.data.tokenizers import find_tokenizer, read_tokenizer
from tost_lm.interop.hf.cache import TostCache
from tost_lm.model.config import PRESETS, ModelConfig
from tost_lm.model.lm import Head, TostLM
from tost_lm.model.streaming import to_running_dtype

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
        model = validate(ModelConfig, tree, "TostConfig")
        super().__post_init__(**named, **model.in_use())
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
    """A `TostLM` as `model`, whose head returns hidden states. `tost train` and `TostLM` train it."""

    config: TostConfig
    config_class = TostConfig
    base_model_prefix = "model"
    _is_stateful = True
    _input_embed_layer = "embedding"

    def __init__(self, config: TostConfig) -> None:
        super().__init__(config)
        self.model = TostLM(config.to_model(), head=HiddenStates)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """`TostLM` has drawn them."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: TostCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: TostCache | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, K, V] and the cache.

        Arguments are the library's. `logits_to_keep` is the number of last columns with logits, 0 for all, or their
        indices [K]. Padding at any place, where `attention_mask` [B, columns of the cache + T] is 0, is skipped:
        positions count tokens only, and logits at padding are 0. A cache, `past_key_values` or `cache`, is updated in
        place.

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
        x_BTC = self._read(input_ids, attention_mask, cache)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        tied_VC = self.model.embedding.weight if self.model.head.weight is None else None
        logits: Any = linear(x_BTC[:, kept], self.model.head.weight_or(tied_VC))
        return CausalLMOutputWithPast(None, logits, **dict[str, Any]({CACHE: cache}))

    def _read(self, tokens_BT: Tensor, mask: Tensor | None, cache: TostCache | None) -> Tensor:
        """Hidden states [B, T, C], 0 at padding; the cache is updated. With padding, the tokens are read as packed
        documents."""
        columns, state = (0, None) if cache is None else (cache.columns, cache.state)
        rows, tokens = tokens_BT.shape
        if mask is not None and mask.shape != (rows, columns + tokens):
            raise ValueError(f"attention_mask must be {[rows, columns + tokens]}, got {list(mask.shape)}")
        real_BT = None if mask is None else mask[:, columns:] != 0
        if real_BT is None or real_BT.all():
            output = self.model(tokens_BT, state=state, output_state=cache is not None)
            x_BTC = output.logits
        else:
            if not real_BT.any(1).all():
                raise ValueError("attention_mask masks all tokens of a row; give each row a 1, and prompts in one call")
            offsets = pad(real_BT.sum(1).cumsum(0), (1, 0)).int()
            output = self.model(tokens_BT[real_BT][None], None, state, offsets, output_state=cache is not None)
            x_1MC = output.logits
            x_BTC = x_1MC.new_zeros(*real_BT.shape, x_1MC.shape[-1]).masked_scatter(real_BT[..., None], x_1MC)
        if cache is not None:
            cache.state, cache.columns = to_running_dtype(output.state), columns + tokens
        return x_BTC

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
        model.generation_config.suppress_tokens = [*range(tokenizer.vocab_size, model_config.vocab_size)] or None
        return model.to(device).eval()
