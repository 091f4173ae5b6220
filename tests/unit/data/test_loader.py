"""Training windows cover each shard in order, overlap by the one token that is only a label, and cross no shard."""

import numpy as np
import pytest

from tost_lm.data.loader import TrainingWindows
from tost_lm.data.shards import Shards
from tost_lm.errors import ConfigError


def shards_of(folder, *lengths: int) -> Shards:
    """Shards whose training tokens are 0, 1, 2, … throughout."""
    entries, start = [], 0
    for number, length in enumerate(lengths):
        name = f"train_{number:05d}"
        np.arange(start, start + length, dtype=np.uint16).tofile(folder / f"{name}.bin")
        entries.append({"name": name, "documents": 1, "tokens": length})
        start += length
    manifest = {
        "tokenizer": {"vocab_size": 65_536, "eot": 1},
        "dtype": "uint16",
        "splits": {"train": {"tokens": sum(lengths), "shards": entries}},
    }
    return Shards(folder, manifest, "")


def test_windows_of_several_shards(tmp_path):
    windows = TrainingWindows(shards_of(tmp_path, 9, 3, 13, 5), 4)
    assert [windows[i].tolist() for i in range(len(windows))] == [
        [0, 1, 2, 3, 4],
        [4, 5, 6, 7, 8],
        [12, 13, 14, 15, 16],
        [16, 17, 18, 19, 20],
        [20, 21, 22, 23, 24],
        [25, 26, 27, 28, 29],
    ]
    for window in (-1, 6):
        with pytest.raises(IndexError):
            windows[window]


@pytest.mark.parametrize(("length", "count"), [(8, 1), (9, 2), (12, 2), (13, 3)])
def test_a_window_needs_its_last_label(tmp_path, length, count):
    assert len(TrainingWindows(shards_of(tmp_path, length), 4)) == count


def test_batch_is_tokens_and_what_follows_them(tmp_path):
    windows = TrainingWindows(shards_of(tmp_path, 1000, 1000), 10)
    ids = np.array([150, 0, 99])
    tokens, labels = windows.batch(ids)
    assert tokens.shape == labels.shape == (3, 10)
    assert tokens.dtype == labels.dtype == np.int64
    assert np.array_equal(tokens + 1, labels)
    assert tokens[:, 0].tolist() == [1510, 0, 1000]


def test_every_label_is_predicted_once(tmp_path):
    windows = TrainingWindows(shards_of(tmp_path, 101), 10)
    _, labels = windows.batch(range(len(windows)))
    assert labels.ravel().tolist() == list(range(1, 101))


def test_split_shorter_than_a_window_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"train\.sequence_tokens 4: .* 4 tokens"):
        TrainingWindows(shards_of(tmp_path, 4, 2), 4)
