"""Two launches in one run folder under other names, and a run folder that is a link."""

import socket
from collections.abc import Callable
from pathlib import Path

from launches import launch, train
from test_stopped_runs import saved_steps

RecordFault = Callable[[str, int, str], None]
ENDLESS = "train.steps=100000"


def test_a_launch_under_another_name_of_the_folder_is_refused(workplace: Path, record_fault: RecordFault):
    runs = workplace / "runs"
    (runs / "real").mkdir(parents=True)
    (runs / "tiny").symlink_to("real")
    with launch(workplace, 1, ENDLESS) as first:
        first.until(lambda: first.step() > 3)
        for name in ("real", "other"):
            (workplace / name).mkdir()
            for link in ("shards", "runs", "run.toml"):
                (workplace / name / link).symlink_to(workplace / link)
            if name == "other":
                (runs / "other").symlink_to(runs / "tiny")
            with launch(workplace / name, 1, ENDLESS, f"run.name={name}") as second:
                assert second.wait() == [2], second.output()
                (line,) = second.errors()
                assert f"runs/{name}: another launch is using it (host {socket.gethostname()}, pid " in line
                assert f"pid {first.pids[0]})" in line
    record_fault("two launches on two names of one run folder", 2, "the second is refused")


def test_a_link_to_a_run_folder_stays(workplace: Path):
    (workplace / "runs").mkdir()
    (workplace / "runs/tiny").symlink_to(workplace / "elsewhere")  # which the launch makes
    train(workplace, 1, "train.steps=4", "run.stop_at_step=2")
    train(workplace, 1, "train.steps=4")
    assert (workplace / "runs/tiny").is_symlink()
    assert sorted(saved_steps(workplace / "elsewhere")) == [2, 4]
