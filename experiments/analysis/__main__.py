"""Analysis of the TSSA layers of a trained model: memberships and coding rates.

    python -m experiments.analysis runs/demo

Memberships Π: concentration and variance explained by position; change after more context. Layers: the coding rate R_c
of the tokens and its variational form R_var, before and after the layer's branch, also for each retained checkpoint.
Writes results.json, report.html, report.md and the figures to RUN/eval/tssa_layers@1. docs/analysis.md explains them.
"""

import time
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from experiments.analysis import coding_rate, memberships
from experiments.analysis.layers import Analysis, read_text
from tost_lm.checkpointing.format import MANIFEST, read_model_config
from tost_lm.checkpointing.run_folder import step_folders
from tost_lm.command_line import run_program
from tost_lm.config import NAMES_FILES, Section
from tost_lm.data.shards import Shards
from tost_lm.errors import ConfigError
from tost_lm.files import sha256_file
from tost_lm.inference.evaluated import EvaluatedCheckpoint, pick_device
from tost_lm.interop.load import load
from tost_lm.markdown import code, escape
from tost_lm.page import Page, require_packages

PROTOCOL = "tssa_layers@1"


class TextConfig(Section):
    """The held-out text."""

    shards: Annotated[str, NAMES_FILES] = ""
    """Shard folder whose `valid` split is used; empty: the training shards of the run."""


class MembershipsConfig(Section):
    """Text of the analyses."""

    sequences: int = Field(default=16, gt=0)
    """Number of held-out sequences of model.context_length tokens for means."""
    probe_tokens: int = Field(default=256, gt=0)
    """Number of first tokens of each sequence that are read again after other text."""
    context_tokens: list[int] = Field(default=[500, 1000, 10_000, 100_000])
    """Tokens of other held-out text before them; values beyond the model's positions are left out."""

    @field_validator("context_tokens")
    @classmethod
    def _check_ascending(cls, tokens: list[int]) -> list[int]:
        if any(later <= earlier for earlier, later in pairwise([0, *tokens])):
            raise ValueError(f"memberships.context_tokens: {tokens} is not ascending; give positive numbers in order")
        return tokens


class AnalysisConfig(Section):
    """Settings of `experiments.analysis`."""

    heldout: TextConfig = Field(default_factory=TextConfig)
    memberships: MembershipsConfig = Field(default_factory=MembershipsConfig)


def main(path: Path, config: AnalysisConfig) -> None:
    require_packages()
    evaluated = EvaluatedCheckpoint.find(path)
    model = read_model_config(evaluated.checkpoint)
    if "T" not in model.pattern or model.heads == 1:
        raise ConfigError(
            f"{evaluated.home}: no TSSA layer with several heads: model.pattern={model.pattern}, "
            f"model.heads={model.heads}; give a model with such a layer"
        )
    if model.context_length < 2:
        raise ConfigError(f"{evaluated.home}: sequences are too short: model.context_length=1; give another model")
    shards = evaluated.open_shards(config.heldout.shards)
    kept = [folder for folder in step_folders(evaluated.home) if (folder / MANIFEST).is_file()]
    identity = evaluated.identity(config, shards)
    identity["kept"] = {folder.name: sha256_file(folder / MANIFEST) for folder in kept}
    results = evaluated.reusable(PROTOCOL, identity)
    if results is None:
        started = time.monotonic()
        results = measure(evaluated, shards, config, kept)
        evaluated.write_results(PROTOCOL, identity, started, results)
    print(f"wrote {write_page(evaluated, results)}")


def measure(evaluated: EvaluatedCheckpoint, shards: Shards, config: AnalysisConfig, kept: list[Path]) -> dict[str, Any]:
    """Results of both analyses. Raises DataError if the held-out text is too short."""
    device, settings = pick_device(), config.memberships
    model = load(evaluated.checkpoint, device)
    contexts = memberships.fitting_contexts(model.config, settings.context_tokens, settings.probe_tokens)
    text = read_text(shards, settings.sequences, model.config.context_length, max(contexts, default=0))
    of = Analysis(model, text.to(device))
    return {
        "memberships": memberships.measure(of, settings.probe_tokens, settings.context_tokens),
        "coding_rates": coding_rate.measure(of, kept),
    }


def write_page(evaluated: EvaluatedCheckpoint, results: dict[str, Any]) -> Path:
    """Write the page and its figures beside results.json."""
    page = Page(f"TSSA layers of {evaluated.home.resolve().name}", figures="figures")
    sections = [
        f"# {escape(page.title)}",
        f"Checkpoint {code(str(evaluated.checkpoint))}.",
        *memberships.section(results["memberships"], page),
        *coding_rate.section(results["coding_rates"], page),
        page.figure_files(),
    ]
    return page.write(evaluated.results_path(PROTOCOL).parent, sections)


if __name__ == "__main__":
    run_program(main, name="experiments.analysis", doc=__doc__ or "", positional="RUN", config=AnalysisConfig)
