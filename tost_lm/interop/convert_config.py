"""Settings of `tost convert`."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from tost_lm.config import Section


class ConversionConfig(Section):
    """The target, and the tokenizer."""

    folder: Path
    """New folder for the result: a model folder, or with `to=authors` one with a ckpt.pt."""
    to: Literal["ours", "authors"] = "ours"
    """`ours`: from a ckpt.pt or a folder with GPT-2; `authors`: to a ckpt.pt, from a run, step folder or export."""
    tokenizer: Path | None = None
    """Folder with encoder.json and vocab.bpe, tokenizer.model or meta.pkl; default: the source's, or GPT-2's."""

    @model_validator(mode="after")
    def _tokenizer_is_used(self) -> "ConversionConfig":
        if self.to == "authors" and self.tokenizer:
            raise ValueError(f"convert.tokenizer {self.tokenizer}: a ckpt.pt holds no tokenizer; leave it out")
        return self


class ConvertConfig(Section):
    """Settings of `tost convert`."""

    convert: ConversionConfig = Field(default_factory=dict, validate_default=True)
