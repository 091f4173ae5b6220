"""The golden set: losses of training and results of evaluation, measured before the structure of the code changes.

    python tests/golden/golden.py [PART …]

writes results/PROCESSOR.json: what this checkout computes on this processor. `test_unchanged.py` measures again
(most trainings and the runs of the program in `make test-full`, since they take minutes). On a processor with a
file, every number is equal to the last bit; elsewhere within the tolerances that stand there. A change of structure
leaves the files as they are. To add a processor, run the command at a commit whose tests passed on a processor that has
a file.

frozen/ has the inputs: token shards, a run with the checkpoint of step 5, and test sets, from the code of its day.
"""

import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as the tests
    sys.path[:0] = [
        str(HERE.parents[1]),
        *(str(HERE.parent / tier) for tier in ("unit/testing", "multiprocess", "programs")),
    ]

import torch
from other_forms import OTHER_FORMS
from programs import run
from training_on_layouts import build_engine, train_in_one_process, train_steps

from tost_lm.config import leaves
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.testing import run_on_ranks

FROZEN, RESULTS = HERE / "frozen", HERE / "results"
STEPS = 10
GRAD_CLIP = 0.5
GROUP = 10  # cases of one launch of ranks


@dataclass(frozen=True)
class Case:
    """A training of ten steps."""

    ranks: int
    model: dict[str, Any]
    layout: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"
    tile_tokens: int | None = None
    others: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `build_engine`."""

    @property
    def name(self) -> str:
        parts = {**self.model, **self.layout, "tile_tokens": self.tile_tokens, **self.others}
        words = [f"{key}={value}" for key, value in leaves(parts) if value is not None]
        return f"{self.ranks} ranks, {self.optimizer}, {', '.join(words)}"


def training_cases() -> Iterator[Case]:
    """Every pattern, layout, ZeRO stage and tile setting, and every form of block, norm and precision."""
    patterns = [
        {"pattern": "T"}, {"pattern": "D"}, {"pattern": "A"}, {"pattern": "TDA"}, {"pattern": "DDA"},
        {"pattern": "A", "softmax": {"window": 7}},
        {"pattern": "DDA", "softmax": {"window": 7}, "positions": "none"},
    ]  # fmt: skip
    hybrid = {"pattern": "TDA"}
    for model in patterns:
        yield Case(1, model, {"zero_stage": 0})
        yield Case(2, model, {"tensor": 2})
        yield Case(2, model, {"sequence": 2})
    yield Case(1, {**hybrid, **OTHER_FORMS, "z_loss": 0.1}, {"zero_stage": 0})
    yield Case(1, hybrid, {"zero_stage": 0}, "muon")
    yield Case(2, hybrid, {"zero_stage": 0, "sequence": 2}, "muon")
    checkpointing = {"memory": {"activation_checkpointing": "full", "mlp_tile_tokens": 5}}
    yield Case(1, hybrid, {"zero_stage": 0}, others=checkpointing)
    yield Case(2, hybrid, {"zero_stage": 2, "sequence": 2}, others=checkpointing)
    for axes in ({}, {"tensor": 2}, {"sequence": 2}):
        for stage in range(4):
            yield Case(2, hybrid, {**axes, "zero_stage": stage}, "sgd")
    for stage in (1, 2, 3):
        yield Case(2, hybrid, {"zero_stage": stage}, others={"bfloat16": True})
    yield Case(2, hybrid, {"zero_stage": 2, "offload": "optimizer"})
    for number, (tensor, sequence) in enumerate(((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1))):
        yield Case(4, hybrid, {"tensor": tensor, "sequence": sequence, "zero_stage": number % 4})
    for model in (
        {"pattern": "TTA", "softmax": {"window": 7}},
        {"pattern": "DDT", "tssa": {"denom_bias": "head"}},
        {"pattern": "DDA"},
    ):
        for tile_tokens in (9, 13):
            for ranks, axes in ((1, {}), (2, {"sequence": 2}), (2, {"tensor": 2}), (4, {"tensor": 2, "sequence": 2})):
                yield Case(ranks, model, {**axes, "zero_stage": 0}, tile_tokens=tile_tokens)
        yield Case(2, model, {"sequence": 2, "zero_stage": 2}, tile_tokens=9)


def train(cases: list[Case]) -> list[list[float]]:
    """Losses and gradient norms of the cases, on the ranks of one process group."""
    found = []
    for case in cases:
        layout = ParallelConfig(**case.layout)
        engine = build_engine(layout, case.optimizer, grad_clip=GRAD_CLIP, **case.model, **case.others)
        losses, norms = zip(*train_steps(engine, case.optimizer, range(STEPS), (), case.tile_tokens), strict=True)
        found.append([*losses, *norms])
    return found


RANKS = (1, 2, 4)


def trained(*numbers: int, every: int = 1) -> dict[str, list[float]]:
    """Losses, then gradient norms, of ten steps on so many ranks, or on all; of `every` cases one."""
    cases, found = list(training_cases()), {}
    for ranks in numbers or RANKS:
        of_ranks = [case for case in cases if case.ranks == ranks][::every]
        for start in range(0, len(of_ranks), GROUP):
            group = of_ranks[start : start + GROUP]
            found |= zip(
                [case.name for case in group], run_on_ranks(train, ranks, group, timeout_s=600)[0], strict=True
            )
    return found


def trained_in_float64() -> dict[str, list[float]]:
    """The same in one process and float64, by torch alone."""
    found = {}
    for case in training_cases():
        record = train_in_one_process(case.optimizer, GRAD_CLIP, torch.float64, STEPS, **case.model)
        found[case.name] = [*record.losses, *record.norms]
    return found


PROGRAMS: dict[str, tuple[int, str]] = {
    "resumed": (0, "run.name=golden"),
    "whole rows": (0, "run.name=rows"),
    "documents": (0, "run.name=documents data.packing=best-fit validation.interval=5"),
    "tiles": (2, "run.name=tiles data.packing=best-fit memory.tile_tokens=20 parallel.sequence=2"),
    "tensor": (2, "run.name=tensor parallel.tensor=2 parallel.zero_stage=0"),
    "bfloat16": (2, "run.name=bfloat16 train.dtype=bfloat16 parallel.zero_stage=2"),
    "muon": (0, "run.name=muon optim.kind=muon parallel.zero_stage=0"),
    "softmax": (0, "run.name=softmax model.pattern=A model.softmax.window=0 model.positions=learned"),
}
"""Ranks and settings of `tost train run.toml`."""

SETS = [f"sets.{path.stem}=sets/{path.name}" for path in sorted((FROZEN / "sets").iterdir())]
"""All test sets: `sets.NAME=FILE`."""
ZERO_SHOT = [
    "wikitext2@hf-stride20", "wikitext2@lm-eval", "lambada_openai@lm-eval", "lambada_openai@last-token",
    "ptb@megatron",
]  # fmt: skip
EVALUATIONS = [
    ["tost eval", *ZERO_SHOT, "heldout", *SETS],
    ["tost eval", "needle", "records", *(f"{name}.{setting}" for name in ("needle", "records") for setting in (
        "lengths=[4096]", "samples=2", "depths=[0.2, 0.9]")), "needle.haystack=haystack.txt"],
    ["tost eval", "positions", "text", "positions.times=2", "positions.sequences=2", "text.file=sets/wikitext2.txt"],
    ["tost generate", "sample.tokens=20", "sample.temperature=0.8"],
]  # fmt: skip
HUGGING_FACE = [
    ["tost eval", "lambada_openai@lm-eval", "wikitext2@lm-eval", "needle", "positions", "text", *SETS,
     "needle.haystack=haystack.txt", "needle.lengths=[160]", "needle.samples=2", "needle.depths=[0.5]", "needle.keys=2",
     "positions.file=haystack.txt", "positions.times=1", "positions.sequences=2", "text.file=sets/wikitext2.txt"],
    ["tost generate", "sample.tokens=20"],
]  # fmt: skip
"""Evaluations of a folder of the Hugging Face library."""


VOLATILE = ("/seconds", "_per_second", "/commit", "/tost_lm", "/xxh3")
"""Results that are not of the checkpoint: times and versions, and the hash of the file."""


def in_a_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for the programs, with the frozen shards and run."""
    folder = tempfile.TemporaryDirectory(prefix="tost_lm_golden_")
    for name in ("runs", "gpt2"):
        shutil.copytree(FROZEN / name, f"{folder.name}/{name}")
    for name in ("shards", "sets", "haystack.txt", "run.toml"):
        Path(folder.name, name).symlink_to(FROZEN / name)
    return folder


def trained_by_programs() -> dict[str, list[float]]:
    """Losses and gradient norms of the runs of `tost train`, and their validation losses."""
    found = {}
    with in_a_folder() as folder:
        for name, (ranks, words) in PROGRAMS.items():
            run("tost train", "run.toml", *words.split(), cwd=Path(folder), ranks=ranks)
            home = Path(folder, "runs", re.findall("run.name=(.+?)( |$)", words)[0][0])
            steps = [json.loads(row) for row in (home / "metrics.jsonl").read_text().splitlines()]
            found[name] = [step[key] for key in ("loss", "grad_norm") for step in steps]
            validated = [json.loads(row) for row in (home / "validation.jsonl").read_text().splitlines()]
            found[name] += [loss for row in validated for loss in row["loss_by_position"]]
    return found


def evaluated() -> dict[str, Any]:
    """The results of all evaluation programs on the frozen checkpoint, as one value for each key."""
    found = {}
    with in_a_folder() as folder:
        for model, prefix, programs in (("runs/golden", "", EVALUATIONS), ("gpt2", "gpt2/", HUGGING_FACE)):
            for program, *words in programs:
                run(program, model, *words, cwd=Path(folder))
            home = Path(folder, model, "eval")
            for path in sorted(home.rglob("results.json")):
                found |= flat(json.loads(path.read_text()), f"{prefix}{path.parent.relative_to(home)}")
    return found


def flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from flat(inner, f"{key}/{name}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from flat(inner, f"{key}/{number}")
    elif not key.endswith(VOLATILE):
        yield key, value


def processor() -> str:
    """Names what decides the bits: the processor, the kernels that torch chooses, and the versions."""
    cpu = dict(re.findall(r"^(.+?)\s*: (.+)$", Path("/proc/cpuinfo").read_text().split("\n\n")[0], re.MULTILINE))
    model = "_".join(cpu.get(key, "") for key in ("vendor_id", "cpu family", "model", "stepping"))
    name = f"{platform.machine()}_{model}_{torch.backends.cpu.get_cpu_capability()}_torch_{torch.__version__}"
    return re.sub(r"[^\w.]+", "_", name)


PARTS = {"programs": trained_by_programs, "evaluation": evaluated, "training": trained, "float64": trained_in_float64}

if __name__ == "__main__":
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{processor()}.json"
    for part in sys.argv[1:] or PARTS:
        results = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({**results, part: PARTS[part]()}, indent=0, sort_keys=True) + "\n")
        print(f"wrote {part} of {path}", flush=True)
