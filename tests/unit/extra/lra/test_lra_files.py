"""The tasks of the Long-Range Arena from small files in the formats of their releases, and malformed files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tost_lm.config import validate
from tost_lm.errors import DataError
from tost_lm.extra.lra.settings import LraConfig
from tost_lm.extra.lra.tasks import Task, load

NAMES = {"text": "aclImdb", "retrieval": "tsv", "image": "cifar-10-batches-bin", "pathfinder": "curv_contour_length_14"}


def load_task(task: str, folder: Path, **data: Any) -> Task:
    tree = {
        "data": {"task": task, "folder": str(folder), **data},
        "model": {"layers": 1, "heads": 1, "width": 8},
        "train": {"steps": 1},
        "lra": {"mixers": ["T"]},
    }
    return load(validate(LraConfig, tree, "test"))


def write_reviews(folder: Path) -> None:
    for split, count in (("train", 20), ("test", 3)):
        for name in ("neg", "pos"):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                (folder / split / name / f"{i:02}_7.txt").write_bytes(f"{split} {name} {i:02} ".encode() + b"\xc3\xa9")


def write_pairs(folder: Path) -> None:
    folder.mkdir()
    for name in ("train", "eval", "test"):
        lines = [f"{n % 2}.0\tP{n}\tQ{n}\tb'{name} one {n}'\tb'two {n}'" for n in range(4)]
        (folder / f"new_aan_pairs.{name}.tsv").write_text("\n".join(lines) + "\n")


def write_cifar(folder: Path) -> np.ndarray:
    """Returns the pixels of all six batches, [6, 3, 3, 32, 32]."""
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(256, size=(6, 3, 3, 32, 32), dtype=np.uint8)
    for number, name in enumerate([*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]):
        labels = np.array([number, 9, 0], dtype=np.uint8)
        records = np.concatenate([labels[:, None], pixels[number].reshape(3, -1)], axis=1)
        (folder / name).write_bytes(records.tobytes())
    return pixels


def write_pathfinder(folder: Path) -> None:
    """Images of one grey each, 12 in folder 2 and 8 in folder 10; the label is whether the grey is odd."""
    image = pytest.importorskip("PIL.Image")
    (folder / "metadata").mkdir(parents=True)
    for number, count in (("10", 8), ("2", 12)):
        (folder / "imgs" / number).mkdir(parents=True)
        lines = []
        for i in range(count):
            grey = 2 * i + (i < count // 2)
            pixels = np.full((32, 32), grey, dtype=np.uint8)
            image.fromarray(pixels).save(folder / "imgs" / number / f"sample_{i}.png")
            lines.append(f"imgs/{number} sample_{i}.png {i} {grey % 2} 1.8 3 14")
        (folder / "metadata" / f"{number}.npy").write_text("\n".join(lines) + "\n")


WRITE = {"text": write_reviews, "retrieval": write_pairs, "image": write_cifar, "pathfinder": write_pathfinder}


def test_reviews_are_bytes_and_every_tenth_of_a_class_is_held_out(tmp_path: Path):
    write_reviews(tmp_path / "aclImdb")
    task = load_task("text", tmp_path / "aclImdb")
    assert (task.classes, task.vocab_size, task.towers) == (2, 256, 1)
    assert [bytes(document) for document in task.valid.documents] == [
        f"train {name} {i} é".encode() for name in ("neg", "pos") for i in ("00", "10")
    ]
    assert task.valid.labels.tolist() == [0, 0, 1, 1]
    assert task.train.labels.tolist() == [0] * 18 + [1] * 18
    assert bytes(task.test.documents[-1]) == "test pos 02 é".encode()
    short = load_task("text", tmp_path / "aclImdb", max_tokens=5)
    assert {bytes(document) for document in short.train.documents} == {b"train"}


def test_pairs_are_neighbouring_documents(tmp_path: Path):
    write_pairs(tmp_path / "tsv")
    task = load_task("retrieval", tmp_path / "tsv")
    assert task.towers == 2
    assert [bytes(document) for document in task.valid.documents[2:4]] == [b"b'eval one 1'", b"b'two 1'"]
    assert task.test.labels.tolist() == [0, 1, 0, 1]


def test_cifar_is_grey_row_by_row_and_its_last_tenth_is_held_out(tmp_path: Path):
    pixels = write_cifar(tmp_path / "cifar")
    task = load_task("image", tmp_path / "cifar")
    red, green, blue = pixels[-1, 1].astype(float)
    grey = (0.2989 * red + 0.5870 * green + 0.1140 * blue) / 255
    # TensorFlow converts a fraction to uint8 so: it multiplies by 255.5 and cuts.
    assert np.array_equal(task.test.documents[1].reshape(32, 32), np.floor(255.5 * grey))
    assert task.test.labels.tolist() == [5, 9, 0]
    assert [len(split.labels) for split in (task.train, task.valid)] == [14, 1]
    assert task.train.labels.tolist() == [0, 9, 0, 1, 9, 0, 2, 9, 0, 3, 9, 0, 4, 9]


def test_pathfinder_is_split_in_the_order_of_its_numbers(tmp_path: Path):
    write_pathfinder(tmp_path / "curv")
    task = load_task("pathfinder", tmp_path / "curv")
    greys = [[int(document[0]) for document in split.documents] for split in (task.train, task.valid, task.test)]
    of_2 = [2 * i + (i < 6) for i in range(12)]
    of_10 = [2 * i + (i < 4) for i in range(8)]
    assert greys == [[*of_2, *of_10[:4]], of_10[4:6], of_10[6:]]
    assert task.train.labels.tolist() == [grey % 2 for grey in greys[0]]
    assert {len(document) for document in task.train.documents} == {1024}


DAMAGES: dict[str, tuple[str, str, bytes | None, str]] = {
    "no reviews": ("text", "train/neg", None, r"train/neg: fewer than two texts \(\*.txt\); set data.folder"),
    "an empty review": ("text", "test/pos/01_7.txt", b"", "test/pos/01_7.txt: empty; unpack the data set again"),
    "no pairs": ("retrieval", "new_aan_pairs.eval.tsv", None, "eval.tsv: no such file; set data.folder to the folder"),
    "a pair without a text": (
        "retrieval",
        "new_aan_pairs.test.tsv",
        b"1.0\ta\tb\tc",
        "test.tsv: line 1 is not a label",
    ),
    "a label of 2": ("retrieval", "new_aan_pairs.test.tsv", b"2\ta\tb\tc\td", "test.tsv: line 1 is not a label of 0"),
    "no batch": (
        "image",
        "data_batch_3.bin",
        None,
        "data_batch_3.bin: no such file; set data.folder to the folder cifar",
    ),
    "half a record": ("image", "test_batch.bin", bytes(3000), "test_batch.bin: not records of 3,073 bytes; download"),
    "a class of 12": ("image", "test_batch.bin", bytes([12] * 3073), "test_batch.bin: has labels above 9; download"),
    "no metadata": ("pathfinder", "metadata", None, "metadata: no files N.npy; set data.folder to a folder such as"),
    "no label": ("pathfinder", "metadata/2.npy", b"imgs/2 sample_0.png", "2.npy: line 1 names no image and label"),
    "no image": ("pathfinder", "imgs/2/sample_3.png", None, "sample_3.png: no such file, but .*2.npy names it"),
    "a text as image": ("pathfinder", "imgs/2/sample_3.png", b"text", "sample_3.png: not an image; unpack the release"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_missing_or_malformed_file_is_named(damage: str, tmp_path: Path):
    task, name, content, message = DAMAGES[damage]
    folder = tmp_path / NAMES[task]
    WRITE[task](folder)
    path = folder / name
    if content is not None:
        path.write_bytes(content)
    else:
        path.rename(tmp_path / "away")
    with pytest.raises(DataError, match=message) as raised:
        load_task(task, folder)
    assert "\n" not in str(raised.value)
