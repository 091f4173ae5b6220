"""A language model of token statistics self-attention (TSSA, arXiv 2412.17810) for the Hugging Face library: one file.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

runs this file from a model folder that contains it. It imports torch and transformers alone, and computes what the
package tost_lm, which wrote the folder, computes for models with settings of the published form.

Shapes: B rows, T tokens, C channels, H heads, D = C / H channels per head, K columns with logits, V vocabulary.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from transformers import Cache, GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

ENERGY_FLOOR, MASS_FLOOR = 1e-12, 1e-8
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__annotations__ else "past_key_values"  # before transformers 5.24


class TostConfig(PreTrainedConfig):
    """The settings in config.json, which are those of tost_lm under their own names."""

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
    max_positions: Any = None
    """None: the model has no parameters of positions, and reads any number of tokens."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class LayerState(NamedTuple):
    """Sums of a layer over the tokens read so far: 2·C + H numbers a row, float64 if the device has it."""

    energy: Tensor
    """Σ w², [B, H, D]."""
    weighted_energy: Tensor
    """Σ Π·w², [B, H, D]."""
    mass: Tensor
    """Σ Π, [B, H]."""


class TostCache(Cache):
    """The sums of all layers, whose size does not depend on the number of tokens. Forward replaces them."""

    is_compileable = is_croppable = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    is_linear = (False,)  # else `generate` reads the known tokens again  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.reset()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens per row so far, with padding."""
        return self.columns

    def reset(self) -> None:
        """Forget all tokens."""
        self.states: list[LayerState] = []
        self.positions: Tensor | None = None  # tokens per row so far, without padding, [B]
        self.columns = 0

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at `indices`, int64 [n], in that order."""
        if self.positions is not None:
            indices = indices.to(self.positions.device)
            self.positions = self.positions[indices]
            self.states = [LayerState(*(x[indices] for x in state)) for state in self.states]

    reorder_cache = batch_select_indices  # pyright: ignore[reportAssignmentType]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, copies next to each other."""
        if self.positions is not None:
            self.batch_select_indices(torch.arange(len(self.positions)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Raises ValueError unless `tokens_to_remove` is 0: sums over tokens cannot be undone."""
        if tokens_to_remove:
            raise ValueError(f"TostCache: the last {abs(tokens_to_remove)} tokens cannot be removed from its state")


class Tssa(nn.Module):
    """Causal TSSA between two linear layers. Statistics are float32, or float64 for float64 weights."""

    def __init__(self, config: TostConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.in_proj = nn.Linear(config.width, config.width, bias=config.bias)
        self.out_proj = nn.Linear(config.width, config.width, bias=config.bias)
        self.temp = nn.Parameter(torch.ones(self.heads))
        shapes = {"position": (self.heads, config.max_positions), "head": (self.heads,)}
        shape = shapes.get(config.tssa["denom_bias"])
        self.denom_bias = nn.Parameter(torch.zeros(shape)) if shape else None

    def forward(
        self, x_BTC: Tensor, before: LayerState | None, position_BT: Tensor, real_BT: Tensor
    ) -> tuple[Tensor, LayerState]:
        """Mix the tokens after those of `before`; padding, where `real_BT` is False, changes no statistics."""
        w_BTHD = self.in_proj(x_BTC).unflatten(-1, (self.heads, -1))
        given, dtype = w_BTHD.dtype, torch.promote_types(w_BTHD.dtype, torch.float32)
        with torch.autocast(x_BTC.device.type, enabled=False):
            w_BTHD, real_BT1 = w_BTHD.to(dtype), real_BT[..., None]
            w_sq_BTHD = w_BTHD.square() * real_BT1[..., None]
            energy_BTHD = _running_sum(w_sq_BTHD, before and before.energy)
            z_BTH = (w_sq_BTHD / energy_BTHD.to(dtype).clamp_min(ENERGY_FLOOR)).sum(-1)
            if self.denom_bias is not None:  # inside the sum over channels
                of_position = self.denom_bias.dim() == 2
                bias = self.denom_bias[:, position_BT].movedim(0, -1) if of_position else self.denom_bias
                z_BTH = z_BTH + bias.to(dtype) * w_BTHD.shape[-1]
            pi_BTH = (self.temp.to(dtype) * z_BTH).softmax(-1) * real_BT1
            weighted_BTHD = _running_sum(pi_BTH[..., None] * w_sq_BTHD, before and before.weighted_energy)
            mass_BTH = _running_sum(pi_BTH, before and before.mass)
            second_moment_BTHD = weighted_BTHD.to(dtype) / (mass_BTH.to(dtype) + MASS_FLOOR)[..., None]
            y_BTHD = -(pi_BTH[..., None] * w_BTHD) / (1 + second_moment_BTHD)
        # After some hundred thousand tokens, a new one is too small to change a float32 sum.
        running = torch.float32 if w_BTHD.device.type == "mps" else torch.float64
        after = LayerState(*(x[:, -1].to(running) for x in (energy_BTHD, weighted_BTHD, mass_BTH)))
        return self.out_proj(y_BTHD.to(given).flatten(-2)), after


class LayerNorm(nn.LayerNorm):
    """LayerNorm of the residual stream, which is float32 or wider, rounded to the weights' dtype first."""

    def __init__(self, config: TostConfig) -> None:
        super().__init__(config.width, eps=config.norm_epsilon, bias=config.bias)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(self.weight.dtype))


class LayerScale(nn.Module):
    """A learned factor per channel."""

    def __init__(self, config: TostConfig) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((config.width,), config.layer_scale))

    def forward(self, x_BTC: Tensor) -> Tensor:
        return x_BTC * self.gamma


class Mlp(nn.Module):
    def __init__(self, config: TostConfig) -> None:
        super().__init__()
        hidden = config.mlp_hidden or 4 * config.width
        self.in_proj = nn.Linear(config.width, hidden, bias=config.bias)
        self.out_proj = nn.Linear(hidden, config.width, bias=config.bias)
        self.approximation = {"exact": "none", "tanh": "tanh"}[config.gelu]

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.out_proj(gelu(self.in_proj(x_BTC), approximate=self.approximation))


class Block(nn.Module):
    """x + γ1·mixer(norm(x)), then x + γ2·mlp(norm(x))."""

    def __init__(self, config: TostConfig) -> None:
        super().__init__()
        self.mixer_norm, self.mlp_norm = LayerNorm(config), LayerNorm(config)
        self.mixer, self.mlp = Tssa(config), Mlp(config)
        scale = LayerScale if config.layer_scale else nn.Identity
        self.mixer_scale, self.mlp_scale = scale(config), scale(config)

    def forward(self, x_BTC: Tensor, *context: Any) -> tuple[Tensor, LayerState]:
        mixed_BTC, after = self.mixer(self.mixer_norm(x_BTC), *context)
        x_BTC = x_BTC + self.mixer_scale(mixed_BTC)
        return x_BTC + self.mlp_scale(self.mlp(self.mlp_norm(x_BTC))), after


class TostLM(nn.Module):
    """Embedding, blocks and norm; `TostForCausalLM` applies the head."""

    def __init__(self, config: TostConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.max_positions, config.width) if config.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = LayerNorm(config)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(
        self, tokens_BT: Tensor, states: list[LayerState], position_BT: Tensor, real_BT: Tensor
    ) -> tuple[Tensor, list[LayerState]]:
        """Hidden states [B, T, C] and the states after the tokens; without states, these are the first tokens."""
        x_BTC = self.embedding(tokens_BT)
        x_BTC = x_BTC.to(torch.promote_types(x_BTC.dtype, torch.float32))
        if self.positions is not None:
            x_BTC = x_BTC + self.positions(position_BT)
        after = []
        for i, block in enumerate(self.blocks):
            x_BTC, state = block(x_BTC, states[i] if states else None, position_BT, real_BT)
            after.append(state)
        return self.norm(x_BTC), after


class TostForCausalLM(PreTrainedModel, GenerationMixin):
    config: Any
    config_class = TostConfig
    base_model_prefix = "model"
    _is_stateful = True
    _input_embed_layer = "embedding"
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}  # noqa: RUF012, the library's
    cache_class = TostCache

    def __init__(self, config: TostConfig) -> None:
        super().__init__(config)
        self.model = TostLM(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.model.head = new_embeddings

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
        padding have no meaning. A cache, `past_key_values` or `cache`, is updated in place.

        Raises:
            ValueError: a row has more tokens than the model's positions, the mask does not fit, the cache has other
                rows or another class, or an argument is unknown.
        """
        for name, value in others.items():
            if value is not None and value is not False:
                raise ValueError(f"TostForCausalLM does not support {name}: leave it out")
        cache = past_key_values if cache is None else cache
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = self.cache_class()
        if cache is not None and not isinstance(cache, self.cache_class):
            raise ValueError(f"past_key_values is a {type(cache).__name__}: give a TostCache, or leave it out")
        loss, x_BTC = self.read(input_ids, attention_mask, cache, labels, num_items_in_batch)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits: Any = self.logits(x_BTC[:, kept]) if labels is None or not self.training else None
        return CausalLMOutputWithPast(loss, logits, **dict[str, Any]({CACHE: cache}))

    def logits(self, x_BKC: Tensor) -> Tensor:
        """[B, K, V] of hidden states."""
        return self.model.head(x_BKC)

    def read(
        self, tokens_BT: Tensor, mask: Tensor | None, cache: Any, labels_BT: Tensor | None, label_count: Any
    ) -> tuple[Tensor | None, Tensor]:
        """The loss and hidden states [B, T, C]; the cache is updated."""
        states, first_B, columns = ([], None, 0) if cache is None else (cache.states, cache.positions, cache.columns)
        real_BT = real_tokens(tokens_BT, mask, columns)
        count_BT = _running_sum(real_BT, first_B)
        limit = self.config.max_positions
        if limit is not None and columns + real_BT.shape[1] > limit and (longest := int(count_BT.max())) > limit:
            raise ValueError(f"{longest} tokens are more than the model's {limit} positions; shorten the text")
        x_BTC, states = self.model(tokens_BT, states, (count_BT - 1).clamp_min(0), real_BT)
        if cache is not None:
            cache.states, cache.positions, cache.columns = states, count_BT[:, -1], columns + real_BT.shape[1]
        if labels_BT is None:
            return None, x_BTC
        labels_BT = labels_BT.masked_fill(~real_BT.roll(1, 1), -100)  # none follows padding
        return self.loss_function(self.logits(x_BTC), labels_BT, self.config.vocab_size, label_count), x_BTC

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *others: Any, **named: Any
    ) -> Any:
        mask_BT = model_kwargs.get("attention_mask")
        if mask_BT is not None and not mask_BT[:, -1].all():
            raise ValueError("attention_mask ends in padding, which generation cannot continue; pad on the left")
        if generation_config.use_cache is not False and model_kwargs.get(CACHE) is None:
            model_kwargs[CACHE] = self.cache_class()
        prepare: Any = super()._prepare_cache_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        return prepare(generation_config, model_kwargs, *others, **named)


def _running_sum(x_BT: Tensor, before_B: Tensor | None) -> Tensor:
    return x_BT.cumsum(1) if before_B is None else before_B[:, None] + x_BT.cumsum(1)


def real_tokens(tokens_BT: Tensor, mask: Tensor | None, columns: int) -> Tensor:
    """Whether each token is not padding, [B, T]. The mask also covers the `columns` before these."""
    if mask is None:
        return torch.ones_like(tokens_BT, dtype=torch.bool)
    rows, tokens = tokens_BT.shape
    if mask.shape != (rows, columns + tokens):
        raise ValueError(f"attention_mask must be {[rows, columns + tokens]}, got {list(mask.shape)}")
    return mask[:, columns:] != 0
