"""Tokenizer training: a uniform sample, deterministic, interruptible; errors are one line."""

import json
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from builds import prep_config

from tost_lm.data.settings import DataPrepConfig
from tost_lm.data.sources import Splitter
from tost_lm.data.tokenizers import SentencePieceTokenizer
from tost_lm.data.tokenizers.training import (
    Sample,
    record_path,
    retrain_reason,
    sample_texts,
    train_sentencepiece,
    write_tokenizer,
)
from tost_lm.data_prep.commands import tokenizer as train_tokenizer
from tost_lm.errors import DataError


def random_texts(count: int) -> list[str]:
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghijklmnopqrstuvwxyzé", k=6)) for _ in range(300)]
    return [f"{number} " + " ".join(generator.choices(words, k=generator.randrange(60))) for number in range(count)]


TEXTS = random_texts(2000)


def write_rows(path: Path, rows: list[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))


def settings(source: Path, corpus: dict[str, Any] | None = None, **tokenizer: Any) -> DataPrepConfig:
    tokenizer = {"path": str(source.parent / "tokenizer.model"), "vocab_size": 400, **tokenizer}
    return prep_config(source, tokenizer=tokenizer, **{"valid_fraction": 0.1, "test_fraction": 0.0, **(corpus or {})})


def sample(config: DataPrepConfig) -> Sample:
    return sample_texts(config, lambda done, total: None)


def train(found: Sample) -> bytes:
    return train_sentencepiece((text.decode() for text in found.texts), 400)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    write_rows(path, TEXTS)
    return path


def train_texts(config: DataPrepConfig) -> list[str]:
    splitter = Splitter(config.corpus, len(TEXTS))
    return [text for row, text in enumerate(TEXTS) if splitter.split_of(row, text) == "train"]


def test_the_sample_of_a_small_corpus_is_the_whole_corpus(corpus):
    config = settings(corpus)
    found = sample(config)
    assert sorted(text.decode() for text in found.texts) == sorted(train_texts(config))
    assert found.documents == len(found.texts) < len(TEXTS)


def test_a_sample_has_its_size_and_only_training_documents(corpus):
    config = settings(corpus, sample_bytes=20_000)
    found = sample(config)
    *whole, last = found.texts
    train = {text.encode() for text in train_texts(config)}
    assert set(whole) < train
    assert any(text.startswith(last) for text in train)
    assert 20_000 - 1 <= sum(map(len, found.texts)) <= 20_000  # a character of two bytes may not fit
    assert found.documents == len(train_texts(config))


def test_a_sample_is_uniform(corpus):
    indices = {text: number for number, text in enumerate(train_texts(settings(corpus)))}
    drawn: list[int] = []
    for seed in range(20):
        texts = sample(settings(corpus, sample_bytes=30_000, seed=seed)).texts[:-1]
        drawn += [indices[text.decode()] for text in texts]
        assert len(texts) > 100
    fifths = [0] * 5
    for index in drawn:
        fifths[5 * index // len(indices)] += 1
    expected = len(drawn) / 5
    assert sum((count - expected) ** 2 / expected for count in fifths) < 18.5  # chi-squared of 4, p = 0.001


def test_a_sample_does_not_depend_on_order_or_files(corpus, tmp_path):
    shuffled = random.Random(1).sample(TEXTS, len(TEXTS))
    for number in range(3):
        write_rows(tmp_path / f"files/{number}.jsonl", shuffled[number::3])
    for most in (10_000_000, 20_000):
        one, other = (sample(settings(source, sample_bytes=most)) for source in (corpus, tmp_path / "files"))
        assert one == other
        assert train(one) == train(other)
        assert sample(settings(corpus, sample_bytes=most, seed=1)).texts != one.texts


def test_a_document_larger_than_the_sample_is_cut_between_characters(tmp_path):
    (tmp_path / "one.txt").write_text("é" * 5000)
    found = sample(settings(tmp_path / "one.txt", {"valid_fraction": 0}, sample_bytes=1001))
    assert found.texts == [("é" * 500).encode()]


def test_bad_rows_are_skipped_up_to_the_allowed_fraction(tmp_path):
    path = tmp_path / "corpus.jsonl"
    write_rows(path, TEXTS[:50])
    path.write_text(path.read_text() + '{"text": 7}\nnot JSON\n')
    found = sample(settings(path, {"valid_fraction": 0, "max_bad_fraction": 2 / 52}))
    assert (found.documents, found.bad_rows) == (50, 2)
    with pytest.raises(
        DataError,
        match=r"corpus\.jsonl, line 51: field 'text' is a number, not a string; 2 of 52 rows cannot be read: correct "
        r"them, or raise corpus\.max_bad_fraction$",
    ):
        sample(settings(path, {"max_bad_fraction": 0.038}))
    write_rows(path, ["", ""])
    with pytest.raises(DataError, match=r"no training document; add documents or lower corpus\.valid_fraction"):
        sample(settings(path))


def test_a_corpus_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "corpus.jsonl"
    write_rows(path, TEXTS[:50])

    def changing(*arguments):
        found = sample_texts(*arguments)
        write_rows(path, TEXTS[:51])
        return found

    monkeypatch.setattr(train_tokenizer, "sample_texts", changing)
    with pytest.raises(DataError, match=r"^corpus\.source .*jsonl: changed while it was read; run the same"):
        train_tokenizer.main(None, settings(path))
    assert [file.name for file in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_a_lossy_tokenizer_is_refused():
    class Lossy(SentencePieceTokenizer):
        def encode(self, text: str) -> list[int]:
            return super().encode(text.replace("é", "e"))

    model = train_sentencepiece(TEXTS, 400)
    texts = [text.encode() for text in TEXTS[:50]]
    assert train_tokenizer.check_lossless(SentencePieceTokenizer(model), texts) > 1
    with pytest.raises(DataError, match=r"not lossless: it decodes '.*é.*' as '.*e.*'; nothing was written"):
        train_tokenizer.check_lossless(Lossy(model), texts)


def test_the_largest_vocabulary_of_the_message_can_be_trained():
    with pytest.raises(DataError, match=r"vocab_size 50000: too large .* at most \d+ or add text") as caught:
        train_sentencepiece(TEXTS, 50_000)
    most = re.search(r"at most (\d+)", str(caught.value))
    assert most is not None
    assert SentencePieceTokenizer(train_sentencepiece(TEXTS, int(most[1]))).vocab_size == int(most[1])
    with pytest.raises(DataError, match="too large"):
        train_sentencepiece(TEXTS, int(most[1]) + 1)


@pytest.mark.parametrize("texts", [[], [""], ["\0"]])
def test_no_training_text_is_refused(texts):
    with pytest.raises(DataError, match="no training text; add text"):
        train_sentencepiece(texts, 300)


def trainers() -> list[Any]:
    """The training processes among the children of this process."""
    import psutil

    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if any(word.endswith("sentencepiece_process.py") for word in child.cmdline()):
                found.append(child)
    return found


@contextmanager
def when_it_trains(act: Callable[[Any], object]) -> Iterator[None]:
    """Acts on the training process once."""

    def wait() -> None:
        while not (found := trainers()):
            time.sleep(0.01)
        act(found[0])

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join()


def test_ctrl_c_ends_training():
    main = threading.main_thread().ident or 0
    with (
        when_it_trains(lambda trainer: signal.pthread_kill(main, signal.SIGINT)),
        pytest.raises(KeyboardInterrupt),
    ):
        train_sentencepiece(TEXTS * 20, 2000)
    while trainers():  # it is killed, and takes a moment
        time.sleep(0.01)


def test_a_killed_training_is_reported():
    problem = r"exit code -9 .*lower tokenizer\.sample_bytes"
    with when_it_trains(lambda trainer: trainer.kill()), pytest.raises(DataError, match=problem):
        train_sentencepiece(TEXTS * 20, 2000)


def test_a_record_matches_only_its_settings(tmp_path):
    path = tmp_path / "corpus.jsonl"
    config = settings(path)
    assert retrain_reason(config, "abc") == "it does not exist yet"
    write_tokenizer(config, "abc", b"a model", 3, 14)
    assert retrain_reason(config, "abc") is None
    assert retrain_reason(config, "abd") == "the corpus or its settings changed"
    changes: list[dict[str, Any]] = [{"vocab_size": 500}, {"sample_bytes": 9}, {"seed": 1}]
    for changed in changes:
        (setting,) = changed
        was = getattr(config.tokenizer, setting)
        assert retrain_reason(settings(path, **changed), "abc") == f"{setting} was {was}"
    for changed in ({"valid_fraction": 0.2}, {"test_fraction": 0.2}, {"split": "nanogpt"}):
        (setting,) = changed
        assert retrain_reason(settings(path, changed), "abc") == f"{setting} was {getattr(config.corpus, setting)}"
    for record in ("[]", "{"):
        record_path(config).write_text(record)
        assert retrain_reason(config, "abc") is not None
    write_tokenizer(config, "abc", b"a model", 3, 14)
    (tmp_path / "tokenizer.model").write_bytes(b"b model")
    assert retrain_reason(config, "abc") == "the model file differs from its record"
    record_path(config).unlink()
    with pytest.raises(DataError, match=r"tokenizer\.model: was trained elsewhere; choose another"):
        retrain_reason(config, "abc")
