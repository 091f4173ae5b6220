"""Models of the Hugging Face library, read and written with its own classes: what all of their forms share.

A form, a module beside this one, names the classes, settings and weights. Weights and settings keep their values, so
logits agree up to rounding, and a model that is read and written again is equal. Names, shards and ties of the weights
are those of the library.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tost_lm.checkpointing.format import CARD, CONVERSION, StoredTensors, read_model_config
from tost_lm.config import leaves, validate
from tost_lm.data.tokenizers import HfTokenizer, Tokenizer, find_tokenizer, read_tokenizer
from tost_lm.data.tokenizers.hf import hf_tokenizer
from tost_lm.data.tokenizers.lossless import FORMS
from tost_lm.errors import CheckpointError, ConfigError, DataError, first_line
from tost_lm.files import make_temp_folder, publish_folder, remove_temp_folder
from tost_lm.inference.evaluated import EvaluatedCheckpoint
from tost_lm.inference.hugging_face import check_settings, transformers_library
from tost_lm.interop.card import TRANSFORMERS_USAGE, model_card
from tost_lm.interop.folder import CONFIG, listed, read_settings, weight_files
from tost_lm.interop.interface import ForeignFormat, ForeignModel
from tost_lm.mixers.delta.settings import CONV_TAPS, DeltaSizes
from tost_lm.mixers.softmax.settings import SoftmaxSizes
from tost_lm.model import ModelConfig
from tost_lm.model.lm import parameter_shapes

LETTERS = {"linear_attention": "D", "full_attention": "A"}
SIZES = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "width": "hidden_size",
    "vocab_size": "vocab_size",
    "mlp_hidden": "intermediate_size",
    "norm_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "tied_head": "tie_word_embeddings",
    "softmax.kv_heads": "num_key_value_heads",
}
"""Our settings, and theirs, of every form."""
DELTA_SIZES = {
    "delta.qk_heads": "linear_num_key_heads",
    "delta.value_heads": "linear_num_value_heads",
    "delta.qk_size": "linear_key_head_dim",
    "delta.value_size": "linear_value_head_dim",
}
SETTINGS: dict[str, Any] = {
    "positions": "none", "layer_scale": 0.0, "mlp": "swiglu", "norm": "rms", "norm_after": "", "bias": False,
    "softmax.qk_norm": False, "softmax.window": 0, "softmax.gate": False, "softmax.rotary_fraction": 1.0,
    "delta.beta_to_two": False, "delta.decay_per_channel": False, "delta.norm_epsilon": 1e-5,
}  # fmt: skip
"""Our settings of all models of a form, unless it names others."""
FIXED: dict[str, Any] = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "linear_conv_kernel_dim": CONV_TAPS,
}  # fmt: skip
"""Their settings with one supported value."""
SCALED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Their settings of Llama 3's scaling, beside its factor."""
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
"""By their names in safetensors; others become float32."""
KEPT_FILES = ("*token*", "vocab.*", "merges.*", "chat_template.*", "generation_config.json")
"""Files of tokenizer and generation beside a model."""
UNLIMITED = 1 << 20
"""Positions of a trained model without rotary embeddings. It reads any length, but other tools refuse longer texts, and
some reserve memory for as many tokens."""

CONSTANT = ".attn.masked_bias"
"""No weight, but in old files of GPT-2."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TEXT_PART = "model.language_model."
"""Before the names of a text part among other parts."""
FORMAT = {"format": "pt"}
STALE = """
Only its text part is new: the weights of images, and `mtp.*`, which predict several tokens, are as in {}, hence stale.
"""
MLP = {
    "mlp.in_proj.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.out_proj.weight": ["mlp.down_proj.weight"],
}
NORMS = {
    "mixer_norm.weight": ["input_layernorm.weight"],
    "mlp_norm.weight": ["post_attention_layernorm.weight"],
}
ATTENTION = {
    "mixer.in_proj.weight": [f"self_attn.{name}_proj.weight" for name in "qkv"],
    "mixer.out_proj.weight": ["self_attn.o_proj.weight"],
    **NORMS,
    **MLP,
}
QK_NORM = {f"mixer.{name}_norm.weight": [f"self_attn.{name}_norm.weight"] for name in "qk"}
DELTA = {
    "mixer.conv": ["linear_attn.conv1d.weight"],
    "mixer.log_rate": ["linear_attn.A_log"],
    "mixer.step_bias": ["linear_attn.dt_bias"],
    **NORMS,
    **MLP,
}


@dataclass(frozen=True)
class PublicForm:
    """A form of models of the Hugging Face library."""

    title: str
    model_types: tuple[str, ...]
    """In config.json; those after the first are of models with more parts, whose text part is read."""
    config_class: str
    model_class: str
    blocks: dict[str, dict[str, list[str]]]
    """By letter, our parameters of a block, and theirs whose rows follow each other in it: see `_order`."""
    sizes: dict[str, str] = field(default_factory=dict)
    """Our settings, and theirs, beside SIZES."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Our settings of all of these models that differ from SETTINGS."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Their settings with one supported value, beside FIXED."""
    partial_rotary: bool = False
    """Whether the rotary embedding may rotate a part of each head."""
    without_rotary: dict[str, Any] | None = None
    """Their settings of the rotary embedding for none; None: each model has one."""
    misnamed: dict[str, dict[str, str]] = field(default_factory=dict)
    """By letter, names of a block's weights in files as the library writes them, and those in public models."""

    @property
    def format(self) -> ForeignFormat:
        title = f"{self.title} of the Hugging Face library"
        return ForeignFormat(title, self.model_types, self.read, read_their_tokenizer, self._write)

    def read(self, folder: Path) -> ForeignModel:
        """The settings and the weights [float32, by our names] of a model in a folder.

        Raises:
            CheckpointError: a file is missing or damaged, or a setting is not supported.
            ConfigError: its sizes are inconsistent, or transformers is not installed.
        """
        where, library = folder / CONFIG, transformers_library()
        try:
            stored, _ = library.PreTrainedConfig.get_config_dict(folder, local_files_only=True)
            settings = getattr(library, self.config_class).from_pretrained(folder, local_files_only=True)
        except Exception as error:  # the library has none of its own
            raise CheckpointError(f"{where}: transformers rejects it: {first_line(error)}; correct it") from None
        check_settings(stored, where)
        config, files = self.our_settings(settings, where), weight_files(folder)
        try:
            model, found = getattr(library, self.model_class).from_pretrained(
                None, config=settings, state_dict=_slices(files), dtype=torch.float32, output_loading_info=True
            )
        except Exception as error:
            raise CheckpointError(
                f"{folder}: transformers cannot read it: {first_line(error)}; copy it again"
            ) from None
        for problem in ("missing", "unexpected"):
            if names := sorted(name for name in found[f"{problem}_keys"] if not name.endswith(CONSTANT)):
                raise CheckpointError(f"{folder}: {problem} weights: {listed(names)}; copy it again")
        if config.tied_head and not torch.equal(
            model.get_input_embeddings().weight, model.get_output_embeddings().weight
        ):
            raise CheckpointError(f"{folder}: {HEAD} differs from the token embedding; give a model with a tied head")
        theirs = model.state_dict()
        del model  # so that each weight is in memory once
        return ForeignModel(config, self.our_weights(config, theirs))

    def write(
        self, folder: Path, config: ModelConfig, weights: Mapping[str, Tensor], tokenizer: Tokenizer, *,
        as_read: bool = False, like: Path | None = None, card: str = "",
    ) -> None:  # fmt: skip
        """Write a folder that `from_pretrained` reads, complete or not at all.

        It has no tokenizer if the library has no equivalent.

        Args:
            as_read: the settings are those of a folder that was read, and none changes. Else a model without rotary
                embeddings gets at least UNLIMITED positions.
            like: a folder of a model with the same tokenizer. Its other settings, the dtype of each weight, and its
                files of tokenizer and generation are kept. If its model has more parts, the result is a copy of it with
                this text part.
            card: the text of its README.md; empty: it has none.

        Raises:
            ConfigError: the library has no such model, with a line for each setting, or it is not installed.
            CheckpointError: the folder cannot be written.
            DataError: the tokenizer of `like` is another, or the sizes of its text part are.
        """
        library = transformers_library()
        theirs = self.their_settings(config, tokenizer.eot, as_read=as_read, like=like)
        with torch.device("meta"):
            model = getattr(library, self.model_class)(theirs)
        files, dtypes = ([], {}) if like is None else (_files_of_tokenizer(like, tokenizer), _dtypes(like))
        found = self.their_weights(config, weights, model.state_dict(), dtypes, theirs.dtype or torch.float32)
        if copied := self._with_more_parts(like):
            _check_shapes(copied, found)
        model.load_state_dict(found, assign=True)
        model.tie_weights()
        try:
            temporary = make_temp_folder(folder)
            if copied:
                _write_into_copy(temporary, copied, found, theirs)
            else:
                stored = self._as_in_files(model, config)
                model.save_pretrained(temporary, state_dict=stored, save_original_format=False)
            if like is None and (saved := _their_tokenizer(tokenizer)):
                saved.save_pretrained(temporary)
            for path in files:
                shutil.copyfile(path, temporary / path.name)
            if card:
                (temporary / CARD).write_text(card)
            publish_folder(temporary, folder)
        except Exception as error:
            remove_temp_folder(folder)
            raise CheckpointError(f"{folder}: cannot be written: {first_line(error)}") from None

    def our_settings(self, theirs: Any, where: Path) -> ModelConfig:
        """Our settings of a model with a configuration of the library, which messages name as `where`.

        Raises:
            CheckpointError: one is not supported.
            ConfigError: the sizes are inconsistent.
        """
        rope = getattr(theirs, "rope_parameters", None) or {}
        kind = rope.get("rope_type", "default")
        supported = {**FIXED, **self.fixed, **(SCALED if kind == "llama3" else {"rope_type": "default"})}
        for name, value in supported.items():
            if (given := rope.get(name, getattr(theirs, name, value))) != value:
                raise CheckpointError(f"{where}: unsupported {name}: {given!r}; give a model with {value!r}")
        kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * theirs.num_hidden_layers
        if strange := set(kinds) - {kind for kind, letter in LETTERS.items() if letter in self.blocks}:
            raise CheckpointError(f"{where}: unsupported layer_types: {min(strange)!r}; give a model without them")
        letters = "".join(LETTERS[kind] for kind in kinds)
        flat = {**SETTINGS, **self.settings, "pattern": _shortest_pattern(letters)}
        flat |= {ours: getattr(theirs, name) for ours, name in self._sizes.items()}
        theta, fraction = rope.get("rope_theta") or 0.0, rope.get("partial_rotary_factor", 1.0)
        flat |= {"softmax.rope_theta": float(theta) if fraction else 0.0, "softmax.rotary_fraction": fraction or 1.0}
        flat["softmax.rope_scaling_factor"] = float(rope["factor"]) if kind == "llama3" else 1.0
        return validate(ModelConfig, _nested(flat), str(where))

    def their_settings(self, config: ModelConfig, eot: int, *, as_read: bool = False, like: Path | None = None) -> Any:
        """The configuration of a model whose documents end with the token `eot`; others as in `write`."""
        ours = self._ours(config)
        if not as_read and not config.softmax.rope_theta:
            ours["context_length"] = max(config.context_length, UNLIMITED)
        config_class = getattr(transformers_library(), self.config_class)
        settings = {} if like is None else config_class.from_pretrained(like, local_files_only=True).to_dict()
        ends = settings.get("eos_token_id")
        if eot not in (ends if isinstance(ends, list) else [ends]):
            settings |= {"bos_token_id": None, "eos_token_id": eot, "pad_token_id": None}
        if "D" in self.blocks:
            kinds = {letter: kind for kind, letter in LETTERS.items()}
            settings["layer_types"] = [kinds[letter] for letter in config.letters]
        of_images = {name: x for name, x in (settings.get("rope_parameters") or {}).items() if name.startswith("mrope")}
        settings["rope_parameters"] = of_images | self._their_rotary(config)
        return config_class(**settings | {theirs: ours[name] for name, theirs in self._sizes.items()})

    def our_weights(self, config: ModelConfig, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights by our names, from those of the library's model, which are removed from `theirs`."""
        shapes, found = parameter_shapes(config), {}
        for ours, names, order in self._parameters(config):
            joined = torch.cat([theirs.pop(name) for name in names]).reshape(shapes[ours])
            found[ours] = joined if order is None else joined[order]
        return found

    def their_weights(
        self,
        config: ModelConfig,
        ours: Mapping[str, Tensor],
        like: Mapping[str, Tensor],
        dtypes: Mapping[str, torch.dtype],
        usual: torch.dtype,
    ) -> dict[str, Tensor]:
        """The weights by the names of the library's model, with shapes as in `like`, from ours, each read once.

        `dtypes` are by their names, `usual` that of the others.
        """
        found: dict[str, Tensor] = {}
        for name, names, order in self._parameters(config):
            weight = ours[name] if order is None else ours[name][order.argsort()]
            parts = weight.split([like[one].shape[0] for one in names])
            for one, part in zip(names, parts, strict=True):
                found[one] = part.reshape(like[one].shape).to(dtypes.get(one, usual), copy=True)
        return found | ({HEAD: found[EMBEDDING]} if config.tied_head else {})

    def _as_in_files(self, model: Any, config: ModelConfig) -> dict[str, Tensor]:
        """The weights of the library's model by the names in files of public models, which servers read."""
        from transformers.core_model_loading import revert_weight_conversion

        stored = revert_weight_conversion(model, model.state_dict())
        for n, letter in enumerate(config.letters):
            for wrong, right in self.misnamed.get(letter, {}).items():
                stored[f"model.layers.{n}.{right}"] = stored.pop(f"model.layers.{n}.{wrong}")
        return stored

    def _with_more_parts(self, like: Path | None) -> Path | None:
        """The folder `like` if its model has more parts."""
        return like if like and read_settings(like).get("model_type") in self.model_types[1:] else None

    @property
    def _sizes(self) -> dict[str, str]:
        return SIZES | self.sizes

    def _ours(self, config: ModelConfig) -> dict[str, Any]:
        """Our settings by their dotted names, without unset ones. Raises ConfigError as `write`."""
        ours = dict(leaves(config.model_dump())) | {"mlp_hidden": config.mlp_width}
        ours["softmax.kv_heads"] = config.softmax.kv_heads or config.heads
        ours["softmax.head_size"] = SoftmaxSizes.of(config.shape_of("A")).head
        ours |= zip(DELTA_SIZES, DeltaSizes.of(config.shape_of("D")), strict=True)
        ours["pattern"] = "".join(sorted(set(config.pattern)))
        supported = SETTINGS | {"softmax.head_size": config.width // config.heads} | self.settings
        if self.partial_rotary or not config.softmax.rope_theta:
            supported.pop("softmax.rotary_fraction")
        if "D" not in self.blocks:
            supported = {name: value for name, value in supported.items() if not name.startswith("delta.")}
        of_theirs: dict[str, Any] = {}
        for name, theirs in self._sizes.items():  # where two of ours are one of theirs, they are equal
            supported[name] = of_theirs.setdefault(theirs, ours[name])
        _check_supported(ours, supported | {"pattern": "".join(sorted(self.blocks))}, self.model_class)
        if self.without_rotary is None and not config.softmax.rope_theta:
            raise ConfigError(
                f"model.softmax.rope_theta 0: {self.model_class} always has a rotary embedding; this model cannot be "
                "converted"
            )
        return ours

    def _their_rotary(self, config: ModelConfig) -> dict[str, Any]:
        own = config.softmax
        rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": own.rope_theta}
        if not own.rope_theta:
            return rotary | (self.without_rotary or {})
        if own.rope_scaling_factor != 1:
            rotary |= {"rope_type": "llama3", "factor": own.rope_scaling_factor, **SCALED}
        return rotary | ({"partial_rotary_factor": own.rotary_fraction} if self.partial_rotary else {})

    def _parameters(self, config: ModelConfig) -> Iterator[tuple[str, list[str], Tensor | None]]:
        """Each of our parameters, the names of theirs in it, and the order of their rows; None: as they are."""
        ends = {"embedding.weight": [EMBEDDING], "norm.weight": ["model.norm.weight"]}
        yield from ((ours, names, None) for ours, names in ends.items())
        if not config.tied_head:
            yield "head.weight", [HEAD], None
        orders = {letter: _order(config, letter) for letter in self.blocks}
        for n, letter in enumerate(config.letters):
            for ours, names in self.blocks[letter].items():
                yield f"blocks.{n}.{ours}", [f"model.layers.{n}.{name}" for name in names], orders[letter].get(ours)

    def _write(self, folder: Path, checkpoint: Path, like: Path | None) -> list[str]:
        config, path = read_model_config(checkpoint), find_tokenizer(checkpoint)
        weights, as_read = StoredTensors(checkpoint, "model", backend="pread"), (checkpoint / CONVERSION).is_file()
        evaluated = EvaluatedCheckpoint.find(checkpoint)
        texts = {"usage": TRANSFORMERS_USAGE, "library": "transformers"}
        card = model_card(evaluated.checkpoint, folder.name, evaluated.home, evaluated.cited_results(), **texts)
        stale = STALE.format(like) if self._with_more_parts(like) else ""
        self.write(folder, config, weights, read_tokenizer(path), as_read=as_read, like=like, card=card + stale)
        written = f"{checkpoint}: written to {folder} for {self.model_class}.from_pretrained"
        return [written, f"its ids are those of {path}", *stale.splitlines()[1:]]


def _check_supported(ours: Mapping[str, Any], supported: Mapping[str, Any], theirs: str) -> None:
    """Raises ConfigError with a line for each setting, by its dotted name, whose only value there is another."""
    differing = {name: value for name, value in supported.items() if ours[name] != value}
    if differing:
        raise ConfigError(
            "\n".join(
                f"model.{name} {ours[name]!r}: {theirs} only has {value!r}; this model cannot be converted"
                for name, value in differing.items()
            )
        )


def read_their_tokenizer(folder: Path) -> HfTokenizer | None:
    """The tokenizer of a model folder, whose end-of-text token is the first of `eos_token_id`; None: it has none.

    Raises:
        ConfigError: transformers is not installed.
        DataError: it is not lossless, or has no such token.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    settings = read_settings(folder)
    eos = settings.get("eos_token_id", settings.get("text_config", {}).get("eos_token_id"))
    eos = eos[0] if isinstance(eos, list) and eos else eos
    transformers_library()  # with it come the tokenizers
    import tokenizers

    try:
        token = tokenizers.Tokenizer.from_file(str(path)).id_to_token(eos) if isinstance(eos, int) else None
    except Exception as error:  # the library has none of its own
        raise DataError(f"{path}: damaged: {first_line(error)}; copy it again") from None
    if token is None:
        raise DataError(f"{folder / CONFIG}: eos_token_id {eos} is no token of {path.name}; correct it")
    return hf_tokenizer(path, token, FORMS[-1])


def _their_tokenizer(tokenizer: Tokenizer) -> Any:
    """That of the library; None: there is none. Texts begin with the end-of-text token if they did in training."""
    if not isinstance(tokenizer, HfTokenizer):
        from tost_lm.interop.hf import fast_tokenizer

        return fast_tokenizer(tokenizer)
    library = transformers_library()
    import tokenizers

    pipeline = tokenizers.Tokenizer.from_str(tokenizer.tokenizer_json)
    return library.PreTrainedTokenizerFast(tokenizer_object=pipeline, eos_token=tokenizer.eot_token)


def _files_of_tokenizer(like: Path, tokenizer: Tokenizer) -> list[Path]:
    """The files of tokenizer, chat template and generation in a folder. Raises DataError: its tokenizer is another."""
    whole = like / "tokenizer.json"
    text = whole.read_text("utf-8") if whole.is_file() else None
    if not isinstance(tokenizer, HfTokenizer) or text != tokenizer.tokenizer_json:
        raise DataError(
            f"convert.like {like}: its tokenizer.json is not the model's; give the folder that it came from"
        )
    return sorted({path for pattern in KEPT_FILES for path in like.glob(pattern) if path.is_file()})


def _slices(paths: list[Path]) -> dict[str, Any]:
    """The weights in files, each read when it is indexed. The files are not mapped into memory: pages would stay."""
    files = [safe_open(path, framework="pt", backend="pread") for path in paths]
    return {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118


def _dtypes(folder: Path) -> dict[str, torch.dtype]:
    """The dtypes of the weights in a folder, by their names there, which may not be those in the model."""
    slices = _slices(weight_files(folder))
    return {_in_text(name): DTYPES.get(one.get_dtype(), torch.float32) for name, one in slices.items()}


def _in_text(name: str) -> str:
    """The name of a weight in the model of the text part alone."""
    return name.replace(TEXT_PART, "model.", 1) if name.startswith(TEXT_PART) else name


def _check_shapes(like: Path, found: Mapping[str, Tensor]) -> None:
    """Raises DataError: the text part of a folder has other weights."""
    shapes = {_in_text(name): one.get_shape() for name, one in _slices(weight_files(like)).items()}
    shapes.setdefault(HEAD, shapes.get(EMBEDDING))  # tied
    if others := [name for name, weight in found.items() if shapes.get(name) != list(weight.shape)]:
        raise DataError(
            f"convert.like {like}: its text part has other weights: {listed(others)}; give the folder that it came from"
        )


def _write_into_copy(folder: Path, like: Path, weights: Mapping[str, Tensor], settings: Any) -> None:
    """Copy a folder, with other weights of its text part. Settings that training changes are replaced."""
    for path in filter(Path.is_file, like.iterdir()):
        if path.name != CARD:
            shutil.copyfile(path, folder / path.name)
    for path in weight_files(like):
        stored = load_file(path)
        save_file({name: weights.get(_in_text(name), x) for name, x in stored.items()}, folder / path.name, FORMAT)
    tree, changed = read_settings(like), settings.to_dict()
    tree["text_config"] |= {name: changed[name] for name in ("max_position_embeddings", "rope_parameters")}
    (folder / CONFIG).write_text(json.dumps(tree, indent=2) + "\n")


def _order(config: ModelConfig, letter: str) -> dict[str, Tensor]:
    """By parameter, which of their rows, one tensor after the other, are ours: in D layers those of each key head
    follow each other, and the gates of A layers, which in theirs follow the queries of each head, are the last."""
    if letter == "D":
        h, H, K, V = DeltaSizes.of(config.shape_of("D"))
        group = H // h
        of_head = [K, K, group * V, group * V, group, group]
        return {"mixer.in_proj.weight": _by_head(h, of_head), "mixer.conv": _by_head(h, of_head[:3])}
    sizes = SoftmaxSizes.of(config.shape_of("A"))
    if not sizes.gate:
        return {}
    queries, others = torch.arange(sizes.projected).split([2 * sizes.queries, 2 * sizes.keys])
    query, gate = queries.unflatten(0, (-1, 2, sizes.head)).unbind(1)
    return {"mixer.in_proj.weight": torch.cat([query.flatten(), others, gate.flatten()])}


def _by_head(heads: int, sizes: list[int]) -> Tensor:
    """The rows of tensors with `sizes` rows for each head, one head after the other."""
    rows = torch.arange(heads * sum(sizes)).split([heads * size for size in sizes])
    return torch.cat([x.unflatten(0, (heads, -1)) for x in rows], 1).flatten()


def _shortest_pattern(letters: str) -> str:
    lengths = (n for n in range(1, len(letters) + 1) if letters[:n] * (len(letters) // n) == letters)
    return letters[: next(lengths)]


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        section, _, last = name.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[last] = value
    return tree
