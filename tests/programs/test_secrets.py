"""A secret in a setting of a run: shown by no file, and kept as typed only where the setting is read again."""

from pathlib import Path

import pytest
from programs import run

pytestmark = pytest.mark.quick

SECRET = "planted3f9a"
FORMS = ("https:", f"me:{SECRET}@host", f"token={SECRET}", f"sig={SECRET}", f"Bearer {SECRET}", f"hf_{SECRET * 3}")


def test_only_settings_and_results_hold_a_secret_of_a_path(workplace: Path):
    shards = Path("elsewhere", *FORMS, "shards")
    (workplace / shards).parent.mkdir(parents=True)
    (workplace / shards).symlink_to(workplace / "out/shards")
    loggers = 'run.loggers=["wandb", "tensorboard"]'
    folder = f"data.folder={shards}"
    for steps in (4, 8):  # resumed with the same settings
        run(
            "tost train", "run.toml", folder, loggers, f"run.stop_at_step={steps}", cwd=workplace,
            WANDB_MODE="offline", HF_TOKEN=SECRET, MY_PASSWORD=SECRET,
        )  # fmt: skip
    run("tost eval", "runs/tiny", "heldout", cwd=workplace)
    run("tost report", "runs/tiny", cwd=workplace)
    files = {path: path.read_bytes() for path in (workplace / "runs").rglob("*") if path.is_file()}
    names = {path.name for path in files}
    assert {"env.json", "log.txt", "report.md", "report.html", "results.json"} <= names
    assert any(name.endswith(".wandb") for name in names)
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert {path.name for path, data in files.items() if SECRET.encode() in data} == {
        "config.toml", "training.json", "results.json",
    }  # fmt: skip
