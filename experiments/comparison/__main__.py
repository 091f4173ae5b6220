"""Train the models of forms.toml with `tost train`, measure them on unseen books, and store each in results/comparison.

    tost prepare tokenizer corpus.source=BOOKS …      (docs/experiments.md has the commands)
    python -m experiments.comparison [comparison.forms='["qwen3-5"]'] [comparison.seeds=1]
    python -m experiments.comparison comparison.tables=true

With comparison.rates='[1e-3, 2e-3]', models train at these. A stopped training resumes, and a finished one is not
repeated. Models have equally many parameters, within 0.5 %.
"""

import json
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat

import tost_lm
from experiments.commands import ROOT, run_tost
from experiments.comparison.tables import ALL, tables
from experiments.comparison.text import Texts, losses, measures, without_attention
from tost_lm.command_line import run_program
from tost_lm.config import Section, load_config, read_toml
from tost_lm.data.shards import Shards
from tost_lm.errors import ConfigError
from tost_lm.files import read_rows, write_atomically
from tost_lm.inference.evaluated import read_result_file, results_path
from tost_lm.model.flops import parameters
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.version import VERSION, git_commit

HERE = Path(__file__).parent
RECIPE, FORMS, RESULTS = HERE / "recipe.toml", HERE / "forms.toml", ROOT / "results/comparison"
HIDDEN_UNIT = 2
NEEDLES = (
    "needle", "needle.keys=8", "needle.samples=100", "needle.lengths=[512, 1024, 4096]",
    "heldout.shards=runs/comparison/shards",
)  # fmt: skip
"""Five questions of each text; of models that trained on recall passages too."""


class ComparisonSettings(Section):
    """Which models are trained and measured."""

    forms: list[str] = Field(default_factory=list)
    """Names of forms.toml; empty: all, seed by seed."""
    seeds: int | None = Field(default=None, gt=0)
    """The first seeds only."""
    rates: list[PositiveFloat] = Field(default_factory=list)
    """Learning rates; empty: the recipe's."""
    tables: bool = False
    """Print the tables of the stored results."""


class ComparisonConfig(Section):
    """Settings of `python -m experiments.comparison`."""

    comparison: ComparisonSettings = Field(default_factory=ComparisonSettings)


def main(_: Path | None, config: ComparisonConfig) -> None:
    settings = config.comparison
    if settings.tables:
        print(tables(stored("text"), at_rates(), ALL))
        return
    forms = read_forms()
    if unknown := [name for name in settings.forms if name not in forms]:
        raise ConfigError(f"comparison.forms: {', '.join(unknown)}: choose from {', '.join(forms)}")
    names = settings.forms or list(forms)
    folder, rates = (RESULTS / "rates", settings.rates) if settings.rates else (RESULTS / "text", [None])
    for seed, rate in product(range(max(forms[name]["seeds"] for name in names)), rates):
        for name in names:
            path = folder / (f"{name}_{seed}_{rate:g}.json" if rate else f"{name}_{seed}.json")
            if seed < min(forms[name]["seeds"], settings.seeds or seed + 1) and not path.is_file():
                of_rate = [f"optim.lr={rate:g}", f"optim.min_lr={rate / 10:g}"] if rate else []
                words = [*with_equal_parameters(forms[name]["settings"]), *of_rate]
                result = {"form": name, "seed": seed, "rate": rate, "commit": git_commit(), "tost_lm": VERSION}
                write_atomically(path, json.dumps(result | run(path.stem, forms[name], words, seed), indent=1) + "\n")


def stored(task: str) -> list[dict[str, Any]]:
    """All results, in the order of forms.toml."""
    found, forms = [json.loads(path.read_text()) for path in (RESULTS / task).glob("*.json")], list(read_forms())
    return sorted(found, key=lambda result: (forms.index(result["form"]), result["seed"]))


def at_rates() -> list[dict[str, Any]]:
    """The first seed of the forms that trained at other rates than their own, at all of them."""
    found, forms = stored("rates"), read_forms()
    own = {
        name: load_config(PretrainConfig, RECIPE, forms[name]["settings"], from_user=True).optim.lr for name in forms
    }
    of_forms = {one["form"] for one in found}
    return found + [
        one | {"rate": own[one["form"]]} for one in stored("text") if one["form"] in of_forms and one["seed"] == 0
    ]


def run(name: str, form: dict[str, Any], words: list[str], seed: int) -> dict[str, Any]:
    """Train and measure a model. Raises TostError if `tost train` fails."""
    words = [*words, f"train.seed={seed}", f"run.name={name}"]
    if start := form.get("continues"):
        words.append(f"train.branch_from=runs/comparison/{start}_{seed}/checkpoints/step_00002930")
    command = ["tost", "train", str(RECIPE.relative_to(ROOT)), *words]
    run_tost(*command[1:])
    config = load_config(PretrainConfig, RECIPE, words, from_user=True)
    model = tost_lm.load(config.run_folder)
    texts = Texts.of(Shards.open(next(iter(config.data.folders))))
    count, seconds = parameters(config.model).total, read_rows(config.run_folder / "metrics.jsonl")[-1]["seconds"]
    found = measures(model, texts, config.train.seq_len)
    if zeroed := without_attention(model):
        found["loss_without_attention"] = losses(zeroed, texts).mean(1).tolist()
    if config.data.mixture:
        run_tost("eval", str(config.run_folder), *NEEDLES)
        cells = (read_result_file(results_path(config.run_folder, "needle@keys")) or {})["cells"]
        found["needle"] = {str(cell["length"]): [[cell["choice_accuracy"]]] for cell in cells}
    return {"command": command, "parameters": count, "train_seconds": seconds, **found}


def read_forms() -> dict[str, dict[str, Any]]:
    """forms.toml: each form with what it takes from the one that it extends or continues, whose settings precede."""
    forms: dict[str, dict[str, Any]] = {}
    for name, form in read_toml(FORMS).items():
        base = next((forms[form[key]] for key in ("extends", "continues") if key in form), {"settings": []})
        forms[name] = {**base, **form, "settings": [*base["settings"], *form["settings"]]}
    return forms


def with_equal_parameters(words: list[str]) -> list[str]:
    """The settings with so many hidden channels that the model has as many parameters as that of the recipe."""
    count = lambda *words: parameters(load_config(PretrainConfig, RECIPE, words, from_user=True).model).total
    small, next_one = (count(*words, f"model.mlp_hidden={n * HIDDEN_UNIT}") for n in (1, 2))
    units = 1 + round((count() - small) / (next_one - small))
    return [*words, f"model.mlp_hidden={units * HIDDEN_UNIT}"]


if __name__ == "__main__":
    run_program(main, name="experiments.comparison", doc=__doc__ or "", positional="[CONFIG]", config=ComparisonConfig)
