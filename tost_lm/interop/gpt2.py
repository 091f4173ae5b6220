"""GPT-2 from a folder of the Hugging Face library, and the names of GPT-2's weights.

The folder holds config.json, model.safetensors (or shards of it) and perhaps the tokenizer: tokenizer.json, or
vocab.json and merges.txt.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tost_lm.config import validate
from tost_lm.data.tokenizers import Gpt2Tokenizer
from tost_lm.data.tokenizers.gpt2 import gpt2_tokenizer
from tost_lm.errors import CheckpointError, DataError
from tost_lm.files import regular_file
from tost_lm.interop.interface import ForeignFormat, ForeignModel
from tost_lm.model import ModelConfig, TostLM

NAMES = {
    "blocks.": "h.",
    "mixer_norm.": "ln_1.",
    "mixer_scale.gamma": "gamma1",
    "mixer.in_proj.": "attn.c_attn.",
    "mixer.out_proj.": "attn.c_proj.",
    "mixer.": "attn.",
    "mlp_norm.": "ln_2.",
    "mlp_scale.gamma": "gamma2",
    "mlp.in_proj.": "mlp.c_fc.",
    "mlp.out_proj.": "mlp.c_proj.",
    "embedding.": "wte.",
    "positions.": "wpe.",
    "norm.": "ln_f.",
}
"""Fragments of our parameter names, and GPT-2's; a fragment comes before those that it contains."""
PREFIX, HEAD, MASKS = "transformer.", "lm_head.weight", (".attn.bias", ".attn.masked_bias")
"""Prefix of all names in a model with its head; the tied head; constants of old versions."""
SIZES = {"n_layer": "layers", "n_head": "heads", "n_embd": "width", "vocab_size": "vocab_size"}
"""GPT-2's settings, and ours."""
BLOCK = {"norm": "layer", "norm_after": "", "mlp": "gelu", "tied_head": True}
"""Our settings of the parts that all models with these names share."""
SOFTMAX: dict[str, Any] = {"pattern": "A", "positions": "learned", "softmax": {"rope_theta": 0.0}, **BLOCK}
"""Our settings of GPT-2, beside LayerScale, which it lacks."""
GELU = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "exact"}
FIXED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
"""Settings of the library with one supported value, which is also their default."""
CONFIG = "config.json"


def read_gpt2(folder: Path) -> ForeignModel:
    """The settings and the weights [float32, by our names] of GPT-2 in a folder.

    Raises:
        CheckpointError: a file is missing or damaged, a setting is not supported, or weights do not fit the settings.
        ConfigError: its sizes are inconsistent.
    """
    where, settings = folder / CONFIG, read_settings(folder)
    for name, value in FIXED.items():
        if settings.get(name, value) != value:
            raise CheckpointError(f"{where}: unsupported {name}: {settings[name]!r}; give a model with {value!r}")
    activation = settings.get("activation_function", "gelu_new")
    if activation not in GELU:
        raise CheckpointError(
            f"{where}: unsupported activation_function: {activation!r}; give a model with {' or '.join(GELU)}"
        )
    tree = read_sizes(settings, {**SIZES, "n_positions": "max_positions"}, where)
    tree |= {"mlp_hidden": settings.get("n_inner"), "norm_epsilon": settings.get("layer_norm_epsilon", 1e-5)}
    config = validate(
        ModelConfig, {**SOFTMAX, **tree, "layer_scale": 0.0, "bias": True, "gelu": GELU[activation]}, str(where)
    )
    found = _read_weights(folder)
    theirs = match_weights(folder, config, found, lambda name, shape: shape[::-1] if _is_transposed(name) else shape)
    return ForeignModel(
        config, {name: weight.T.contiguous() if _is_transposed(name) else weight for name, weight in theirs.items()}
    )


def weight_files(folder: Path) -> list[Path]:
    """The files with the weights in a folder of the Hugging Face library. Raises CheckpointError: there are none."""
    if files := sorted(folder.glob("model*.safetensors")):
        return files
    raise CheckpointError(
        f"{folder}: no model.safetensors; load the model in transformers and write it with save_pretrained"
    )


def read_gpt2_tokenizer(folder: Path) -> Gpt2Tokenizer | None:
    """The tokenizer in a folder; None if there is none.

    Raises:
        DataError: it differs from GPT-2's.
    """
    found = _read_vocab_and_merges(folder)
    if found is None:
        return None
    ids, merges = found
    with TemporaryDirectory(prefix="tost_lm_gpt2_") as name:
        # Restores the two published files, whose hashes are known.
        published = Path(name)
        try:
            (published / "encoder.json").write_text(json.dumps(dict(sorted(ids.items(), key=lambda item: item[1]))))
            (published / "vocab.bpe").write_text("".join(f"{line}\n" for line in ["#version: 0.2", *merges]), "utf-8")
            return gpt2_tokenizer(published)
        except (DataError, TypeError, AttributeError):
            raise DataError(
                f"{folder}: its tokenizer is not GPT-2's; if the model uses GPT-2's ids, set convert.tokenizer to a "
                "folder with GPT-2's encoder.json and vocab.bpe"
            ) from None


def read_sizes(settings: dict[str, Any], names: dict[str, str], where: Path) -> dict[str, Any]:
    """Our settings, by a table from their names to ours. Raises CheckpointError if one is missing."""
    if missing := [name for name in names if name not in settings]:
        raise CheckpointError(f"{where}: lacks {', '.join(missing)}; add the model's values")
    return {ours: settings[name] for name, ours in names.items()}


def match_weights(
    where: Path,
    config: ModelConfig,
    found: dict[str, Any],
    their_shape: Callable[[str, tuple[int, ...]], tuple[int, ...]],
) -> dict[str, Tensor]:
    """The weights of a model by our names, in float32 and still in their shapes.

    Args:
        found: by their names, without PREFIX; the head is optional.
        their_shape: maps our name and shape of a weight to its shape there.

    Raises:
        CheckpointError: a weight is missing, unexpected or of another shape, or the head is not tied to the embedding.
    """
    layers = len({name.split(".")[1] for name in found if name.startswith("h.")})
    if layers != config.layers:
        raise CheckpointError(f"{where}: its settings say {config.layers} layers, its weights {layers}; copy it again")
    with torch.device("meta"):
        ours = TostLM(config).state_dict()
    expected = {gpt2_name(name): w.new_empty(their_shape(name, tuple(w.shape))) for name, w in ours.items()}
    check_weights(where, expected, {name: weight for name, weight in found.items() if name != HEAD})
    if HEAD in found and not torch.equal(found[HEAD], found["wte.weight"]):
        raise CheckpointError(f"{where}: {HEAD} differs from the token embedding; give a model with a tied head")
    return {name: found[gpt2_name(name)].float() for name in ours}


def check_weights(where: Path, expected: Mapping[str, Tensor], found: Mapping[str, Any]) -> None:
    """Compare the weights of a checkpoint with those that its settings imply, which may be on the meta device.

    Raises:
        CheckpointError: a weight is missing, unexpected, of another shape or of another kind of number.
    """
    if missing := [name for name in expected if name not in found]:
        raise CheckpointError(f"{where}: lacks weights: {listed(missing)}; copy it again")
    if unexpected := [str(name) for name in found if name not in expected]:
        raise CheckpointError(f"{where}: unexpected weights: {listed(unexpected)}; give a model without them")
    for name, wanted in expected.items():
        weight, is_floating = found[name], wanted.is_floating_point()
        if not isinstance(weight, Tensor) or weight.is_floating_point() != is_floating:
            kind = "a floating-point" if is_floating else "an integer"
            raise CheckpointError(f"{where}: {name} is not {kind} tensor; copy it again")
        if weight.shape != wanted.shape:
            raise CheckpointError(
                f"{where}: {name} has shape {list(weight.shape)}, its settings say {list(wanted.shape)}; copy it again"
            )


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of a folder of the Hugging Face library. Raises CheckpointError: they are missing or damaged."""
    return _read_json(folder / CONFIG)


def gpt2_name(name: str) -> str:
    """GPT-2's name of a weight of ours, without PREFIX."""
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def _is_transposed(name: str) -> bool:
    """A projection is [in, out] in GPT-2, [out, in] in nn.Linear."""
    return name.endswith("_proj.weight")


def listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Weights by their names without PREFIX; no causal masks."""
    found = {}
    for path in weight_files(folder):
        try:
            with safe_open(regular_file(path), framework="pt") as file:
                found |= {name.removeprefix(PREFIX): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise CheckpointError(f"{path}: damaged, or not a safetensors file: {error}; copy it again") from None
    return {name: weight for name, weight in found.items() if not name.endswith(MASKS)}


def _read_vocab_and_merges(folder: Path) -> tuple[dict[str, int], list[str]] | None:
    """The id of each token, and the merges in order, one line each; None if there is no tokenizer."""
    whole, vocab, merges = folder / "tokenizer.json", folder / "vocab.json", folder / "merges.txt"
    if whole.is_file():
        tree = _read_json(whole)
        with suppress(KeyError, TypeError, AttributeError):
            pre = tree["pre_tokenizer"]
            as_published = pre["type"] == "ByteLevel" and not pre["add_prefix_space"] and tree["normalizer"] is None
            pairs = tree["model"]["merges"] if as_published else []
            return tree["model"]["vocab"], [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]
        return {}, []
    if vocab.is_file() and merges.is_file():
        return _read_json(vocab), regular_file(merges).read_text("utf-8", "replace").split("\n")[1:-1]
    return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(regular_file(path).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; give a folder of the Hugging Face library") from None
    except ValueError:
        tree = None
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: damaged: not a JSON object; copy it again")
    return tree


FORMAT = ForeignFormat("GPT-2 of the Hugging Face library", ("gpt2",), read_gpt2, read_gpt2_tokenizer)
