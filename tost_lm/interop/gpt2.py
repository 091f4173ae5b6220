"""GPT-2 from a folder of the Hugging Face library to weights and tokenizer of ours, and the names of GPT-2's weights.

In the folder lie config.json, model.safetensors (or shards of it) and, where it was saved with the weights, the
tokenizer: tokenizer.json, or vocab.json and merges.txt.
"""

import json
from collections.abc import Callable
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
from tost_lm.model import ModelConfig, TostLM

# Parts of our names and what they are called in GPT-2; one that contains another comes before it.
PARTS = {
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
PREFIX, HEAD, MASKS = "transformer.", "lm_head.weight", (".attn.bias", ".attn.masked_bias")
"""Before the names, unless the head was left away; the weight tied to the embedding; constants of old versions."""
SIZES = {"n_layer": "layers", "n_head": "heads", "n_embd": "width", "vocab_size": "vocab_size"}
"""What GPT-2's settings call ours."""
SOFTMAX = {"pattern": "A", "positions": "learned", "rope_theta": 0.0, "window": 0, "layer_scale": 0.0}
"""What GPT-2 computes."""
GELU = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "exact"}
# Settings of the library for which ours has one value; those that are not there have it as well.
FIXED = {
    "model_type": "gpt2",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
CONFIG = "config.json"


def read_gpt2(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The settings and the weights [float32, by our names] of GPT-2 in a folder.

    Raises:
        CheckpointError: a file is missing or damaged, it is no GPT-2, or its weights are not those of its settings.
        ConfigError: its sizes do not go together.
    """
    where, settings = folder / CONFIG, _read_json(folder / CONFIG)
    for name, value in FIXED.items():
        if settings.get(name, value) != value:
            raise CheckpointError(f"{where}: {name} is {settings[name]!r}, and only {value!r} is understood")
    activation = settings.get("activation_function", "gelu_new")
    if activation not in GELU:
        raise CheckpointError(f"{where}: activation_function {activation!r}: must be one of {', '.join(GELU)}")
    tree = sizes(settings, {**SIZES, "n_positions": "max_positions"}, where)
    if settings.get("n_inner") not in (None, 4 * tree["width"]):
        raise CheckpointError(f"{where}: n_inner is {settings['n_inner']}, and the MLP is four times as wide as n_embd")
    config = validate(ModelConfig, {**SOFTMAX, **tree, "bias": True, "gelu": GELU[activation]}, str(where))
    # A projection's weight is [in, out], that of nn.Linear [out, in].
    theirs = matched(folder, config, _read_weights(folder), lambda name, shape: shape[::-1] if _turned(name) else shape)
    return config, {name: weight.T.contiguous() if _turned(name) else weight for name, weight in theirs.items()}


def read_gpt2_tokenizer(folder: Path) -> Gpt2Tokenizer | None:
    """The tokenizer in a folder; None: there is none.

    Raises:
        DataError: it is not GPT-2's to the byte.
    """
    parts = _tokenizer_parts(folder)
    if parts is None:
        return None
    ids, merges = parts
    with TemporaryDirectory(prefix="tost_lm_gpt2_") as name:
        # The files that GPT-2 was published with are these, written anew, and the hashes of those are known.
        published = Path(name)
        try:
            (published / "encoder.json").write_text(json.dumps(dict(sorted(ids.items(), key=lambda item: item[1]))))
            (published / "vocab.bpe").write_text("".join(f"{line}\n" for line in ["#version: 0.2", *merges]), "utf-8")
            return gpt2_tokenizer(published)
        except (DataError, TypeError, AttributeError):
            raise DataError(
                f"{folder}: its tokenizer is not GPT-2's; if the model reads GPT-2's tokens all the same, give "
                "convert.gpt2, a folder with GPT-2's encoder.json and vocab.bpe"
            ) from None


def sizes(settings: dict[str, Any], names: dict[str, str], where: Path) -> dict[str, Any]:
    """Settings of ours from some of theirs. Raises CheckpointError if one is missing."""
    if missing := [name for name in names if name not in settings]:
        raise CheckpointError(f"{where}: says nothing of {', '.join(missing)}")
    return {ours: settings[name] for name, ours in names.items()}


def matched(
    where: Path,
    config: ModelConfig,
    found: dict[str, Any],
    their_shape: Callable[[str, tuple[int, ...]], tuple[int, ...]],
) -> dict[str, Tensor]:
    """The weights of a model by our names, in float32 and still in their shapes.

    Args:
        found: by their names, without PREFIX; perhaps with the head.
        their_shape: of a weight, from our name and shape of it.

    Raises:
        CheckpointError: one is missing, is too many or is of another shape, or the head is not tied to the embedding.
    """
    layers = len({name.split(".")[1] for name in found if name.startswith("h.")})
    if layers != config.layers:
        raise CheckpointError(f"{where}: is said to have {config.layers} layers, and holds weights of {layers}")
    with torch.device("meta"):
        expected = {name: tuple(weight.shape) for name, weight in TostLM(config).state_dict().items()}
    theirs = {name: gpt2_name(name) for name in expected}
    if missing := [name for name in theirs.values() if name not in found]:
        raise CheckpointError(f"{where}: lacks {_listed(missing)}")
    if unexpected := [name for name in found if name not in {HEAD, *theirs.values()}]:
        raise CheckpointError(f"{where}: holds what such a model does not have: {_listed(unexpected)}")
    for name, shape in expected.items():
        weight, wanted = found[theirs[name]], list(their_shape(name, shape))
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            raise CheckpointError(f"{where}: {theirs[name]} is no tensor of floating point numbers")
        if list(weight.shape) != wanted:
            raise CheckpointError(
                f"{where}: {theirs[name]} is of shape {list(weight.shape)}, and the sizes that go with it say {wanted}"
            )
    if HEAD in found and not torch.equal(found[HEAD], found["wte.weight"]):
        raise CheckpointError(f"{where}: {HEAD} is not the token embedding, to which our head is tied")
    return {name: found[theirs[name]].float() for name in expected}


def gpt2_name(name: str) -> str:
    """What a weight of ours is called in GPT-2, without PREFIX."""
    for ours, theirs in PARTS.items():
        name = name.replace(ours, theirs)
    return name


def _turned(name: str) -> bool:
    return name.endswith("_proj.weight")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """By their names without PREFIX, without the causal masks."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder}: holds no model.safetensors; transformers' save_pretrained writes one from what it reads"
        )
    found = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                found |= {name.removeprefix(PREFIX): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise CheckpointError(f"{path}: damaged, or not a safetensors file: {error}") from None
    return {name: weight for name, weight in found.items() if not name.endswith(MASKS)}


def _tokenizer_parts(folder: Path) -> tuple[dict[str, int], list[str]] | None:
    """The id of each token, and the merges in their order as lines; None: there is no tokenizer."""
    whole, vocab, merges = folder / "tokenizer.json", folder / "vocab.json", folder / "merges.txt"
    if whole.is_file():
        tree = _read_json(whole)
        with suppress(KeyError, TypeError, AttributeError):
            cut = tree["pre_tokenizer"]
            as_published = cut["type"] == "ByteLevel" and not cut["add_prefix_space"] and tree["normalizer"] is None
            pairs = tree["model"]["merges"] if as_published else []
            return tree["model"]["vocab"], [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]
        return {}, []
    if vocab.is_file() and merges.is_file():
        return _read_json(vocab), merges.read_text("utf-8", "replace").split("\n")[1:-1]
    return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except ValueError:
        tree = None
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: damaged: not a JSON object")
    return tree
