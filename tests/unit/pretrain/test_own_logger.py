"""A logger of a user: its rows and settings, its errors, and files that are none."""

from pathlib import Path
from typing import Any

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
from tost_lm.config import Section
from tost_lm.pretrain.loggers import Logger, register

class Settings(Section):
    file: str
    fails_at: int = 0

class ToAFile(Logger):
    settings = Settings

    def __init__(self, launch, settings):
        self.settings, self.lines, self.run_id = settings, [f"after {launch.first_step}"], "the run"

    def log(self, row):
        if row["step"] == self.settings.fails_at:
            raise OSError("the server is gone")
        self.lines.append(" ".join(row))

    def close(self):
        Path(self.settings.file).write_text("\\n".join(self.lines))

register(ToAFile)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/r").mkdir(parents=True)
    Path("mine.py").write_text(LOGGER)


def metrics_with(**own: Any) -> Metrics:
    settings = settings_of(loggers=["mine.py"], logger_settings={"mine": own})
    config = validate(PretrainConfig, settings, "test", from_user=True)
    return Metrics(config, Progress(2, 2), 1, torch.device("cpu"))


def test_it_gets_every_row_and_its_settings():
    metrics = metrics_with(file="shown.txt")
    assert metrics.wandb_run_id == "the run"
    log_steps(metrics, 3, 4)
    metrics.close()
    first, *steps, validation, evaluation = Path("shown.txt").read_text().splitlines()
    assert first == "after 2"
    assert [line.split()[:4] for line in steps] == [["step", "loss", "lr", "grad_norm"]] * 2
    assert validation.startswith("step validation/loss ")
    assert evaluation == "step evaluation/a@b/accuracy"


def test_its_first_error_is_a_warning(capsys: pytest.CaptureFixture[str]):
    metrics = metrics_with(file="shown.txt", fails_at=4)
    log_steps(metrics, 3, 6)
    metrics.close()
    assert capsys.readouterr().out.count("mine failed (the server is gone); metrics.jsonl continues") == 1
    assert len(Path("runs/r/metrics.jsonl").read_text().splitlines()) == 4
    assert len(Path("shown.txt").read_text().splitlines()) == 2, "it was closed"


@pytest.mark.parametrize(
    ("loggers", "own", "problem"),
    [
        (["wanbd"], {}, "run.loggers: no such logger: wanbd; choose from wandb, tensorboard, or name a file"),
        (["none.py"], {}, "run.loggers none.py: cannot be read: No such file or directory"),
        (["empty.py"], {}, "run.loggers empty.py: registers no logger; call tost_lm.pretrain.loggers.register in it"),
        (["mine.py"], {"mine": {"file": "x", "fail": 1}}, "run.logger_settings.mine: fail: unknown key"),
        (["mine.py"], {}, "run.logger_settings.mine: file: must be set"),
        (["mine.py"], {"yours": {}}, "run.logger_settings.yours: run.loggers has no such logger; remove it"),
    ],
)
def test_mistakes_are_one_line(loggers: list[str], own: dict[str, Any], problem: str):
    Path("empty.py").touch()
    with pytest.raises(ConfigError) as error:
        validate(PretrainConfig, settings_of(loggers=loggers, logger_settings=own), "test", from_user=True)
    assert problem in str(error.value)


def test_stored_settings_run_no_file():
    Path("mine.py").write_text("raise SystemExit")
    validate(PretrainConfig, settings_of(loggers=["mine.py"]), "test")
