"""What ranks read of a step: the same tokens however they are shared out, and documents by themselves where packed."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hand_made import EOT, hand_made

from tost_lm.data import loader
from tost_lm.data.concatenation import Concatenation
from tost_lm.data.loader import Packing, Share, TrainingBatches
from tost_lm.data.mixture import Corpora
from tost_lm.data.prefetch import micro_batches
from tost_lm.errors import ConfigError
from tost_lm.ops.split import SequenceSplit

IGNORED, T, BATCH = -100, 20, 8
LENGTHS = [1 + 37 * i % 49 for i in range(60)]
PACKINGS: tuple[Packing, ...] = ("concatenated", "best-fit")


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Corpora:
    """Tokens 1, 2, 3, … in several shards."""
    return Corpora([hand_made(tmp_path_factory.mktemp("shards"), LENGTHS, shard_tokens=300)], [1.0])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Corpora:
    folder = tmp_path_factory.mktemp("mixed")
    return Corpora([hand_made(folder / "a", LENGTHS), hand_made(folder / "b", LENGTHS[5:], first=10_001)], [3, 1])


def batches_of(corpora: Corpora, packing: Packing, ranks: str = "0/1 0/1", **changes: Any) -> TrainingBatches:
    """As rank `data rank/data ranks sequence rank/sequence ranks` reads them."""
    (data, data_ranks), (sequence, sequence_ranks) = (map(int, part.split("/")) for part in ranks.split())
    settings = {"seed": 1, "batch_sequences": BATCH, "micro_batch_sequences": 2, "sequence_tokens": T, **changes}
    row = settings["sequence_tokens"] * (settings["micro_batch_sequences"] if packing == "best-fit" else 1)
    split = SequenceSplit.even(row, sequence_ranks, sequence)
    share = Share(data, data_ranks, ((split.start, split.end),))
    return TrainingBatches(corpora, share, packing=packing, ignored_label=IGNORED, **settings)


def whole(batches: TrainingBatches, steps: range) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and labels of whole steps, flat."""
    parts = [batches[step] for step in steps]
    return tuple(np.concatenate([x.ravel() for x in xs]) for xs in list(zip(*parts, strict=True))[:2])  # pyright: ignore[reportReturnType]


def steps_of_an_epoch(batches: TrainingBatches) -> range:
    """An epoch and, where it does not fill the last step, the beginning of the next."""
    return range(-(-len(batches._samples[0]) // BATCH))


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_stored_token_is_a_label_once_in_an_epoch(corpora: Corpora, packing: Packing):
    batches = batches_of(corpora, packing)
    tokens, labels = whole(batches, steps_of_an_epoch(batches))
    samples = len(batches._samples[0])
    real = labels[: samples * T] != IGNORED
    assert sorted(labels[: samples * T][real]) == list(range(1, sum(LENGTHS) + 1))
    assert (~real).sum() == samples * T - sum(LENGTHS) < T
    assert (tokens[: samples * T][~real] == EOT).all()
    if packing == "concatenated":
        assert np.array_equal(tokens[: samples * T][real], labels[: samples * T][real] - 1)  # before token 1: EOT, 0


def test_a_packed_document_begins_behind_an_end_of_text_and_knows_of_no_other(corpora: Corpora):
    batches, first_of_document = batches_of(corpora, "best-fit"), set((np.cumsum([0, *LENGTHS[:-1]]) + 1).tolist())
    begun = set()
    for step in steps_of_an_epoch(batches):
        portions = micro_batches(batches[step], torch.device("cpu"))  # pyright: ignore[reportArgumentType]
        assert len(portions) == BATCH // 2
        for tokens, labels, cu_seqlens in portions:
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
    portions = micro_batches(batches_of(corpora, "concatenated")[0], torch.device("cpu"))  # pyright: ignore[reportArgumentType]
    assert [x.tokens.shape for x in portions] == [(2, T)] * 4
    assert all(x.cu_seqlens is None for x in portions)
    assert all(int(x.tokens[0, 0]) % T == 0 for x in portions)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", ["corpora", "mixed"])
@pytest.mark.parametrize(("data", "sequence"), [(2, 1), (4, 1), (1, 2), (1, 3), (2, 2)])
def test_ranks_read_together_what_one_reads(
    name: str, packing: Packing, data: int, sequence: int, request: pytest.FixtureRequest
):
    corpora = request.getfixturevalue(name)
    alone = batches_of(corpora, packing)
    for step in (0, 3, 17, 200):
        expected = alone[step]
        of_data = []
        for d in range(data):
            parts = [batches_of(corpora, packing, f"{d}/{data} {s}/{sequence}")[step] for s in range(sequence)]
            assert all(np.array_equal(part.document_ends, parts[0].document_ends) for part in parts)
            of_data.append([np.concatenate(x, -1) for x in list(zip(*parts, strict=True))[:2]])
        for number in range(2):
            assert np.array_equal(np.concatenate([x[number] for x in of_data]), expected[number])


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_portions_of_a_step_do_not_change_what_is_in_it(corpora: Corpora, packing: Packing):
    one, other = (batches_of(corpora, packing, micro_batch_sequences=size) for size in (1, 8))
    for x, y in zip(whole(one, range(30)), whole(other, range(30)), strict=True):
        assert np.array_equal(x, y)
    again, changed = batches_of(corpora, packing), batches_of(corpora, packing, seed=2)
    assert np.array_equal(again[7].labels.ravel(), one[7].labels.ravel())
    assert not np.array_equal(changed[7].labels, again[7].labels)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_mixture_goes_through_each_corpus_as_if_it_were_alone(mixed: Corpora, packing: Packing):
    _, labels = whole(batches_of(mixed, packing), range(40))
    for number, one in enumerate(mixed.shards):
        lowest = 10_001 if one.folder.name == "b" else 1
        size = one.manifest["splits"]["train"]["tokens"]
        ours = labels[(labels >= lowest) & (labels < lowest + 10_000)]
        epochs = np.array([(ours == token).sum() for token in range(lowest, lowest + size)])
        assert epochs.max() - epochs.min() <= 1
        assert len(ours) / (labels != IGNORED).sum() == pytest.approx(mixed.weights[number], abs=0.05)


class Counted(Concatenation):
    """Counts what is read of all."""

    read_tokens = 0

    def read(self, start_S: np.ndarray, length_S: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
        Counted.read_tokens += length_S.sum()
        return super().read(start_S, length_S, dtype)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_rank_reads_its_share_and_no_more(corpora: Corpora, packing: Packing, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loader, "Concatenation", Counted)
    for ranks, share in (("0/1 0/1", 1), ("1/4 0/1", 4), ("0/1 1/2", 2), ("1/2 1/2", 4)):
        batches = batches_of(corpora, packing, ranks)
        Counted.read_tokens = 0
        batch = batches[2]
        labels = (batch.labels != IGNORED).sum()
        assert batch.labels.size == BATCH * T // share
        spans_at_most = BATCH * T // share if packing == "best-fit" else BATCH  # the token before each, at most
        assert labels <= Counted.read_tokens <= labels + min(spans_at_most, labels // 4)


def test_too_short_a_corpus_is_named(corpora: Corpora, tmp_path: Path):
    for packing in PACKINGS:
        batches_of(Corpora([hand_made(tmp_path / f"enough {packing}", [15, 5])], [1.0]), packing)
        short = Corpora([hand_made(tmp_path / packing, [15, 4])], [1.0])
        with pytest.raises(ConfigError, match=r"^train\.sequence_tokens 20: .*, 19 tokens; shorten it"):
            batches_of(short, packing)
    with pytest.raises(IndexError):
        batches_of(corpora, "best-fit")[-1]


@pytest.mark.parametrize(
    ("packing", "pinned"), [("concatenated", [381, 1441, 1041, 1001]), ("best-fit", [1227, 711, 724, 186])]
)
def test_batches_are_pinned(corpora: Corpora, packing: Packing, pinned: list[int]):
    # Runs are resumed with later versions of this package, so these numbers may never change.
    assert batches_of(corpora, packing)[1000].labels[:, 0, 0].tolist() == pinned
