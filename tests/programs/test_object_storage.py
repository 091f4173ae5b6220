"""Runs whose shards and checkpoints are at URLs: resumed on another computer, they are those of local folders."""

import json
import re
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from forked import Forked, wait_until
from programs import losses, refusal, run, snapshot, weights
from public_models import write_olmo_hybrid


@pytest.fixture
def storage(workplace: Path) -> str:
    shutil.copytree(workplace / "out/shards", workplace / "bucket/shards")
    return f"file://{workplace}/bucket"


def train(workplace: Path, *words: str, name: str = "tiny") -> str:
    return run("tost train", "run.toml", f"run.name={name}", *words, cwd=workplace, TOST_CACHE=str(workplace / "cache"))


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.quick
def test_a_run_resumes_from_a_url_where_its_folder_is_gone(workplace: Path, storage: str):
    at_url = (f"data.folder={storage}/shards", f"checkpoint.upload={storage}/runs", "checkpoint.keep_latest_k=1")
    train(workplace, name="local")
    train(workplace, *at_url, "run.stop_at_step=8")
    uploaded = workplace / "bucket/runs/tiny"
    assert steps(uploaded) == ["step_00000008"]
    shutil.rmtree(workplace / "runs/tiny")
    (uploaded / "checkpoints/step_00000012").mkdir()  # an interrupted upload
    (uploaded / "checkpoints/step_00000012/training.json").write_text("{}")
    said = train(workplace, *at_url)
    assert f"fetching {storage}/runs/tiny/checkpoints/step_00000008" in said
    assert "resuming from runs/tiny/checkpoints/step_00000008" in said
    assert losses(workplace, "tiny") == losses(workplace, "local")[8:]
    assert weights(workplace, "tiny") == weights(workplace, "local")
    assert steps(uploaded) == steps(workplace / "runs/tiny") == ["step_00000012"]
    assert "nothing is left to train" in train(workplace, *at_url)


def test_a_killed_upload_is_made_up_for(workplace: Path, storage: str):
    words = ("run.toml", f"checkpoint.upload={storage}/runs", "train.steps=200", "optim.schedule=constant")
    uploaded = workplace / "bucket/runs/tiny/checkpoints"
    for launch in range(2):
        started = Forked("tost train", *words, cwd=workplace)
        last = f"step_{4 * (launch + 1):08d}"
        wait_until(lambda last=last: uploaded.exists() and max(steps(uploaded.parent)) > last)
        started.send_signal(signal.SIGKILL)
        started.finish()
        shutil.rmtree(workplace / "runs/tiny")
    train(workplace, *words[1:], "train.steps=24")
    train(workplace, *words[2:], "train.steps=24", name="local")
    assert weights(workplace, "tiny") == weights(workplace, "local")
    assert steps(uploaded.parent) == steps(workplace / "runs/tiny")


def test_a_damaged_checkpoint_at_the_url_is_skipped(workplace: Path, storage: str):
    upload = f"checkpoint.upload={storage}/runs"
    train(workplace, upload, "run.stop_at_step=8")
    shard = next((workplace / "bucket/runs/tiny/checkpoints/step_00000008").glob("model-*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    shutil.rmtree(workplace / "runs/tiny")
    said = train(workplace, upload, "run.stop_at_step=8")
    assert f"skipped checkpoint: {storage}/runs/tiny/checkpoints/step_00000008/{shard.name}: damaged" in said
    assert "resuming from runs/tiny/checkpoints/step_00000004" in said


def test_a_later_launch_takes_the_url_over(workplace: Path, storage: str):
    words = ("run.toml", f"checkpoint.upload={storage}/runs", "optim.schedule=constant", "train.steps=100000")
    uploaded = workplace / "bucket/runs/tiny"
    first = Forked("tost train", *words, cwd=workplace)
    wait_until(lambda: (uploaded / "checkpoints").exists() and len(steps(uploaded)) > 1)
    refused = refusal("tost train", *words, cwd=workplace)  # in the same folder
    assert refused.startswith("runs/tiny: another launch is using it (host ")
    later = Forked("tost train", *words, "run.folder=others", cwd=workplace)
    code, _, errors = first.finish()
    assert code == 2
    owner = rf"\(host {re.escape(socket.gethostname())}, pid \d+, run folder {workplace}/others/tiny, launch \w+\)"
    assert re.match(rf"error: {storage}/runs/tiny: a later launch uploads there {owner}, so this one ends", errors)
    last, own = max(steps(uploaded)), workplace / "others/tiny"
    wait_until(lambda: (own / "checkpoints").exists() and max(steps(own), default="") > last)
    later.send_signal(signal.SIGTERM)
    code, said, _ = later.finish()
    assert code == 75
    assert "resuming from others/tiny/checkpoints/step_" in said
    newest = max(steps(uploaded))
    one, other = (folder / "checkpoints" / newest for folder in (uploaded, own))
    assert snapshot(one) == snapshot(other)


def test_another_run_does_not_replace_the_checkpoints_at_the_url(workplace: Path, storage: str):
    upload = f"checkpoint.upload={storage}/runs"
    train(workplace, upload, "run.stop_at_step=4")
    before = snapshot(workplace / "bucket/runs")
    other = ("run.toml", "run.folder=others", "train.seed=7", "run.stop_at_step=8")
    train(workplace, *other[1:])
    refused = refusal("tost train", *other, upload, cwd=workplace)
    assert refused == (
        f"{storage}/runs/tiny: has checkpoints of another run than others/tiny, with another train.seed; choose "
        "another run.name or checkpoint.upload"
    )
    assert snapshot(workplace / "bucket/runs") == before


def test_what_is_missing_at_the_url_is_uploaded_again(workplace: Path, storage: str):
    upload = f"checkpoint.upload={storage}/runs"
    train(workplace, upload)
    newest = workplace / "bucket/runs/tiny/checkpoints/step_00000012"
    next(newest.glob("optimizer-*")).unlink()
    assert "nothing is left to train" in train(workplace, upload)
    assert snapshot(newest) == snapshot(workplace / "runs/tiny/checkpoints/step_00000012")


def test_what_cannot_be_uploaded_is_saved_and_one_line(workplace: Path, storage: str):
    (workplace / "bucket/runs/more/tiny").mkdir(parents=True)
    (workplace / "bucket/runs/more/tiny/checkpoints").write_text("a file in the place of the folder")
    words = ("run.toml", f"checkpoint.upload={storage}/runs/more")
    code, said, errors = Forked("tost train", *words, cwd=workplace).finish()
    assert code == 2
    assert errors.startswith("error: runs/tiny/checkpoints/step_00000012: saved, but not uploaded: file://")
    assert errors.count("\n") == 1
    assert "warning: runs/tiny/checkpoints/step_00000004: saved, but not uploaded yet: file://" in said
    (workplace / "bucket/runs/more/tiny/checkpoints").unlink()
    train(workplace, *words[1:])
    assert steps(workplace / "bucket/runs/more/tiny") == steps(workplace / "runs/tiny")
    assert "not a URL" in refusal("tost train", "run.toml", "checkpoint.upload=some/folder", cwd=workplace)


def test_models_are_read_from_urls_and_written_to_them(workplace: Path, storage: str):
    upload, cache = f"checkpoint.upload={storage}/runs", dict[str, Any](TOST_CACHE=str(workplace / "cache"))
    train(workplace, upload, f"data.folder={storage}/shards")
    at_url, local = f"{storage}/runs/tiny", workplace / "runs/tiny"
    write_olmo_hybrid(workplace / "bucket/olmo")
    words = [f"{storage}/olmo", f"convert.folder={storage}/models/back"]
    said = run("tost convert", *words, cwd=workplace, **cache)
    assert f"written to {storage}/models/back: tost generate {storage}/models/back" in said
    assert str(workplace / "cache") not in said
    record = json.loads((workplace / "bucket/models/back/conversion.json").read_text())
    assert record["source"] == f"{storage}/olmo"
    texts = [
        run("tost generate", model, "x = ", "sample.tokens=8", cwd=workplace, **cache).partition("\nstate after")[0]
        for model in (local, at_url, f"{storage}/models/back", f"{storage}/olmo")
    ]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    refused = refusal("tost convert", at_url, f"convert.folder={storage}/models/back", cwd=workplace, **cache)
    assert refused == f"{storage}/models/back: exists already; give another convert.folder"

    run("tost eval", local, "heldout", cwd=workplace, **cache)
    run("tost eval", at_url, "heldout", cwd=workplace, **cache)
    shutil.rmtree(workplace / "cache")
    results = [*workplace.glob("runs/*/eval/heldout@bpb/results.json")]
    assert len(results) == 2
    one, other = (json.loads(path.read_text())["model"] for path in results)
    assert one == other
    assert "URLs are not supported" in refusal("tost report", at_url, cwd=workplace)


@pytest.mark.slow
def test_a_run_starts_from_weights_at_a_url(workplace: Path, storage: str):
    train(workplace, f"checkpoint.upload={storage}/runs")
    step = "tiny/checkpoints/step_00000008"
    for name, start in (("weights", "initial_weights"), ("branch", "branch_from")):
        for where in ("runs", f"{storage}/runs"):
            train(workplace, f"train.{start}={where}/{step}", name=f"{name}_{'url' if '/' in where else 'local'}")
        assert weights(workplace, f"{name}_url") == weights(workplace, f"{name}_local")
