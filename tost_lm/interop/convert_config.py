"""How a model that others wrote becomes one of ours, or one of ours theirs."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from tost_lm.config import Section


class ConversionConfig(Section):
    """Where to, and with which tokenizer."""

    folder: Path
    """The folder to write, which must not be there yet: a model folder as an export, or one with a ckpt.pt."""
    to: Literal["ours", "authors"] = "ours"
    """`ours` from an authors' ckpt.pt or a folder with GPT-2; `authors` from a run, step or export, a ckpt.pt."""
    gpt2: Path | None = None
    """Folder with GPT-2's encoder.json and vocab.bpe; without it they are what the source holds, or downloaded."""

    @model_validator(mode="after")
    def _a_tokenizer_has_a_place(self) -> "ConversionConfig":
        if self.to == "authors" and self.gpt2:
            raise ValueError("convert.gpt2: a ckpt.pt holds no tokenizer; leave it out")
        return self


class ConvertConfig(Section):
    """What `tost_lm.convert` reads."""

    convert: ConversionConfig = Field(default_factory=dict, validate_default=True)
