"""Convert models of the Hugging Face library to model folders, and models to that library.

    tost convert Olmo-Hybrid-7B convert.folder=models/olmo
    tost convert runs/longer convert.folder=models/longer convert.to=olmo-hybrid convert.like=Olmo-Hybrid-7B

The source is a folder of the Hugging Face library with a form of convert.to. The result is a model folder, which every
program reads. Its model card, README.md, names the source. Logits stay the same up to rounding. Source and result may
be at URLs.

With the name of a form of the Hugging Face library (convert.to=llama, …) the source is a run folder (its newest valid
checkpoint), a step folder or an export, and the result is a folder that the library's from_pretrained reads, with a
tokenizer and a model card. The model must have this form, at any size. With convert.like=FOLDER, where FOLDER is the
model that was first converted, the files of its tokenizer, its chat template, its other settings, and the names and
dtypes of its weights are kept. Of a model of images, the result is a copy with the new text part.
"""

import json
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, NoReturn

from pydantic import Field, model_validator

from tost_lm.command_line import run_program
from tost_lm.config import TAKES_URLS, Section
from tost_lm.errors import CheckpointError, ConfigError
from tost_lm.files import sha256_file
from tost_lm.interop import Target
from tost_lm.remote import RemotePath, list_files, local_copy, upload_folder, work_folder
from tost_lm.version import VERSION


class ConversionConfig(Section):
    """The target."""

    folder: Annotated[Path, TAKES_URLS]
    """New folder for the result, perhaps at a URL."""
    to: Target = "ours"
    """`ours`: to a model folder. Others: from a run or model to this form of the Hugging Face library."""
    like: Annotated[Path | None, TAKES_URLS] = None
    """Folder of the Hugging Face library whose tokenizer the model has, and whose other files and settings are kept."""

    @model_validator(mode="after")
    def _target_fits_source(self) -> "ConversionConfig":
        if self.like and self.to == "ours":
            raise ValueError(f"convert.like {self.like}: only for forms of the Hugging Face library; set convert.to")
        return self


class ConvertConfig(Section):
    """Settings of `tost convert`."""

    convert: ConversionConfig = Field(default_factory=dict, validate_default=True)


def main(path: Path, config: ConvertConfig) -> None:
    from tost_lm.checkpointing.format import MANIFEST
    from tost_lm.checkpointing.run_folder import local_model
    from tost_lm.inference.foreign_folder import CONFIG

    conversion = config.convert
    folder = conversion.folder
    if list_files(folder) if isinstance(folder, RemotePath) else folder.exists():
        raise ConfigError(f"{folder}: exists already; give another convert.folder")
    source = local_model(path)
    like = conversion.like and local_copy(conversion.like)
    with work_folder() if isinstance(folder, RemotePath) else nullcontext(folder.parent) as parent:
        written = parent / folder.name
        convert = partial(_to_ours, named=path) if conversion.to == "ours" else _from_ours
        lines = convert(source, conversion.model_copy(update={"like": like, "folder": written}))
        if isinstance(folder, RemotePath):
            upload_folder(written, folder, MANIFEST if (written / MANIFEST).exists() else CONFIG)
    for line in lines:
        print(line.replace(str(written), str(folder)).replace(str(source), str(path)))


def _to_ours(source: Path, conversion: ConversionConfig, named: Path) -> list[str]:
    """`named` is the source in the record."""
    from tost_lm.checkpointing.format import CARD, CONVERSION, write_checkpoint
    from tost_lm.inference.foreign_folder import CONFIG, weight_files
    from tost_lm.inference.hugging_face import print_only_errors
    from tost_lm.interop.card import model_card
    from tost_lm.interop.load import form_of
    from tost_lm.interop.public_tokenizer import read_their_tokenizer

    form = form_of(source)
    if form is None:
        hint = " or, for a model folder, another convert.to" if source.is_dir() else ""
        raise CheckpointError(f"{source}: no folder of the Hugging Face library, with {CONFIG}; give one{hint}")
    print_only_errors()
    found = form.read(source)
    config, weights = found.config, found.weights
    tokenizer = read_their_tokenizer(source)
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"{source}: its vocabulary of {config.vocab_size} ids is smaller than the tokenizer's: "
            f"{tokenizer.vocab_size}; replace its tokenizer.json by that of the model"
        )
    record = {
        "source": str(named),
        "format": f"{form.title} of the Hugging Face library",
        "sha256": {path.name: sha256_file(path) for path in weight_files(source)},
        "tost_lm": VERSION,
    }

    def write_others(folder: Path) -> None:
        (folder / CONVERSION).write_text(json.dumps(record, indent=1))
        (folder / CARD).write_text(model_card(folder, conversion.folder.name))

    write_checkpoint(conversion.folder, config, weights, tokenizer, write_others)
    return [
        f"{source}: {config.layers} layers, {config.layer_kinds}; width {config.width}, {config.heads} heads, "
        f"vocabulary {config.vocab_size:,}, {config.context_length:,} positions; "
        f"{sum(weight.numel() for weight in weights.values()):,} parameters",
        *([f"left out: {', '.join(found.left_out)}"] if found.left_out else []),
        f"written to {conversion.folder}: tost generate {conversion.folder}",
    ]


def _from_ours(source: Path, conversion: ConversionConfig) -> list[str]:
    from tost_lm.checkpointing.run_folder import find_checkpoint
    from tost_lm.inference.hugging_face import print_only_errors

    print_only_errors()
    form = import_module(f"tost_lm.interop.{conversion.to.replace('-', '_')}").FORM
    return form.write_from(find_checkpoint(source), conversion.folder, conversion.like)


def run() -> NoReturn:
    run_program(
        main, name="tost convert", doc=__doc__ or "", positional="SOURCE", config=ConvertConfig, takes_urls=True
    )
