"""Ranks read the same global batch for any parallel layout, and packed documents are masked."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hand_made import BATCH, EOT, IGNORED, LENGTHS, T, batches_of, hand_made

from tost_lm.data import loader
from tost_lm.data.loader import Corpora, TrainingBatches
from tost_lm.data.prefetch import micro_batches
from tost_lm.data.shards import Concatenation
from tost_lm.data.stages import Packing
from tost_lm.errors import ConfigError

pytestmark = pytest.mark.quick

PACKINGS: tuple[Packing, ...] = ("concatenated", "best-fit")


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Corpora:
    """Tokens 1, 2, 3, … in several shards."""
    return Corpora([hand_made(tmp_path_factory.mktemp("shards"), LENGTHS, shard_tokens=300)], [1.0])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Corpora:
    folder = tmp_path_factory.mktemp("mixed")
    return Corpora([hand_made(folder / "a", LENGTHS), hand_made(folder / "b", LENGTHS[5:], first=10_001)], [3, 1])


def whole(batches: TrainingBatches, steps: range) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and labels of whole steps, flat."""
    found = [batches[step] for step in steps]
    return tuple(np.concatenate([x.ravel() for x in xs]) for xs in list(zip(*found, strict=True))[:2])  # pyright: ignore[reportReturnType]


def steps_of_an_epoch(batches: TrainingBatches) -> range:
    """The steps of an epoch; the last one may include the start of the next epoch."""
    return range(-(-len(batches._samples[0]) // BATCH))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("corpora", [1, 2])
def test_a_validation_batch_is_one_pass_at_most(tmp_path: Path, packing: Packing, corpora: int):
    a = hand_made(tmp_path / "a", LENGTHS, split="valid")
    b = hand_made(tmp_path / "b", LENGTHS[5:], first=10_001, split="valid")
    held_out = Corpora([a, b][:corpora], [3, 1][:corpora])
    everything = [*range(1, sum(LENGTHS) + 1), *range(10_001, sum(LENGTHS[5:]) + 10_001)][
        : [sum(LENGTHS), None][corpora - 1]
    ]
    valid = {"documents": "valid", "micro_batch_size": 3}
    labels = []
    for rank in range(2):
        batches = batches_of(held_out, packing, f"{rank}/2 0/1", **valid, global_batch_size=10**6)
        labels += batches[0].labels[batches[0].labels != IGNORED].tolist()
        assert batches.samples == sum(map(len, batches._samples))
    assert sorted(labels) == everything
    five = batches_of(held_out, packing, **valid, global_batch_size=5)
    assert (five.samples, five[0].labels.size) == (5, 6 * T)
    assert (five[0].labels.reshape(6, T)[5] == IGNORED).all()


@pytest.mark.parametrize("packing", PACKINGS)
def test_each_stored_token_is_a_label_once_per_epoch(corpora: Corpora, packing: Packing):
    batches = batches_of(corpora, packing)
    tokens, labels = whole(batches, steps_of_an_epoch(batches))
    samples = len(batches._samples[0])
    real = labels[: samples * T] != IGNORED
    assert sorted(labels[: samples * T][real]) == list(range(1, sum(LENGTHS) + 1))
    assert (~real).sum() == samples * T - sum(LENGTHS) < T
    assert (tokens[: samples * T][~real] == EOT).all()
    if packing == "concatenated":
        assert np.array_equal(tokens[: samples * T][real], labels[: samples * T][real] - 1)  # before token 1: EOT, 0


def test_a_packed_document_starts_with_end_of_text_and_is_masked(corpora: Corpora):
    batches, first_of_document = batches_of(corpora, "best-fit"), set((np.cumsum([0, *LENGTHS[:-1]]) + 1).tolist())
    begun = set()
    for step in steps_of_an_epoch(batches):
        found = micro_batches(batches[step], torch.device("cpu"))  # pyright: ignore[reportArgumentType]
        assert len(found) == BATCH // 2
        for tokens, labels, cu_seqlens in found:
            assert tokens.shape == labels.shape == (1, 2 * T)
            assert (tokens.dtype, labels.dtype) == (torch.int64, torch.int64)
            assert cu_seqlens is not None
            assert (cu_seqlens.dtype, int(cu_seqlens[0]), int(cu_seqlens[-1])) == (torch.int32, 0, 2 * T)
            assert T in cu_seqlens
            for start, end in pairwise(cu_seqlens.tolist()):
                assert start < end
                inputs, follow = tokens[0, start:end].tolist(), labels[0, start:end].tolist()
                if follow[0] == IGNORED:
                    assert set(inputs) == {EOT}
                    assert set(follow) == {IGNORED}
                    continue
                assert follow == list(range(follow[0], follow[0] + len(follow)))
                assert not first_of_document & set(follow[1:])
                assert inputs == [EOT if follow[0] in first_of_document else follow[0] - 1, *follow[:-1]]
                begun |= first_of_document & {follow[0]}
    assert begun == first_of_document


def test_concatenated_rows_are_whole_samples(corpora: Corpora):
    found = micro_batches(batches_of(corpora, "concatenated")[0], torch.device("cpu"))  # pyright: ignore[reportArgumentType]
    assert [x.tokens.shape for x in found] == [(2, T)] * 4
    assert all(x.cu_seqlens is None for x in found)
    assert all(int(x.tokens[0, 0]) % T == 0 for x in found)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", ["corpora", "mixed"])
@pytest.mark.parametrize(("data", "sequence"), [(2, 1), (4, 1), (1, 2), (1, 3), (2, 2)])
def test_the_ranks_together_read_the_batch_of_one_rank(
    name: str, packing: Packing, data: int, sequence: int, request: pytest.FixtureRequest
):
    corpora = request.getfixturevalue(name)
    alone = batches_of(corpora, packing)
    for step in (0, 3, 17, 200):
        expected = alone[step]
        of_data = []
        for d in range(data):
            shards = [batches_of(corpora, packing, f"{d}/{data} {s}/{sequence}")[step] for s in range(sequence)]
            assert all(np.array_equal(shard.document_ends, shards[0].document_ends) for shard in shards)
            of_data.append([np.concatenate(x, -1) for x in list(zip(*shards, strict=True))[:2]])
        for number in range(2):
            assert np.array_equal(np.concatenate([x[number] for x in of_data]), expected[number])


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_micro_batch_size_does_not_change_a_step(corpora: Corpora, packing: Packing):
    one, other = (batches_of(corpora, packing, micro_batch_size=size) for size in (1, 8))
    for x, y in zip(whole(one, range(30)), whole(other, range(30)), strict=True):
        assert np.array_equal(x, y)
    again, changed = batches_of(corpora, packing), batches_of(corpora, packing, seed=2)
    assert np.array_equal(again[7].labels.ravel(), one[7].labels.ravel())
    assert not np.array_equal(changed[7].labels, again[7].labels)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_mixture_reads_each_corpus_in_epochs_of_its_own(mixed: Corpora, packing: Packing):
    _, labels = whole(batches_of(mixed, packing), range(40))
    for number, one in enumerate(mixed.shards):
        lowest = 10_001 if one.folder.name == "b" else 1
        size = one.manifest["splits"]["train"]["tokens"]
        ours = labels[(labels >= lowest) & (labels < lowest + 10_000)]
        epochs = np.array([(ours == token).sum() for token in range(lowest, lowest + size)])
        assert epochs.max() - epochs.min() <= 1
        assert len(ours) / (labels != IGNORED).sum() == pytest.approx(mixed.weights[number], abs=0.05)


class Counted(Concatenation):
    """Counts the tokens that are read."""

    read_tokens = 0

    def read(self, start_S: np.ndarray, length_S: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
        Counted.read_tokens += length_S.sum() if dtype is np.int32 else 0  # not those of the loss mask
        return super().read(start_S, length_S, dtype)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_rank_reads_only_its_batch_shard(corpora: Corpora, packing: Packing, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loader, "Concatenation", Counted)
    for ranks, divisor in (("0/1 0/1", 1), ("1/4 0/1", 4), ("0/1 1/2", 2), ("1/2 1/2", 4)):
        batches = batches_of(corpora, packing, ranks)
        Counted.read_tokens = 0
        batch = batches[2]
        labels = (batch.labels != IGNORED).sum()
        assert batch.labels.size == BATCH * T // divisor
        max_segments = BATCH * T // divisor if packing == "best-fit" else BATCH  # each may read the token before it
        assert labels <= Counted.read_tokens <= labels + min(max_segments, labels // 4)


def test_a_too_short_corpus_is_named(corpora: Corpora, tmp_path: Path):
    for packing in PACKINGS:
        batches_of(Corpora([hand_made(tmp_path / f"enough {packing}", [15, 5])], [1.0]), packing)
        short = Corpora([hand_made(tmp_path / packing, [15, 4])], [1.0])
        with pytest.raises(ConfigError, match=r"^train\.seq_len 20: .* only 19 tokens; lower it"):
            batches_of(short, packing)
    with pytest.raises(IndexError):
        batches_of(corpora, "best-fit")[-1]


@pytest.mark.parametrize(
    ("packing", "pinned"), [("concatenated", [381, 1441, 1041, 1001]), ("best-fit", [1227, 711, 724, 186])]
)
def test_batches_are_pinned(corpora: Corpora, packing: Packing, pinned: list[int]):
    # Later versions must resume runs of earlier ones, so these numbers must not change.
    assert batches_of(corpora, packing)[1000].labels[:, 0, 0].tolist() == pinned
