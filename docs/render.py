"""Write the generated parts of the pages: groups of commands, and what results/ has stored.

    python docs/render.py

A generated part stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`; NAME is a function of `PARTS`. A test
compares the pages with what this program would write. The results come from these commands:

- results/benchmarks: `python -m benchmarks.NAME`, one file for each device.
- results/comparison: `python -m experiments.comparison`, one file for each run.
- results/mqar.json: `python -m experiments.mqar experiments/mqar.toml`, as it stores it in runs/mqar.
- results/needle_recall.json: `tost eval`, with the commands that the file has, and what they ran on.
- results/published: rows that others published, in TOML; `python -m benchmarks.published` plans them.
- results/servers.json: `pytest --full --record results/tests.json tests/full/test_servers.py`.
- results/tests.json: `pytest --record`, the last run of each test file.

Plans are computed, as `tost plan` does.
"""

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import published
from benchmarks.gpu import PARTS as GPU_PARTS
from experiments.comparison.__main__ import at_rates, stored
from experiments.comparison.tables import tables
from experiments.mqar import recall_table
from tost_lm.cli.main import COMMANDS
from tost_lm.config import load_config, recipes
from tost_lm.inference.effective_length import effective_lengths
from tost_lm.markdown import table
from tost_lm.pretrain.commands.plan import memory_rows, time_rows
from tost_lm.pretrain.plan.fit import complete
from tost_lm.pretrain.plan.settings import PlanConfig
from tost_lm.tasks.grid import HEADER, rows_of

CHECKOUT = Path(__file__).parents[1]
RESULTS = CHECKOUT / "results"
TESTS = CHECKOUT / "tests"
STATUS = Path(__file__).with_name("status.toml")
PART = re.compile(r"(?s)(<!-- begin: (\S+) -->\n)(.*?)(<!-- end: \2 -->\n)")


def pages() -> dict[Path, str]:
    """The text of each page that has generated parts."""
    found = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]
    texts = {path: path.read_text() for path in found if "<!-- begin: " in path.read_text()}
    return {path: PART.sub(_written, text) for path, text in texts.items()}


def _written(part: re.Match[str]) -> str:
    begin, name, old, end = part.groups()
    return f"{begin}\n{PARTS[name](old).strip()}\n\n{end}"


PAGES = {
    "Data preparation": "[Corpora](corpora.md)",
    "Training": "[Training](training.md), [planning](plan.md), [clusters](cluster.md)",
    "Evaluation": "[Evaluation](evaluation.md)",
    "Generation and other formats": "[Serving](serving.md), [public models](tutorials/public_hybrid.md)",
}
"""What describes each group of commands."""


def commands(_: str) -> str:
    """The commands of each group, which `tost` lists with their purposes, and the pages on them."""
    rows = [(title, ", ".join(f"`tost {name}`" for name in names), PAGES[title]) for title, names in COMMANDS.items()]
    return "\n".join(["| group | commands | pages |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def gpu(_: str) -> str:
    """What `python -m benchmarks.gpu` has shown of each part: on which GPU, and when."""
    rows = []
    found = [(record["machine"]["device"], cell) for record in _gpu_records() for cell in record["cells"]]
    for name, (_limit, measured) in GPU_PARTS.items():
        shown = [(device, cell) for device, cell in found if cell["part"] == name]
        before = None
        for device, cell in shown:
            result = cell.get("failed") or "; ".join(filter(None, [cell["value"], cell["beside"]]))
            where = name, f"{device}, {cell['time'][:10]}"
            part_name, by = ("", "") if where == before else where
            rows.append((part_name, cell.get("case", "what followed"), by, result))
            before = where
        if not shown:
            rows.append((name, (measured.__doc__ or "").split("\n")[0], "no GPU", ""))
    return table(("part", "case", "shown by", "result"), rows)


def _gpu_records() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((RESULTS / "benchmarks").glob("gpu_nvidia-*.json"))]


def benchmark(name: str, _: str) -> str:
    """The first table of the newest result of a benchmark, its note and its device."""
    files = (RESULTS / "benchmarks").glob(f"{name}_*.json")
    newest = max(files, key=lambda path: json.loads(path.read_text())["machine"]["time"])
    _, device, values, note = newest.with_suffix(".md").read_text().strip().split("\n\n")[:4]
    return f"{values}\n\n{note} Measured on {device.removeprefix('device ')}."


def comparison(_: str) -> str:
    return tables(stored("text"), at_rates())


def mqar(_: str) -> str:
    """The stored result of `python -m experiments.mqar`."""
    return recall_table(json.loads((RESULTS / "mqar.json").read_text())["results"])


def needles(_: str) -> str:
    """What `tost eval` has printed of the recipe recall."""
    (results,) = json.loads((RESULTS / "needle_recall.json").read_text())["results"]
    (found,) = effective_lengths({results["protocol"]: results})
    return f"{table(HEADER, rows_of(results['protocol'], results))}\n\nEffective length: {found.shown}; {found.about}."


QWEN3_5 = {
    "qwen3_5_4b": [],
    "qwen3_5_9b": [],
    "qwen3_5_27b": ["cluster.nodes=4", "parallel.sequence=8"],
}
"""Recipes, and the settings that they are planned with."""

STEPS = [
    ("qwen3_5_4b", ["train.batch_tokens=262144"]),
    ("qwen3_5_9b", ["train.batch_tokens=262144"]),
    ("qwen3_5_9b", ["cluster.nodes=8", "parallel.sequence=32", "train.seq_len=1048576", "train.batch_tokens=1048576"]),
    ("qwen3_5_27b", ["cluster.nodes=8", "parallel.sequence=16", "train.batch_tokens=262144"]),
]
"""Recipes, and the settings of steps of one micro-batch beside stages=[]: those of tests/full/test_executed_plan.py."""

ONE_GPU = [
    ("delta_350m", []),
    ("delta_350m", ["cluster.memory_gb=24", "train.micro_batch_size=2"]),
    ("delta_350m", ["train.seq_len=131072", "train.batch_tokens=1048576", "train.micro_batch_size=1",
                    "memory.tile_tokens=16384"]),
    ("delta_350m", ["cluster.memory_gb=24", "train.seq_len=131072", "train.batch_tokens=1048576",
                    "train.micro_batch_size=1", "memory.tile_tokens=8192",
                    "memory.activation_checkpointing=full"]),
    ("qwen3_5_4b", ["parallel.sequence=1", "stages=[]", "memory.tile_tokens=16384", "parallel.offload=optimizer"]),
    ("qwen3_5_4b", ["cluster.preset=h200-sxm", "parallel.sequence=1", "stages=[]", "memory.tile_tokens=16384"]),
    ("qwen3_5_9b", ["parallel.tensor=1", "parallel.sequence=1", "stages=[]",
                    "memory.tile_tokens=16384", "parallel.offload=optimizer"]),
]  # fmt: skip
"""Recipes, and the settings that they are planned with beside cluster.gpus_per_node=1."""


def one_gpu(_: str) -> str:
    """Plans of one GPU."""
    rows = []
    for name, words in ONE_GPU:
        ((config, memory, train),) = _planned(name, ["cluster.gpus_per_node=1", *words])
        gpu, needed = config.cluster.device.removeprefix("NVIDIA ").split()[0], memory["GPU memory"]
        what = " ".join([name, *(word for word in words if not word.startswith("cluster.preset"))])
        host = memory["host memory of a node"].partition(" of ")[0]
        rows.append((what, gpu, f"{config.train.seq_len:,}", needed, host, train["tokens/s"], train["duration"]))
    return table(("recipe and settings", "GPU", "tokens", "its memory", "host memory", "tokens/s", "time"), rows)


def qwen3_5(_: str) -> str:
    """The plan of each stage of the recipes of Qwen3.5."""
    rows = []
    for name, words in QWEN3_5.items():
        for config, memory, train in _planned(name, [*words, "cluster.gpu_hour_price=2.5"]):
            parallel, ranks = config.parallel, config.cluster.ranks
            used = f"{ranks}: {parallel.tensor} × {parallel.sequence} × {parallel.data_ranks(ranks)}"
            what = f"{name}, {' '.join(words)}" if words else name
            time = (train[quantity] for quantity in ("duration", "tokens/s", "GPU hours", "price"))
            batch = f"{train['steps']} × {config.batch_tokens:,}"
            rows.append((what, f"{config.train.seq_len:,}", batch, used, memory["GPU memory"], *time))
    of_time = "time", "tokens/s", "GPU hours", "price"
    return table(("recipe", "tokens", "steps × tokens", "GPUs", "memory of a GPU", *of_time), rows)


def qwen3_5_steps(_: str) -> str:
    """Plans of steps of one micro-batch."""
    rows = []
    for name, words in STEPS:
        ((config, memory, train),) = _planned(name, ["stages=[]", *words])
        command = f"tost plan {' '.join([name, *words])} 'stages=[]'"
        ranks, tokens = config.cluster.ranks, f"{config.train.seq_len:,}"
        rows.append((command, tokens, str(ranks), memory["GPU memory"], train["time per step"]))
    return table(("command", "tokens", "GPUs", "memory of a GPU", "time of a step"), rows)


def _planned(name: str, words: list[str]) -> Iterator[tuple[PlanConfig, dict[str, str], dict[str, str]]]:
    """Settings of each stage of a recipe, and the rows of its plan: memory, and times with steps and GPU hours."""
    for stage in load_config(PlanConfig, recipes()[name], words).in_stages():
        assert isinstance(stage.config, PlanConfig)
        config = complete(stage.config)
        times = list(time_rows(config, stage.steps))
        hours = next(how.split()[0] for quantity, _, how in times if quantity == "duration")
        train = {quantity: value for quantity, value, _ in times}
        memory = {quantity: value for quantity, value, _ in memory_rows(config)}
        yield config, memory, {**train, "GPU hours": hours, "steps": str(stage.steps)}


def published_runs(_: str) -> str:
    return published.summary([*published.rows()])


def servers(_: str) -> str:
    """What servers made of exports, by form and tokenizer."""
    rows = json.loads((RESULTS / "servers.json").read_text())["rows"]
    classes = {row["form"]: row["model_class"] for row in rows if "model_class" in row}
    found = {(row["server"], row["form"], row["tokenizer"]): row for row in rows if "equal" in row}
    keys = dict.fromkeys([*((form, "SentencePiece") for form in classes), *(key[1:] for key in found)])
    cells = [
        (form, tokenizer, classes.get(form, "the same"), _continued(found.get(("vLLM", form, tokenizer))),
         _continued(found.get(("llama.cpp", form, tokenizer))))
        for form, tokenizer in keys
    ]  # fmt: skip
    return table(("convert.to", "tokenizer", "class of vLLM", "vLLM", "llama.cpp"), cells)


def _continued(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not run"
    return f"{row['equal']} of {row['texts']}, {row['dtype']}: {row['difference']:.1e} (here {row['own']:.1e})"


def status(_: str) -> str:
    """Where each feature was shown, by docs/status.toml: names of tests, or parts of benchmarks.gpu."""
    columns, features = (tomllib.loads(STATUS.read_text())[key] for key in ("columns", "features"))
    cells = {name: [_shown(of[key]) if key in of else "" for of in features.values()] for key, name in columns.items()}
    nowhere = [title for title, of in cells.items() if {"not shown", ""} >= set(of)]
    shown = {title: of for title, of in cells.items() if title not in nowhere}
    rows = [*zip(features, *shown.values(), strict=True)]
    return "\n\n".join([table(("feature", *shown), rows), *(f"On {title}, nothing was shown." for title in nowhere)])


def _shown(names: list[str]) -> str:
    if not names:
        return "not shown"
    files = [TESTS / name for name in names if name.endswith(".py")]
    shown = [f"{device.removeprefix('NVIDIA ')}, {time[:10]}" for device, part, time in _gpu_parts() if part in names]
    return shown[0] if shown else _last_run(files) if files else "not shown"


def _gpu_parts() -> list[tuple[str, str, str]]:
    """Device, part and time of what a GPU has shown, also by earlier forms of the program."""
    return [
        (record["machine"]["device"], cell["part"], cell.get("time", record["machine"]["time"]))
        for record in _gpu_records()
        for cell in record["cells"]
        if "failed" not in cell
    ]


def _last_run(files: list[Path]) -> str:
    """The earliest of the last runs, and the files without one, or whose last run failed."""
    every = [test for path in files for test in ([path] if path.is_file() else sorted(path.rglob("test_*.py")))]
    recorded = tests()
    runs = {test: recorded.get(test.relative_to(CHECKOUT).as_posix()) for test in every}
    good = {test: run for test, run in runs.items() if run and run["passed"] and not run["failed"]}
    dates, without = [run["date"] for run in good.values()], [test.name for test in runs if test not in good]
    missing = f"without {', '.join(without) if len(without) < 4 else f'{len(without)} files'}" if without else ""
    return ", ".join(filter(None, [min(dates), missing])) if dates else "no recorded run"


def tests() -> dict[str, Any]:
    """By test file: passed and skipped tests, date, commit and device of its last recorded run."""
    path = RESULTS / "tests.json"
    return json.loads(path.read_text()) if path.is_file() else {}


PARTS: dict[str, Callable[[str], str]] = {
    "commands": commands, "gpu": gpu, "status": status, "comparison": comparison,
    "qwen3_5": qwen3_5, "qwen3_5_steps": qwen3_5_steps, "one_gpu": one_gpu, "mqar": mqar, "servers": servers,
    **{f"benchmark-{name}": partial(benchmark, name) for name in ("long", "storage")},
    "needles": needles, "published": published_runs,
}  # fmt: skip


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
