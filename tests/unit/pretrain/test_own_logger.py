"""A logger of a user: its rows, its errors, and files that are none."""

from pathlib import Path

import pytest
import torch
from logged_run import log_steps, settings_of

from tost_lm.checkpointing.format import Progress
from tost_lm.config import validate
from tost_lm.errors import ConfigError
from tost_lm.pretrain.metrics import Metrics
from tost_lm.pretrain.settings import PretrainConfig

LOGGER = """
from pathlib import Path
from tost_lm.pretrain.loggers import Logger, register

class ToAFile(Logger):
    def __init__(self, launch):
        self.lines, self.run_id = [f"after {launch.first_step}"], "the run"

    def log(self, row):
        if row["step"] == FAILS_AT:
            raise OSError("the server is gone")
        self.lines.append(" ".join(row))

    def close(self):
        Path("shown.txt").write_text("\\n".join(self.lines))

register(ToAFile)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/r").mkdir(parents=True)


def metrics_with(fails_at: int = 0) -> Metrics:
    Path("mine.py").write_text(LOGGER.replace("FAILS_AT", str(fails_at)))
    config = validate(PretrainConfig, settings_of(loggers=["mine.py"]), "test", from_user=True)
    return Metrics(config, Progress(2, 2), 1, torch.device("cpu"))


def test_it_gets_every_row():
    metrics = metrics_with()
    assert metrics.wandb_run_id == "the run"
    log_steps(metrics, 3, 4)
    metrics.close()
    first, *steps, validation, evaluation = Path("shown.txt").read_text().splitlines()
    assert first == "after 2"
    assert [line.split()[:4] for line in steps] == [["step", "loss", "lr", "grad_norm"]] * 2
    assert validation.startswith("step validation/loss ")
    assert evaluation == "step evaluation/a@b/accuracy"


def test_its_first_error_is_a_warning(capsys: pytest.CaptureFixture[str]):
    metrics = metrics_with(fails_at=4)
    log_steps(metrics, 3, 6)
    metrics.close()
    assert capsys.readouterr().out.count("mine failed (the server is gone); metrics.jsonl continues") == 1
    assert len(Path("runs/r/metrics.jsonl").read_text().splitlines()) == 4
    assert len(Path("shown.txt").read_text().splitlines()) == 2, "it was closed"


@pytest.mark.parametrize(
    ("logger", "problem"),
    [
        ("wanbd", "run.loggers: no such logger: wanbd; choose from wandb, tensorboard, or name a file"),
        ("none.py", "run.loggers none.py: cannot be read: No such file or directory"),
        ("empty.py", "run.loggers empty.py: registers no logger; call tost_lm.pretrain.loggers.register in it"),
    ],
)
def test_mistakes_are_one_line(logger: str, problem: str):
    Path("empty.py").touch()
    with pytest.raises(ConfigError) as error:
        validate(PretrainConfig, settings_of(loggers=[logger]), "test", from_user=True)
    assert problem in str(error.value)


def test_stored_settings_run_no_file():
    Path("mine.py").write_text("raise SystemExit")
    validate(PretrainConfig, settings_of(loggers=["mine.py"]), "test")
