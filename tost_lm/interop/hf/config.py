"""The model's config.json in the Hugging Face library."""

from typing import TYPE_CHECKING, Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from tost_lm.config import validate
from tost_lm.errors import ConfigError
from tost_lm.model.config import PRESETS, ModelConfig


@strict
class TostConfig(PreTrainedConfig):
    """The fields of `ModelConfig` under their own names, and the library's fields.

    `hidden_size`, `num_hidden_layers`, `num_attention_heads` and `max_position_embeddings` are aliases of `width`,
    `layers`, `heads` and `max_positions`, and `tie_word_embeddings` equals `tied_head`. Defaults are those of
    `ModelConfig`, at the size of tost-base.

    Raises:
        ConfigError: the settings are invalid.
    """

    model_type = "tost"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012, the library's
    attribute_map = {  # noqa: RUF012, the library's
        "hidden_size": "width",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "max_position_embeddings": "max_positions",
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
        super().__post_init__(**named, **model.model_dump(mode="json"))
        if model.tied_head and not self.tie_word_embeddings:
            raise ConfigError("tie_word_embeddings = False contradicts tied_head = True; leave one of them out")
        self.tie_word_embeddings = model.tied_head

    @classmethod
    def of(cls, model: ModelConfig, **others: Any) -> "TostConfig":
        """Build it from a `ModelConfig`; `others` are the library's fields."""
        return cls(**model.model_dump(mode="json"), **others)

    def to_model(self) -> ModelConfig:
        """The `ModelConfig`. Raises ConfigError."""
        return validate(ModelConfig, {name: getattr(self, name) for name in ModelConfig.model_fields}, "TostConfig")
