"""`tost vision train` and `tost vision eval` as a user runs them, on a folder of images."""

import json
from pathlib import Path

import pytest
from image_folders import write_images
from programs import interrupt, refusal, run

from tost_lm.errors import install_hint

try:
    from torchvision.transforms import v2  # pyright: ignore[reportMissingImports]
except (ImportError, RuntimeError) as error:
    v2, problem = None, f"torchvision cannot be imported: {error}"
else:
    problem = ""

needs_torchvision = pytest.mark.skipif(v2 is None, reason=problem)
SETTINGS = """
[model]
layers = 2
heads = 2
width = 32
patch_size = 8
classes = 3
[data]
source = "images"
image_size = 32
workers = 1
[optim]
lr = 3e-3
min_lr = 0.0
[train]
epochs = 3
batch_size = 12
[run]
name = "stripes"
log_every = 1
"""


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    write_images(tmp_path / "images", {"train": 24, "val": 10})
    (tmp_path / "run.toml").write_text(SETTINGS.replace('"images"', '"images"\ntest_split = "validation"'))
    return tmp_path


@pytest.mark.skipif(v2 is not None, reason="torchvision is installed")
def test_without_torchvision_the_extra_is_named(workplace: Path):
    printed = refusal("tost vision train", "run.toml", cwd=workplace)
    assert printed.startswith("images need torchvision (")
    assert printed.endswith(f"); {install_hint('vision')}")
    assert not (workplace / "runs").exists()


@needs_torchvision
def test_a_run_that_is_interrupted_resumes_and_is_evaluated(workplace: Path):
    metrics = workplace / "runs/stripes/metrics.jsonl"
    train = ("tost vision train", "run.toml")

    def trains() -> bool:
        return metrics.is_file() and len(metrics.read_text().splitlines()) >= 2

    code, _ = interrupt(*train, cwd=workplace, when=trains)
    assert code == 75
    printed = run(*train, cwd=workplace)
    assert printed.startswith("resuming from runs/stripes/checkpoints/step_")
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, 19))
    last = json.loads((workplace / "runs/stripes/validation.jsonl").read_text().splitlines()[-1])
    assert (last["epoch"], last["examples"]) == (3, 30)
    assert (
        run(*train, cwd=workplace).splitlines()[-1].startswith("complete after 18 steps: runs/stripes/checkpoints/st")
    )

    evaluated = run("tost vision eval", "runs/stripes", "data.workers=0", cwd=workplace).splitlines()
    assert evaluated[-1].startswith(f"top-1 {last['top1']:.2%} ± ")
    stored = json.loads((workplace / "runs/stripes/eval/images/results.json").read_text())["model"]
    assert stored["top1"] == last["top1"]
    assert abs(stored["nats"] - last["nats"]) < 1e-4 * last["nats"]
    again = run("tost vision eval", "runs/stripes", cwd=workplace).splitlines()
    assert again[0].startswith("reusing runs/stripes/eval/images/results.json")
    other = run("tost vision eval", "runs/stripes", "data.test_split=train+validation", cwd=workplace)
    assert other.splitlines()[-1].endswith(" 102 images")

    analyze = ("tost vision analyze", "runs/stripes", "analysis.rate_images=4", "data.workers=0")
    printed = run(*analyze, cwd=workplace).splitlines()
    assert [line.rsplit(", ", 2)[1:] for line in printed[1::2]] == [
        ["train split", "4 images:"],
        ["test split", "4 images:"],
    ]
    folder = workplace / "runs/stripes/eval/vision_analysis"
    results = json.loads((folder / "results.json").read_text())
    for figure in ("coding_rate", *(drawn["figure"] for drawn in results["drawn"])):
        assert (folder / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
    assert run(*analyze, cwd=workplace).splitlines() == [
        "reusing runs/stripes/eval/vision_analysis/results.json (same checkpoint, text and settings)",
        *printed[1:],
    ]


@needs_torchvision
def test_refused_evaluations_are_one_line(workplace: Path):
    run("tost vision train", "run.toml", "train.epochs=1", cwd=workplace)
    (workplace / "images/train/rows").rename(workplace / "images/train/lines")
    (workplace / "images/val/rows").rename(workplace / "images/val/lines")
    printed = refusal("tost vision eval", "runs/stripes", cwd=workplace)
    assert printed.startswith(
        "images, split validation: has other classes than runs/stripes/checkpoints/step_00000006: "
    )
    model = next((workplace / "runs/stripes/checkpoints").glob("*"))
    run("tost convert", model, "convert.folder=theirs", "convert.to=authors", cwd=workplace)
    run("tost convert", "theirs/ckpt.pt", "convert.folder=ours", cwd=workplace)
    printed = refusal("tost vision eval", "ours", cwd=workplace)
    assert printed == "ours: not a checkpoint of tost vision train; fine-tune the model first"
    printed = refusal("tost vision analyze", "ours", cwd=workplace)
    assert printed == "ours: was not trained on images by tost vision train; give data.source=FOLDER"


@needs_torchvision
def test_transforms_are_those_of_the_released_recipe():
    import numpy as np
    import torch
    from PIL import Image

    from tost_lm.extra.vision.images import augmentation, preprocessing

    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    resized = torch.from_numpy(np.asarray(image.resize((32, 32), Image.Resampling.BILINEAR)).copy())
    expected = ((resized / 255 - mean) / std).permute(2, 0, 1)
    torch.testing.assert_close(preprocessing(32)(image), expected)
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(augmentation(32)(image))
    assert drawn[0].shape == (3, 32, 32)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
