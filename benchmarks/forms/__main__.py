"""Forms of token statistics that remember, beside their rivals: one run for each model, learning rate and seed.

    python -m benchmarks.forms sweep.stage=screen
    python -m benchmarks.forms sweep.stage=finals sweep.list_only=true

Every finished run is a file in benchmarks/results/forms, and is not repeated. Ctrl-C loses the run in progress only.
All models have equal parameters within 0.5 %, and read the same tokens in the same order. Prepare the text first:

    tost prepare tokenizer corpus.source=BOOKS corpus.valid_fraction=0.1 tokenizer.path=runs/forms/1024.model \\
        tokenizer.vocab_size=1024 tokenizer.sample_bytes=10000000 shards.folder=runs/forms/shards-1024
    tost prepare shards corpus.source=BOOKS corpus.valid_fraction=0.1 tokenizer.path=runs/forms/1024.model \\
        tokenizer.vocab_size=1024 tokenizer.sample_bytes=10000000 shards.folder=runs/forms/shards-1024

Output: tables of all finished runs, also those of other stages.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from benchmarks.forms.catalog import CATALOG, forms_of
from benchmarks.forms.tables import tables
from tost_lm.config import Section, load_config, run_program
from tost_lm.errors import ConfigError
from tost_lm.evaluation.recall_config import RecallConfig
from tost_lm.files import write_atomically
from tost_lm.training.plan_config import RESULTS

FOLDER = RESULTS / "forms"
RECIPE = Path(__file__).parents[2] / "configs" / "eval" / "mqar.toml"

SCREENED = [
    "published", "decay-conv", "memory", "memory-means", "memory-copying", "memory-4-slots", "slots", "slots-2x16-16",
    "slots-4x8", "softmax", "hybrid", "linear",
]  # fmt: skip
FINALISTS = [
    "published", "published-no-positions", "slots", "slots@control", "hybrid", "softmax", "linear",
]  # fmt: skip


class SweepSection(Section):
    """Which runs."""

    stage: Literal["screen", "finals", "mqar"] = "screen"
    """`screen`: text, one seed; `finals`: text, five seeds, more tokens; `mqar`: multi-query associative recall."""
    names: list[str] | None = None
    """Models of the catalog; with `@control` the same without memory. Unset: those of the stage."""
    lrs: list[float] | None = None
    """Learning rates of text; unset: those of the stage."""
    seeds: list[int] | None = None
    """Unset: those of the stage."""
    pairs: list[int] = Field(default=[4, 8, 16], min_length=1)
    """Pairs of a key and a value in an example of MQAR."""
    list_only: bool = False
    """Print the runs that are left, and stop."""


class TextSection(Section):
    """Training on text."""

    shards: Path = Path("runs/forms")
    """Folder of the token shards of each vocabulary, shards-1024, …"""
    vocab_size: int = Field(default=1024, gt=0)
    """Pieces of the tokenizer."""
    tokens: int | None = Field(default=None, gt=0)
    """Unset: 1,000,000 in stage `screen`, 3,000,000 in `finals`."""
    seq_len: int = Field(default=512, gt=0)
    """Tokens of a sequence."""
    batch: int = Field(default=2, gt=0)
    """Sequences of a step."""
    layers: int = Field(default=4, gt=0)
    """Blocks."""
    width: int = Field(default=128, gt=0)
    """Channels of the residual stream."""


class FormsConfig(Section):
    """Settings of `benchmarks.forms`."""

    sweep: SweepSection = SweepSection()
    text: TextSection = TextSection()


Run = dict[str, Any]
"""What identifies a run: `task`, `name`, `seed`, and of text `lr`, of MQAR `pairs`; with all settings of the model."""


def runs(config: FormsConfig) -> Iterator[Run]:
    """All runs of the stage, seed by seed, so that pairs of runs are complete early."""
    sweep, text = config.sweep, config.text
    finals = sweep.stage == "finals"
    names = sweep.names or (FINALISTS if sweep.stage != "screen" else SCREENED)
    if unknown := [name for name in names if name.partition("@")[0] not in CATALOG]:
        raise ConfigError(f"sweep.names: unknown model {unknown[0]}; use {', '.join(CATALOG)}")
    for seed in sweep.seeds or (range(5) if finals else [0]):
        if sweep.stage == "mqar":
            for pairs in sweep.pairs:
                yield from (
                    {"task": "mqar", "name": name, "pairs": pairs, "seed": seed, **_forms(name, 2)} for name in names
                )
            continue
        settings = text.model_dump(mode="json", exclude={"shards"})
        settings["tokens"] = text.tokens or (3_000_000 if finals else 1_000_000)
        for lr in sweep.lrs or [4e-3]:
            for name in names:
                yield {"task": "text", "name": name, "lr": lr, "seed": seed, **settings, **_forms(name, text.layers)}


def _forms(name: str, layers: int) -> Run:
    """The settings of each layer, but those that have their default."""
    return {"forms": [form.model_dump(exclude_defaults=True) for form in forms_of(name, layers)]}


def path_of(run: Run) -> Path:
    if run["task"] == "mqar":
        return FOLDER / f"mqar_{run['pairs']}_{run['name']}_{run['seed']}.json"
    shape = f"v{run['vocab_size']}_{run['layers']}x{run['width']}_{run['batch']}x{run['seq_len']}"
    return FOLDER / f"text_{run['tokens'] / 1e6:g}M_{shape}_lr{run['lr']:g}_{run['name']}_{run['seed']}.json"


def is_finished(run: Run) -> bool:
    try:
        return json.loads(path_of(run).read_bytes())["run"] == run
    except (OSError, ValueError, KeyError):
        return False


def main(_: Path | None, config: FormsConfig) -> None:
    left = [run for run in runs(config) if not is_finished(run)]
    print(f"{len(left)} of {len(list(runs(config)))} runs are left", flush=True)
    if config.sweep.list_only:
        print("\n".join(path_of(run).stem for run in left))
        return
    import torch

    torch.set_num_threads(1)
    for run in left:
        result = {"text": _text, "mqar": _mqar}[run["task"]](run, config)
        FOLDER.mkdir(parents=True, exist_ok=True)
        write_atomically(path_of(run), json.dumps({"run": run, **result}, indent=1) + "\n")
        shown = {key: round(value, 4) for key, value in result.items() if isinstance(value, float)}
        print(f"{path_of(run).stem}: {shown}", flush=True)
    print(tables([json.loads(path.read_bytes()) for path in sorted(FOLDER.glob("*.json"))]))


def _text(run: Run, config: FormsConfig) -> dict[str, Any]:
    import torch

    from benchmarks.forms import text
    from benchmarks.forms.lm import FormLM
    from tost_lm.data.shards import Shards
    from tost_lm.optim import OptimConfig

    torch.manual_seed(run["seed"])
    T, batch, forms = run["seq_len"], run["batch"], forms_of(run["name"], run["layers"])
    shards = config.text.shards / f"shards-{run['vocab_size']}"
    model = FormLM(forms, run["width"], Shards.open(shards).vocab_size, T)
    optim = OptimConfig(lr=run["lr"], min_lr=run["lr"] / 10)
    steps = run["tokens"] // (T * batch)
    trained = text.train(model, text.split_tokens(shards, "train"), optim, steps, batch, T, run["seed"])
    measured = text.measures(model, text.split_tokens(shards, "valid"), T)
    return {**measured, **_sizes(model, forms, run["width"]), **trained}


def _mqar(run: Run, _: FormsConfig) -> dict[str, Any]:
    import torch

    from benchmarks.forms.lm import FormLM
    from tost_lm.evaluation import recall

    # From 8 pairs on, eight ids for each pair; a sequence has just enough tokens for all queries.
    pairs, forms = run["pairs"], forms_of(run["name"], 2)
    sizes = {"pairs": pairs, "vocab_size": 8 * pairs, "seq_len": max(32, 4 * pairs)}
    settings = [f"mqar.{key}={value}" for key, value in sizes.items()] + [f"model.vocab_size={8 * pairs}"]
    recipe = load_config(RecallConfig, RECIPE, [*settings, f"model.max_positions={sizes['seq_len']}"])
    torch.manual_seed(run["seed"])
    model = FormLM(forms, recipe.model.width, recipe.mqar.vocab_size, recipe.mqar.seq_len)
    recall.train(model, recipe, run["seed"])  # pyright: ignore[reportArgumentType]
    measured = recall.evaluate(model, recipe.mqar, recipe.train.batch_size)  # pyright: ignore[reportArgumentType]
    return {**measured, **_sizes(model, forms, recipe.model.width)}


def _sizes(model: Any, forms: list[Any], width: int) -> dict[str, Any]:
    """Parameters, and the numbers that decoding keeps for each layer; None: they grow with the text."""
    return {"parameters": model.parameter_count(), "state_numbers": [form.state_numbers(width) for form in forms]}


if __name__ == "__main__":
    run_program(main, name="benchmarks.forms", doc=__doc__ or "", positional="[CONFIG]", config=FormsConfig)
