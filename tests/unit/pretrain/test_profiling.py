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


def test_a_launch_traces_its_part(tmp_path: Path):
    for first_step, last_step in ((1, 3), (5, 7)):
        train(Profiler((2, 6), tmp_path / "profile", 1, torch.device("cpu")), first_step, last_step)
    first, second = sorted((tmp_path / "profile").iterdir())
    assert (first.name, second.name) == ("rank_00001_steps_2-3.json.gz", "rank_00001_steps_5-6.json.gz")
    assert traced(first) == {"our step 2", "our step 3"}
    assert traced(second) == {"our step 5", "our step 6"}
