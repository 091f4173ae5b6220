"""The shape of a language model, and the published presets."""

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from tost_lm.config import Section, is_from_user
from tost_lm.mixers.plugins import complete_settings, run_plugin, settings_of, unknown_letters
from tost_lm.mixers.registry import SPECS, MixerSettings
from tost_lm.mixers.shape import MixerShape
from tost_lm.mixers.spec import MixerSpec
from tost_lm.ops.rotary import Rotary

SWIGLU_MULTIPLE = 256
"""The hidden channels of a SwiGLU are a multiple of it: several tensor ranks have whole tiles of a matrix product."""

# arXiv 2412.17810, language models. gpt2-base is the softmax baseline of the same table, without LayerScale;
# gpt2-base-layerscale is the softmax model that the released train.py builds, with it. The delta presets are ours
# (docs/experiments.md), in the form of Qwen3.5, which vLLM, SGLang and the Hugging Face library run. The qwen3.5 presets
# are the text parts of Qwen's models of these names (docs/qwen3_5.md names the source of each number).
_BASE = {"layers": 12, "heads": 12, "width": 768}
_MEDIUM = {"layers": 24, "heads": 16, "width": 1024}
_LARGE = {"layers": 36, "heads": 20, "width": 1280}
_GATED = {"kv_heads": 8, "qk_norm": True, "gate": True, "rotary_fraction": 0.25}
_DELTA = {
    "pattern": "DDDA", "positions": "none", "layer_scale": 0.0, "norm": "rms-zero-centered", "mlp": "swiglu",
    "tied_head": False, "softmax": _GATED,
}  # fmt: skip
_QWEN3_5 = {
    **_DELTA, "layers": 32, "heads": 16, "vocab_size": 248_320, "context_length": 262_144, "norm_epsilon": 1e-6,
    "softmax": {**_GATED, "head_size": 256, "kv_heads": 4, "rope_theta": 1e7},
}  # fmt: skip
_QWEN3_5_DELTA = {"qk_heads": 16, "value_heads": 32, "qk_size": 128, "value_size": 128, "norm_epsilon": 1e-6}
PRESETS: dict[str, dict[str, Any]] = {
    "tost-base": {"pattern": "T", **_BASE},
    "tost-medium": {"pattern": "T", **_MEDIUM},
    "tost-large": {"pattern": "T", **_LARGE},
    "delta-350m": {**_DELTA, "layers": 20, "heads": 8, "width": 1024, "softmax": {**_GATED, "kv_heads": 4}},
    "delta-1b": {**_DELTA, "layers": 16, "heads": 16, "width": 2048},
    "delta-3b": {**_DELTA, "layers": 24, "heads": 24, "width": 3072},
    "qwen3.5-4b": {**_QWEN3_5, "width": 2560, "mlp_hidden": 9216, "tied_head": True, "delta": _QWEN3_5_DELTA},
    "qwen3.5-9b": {**_QWEN3_5, "width": 4096, "mlp_hidden": 12_288, "delta": _QWEN3_5_DELTA},
    "qwen3.5-27b": {
        **_QWEN3_5, "layers": 64, "heads": 24, "width": 5120, "mlp_hidden": 17_408,
        "delta": {**_QWEN3_5_DELTA, "value_heads": 48},
    },
    "gpt2-base": {"pattern": "A", **_BASE, "layer_scale": 0.0, "softmax": {"rope_theta": 0.0}},
    "gpt2-base-layerscale": {"pattern": "A", **_BASE, "softmax": {"rope_theta": 0.0}},
}  # fmt: skip

MAX_LAYERS = 10_000
"""Far above any model; a larger number is a mistake that would take minutes of building."""


class ModelShape(Section):
    """The settings of a model that all its parts share."""

    preset: Literal[tuple(PRESETS)] | None = None  # pyright: ignore[reportInvalidTypeForm]
    """Sets pattern, layers, heads, width, layer_scale, positions and softmax.rope_theta: published values for the tost and gpt2 presets. In a delta preset every fourth layer is softmax attention to all earlier tokens, and the other layers are the gated delta rule; it also sets norm, mlp, tied_head and, of softmax, kv_heads, qk_norm, gate and rotary_fraction as Qwen3.5 has them, in heads of 128 channels, and does not limit the sequence length. A qwen3.5 preset sets all that the text part of the public model has. Settings that are given explicitly override the preset."""
    plugins: list[Path] = Field(default_factory=list)
    """Python files with token mixers of your own, which are run: see docs/tutorials/own_mixer.md."""
    pattern: str = "T"
    """Token mixer of each layer, one letter a layer, repeated to fill all layers: T token statistics self-attention, D gated delta rule, A softmax attention, or a letter of model.plugins. With DDDA, or 3D:1A as a ratio, every fourth layer is softmax attention."""
    layers: int = Field(gt=0, le=MAX_LAYERS)
    """Number of blocks; a multiple of the pattern's length."""
    heads: int = Field(gt=0)
    """Number of heads of the mixer; must divide model.width, unless all mixers have heads of another size."""
    width: int = Field(gt=0)
    """Channels of the residual stream (hidden size)."""
    vocab_size: int = Field(default=50304, gt=0)
    """Rows of the token embedding and of the head. The default is GPT-2's 50257, padded to a multiple of 64."""
    positions: Literal["learned", "none"] = "learned"
    """Position embedding, added to the token embedding: `learned` as published; `none`."""
    max_positions: int = Field(default=1024, gt=0)
    """Rows of the learned tables of positions: positions `learned` and denom_bias `position` (block_size in the released code). With either, longer sequences are rejected; a model without both ignores it, and its sequence length is unlimited."""
    context_length: int = Field(default=1024, gt=0)
    """Longest sequence that the model was trained on, in tokens; stored in checkpoints, by default model.max_positions. Training raises it to train.seq_len and to that of its initial weights. Evaluation, exports and cards use it as the default length."""


class ModelConfig(MixerSettings, ModelShape):
    """A decoder-only transformer: pre-norm blocks of a token mixer and an MLP, and a head."""

    layer_scale: float = Field(default=1e-5, ge=0)
    """Initial LayerScale of both branches of a block; 0: no LayerScale."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """MLP of a block: `gelu`, 4 times as wide as the model, as published; `swiglu`, silu(gate) · up, 8/3 times as wide, rounded up to a multiple of 256."""
    mlp_hidden: int | None = Field(default=None, gt=0)
    """Hidden channels of the MLP; unset: as wide as model.mlp says."""
    gelu: Literal["exact", "tanh"] = "exact"
    """GELU of the MLP `gelu`: `exact` as published; `tanh`, the approximation that GPT-2's weights were trained with."""
    norm: Literal["layer", "rms", "rms-zero-centered"] = "layer"
    """Norm of both branches of a block and before the head: `layer`, LayerNorm, as published; `rms`, RMSNorm, without a mean and without a bias; `rms-zero-centered`, an RMSNorm that multiplies with 1 + its weight, as do then the norms of softmax.qk_norm."""
    norm_epsilon: float = Field(default=1e-5, gt=0)
    """Added to the variance in these norms and in those of softmax.qk_norm."""
    norm_after: str = ""
    """Letters of mixers, in model.pattern or not. In the blocks of these mixers the norms are applied to the outputs of both branches instead of their inputs (arXiv 2501.00656)."""
    tied_head: bool = True
    """Whether the head's weight is the token embedding; otherwise it has a weight of its own, drawn from the same distribution."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial embedding and matrices; it is divided by √(2·layers) for those that end a branch. The default is GPT-2's, for a width of 768: narrower models learn faster with 0.02·√(768 / width)."""
    bias: bool = False
    """Biases in linear layers and, with norm `layer`, in norms."""
    plugin_settings: dict[str, dict[str, Any]] = Field(default_factory=dict, validate_default=True)
    """Settings of plugins by letter: model.plugin_settings.E.NAME is the setting NAME of the plugin with the letter E. Its sha256 is that of the plugin's text; unset: of any text."""

    @property
    def letters(self) -> str:
        """The mixer of each layer, a letter each."""
        return self.pattern * (self.layers // len(self.pattern))

    def shape_of(self, letter: str) -> MixerShape:
        """The part of these settings that the mixer with this letter of `pattern` reads."""
        spec = SPECS[letter]
        own = settings_of(letter, self.plugin_settings[letter]) if spec.plugin else getattr(self, spec.folder)
        zero_centered = self.norm == "rms-zero-centered"
        return MixerShape(self.width, self.heads, self.bias, self.norm_epsilon, zero_centered, self.max_positions, own)

    @property
    def mixers(self) -> list[tuple[MixerSpec, MixerShape]]:
        """The mixers in `pattern`, each once."""
        return [(spec, self.shape_of(letter)) for letter, spec in SPECS.items() if letter in self.pattern]

    @property
    def mlp_width(self) -> int:
        """Hidden channels of an MLP; a SwiGLU has as many again for its gate."""
        if self.mlp_hidden or self.mlp == "gelu":
            return self.mlp_hidden or 4 * self.width
        return -(-8 * self.width // (3 * SWIGLU_MULTIPLE)) * SWIGLU_MULTIPLE

    @property
    def layer_kinds(self) -> str:
        """The mixers and their pattern, in words."""
        used = {spec.letter: spec.description(shape) for spec, shape in self.mixers}
        listed = ", ".join(f"{letter} {kind}" for letter, kind in used.items())
        return used[self.pattern[0]] if len(used) == 1 else f"pattern {self.pattern}: {listed}"

    @property
    def position_limit(self) -> int | None:
        """The longest sequence length that the model accepts; None: unlimited."""
        in_mixers = any(spec.has_position_parameters(shape) for spec, shape in self.mixers)
        return self.max_positions if self.positions == "learned" or in_mixers else None

    def in_use(self) -> dict[str, Any]:
        """The settings that the model depends on: without the name of a preset, settings of parts that it lacks, and the size of the weights that it began with."""
        absent = {spec.folder for letter, spec in SPECS.items() if letter not in self.pattern and not spec.plugin}
        unused = {"preset", "plugins", "plugin_settings", "init_std"} | absent
        used = self.model_dump(
            mode="json", exclude=unused | ({"max_positions"} if self.position_limit is None else set())
        )
        own = {letter: values for letter, values in self.plugin_settings.items() if letter in self.pattern}
        return used | ({"plugin_settings": own} if own else {})

    @property
    def rotary(self) -> Rotary | None:
        """The rotary embedding of mixers; None: they have none."""
        return max((one for spec, shape in self.mixers if (one := spec.rotary(shape))), default=None)

    @property
    def kept_tokens(self) -> int | None:
        """Tokens whose keys and values are in a state, at most; None: all."""
        kept = [spec.kept_tokens(shape) for spec, shape in self.mixers]
        return None if None in kept else max(filter(None, kept), default=0)

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        name, positions = values.get("preset"), values.get("max_positions")
        filled = {"context_length": positions} if isinstance(positions, int) else {}
        preset = PRESETS.get(name, {}) if isinstance(name, str) else {}
        sections = {
            key: {**given, **values[key]} for key, given in preset.items() if isinstance(given, dict) and key in values
        }
        return {**filled, **preset, **values, **sections}

    @field_validator("plugins")
    @classmethod
    def _run_plugins(cls, plugins: list[Path], info: ValidationInfo) -> list[Path]:
        for path in plugins if is_from_user(info) else []:
            run_plugin(path)
        return plugins

    @field_validator("pattern")
    @classmethod
    def _letters_are_mixers(cls, pattern: str, info: ValidationInfo) -> str:
        if re.fullmatch(r"[1-9]\d?[A-Z](:[1-9]\d?[A-Z])*", pattern):
            pattern = "".join(part[-1] * int(part[:-1]) for part in pattern.split(":"))
        if "plugins" in info.data and (not pattern or unknown_letters(pattern)):
            *listed, last = (f"{spec.letter} ({spec.name})" for spec in SPECS.values())
            raise ValueError(
                f"invalid model.pattern: {pattern!r}; use the letters {', '.join(listed)} and {last}, also as a ratio "
                "such as 3D:1A, or name the file of another mixer in model.plugins or TOST_PLUGINS"
            )
        return pattern

    @field_validator("plugin_settings")
    @classmethod
    def _complete_plugin_settings(cls, given: dict[str, Any], info: ValidationInfo) -> dict[str, dict[str, Any]]:
        return complete_settings(info.data["pattern"], given) if {"plugins", "pattern"} <= info.data.keys() else given

    @model_validator(mode="after")
    def _shapes_fit(self) -> "ModelConfig":
        splits_width = any(spec.splits_width(shape) for spec, shape in self.mixers)
        if splits_width and self.width % self.heads:
            raise ValueError(
                f"model.width {self.width} is not divisible by model.heads {self.heads}; change one of them"
            )
        if self.layers % len(self.pattern):
            raise ValueError(
                f"model.layers {self.layers} is not a multiple of the {len(self.pattern)} letters of model.pattern "
                f"{self.pattern!r}; change one of them"
            )
        if strange := unknown_letters(self.norm_after):
            raise ValueError(
                f"model.norm_after {self.norm_after!r}: no mixer has the letter {min(strange)}; leave it out"
            )
        for spec, shape in self.mixers:
            if problem := spec.problem(shape):
                raise ValueError(problem)
        return self
