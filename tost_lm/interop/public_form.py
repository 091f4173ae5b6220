"""Models of the Hugging Face library, with its settings and its names of weights: what all of their forms share.

A form, a module beside this one, names the classes, settings and weights. Weights and settings keep their values, so
logits agree up to rounding, and a model that is read and written again is equal. A folder is refused if its model
computes anything that ours does not.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from tost_lm.checkpointing.format import CARD, CONVERSION, StoredTensors, read_model_config, write_tensors
from tost_lm.config import leaves, validate
from tost_lm.data.tokenizers import SentencePieceTokenizer, Tokenizer, find_tokenizer, read_tokenizer
from tost_lm.errors import CheckpointError, ConfigError, DataError, first_line, listed
from tost_lm.files import make_temp_folder, publish_folder, remove_temp_folder, usual_mode
from tost_lm.inference.evaluated import EvaluatedCheckpoint
from tost_lm.inference.foreign_folder import CONFIG, read_settings, weight_files
from tost_lm.inference.hugging_face import explained_rejection, transformers_library
from tost_lm.interop.card import TRANSFORMERS_USAGE, model_card
from tost_lm.interop.public_layers import LAYERS, fixed_rotary, our_rotary, their_rotary, unsupported
from tost_lm.interop.public_tokenizer import files_of_tokenizer, write_tokenizer
from tost_lm.model import ModelConfig
from tost_lm.model.lm import parameter_shapes

SIZES = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "width": "hidden_size",
    "vocab_size": "vocab_size",
    "mlp_hidden": "intermediate_size",
    "norm_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "tied_head": "tie_word_embeddings",
}
"""Our settings, and theirs, of every form."""
SETTINGS: dict[str, Any] = {
    "positions": "none", "layer_scale": 0.0, "mlp": "swiglu", "norm": "rms", "norm_after": "", "bias": False,
}  # fmt: skip
"""Our settings of all models of a form, unless it names others, beside those of its layers."""
FIXED: dict[str, Any] = {
    "is_heterogeneous": False, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
"""Their settings with one supported value, beside those of layers; the class of a form may not have them all."""
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float32}
"""Those that are read, by their names in safetensors, and written."""
UNLIMITED = 1 << 20
"""Positions of a trained model without rotary embeddings. It reads any length, but other tools refuse longer texts, and
some reserve memory for as many tokens."""

IGNORED = re.compile(r"^mtp\.|^model\.visual\.|rotary_emb\.inv_freq$")
"""In files, weights of other parts than the text part, and constants."""
OTHER_PARTS = {"model.visual.": "images", "mtp.": "mtp (several tokens at once)"}
"""By the beginning of their weights' names in files, parts that are not read."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER = re.compile(r"model\.layers\.(\d+)\.")
"""The beginning of the library's name of a layer's weight."""
STALE = """
Only its text part is new: the weights of images, and `mtp.*`, which predict several tokens, are as in {}, hence stale.
"""


class FoundModel(NamedTuple):
    """The content of a folder."""

    config: ModelConfig
    weights: dict[str, Tensor]
    """float32, by our names."""
    left_out: tuple[str, ...]
    """Parts of the source that the model does not have."""


class _Stored(NamedTuple):
    """A weight in a file."""

    name: str
    weight: Any
    """Read when it is indexed."""

    @property
    def on_meta(self) -> Tensor:
        dtype = DTYPES.get(self.weight.get_dtype(), torch.int8)
        return torch.empty(self.weight.get_shape(), dtype=dtype, device="meta")


@dataclass(frozen=True)
class PublicForm:
    """A form of models of the Hugging Face library."""

    title: str
    model_types: tuple[str, ...]
    """In config.json; those after the first are of models with more parts, whose text part is read."""
    config_class: str
    model_class: str
    blocks: dict[str, dict[str, list[str]]]
    """By letter, our parameters of a block, and theirs whose rows follow each other in it: see `PublicLayer.rows`."""
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
    renamed: dict[str, str] = field(default_factory=dict)
    """Parts of names in files, and what the library's model has in their place."""

    def read_config(self, folder: Path) -> ModelConfig:
        """The settings of a model in a folder, which may be without weights. Raises as `read`."""
        return self.our_settings(self._read_config(folder), folder / CONFIG)

    def read(self, folder: Path) -> FoundModel:
        """The settings and the weights [float32, by our names] of a model in a folder.

        Raises:
            CheckpointError: a file is missing or damaged, or a setting is not supported.
            ConfigError: its sizes are inconsistent, or transformers is not installed.
        """
        where, stored = folder / CONFIG, self._stored(folder)
        theirs = self._read_config(folder)
        layers = len({found[1] for name in stored if (found := LAYER.match(name))})
        if layers != theirs.num_hidden_layers:  # before as many are built
            raise CheckpointError(
                f"{where}: its settings say {theirs.num_hidden_layers} layers, its weights {layers}; copy it again"
            )
        config, model = self.our_settings(theirs, where), self._build(theirs, folder)
        expected = self.in_files(model, {name: one.on_meta for name, one in stored.items()})
        found = {name: one for name, one in stored.items() if name in expected or not IGNORED.search(one.name)}
        head = found.pop(HEAD, None) if config.tied_head else None
        if config.tied_head:
            del expected[HEAD]
        _check_weights(folder, expected, {name: one.on_meta for name, one in found.items()})
        weights = self.our_weights(config, {name: one.weight for name, one in found.items()})
        for name in weights:  # one after the other, so that few are in memory twice
            weights[name] = weights[name].float()
        if head and not torch.equal(head.weight[:].float(), weights["embedding.weight"]):
            raise CheckpointError(f"{folder}: {HEAD} differs from the token embedding; give a model with a tied head")
        names = [one.name for one in stored.values()]
        left_out = [part for start, part in OTHER_PARTS.items() if any(name.startswith(start) for name in names)]
        return FoundModel(config, weights, tuple(left_out))

    def write(
        self, folder: Path, config: ModelConfig, weights: Mapping[str, Tensor], tokenizer: Tokenizer, *,
        as_read: bool = False, like: Path | None = None, card: str = "",
    ) -> None:  # fmt: skip
        """Write a folder that `from_pretrained` reads, complete or not at all.

        It has no tokenizer if the library has no equivalent.

        Args:
            as_read: the settings are those of a folder that was read, and none changes. Else a model without rotary
                embeddings gets at least UNLIMITED positions.
            like: a folder of a model with the same tokenizer. Its other settings, the name and dtype of each weight,
                and its files of tokenizer and generation are kept. If its model has more parts, the result is a copy of
                it with this text part.
            card: the text of its README.md; empty: it has none.

        Raises:
            ConfigError: the library has no such model, with a line for each setting, or it is not installed.
            CheckpointError: the folder cannot be written.
            DataError: the tokenizer of `like` is another, or the sizes of its text part are.
        """
        theirs = self.their_settings(config, tokenizer.eot, as_read=as_read, like=like)
        if isinstance(tokenizer, SentencePieceTokenizer):  # texts begin with it: see `write_tokenizer`
            theirs.bos_token_id = tokenizer.eot
        files, kept = ([], {}) if like is None else (files_of_tokenizer(like, tokenizer), self._stored(like))
        model = self._build(theirs, folder)
        dtypes = {name: x.dtype for name, one in kept.items() if (x := one.on_meta).is_floating_point()}
        shapes = {name: one.shape for name, one in self.in_files(model).items()}
        found = self.their_weights(config, weights, shapes, dtypes, theirs.dtype or torch.float32)
        if HEAD in kept and config.tied_head:
            found[HEAD] = found[EMBEDDING].clone()
        if copied := self._with_more_parts(like):
            others = [name for name, x in found.items() if name not in kept or kept[name].on_meta.shape != x.shape]
            if others:
                raise DataError(
                    f"convert.like {copied}: its text part has other weights: {listed(others)}; give the folder that "
                    "it came from"
                )
        named = {kept[name].name if name in kept else name: weight for name, weight in found.items()}
        model.to(found[EMBEDDING].dtype)  # written to config.json
        try:
            temporary = make_temp_folder(folder)
            if copied:
                _write_into_copy(temporary, copied, named, theirs)
            else:
                model.save_pretrained(temporary, state_dict=named, save_original_format=False)
                for path in weight_files(temporary):
                    usual_mode(path)
            if like is None:
                write_tokenizer(temporary, tokenizer)
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
        rope: dict[str, Any] = getattr(theirs, "rope_parameters", None) or {}
        supported = self._fixed | fixed_rotary(theirs, rope, where)
        if not self.partial_rotary:
            supported["partial_rotary_factor"] = 1.0
        for name, value in supported.items():
            for given in (rope.get(name, value), getattr(theirs, name, value)):
                if given != value:
                    raise unsupported(where, name, given, f"with {value!r}")
        kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * theirs.num_hidden_layers
        letter_of = {LAYERS[letter].kind: letter for letter in self.blocks}
        if strange := set(kinds) - set(letter_of):
            raise unsupported(where, "layer_types", min(strange), "without them")
        letters = "".join(letter_of[kind] for kind in kinds)
        flat = SETTINGS | self._of_layers("settings") | self.settings | {"pattern": _shortest_pattern(letters)}
        flat |= {ours: getattr(theirs, name) for ours, name in self._sizes.items()}
        flat |= our_rotary(rope, self.without_rotary, where)
        config = validate(ModelConfig, _nested(flat), str(where))
        usual = config.rotary and config.rotary.amplitude
        if (given := rope.get("attention_factor")) not in (None, usual):
            raise unsupported(where, "attention_factor", given, f"with {usual!r}")
        return config

    def their_settings(self, config: ModelConfig, eot: int, *, as_read: bool = False, like: Path | None = None) -> Any:
        """The configuration of a model whose documents end with the token `eot`; others as in `write`."""
        ours = self._ours(config)
        if not as_read and config.rotary is None:
            ours["context_length"] = max(config.context_length, UNLIMITED)
        config_class = getattr(transformers_library(), self.config_class)
        has = {one.name for one in fields(config_class)}
        settings, rotary = {name: self._fixed[name] for name in self._fixed.keys() & has}, self._rotary(config)
        if like is not None:
            theirs = self._read_config(like)
            settings = theirs.to_dict()
            same, kept = self._rotary(self.our_settings(theirs, like / CONFIG)) == rotary, theirs.rope_parameters
            rotary |= {name: value for name, value in (kept or {}).items() if same or name.startswith("mrope")}
        ends = settings.get("eos_token_id")
        if eot not in (ends if isinstance(ends, list) else [ends]):
            settings |= {"bos_token_id": None, "eos_token_id": eot, "pad_token_id": None}
        if len(self.blocks) > 1:
            settings["layer_types"] = [LAYERS[letter].kind for letter in config.letters]
        settings["rope_parameters"] = rotary
        with explained_rejection(like or Path(self.title), "convert.like needs a model of the same sizes"):
            return config_class(**settings | {theirs: ours[name] for name, theirs in self._sizes.items()})

    def our_weights(self, config: ModelConfig, theirs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The weights by our names, from those in files, each read once."""
        shapes, found = parameter_shapes(config), {}
        for ours, names, order in self._parameters(config):
            joined = torch.cat([theirs[name][:] for name in names]).reshape(shapes[ours])
            found[ours] = joined if order is None else joined[order]
        return found

    def their_weights(
        self,
        config: ModelConfig,
        ours: Mapping[str, Tensor],
        shapes: Mapping[str, torch.Size],
        dtypes: Mapping[str, torch.dtype],
        usual: torch.dtype,
    ) -> dict[str, Tensor]:
        """The weights of files from ours, each read once; without a tied head.

        `shapes` and `dtypes` are by their names, `usual` is the dtype of the others.
        """
        found: dict[str, Tensor] = {}
        for name, names, order in self._parameters(config):
            weight = ours[name] if order is None else ours[name][order.argsort()]
            parts = weight.split([shapes[one][0] for one in names])
            for one, part in zip(names, parts, strict=True):
                found[one] = part.reshape(shapes[one]).to(dtypes.get(one, usual), copy=True)
        return found

    def in_files(self, model: Any, stored: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The weights of a model of the library by their names in files, divided as those that are stored."""
        return model.state_dict()

    def _read_config(self, folder: Path) -> Any:
        """The configuration in a folder, as the library reads it. Raises CheckpointError."""
        read_settings(folder)
        with explained_rejection(folder / CONFIG, "correct it"):
            return getattr(transformers_library(), self.config_class).from_pretrained(folder, local_files_only=True)

    def _build(self, theirs: Any, folder: Path) -> Any:
        """The library's model, on the meta device. Raises CheckpointError."""
        with explained_rejection(folder / CONFIG, "correct it"), torch.device("meta"):
            return getattr(transformers_library(), self.model_class)(theirs)

    def _stored(self, folder: Path) -> dict[str, "_Stored"]:
        """The weights in a folder by the library's names. Raises CheckpointError."""
        stored: dict[str, _Stored] = {}
        for path in weight_files(folder):
            try:  # not mapped into memory: pages would stay
                file = safe_open(path, framework="pt", backend="pread")
            except SafetensorError as error:
                raise CheckpointError(f"{path}: damaged: {first_line(error)}; copy it again") from None
            for name in file.keys():  # noqa: SIM118, not a dict
                theirs = name
                for part, replacement in self.renamed.items():
                    theirs = theirs.replace(part, replacement)
                if theirs in stored:
                    raise CheckpointError(f"{path}: {name} is in another file, too; remove the files of an older save")
                stored[theirs] = _Stored(name, file.get_slice(name))
        return stored

    def _with_more_parts(self, like: Path | None) -> Path | None:
        """The folder `like` if its model has more parts."""
        return like if like and read_settings(like).get("model_type") in self.model_types[1:] else None

    @property
    def _fixed(self) -> dict[str, Any]:
        return FIXED | self._of_layers("fixed") | self.fixed

    @property
    def _sizes(self) -> dict[str, str]:
        return SIZES | self._of_layers("sizes") | self.sizes

    def _of_layers(self, what: str) -> dict[str, Any]:
        """An attribute of `PublicLayer`, of all layers of the form."""
        return {name: value for letter in self.blocks for name, value in getattr(LAYERS[letter], what).items()}

    def _rotary(self, config: ModelConfig) -> dict[str, Any]:
        return their_rotary(config, self.without_rotary, partial=self.partial_rotary)

    def _ours(self, config: ModelConfig) -> dict[str, Any]:
        """Our settings by their dotted names, without unset ones. Raises ConfigError as `write`."""
        ours = dict(leaves(config.model_dump())) | {"mlp_hidden": config.mlp_width}
        for letter in self.blocks:
            ours |= LAYERS[letter].values(config)
        ours["pattern"] = "".join(sorted(set(config.pattern)))
        supported = SETTINGS | self._of_layers("settings") | self.settings
        supported["softmax.head_size"] = config.width // config.heads
        if self.partial_rotary or config.rotary is None:
            supported.pop("softmax.rotary_fraction")
        of_theirs: dict[str, Any] = {}
        for name, theirs in self._sizes.items():  # where two of ours are one of theirs, they are equal
            supported[name] = of_theirs.setdefault(theirs, ours[name])
        supported["pattern"] = "".join(sorted(self.blocks))
        problems = [
            f"model.{name} {ours[name]!r}: {self.model_class} only has {value!r}; this model cannot be converted"
            for name, value in supported.items()
            if ours[name] != value
        ]
        if problems:
            raise ConfigError("\n".join(problems))
        if self.without_rotary is None and config.rotary is None:
            raise ConfigError(
                f"model.softmax.rope_theta 0: {self.model_class} always has a rotary embedding; this model cannot be "
                "converted"
            )
        return ours

    def _parameters(self, config: ModelConfig) -> Iterator[tuple[str, list[str], Tensor | None]]:
        """Each of our parameters, the names of theirs in it, and the order of their rows; None: as they are."""
        ends = {"embedding.weight": [EMBEDDING], "norm.weight": ["model.norm.weight"]}
        yield from ((ours, names, None) for ours, names in ends.items())
        if not config.tied_head:
            yield "head.weight", [HEAD], None
        orders = {letter: LAYERS[letter].rows(config) for letter in self.blocks}
        for n, letter in enumerate(config.letters):
            for ours, names in self.blocks[letter].items():
                yield f"blocks.{n}.{ours}", [f"model.layers.{n}.{name}" for name in names], orders[letter].get(ours)

    def write_from(self, checkpoint: Path, folder: Path, like: Path | None) -> list[str]:
        """`write` a checkpoint folder of ours with its model card. Returns lines to print."""
        config, path = read_model_config(checkpoint), find_tokenizer(checkpoint)
        weights, as_read = StoredTensors(checkpoint, "model", backend="pread"), (checkpoint / CONVERSION).is_file()
        evaluated = EvaluatedCheckpoint.find(checkpoint)
        texts = {"usage": TRANSFORMERS_USAGE, "library": "transformers"}
        card = model_card(evaluated.checkpoint, folder.name, evaluated.home, evaluated.cited_results(), **texts)
        stale = STALE.format(like) if self._with_more_parts(like) else ""
        self.write(folder, config, weights, read_tokenizer(path), as_read=as_read, like=like, card=card + stale)
        written = f"{checkpoint}: written to {folder} for {self.model_class}.from_pretrained"
        return [written, f"its ids are those of {path}", *stale.splitlines()[1:]]


def _check_weights(where: Path, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError: a weight is missing, unexpected, of another shape or of integers."""
    if missing := [name for name in expected if name not in found]:
        raise CheckpointError(f"{where}: lacks weights: {listed(missing)}; copy it again")
    if unexpected := [name for name in found if name not in expected]:
        raise CheckpointError(f"{where}: unexpected weights: {listed(unexpected)}; give a model without them")
    for name, wanted in expected.items():
        if not found[name].is_floating_point():
            raise CheckpointError(f"{where}: {name} is not a floating-point tensor; copy it again")
        if found[name].shape != wanted.shape:
            raise CheckpointError(
                f"{where}: {name} has shape {list(found[name].shape)}, its settings say {list(wanted.shape)}; copy it "
                "again"
            )


def _write_into_copy(folder: Path, like: Path, weights: Mapping[str, Tensor], settings: Any) -> None:
    """Copy a folder, with other weights of its text part. Settings that training changes are replaced."""
    files = weight_files(like)
    for path in filter(Path.is_file, like.iterdir()):
        if path in files:
            write_tensors(folder / path.name, {name: weights.get(name, x) for name, x in load_file(path).items()})
        elif path.name != CARD and path.suffix != files[0].suffix:
            shutil.copyfile(path, folder / path.name)
    tree, changed = read_settings(like), settings.to_dict()
    tree["text_config"] |= {name: changed[name] for name in ("max_position_embeddings", "rope_parameters")}
    (folder / CONFIG).write_text(json.dumps(tree, indent=2) + "\n")


def _shortest_pattern(letters: str) -> str:
    lengths = (n for n in range(1, len(letters) + 1) if letters[:n] * (len(letters) // n) == letters)
    return letters[: next(lengths, 0)]


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        section, _, last = name.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[last] = value
    return tree
