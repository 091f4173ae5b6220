"""OLMo-Hybrid models of the Hugging Face library, read and written with its own classes.

Three of four layers are the gated delta rule and the fourth is full softmax attention. In the latter the norms come
after mixer and MLP, and those of queries and keys are over all heads. Weights and settings keep their values, so logits
agree up to rounding, and a model that is read and written again is equal.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tost_lm.checkpointing.format import CONVERSION, StoredTensors, read_model_config
from tost_lm.config import leaves, validate
from tost_lm.data.tokenizers import HfTokenizer, Tokenizer, find_tokenizer, read_tokenizer
from tost_lm.data.tokenizers.hf import hf_tokenizer
from tost_lm.data.tokenizers.lossless import FORMS
from tost_lm.errors import CheckpointError, DataError
from tost_lm.files import make_temp_folder, publish_folder, remove_temp_folder
from tost_lm.inference.hugging_face import check_settings, transformers_library
from tost_lm.interop.gpt2 import CONFIG, check_supported, listed, read_settings
from tost_lm.interop.interface import ForeignFormat, ForeignModel
from tost_lm.mixers.delta.settings import CONV_TAPS, Sizes
from tost_lm.mixers.softmax.settings import Sizes as SoftmaxSizes
from tost_lm.model import ModelConfig

LETTERS = {"linear_attention": "D", "full_attention": "A"}
SIZES = {
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "hidden_size": "width",
    "vocab_size": "vocab_size",
    "intermediate_size": "mlp_hidden",
    "rms_norm_eps": "norm_epsilon",
    "max_position_embeddings": "context_length",
    "tie_word_embeddings": "tied_head",
}
DELTA = {
    "linear_num_key_heads": "qk_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "qk_size",
    "linear_value_head_dim": "value_size",
    "linear_allow_neg_eigval": "beta_to_two",
}
"""Their settings, and ours."""
FORM: dict[str, Any] = {
    "positions": "none", "layer_scale": 0.0, "mlp": "swiglu", "norm": "rms", "norm_after": "A", "bias": False,
    "softmax": {
        "qk_norm": "all-heads", "window": 0, "head_size": None, "gate": False, "rotary_fraction": 1.0,
        "rope_scaling_factor": 1.0,
    },
    "delta": {"norm_epsilon": 1e-5},
}  # fmt: skip
"""Our settings that all of these models share."""
UNLIMITED = 1 << 20
"""Positions of a trained model without rotary embeddings. It reads any length, but other tools refuse longer texts, and
some reserve memory for as many tokens."""
FIXED = {"hidden_act": "silu", "attention_bias": False, "linear_conv_kernel_dim": CONV_TAPS, "head_dim": None}
"""Their settings with one supported value."""

CONVOLUTION = "mixer.conv"
ENDS = {"embedding.weight": ["model.embed_tokens.weight"], "norm.weight": ["model.norm.weight"]}
MLP = {
    "mlp.in_proj.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.out_proj.weight": ["mlp.down_proj.weight"],
}
BLOCKS = {
    "D": {
        "mixer_norm.weight": ["input_layernorm.weight"],
        "mixer.in_proj.weight": [f"linear_attn.{name}_proj.weight" for name in "qkvgba"],
        CONVOLUTION: ["linear_attn.conv1d.weight"],
        "mixer.log_rate": ["linear_attn.A_log"],
        "mixer.step_bias": ["linear_attn.dt_bias"],
        "mixer.norm": ["linear_attn.o_norm.weight"],
        "mixer.out_proj.weight": ["linear_attn.o_proj.weight"],
        "mlp_norm.weight": ["post_attention_layernorm.weight"],
        **MLP,
    },
    "A": {
        "mixer.in_proj.weight": [f"self_attn.{name}_proj.weight" for name in "qkv"],
        "mixer.q_norm.weight": ["self_attn.q_norm.weight"],
        "mixer.k_norm.weight": ["self_attn.k_norm.weight"],
        "mixer.out_proj.weight": ["self_attn.o_proj.weight"],
        "mixer_norm.weight": ["post_attention_layernorm.weight"],
        "mlp_norm.weight": ["post_feedforward_layernorm.weight"],
        **MLP,
    },
}  # fmt: skip
"""Our parameters of a block, and theirs whose rows follow each other in it; in D layers, those of each key head do."""


def read_olmo_hybrid(folder: Path) -> ForeignModel:
    """The settings and the weights [float32, by our names] of an OLMo-Hybrid model in a folder.

    Raises:
        CheckpointError: a file is missing or damaged, or a setting is not supported.
        ConfigError: its sizes are inconsistent, or transformers is not installed.
    """
    where, library = folder / CONFIG, transformers_library()
    try:
        stored, _ = library.PreTrainedConfig.get_config_dict(folder, local_files_only=True)
        settings = library.OlmoHybridConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library has none of its own
        raise CheckpointError(f"{where}: transformers rejects it: {_first_line(error)}; correct it") from None
    check_settings(stored, where)
    config = our_settings(settings, where)
    try:
        model, found = library.OlmoHybridForCausalLM.from_pretrained(
            folder, config=settings, dtype=torch.float32, output_loading_info=True, local_files_only=True
        )
    except Exception as error:
        raise CheckpointError(f"{folder}: transformers cannot read it: {_first_line(error)}; copy it again") from None
    for problem in ("missing", "unexpected"):
        if names := sorted(found[f"{problem}_keys"]):
            raise CheckpointError(f"{folder}: {problem} weights: {listed(names)}; copy it again")
    return ForeignModel(config, our_weights(config, model.state_dict()))


def read_olmo_tokenizer(folder: Path) -> HfTokenizer | None:
    """The tokenizer of a model folder, whose end-of-text token is the first of `eos_token_id`; None: it has none.

    Raises:
        ConfigError: transformers is not installed.
        DataError: it is not lossless, or has no such token.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    eos = read_settings(folder).get("eos_token_id")
    eos = eos[0] if isinstance(eos, list) and eos else eos
    transformers_library()  # with it come the tokenizers
    import tokenizers

    try:
        token = tokenizers.Tokenizer.from_file(str(path)).id_to_token(eos) if isinstance(eos, int) else None
    except Exception as error:  # the library has none of its own
        raise DataError(f"{path}: damaged: {_first_line(error)}; copy it again") from None
    if token is None:
        raise DataError(f"{folder / CONFIG}: eos_token_id {eos} is no token of {path.name}; correct it")
    return hf_tokenizer(path, token, FORMS[-1])


def write_olmo_hybrid(
    folder: Path, config: ModelConfig, weights: Mapping[str, Tensor], tokenizer: Tokenizer, as_read: bool = False
) -> None:
    """Write a folder that `OlmoHybridForCausalLM.from_pretrained` reads, complete or not at all.

    The tokenizer is written if it came from a tokenizer.json.

    Args:
        as_read: the settings are those of a folder that was read, and none changes. Else a model without rotary
            embeddings gets at least UNLIMITED positions.

    Raises:
        ConfigError: the library has no such model, with a line for each setting, or it is not installed.
        CheckpointError: the folder cannot be written.
    """
    library = transformers_library()
    ours = dict(leaves(config.model_dump())) | {"pattern": "".join(sorted(set(config.pattern)))}
    check_supported(ours, dict(leaves(FORM)) | {"pattern": "AD"}, "OlmoHybridForCausalLM")
    with torch.device("meta"):
        model = library.OlmoHybridForCausalLM(their_settings(config, tokenizer.eot, as_read))
    model.load_state_dict(their_weights(config, weights), assign=True)
    try:
        temporary = make_temp_folder(folder)
        model.save_pretrained(temporary)
        if isinstance(tokenizer, HfTokenizer):
            import tokenizers

            pipeline = tokenizers.Tokenizer.from_str(tokenizer.tokenizer_json)
            saved = library.PreTrainedTokenizerFast(tokenizer_object=pipeline, eos_token=tokenizer.eot_token)
            saved.save_pretrained(temporary)
        publish_folder(temporary, folder)
    except Exception as error:
        remove_temp_folder(folder)
        raise CheckpointError(f"{folder}: cannot be written: {_first_line(error)}") from None


def our_settings(theirs: Any, where: Path) -> ModelConfig:
    """Our settings of a model with an OlmoHybridConfig, which messages name as `where`.

    Raises:
        CheckpointError: one is not supported.
        ConfigError: the sizes are inconsistent.
    """
    rope = theirs.rope_parameters or {}
    given = {name: getattr(theirs, name, None) for name in FIXED} | {"rope_type": rope.get("rope_type", "default")}
    for name, value in {**FIXED, "rope_type": "default"}.items():
        if given[name] != value:
            raise CheckpointError(f"{where}: unsupported {name}: {given[name]!r}; give a model with {value!r}")
    softmax = {"kv_heads": theirs.num_key_value_heads, "rope_theta": float(rope.get("rope_theta") or 0)}
    tree = {
        **FORM,
        **{ours: getattr(theirs, name) for name, ours in SIZES.items()},
        "pattern": "".join(LETTERS[kind] for kind in theirs.layer_types),
        "delta": FORM["delta"] | {ours: getattr(theirs, name) for name, ours in DELTA.items()},
        "softmax": FORM["softmax"] | softmax,
    }
    return validate(ModelConfig, tree, str(where))


def their_settings(config: ModelConfig, eot: int, as_read: bool = False) -> Any:
    """The OlmoHybridConfig of a model whose documents end with the token `eot`; `as_read` as in `write_olmo_hybrid`."""
    kinds = {letter: kind for kind, letter in LETTERS.items()}
    sizes = {name: getattr(config, ours) for name, ours in SIZES.items()} | {"intermediate_size": config.mlp_width}
    if not as_read and not config.softmax.rope_theta:
        sizes["max_position_embeddings"] = max(config.context_length, UNLIMITED)
    return transformers_library().OlmoHybridConfig(
        **sizes,
        **dict(zip(DELTA, (*Sizes.of(config.shape_of("D")), config.delta.beta_to_two), strict=True)),
        num_key_value_heads=config.softmax.kv_heads or config.heads,
        rope_parameters={"rope_type": "default", "rope_theta": config.softmax.rope_theta or None},
        layer_types=[kinds[letter] for letter in config.letters],
        eos_token_id=eot,
        pad_token_id=None,
    )


def our_weights(config: ModelConfig, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights by our names, from those of an OlmoHybridForCausalLM."""
    joined = {}
    for ours, names, heads, sizes in _parameters(config):
        if ours.endswith(CONVOLUTION):
            parts = theirs[names[0]].squeeze(1).split([heads * size for size in sizes])
        else:
            parts = [theirs[name] for name in names]
        joined[ours] = torch.cat([x.unflatten(0, (heads, -1)) for x in parts], 1).flatten(0, 1) if sizes else parts[0]
    return joined


def their_weights(config: ModelConfig, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights by the names of an OlmoHybridForCausalLM, from ours."""
    found: dict[str, Tensor] = {}
    for name, names, heads, sizes in _parameters(config):
        parts = [ours[name]]
        if sizes:
            parts = [x.flatten(0, 1).clone() for x in parts[0].unflatten(0, (heads, -1)).split(sizes, 1)]
        found |= zip(names, [torch.cat(parts)[:, None]] if name.endswith(CONVOLUTION) else parts, strict=True)
    return found | ({"lm_head.weight": ours["embedding.weight"]} if config.tied_head else {})


def _parameters(config: ModelConfig) -> Iterator[tuple[str, list[str], int, list[int]]]:
    """Each of our parameters, the names of theirs in it, and the rows of each of these in each of how many heads."""
    ends = ENDS if config.tied_head else {**ENDS, "head.weight": ["lm_head.weight"]}
    yield from ((ours, names, 1, []) for ours, names in ends.items())
    h, H, K, V = Sizes.of(config.shape_of("D"))
    group, kv = H // h, SoftmaxSizes.of(config.shape_of("A")).keys
    of_head = [K, K, group * V, group * V, group, group]
    rows_of = {
        "D": {"mixer.in_proj.weight": (h, of_head), CONVOLUTION: (h, of_head[:3])},
        "A": {"mixer.in_proj.weight": (1, [config.width, kv, kv])},
    }
    for n, letter in enumerate(config.letters):
        rows = {**rows_of[letter], "mlp.in_proj.weight": (1, 2 * [config.mlp_width])}
        for ours, names in BLOCKS[letter].items():
            yield f"blocks.{n}.{ours}", [f"model.layers.{n}.{name}" for name in names], *rows.get(ours, (1, []))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def _write(folder: Path, checkpoint: Path) -> list[str]:
    config, path = read_model_config(checkpoint), find_tokenizer(checkpoint)
    tokenizer = read_tokenizer(path)
    weights, as_read = dict(StoredTensors(checkpoint, "model")), (checkpoint / CONVERSION).is_file()
    write_olmo_hybrid(folder, config, weights, tokenizer, as_read)
    written = f"{checkpoint}: written to {folder} for OlmoHybridForCausalLM.from_pretrained"
    return [written, f"its ids are those of {path}"]


FORMAT = ForeignFormat(
    "OLMo-Hybrid of the Hugging Face library", "olmo_hybrid", read_olmo_hybrid, read_olmo_tokenizer, _write
)
