"""Fine-tuning on folders of images: it learns, resumes bit-exactly from any step, and names what does not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from image_folders import CLASSES, flipped, settings, to_tensor, write_images
from torch import Tensor

import tost_lm
from tost_lm.checkpointing.format import StoredTensors, write_checkpoint
from tost_lm.checkpointing.run_folder import step_folders
from tost_lm.errors import CheckpointError, ConfigError, DataError, TrainingError
from tost_lm.extra.vision.classifier import TostVision
from tost_lm.extra.vision.settings import VisionTrainConfig
from tost_lm.extra.vision.training import Transforms, fine_tune
from tost_lm.files import sha256_file
from tost_lm.parallel.graceful_stop import GracefulStop

TRANSFORMS = Transforms(flipped, to_tensor)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"), {"train": 15, "test": 8})


@pytest.fixture
def workplace(tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "images").symlink_to(images)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(config: VisionTrainConfig) -> str:
    return fine_tune(config, TRANSFORMS, GracefulStop())


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "images_per_second"} for row in found]


def hashes(run: Path) -> dict[str, str]:
    """Of the files of the newest checkpoint but those with the settings."""
    folder = step_folders(run)[-1]
    return {path.name: sha256_file(path) for path in folder.iterdir() if path.suffix == ".safetensors"} | {
        "step": folder.name
    }


def test_a_small_model_learns_to_tell_stripes_apart(workplace: Path):
    assert train(settings(train={"epochs": 12, "evaluate_every": 5})) == ""
    evaluated = rows(workplace / "runs/run", "validation")
    assert [row["epoch"] for row in evaluated] == [5, 10, 12]
    assert evaluated[-1]["examples"] == 24
    assert evaluated[-1]["top1"] > 0.9
    assert "top5" not in evaluated[-1]
    model = tost_lm.load_vision(workplace / "runs/run")
    with torch.no_grad():
        logits = model(torch.stack([to_tensor(image) for image in opened(workplace / "images/test/rows")]))
    assert (logits.argmax(1) == CLASSES.index("rows")).double().mean() > 0.7


def opened(folder: Path) -> list[Any]:
    from PIL import Image

    return [Image.open(path) for path in sorted(folder.glob("*.png"))]


def test_a_run_that_is_stopped_in_an_epoch_or_an_evaluation_ends_as_one_that_is_not(workplace: Path):
    assert train(settings()) == ""
    assert len(rows(workplace / "runs/run", "metrics")) == 20
    stop, seen = GracefulStop(), []

    def stop_at(number: int) -> Any:
        def transform(image: Any) -> Tensor:
            seen.append(image)
            if len(seen) == number:
                stop.request("SIGTERM")
            return flipped(image)

        return transform

    stopped = settings(run={"name": "stopped", "log_every": 1})
    for transforms, step in (
        (Transforms(stop_at(72), to_tensor), 7),  # in the third batch of the second epoch
        (Transforms(flipped, stop_at(5)), 10),  # in the evaluation after it
    ):
        assert fine_tune(stopped, transforms, stop) == "SIGTERM"
        assert step_folders(workplace / "runs/stopped")[-1].name == f"step_{step:08}"
        stop, seen = GracefulStop(), []
    with_workers = settings(run={"name": "stopped", "log_every": 1}, data={"source": "images", "workers": 2})
    assert (
        train(with_workers.model_copy(update={"data": with_workers.data.model_copy(update={"image_size": 24})})) == ""
    )
    for name in ("metrics", "validation"):
        assert rows(workplace / "runs/stopped", name) == rows(workplace / "runs/run", name)
    assert hashes(workplace / "runs/stopped") == hashes(workplace / "runs/run")
    before = hashes(workplace / "runs/run")
    assert train(settings()) == ""  # complete
    assert hashes(workplace / "runs/run") == before


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_state_of_the_optimizer_is_restored(workplace: Path, kind: str):
    config = settings(optim={"kind": kind, "lr": 1e-3, "min_lr": 0.0})
    stop, seen = GracefulStop(), []

    def stopping(image: Any) -> Tensor:
        seen.append(image)
        if len(seen) == 25:
            stop.request("SIGTERM")
        return flipped(image)

    assert fine_tune(config, Transforms(stopping, to_tensor), stop) == "SIGTERM"
    checkpoint = step_folders(workplace / "runs/run")[-1]
    moments = StoredTensors(checkpoint, "optimizer")
    moved = {"adamw": "exp_avg/blocks.0.mixer.in_proj.weight", "muon": "momentum_buffer/blocks.0.mixer.in_proj.weight"}
    assert moments[moved[kind]].any()
    assert tost_lm.load_vision(checkpoint).config == config.model


def test_training_starts_from_the_weights_of_a_model_with_another_head(workplace: Path, capsys: pytest.CaptureFixture):
    torch.manual_seed(1)
    trained = TostVision(settings(model={"classes": 7}).model)
    write_checkpoint(workplace / "trained", trained.config, trained.state_dict(), None)
    slow = {"lr": 1e-12, "min_lr": 0.0, "weight_decay": 0.0}
    config = settings(optim=slow, train={"epochs": 1, "initial_weights": "trained"})
    train(config)
    assert "the head of trained has 7 classes; a head of 3 is drawn" in capsys.readouterr().out
    weights = tost_lm.load_vision(workplace / "runs/run").state_dict()
    for name, weight in trained.state_dict().items():
        if name.startswith("head."):
            assert weights[name].shape[0] == 3
        elif "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-9, msg=name)
    other = settings(train={"initial_weights": "trained"}, model={"layers": 3, "heads": 4}, run={"name": "other"})
    with pytest.raises(ConfigError) as error:
        train(other)
    assert str(error.value).split("\n") == [
        "train.initial_weights trained: has another shape; change [model]",
        "model.layers: 2 there, 3 here",
        "model.heads: 2 there, 4 here",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"classes": 4}}, "images, split train: 3 classes, and model.classes is 4; set model.classes=3"),
        ({"data": {"test_split": "tests"}}, r"images: no split tests \(did you mean test\?\); it has train, test"),
        ({"data": {"label_column": "name"}}, "images: data.label_column name is none of its columns of this kind: "),
        ({"data": {"source": "nowhere"}}, "data.source nowhere: no such folder; give a folder, or hub:NAME for a data"),
        ({"optim": {"schedule": "wsd", "decay_steps": 50}}, "optim.decay_steps 50 and a warm-up of 4 steps are more "),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_one_line(workplace: Path, changes: dict[str, dict[str, Any]], message: str):
    with pytest.raises(ConfigError, match=message) as error:
        train(settings(**changes))
    assert "\n" not in str(error.value)
    assert not (workplace / "runs/run/config.toml").exists()


def test_a_run_with_other_settings_or_images_is_refused(workplace: Path):
    train(settings(train={"epochs": 1}))
    with pytest.raises(ConfigError) as error:
        train(settings(train={"epochs": 2}, run={"name": "run", "log_every": 9}))
    assert str(error.value).split("\n") == [
        "runs/run: this run has other settings; choose another run.name or undo the change",
        "train.epochs: 1 → 2",
    ]
    (workplace / "images").unlink()
    write_images(workplace / "images", {"train": 14, "test": 2})
    with pytest.raises(
        DataError, match=r"was trained on other images than images, split train; choose another run\.name"
    ):
        train(settings(train={"epochs": 1}))
    for path in (workplace / "runs/run/checkpoints").glob("step_*/model-*"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="none of its checkpoints is valid"):
        train(settings(train={"epochs": 1}))


def test_a_checkpoint_of_another_run_is_refused(workplace: Path):
    train(settings(train={"epochs": 1}))
    train(settings(train={"epochs": 1, "seed": 3}, run={"name": "other"}))
    (workplace / "runs/run/checkpoints").rename(workplace / "own")
    (workplace / "runs/other/checkpoints").rename(workplace / "runs/run/checkpoints")
    with pytest.raises(
        ConfigError, match=r"^runs/run/checkpoints/step_\d+: this run has other settings.*\ntrain\.seed:"
    ):
        train(settings(train={"epochs": 1}))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_named_in_one_line(workplace: Path, workers: int):
    (workplace / "images").unlink()
    write_images(workplace / "images", {"train": 3, "test": 1})
    (workplace / "images/train/rows/001.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"images, split train: image 4 \(.*rows/001.png\) cannot be read: .*; remove"):
        train(settings(data={"source": "images", "workers": workers}))


def test_a_loss_that_is_not_finite_ends_the_run(workplace: Path):
    with pytest.raises(TrainingError, match=r"runs/run: the loss is nan at step \d+; lower optim.lr and train under"):
        train(settings(optim={"lr": 1e30, "warmup_steps": 0, "grad_clip": 0.0}))


def test_grey_and_turned_images_are_read_upright_and_in_colour(workplace: Path):
    from PIL import Image

    from tost_lm.extra.vision.images import open_images

    (workplace / "images").unlink()
    pixels = Image.new("L", (4, 2), 0)
    pixels.putpixel((0, 0), 255)
    exif = pixels.getexif()
    exif[0x0112] = 6  # turned by 90°
    for split in ("train", "test"):
        (workplace / f"images/{split}/a").mkdir(parents=True)
        pixels.save(workplace / f"images/{split}/a/0.png", exif=exif)
    with pytest.raises(
        DataError, match=r"images: has no column for data\.label_column; put images of 2 classes or more"
    ):
        open_images(settings().data, "train")
    for split in ("train", "test"):
        (workplace / f"images/{split}/b").mkdir(parents=True)
        pixels.save(workplace / f"images/{split}/b/0.png", exif=exif)
    found = open_images(settings().data, "train+test")
    assert found.labels.tolist() == [0, 1, 0, 1]
    image = found.decode(1)
    assert (image.mode, image.size) == ("RGB", (2, 4))
    assert image.getpixel((1, 0)) == (255, 255, 255)
