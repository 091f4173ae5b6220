"""Settings of programs that run a model: the ranks of an evaluation, and generated texts."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from tost_lm.config import Section
from tost_lm.parallel.settings import LayoutConfig


class RanksConfig(LayoutConfig):
    """The parallel layout; no result depends on it. With more than tensor × sequence ranks, `tost eval` uses several copies of the model, for the task text@bpb alone sequence ranks; other programs reject them."""


class SampleConfig(Section):
    """One generated text."""

    prompt: str = 'def read_lines(path):\n    """Return the lines of a text file'
    """Text that the model continues."""
    prompt_file: Path | None = None
    """A UTF-8 file of any size with the prompt, instead of `prompt`."""
    tokens: int = Field(default=64, gt=0)
    """Maximum number of new tokens; an end of text ends the text earlier."""
    temperature: float = Field(default=0.0, ge=0)
    """0: greedy; otherwise logits are divided by it before sampling."""
    top_k: int | None = Field(default=None, gt=0)
    """Number of most likely tokens to sample from; default: all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample only from the fewest most likely tokens with at least this total probability."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the sampling."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Stop strings; the text ends before the first of them."""

    @model_validator(mode="after")
    def _settings_fit_each_other(self) -> "SampleConfig":
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            raise ValueError(
                "sample.top_k, sample.top_p: unused at sample.temperature 0; set it above 0, or leave them out"
            )
        if {"prompt", "prompt_file"} <= self.model_fields_set:
            raise ValueError("sample.prompt and sample.prompt_file are both set; give one of them")
        return self


class GenerateConfig(Section):
    """Settings of `tost generate`."""

    sample: SampleConfig = Field(default_factory=SampleConfig)
    parallel: RanksConfig = Field(default_factory=RanksConfig)
