"""Which steps a trace holds, and what becomes of it when the run ends before they do."""

import gzip
import json
from pathlib import Path

import torch
from torch.profiler import record_function

from tost_lm.pretrain.profiler import Profiler


def train(profiler: Profiler, first: int, last: int) -> None:
    for step in range(first, last + 1):
        profiler.before_step(step)
        with record_function(f"our step {step}"):
            torch.ones(8).sum()
        profiler.after_step(step)
    profiler.close()


def traced(path: Path) -> set[str]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return {event["name"] for event in events if str(event.get("name")).startswith("our step")}


def profiler(folder: Path, steps: tuple[int, int] | None, rank: int = 0) -> Profiler:
    return Profiler(steps, folder / "profile", rank, torch.device("cpu"))


def test_a_trace_holds_the_chosen_steps(tmp_path: Path):
    train(profiler(tmp_path, (2, 3), rank=1), 1, 5)
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "rank_00001_steps_2-3.json.gz"
    assert traced(trace) == {"our step 2", "our step 3"}


def test_a_launch_traces_its_part(tmp_path: Path):
    train(profiler(tmp_path, (2, 6)), 1, 3)
    train(profiler(tmp_path, (2, 6)), 5, 7)
    first, second = sorted((tmp_path / "profile").iterdir())
    assert (first.name, second.name) == ("rank_00000_steps_2-3.json.gz", "rank_00000_steps_5-6.json.gz")
    assert traced(first) == {"our step 2", "our step 3"}
    assert traced(second) == {"our step 5", "our step 6"}
