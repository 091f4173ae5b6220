"""A secret in a setting of a run: shown by no file, and kept as typed only where the setting is read again."""

from pathlib import Path

import pytest
from programs import refusal_here, run

pytestmark = pytest.mark.quick

SECRET = "planted3f9a"
FORMS = (
    "https:",
    f"me:{SECRET}@host",
    "s3:",
    "key:ab",
    f"{SECRET}@bucket",
    f"token={SECRET}",
    f"sig={SECRET}",
    f"Bearer {SECRET}",
    f"hf_{SECRET * 3}",
)


@pytest.mark.parametrize(
    "words",
    [
        ("tost train", "run.toml", "data.folder={url}"),
        ("tost train", "run.toml", 'data.mixture={{"{url}" = 1.0}}'),
        ("tost train", "run.toml", "checkpoint.upload={url}"),
        ("tost train", "run.toml", "run.folder={url}"),
        ("tost train", "run.toml", "train.steps={url}"),
        ("tost train", "run.toml", "{url}=1"),
        ("tost train", "{url}"),
        ("tost eval", "{url}", "heldout"),
        ("tost generate", "{url}", "x = "),
        ("tost convert", "{url}", "convert.folder=x"),
        ("tost convert", "runs/x", "convert.folder={url}"),
        ("tost prepare inspect", "{url}"),
    ],
)
def test_no_error_line_shows_a_secret_with_a_slash(workplace: Path, words: tuple[str, ...]):
    for url in (
        f"s3://key:ab/{SECRET}@bucket/x",
        f"s3://key:ab?{SECRET}#/c@bucket",
        f"s3://b/x?X-Amz-Signature={SECRET}",
    ):
        refused = refusal_here(*(word.format(url=url) for word in words), cwd=workplace)
        assert SECRET not in refused


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
