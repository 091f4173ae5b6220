"""The lossless SentencePiece tokenizer: training it, and text to token ids and back."""

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tost_lm.errors import DataError
from tost_lm.files import sha256_bytes

EOT_PIECE = "<|endoftext|>"
PIECE_CHARACTERS = 4000  # whole documents would pass SentencePiece's limits, lines would hide newlines from merges

# SentencePiece writes a space as U+2581 and reads that back as a space, so a real one goes in disguise.
SPACE_MARK = "\u2581"
ESCAPE = "\U000f2581"
ESCAPED = {ESCAPE: ESCAPE + "0", SPACE_MARK: ESCAPE + "1"}
UNESCAPED = {disguise: character for character, disguise in ESCAPED.items()}
TO_ESCAPE = re.compile("|".join(ESCAPED))
TO_UNESCAPE = re.compile("|".join(UNESCAPED))


class Tokenizer:
    """A SentencePiece model from whose ids every text comes back exactly.

    Attributes: `model_bytes`, their `sha256` (hex), `vocab_size`, and `eot`, the id that ends a document.
    """

    def __init__(self, model_bytes: bytes) -> None:
        """Raises DataError if the bytes are no SentencePiece model with an end-of-text piece."""
        import sentencepiece

        try:
            # Without the check SentencePiece takes empty bytes for a model and logs on every call.
            if not model_bytes:
                raise RuntimeError
            self._model = sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
        except RuntimeError:
            raise DataError("not a SentencePiece model; train one with python -m data_prep.train_tokenizer") from None
        self.model_bytes = model_bytes
        self.sha256 = sha256_bytes(model_bytes)
        self.vocab_size: int = self._model.vocab_size()
        self.eot: int = self._model.eos_id()
        if self.eot < 0:
            raise DataError("the SentencePiece model has no end-of-text piece (eos_id is -1)")

    @classmethod
    def from_file(cls, path: Path) -> "Tokenizer":
        """Read a model file. Raises DataError if it is absent, unreadable or not a SentencePiece model."""
        try:
            return cls(path.read_bytes())
        except FileNotFoundError:
            raise DataError(f"{path}: no such tokenizer; python -m data_prep.train_tokenizer makes one") from None
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        except DataError as error:
            raise DataError(f"{path}: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text without lone surrogates; the end-of-text id is never among them."""
        return self._model.encode(_escape(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """What `encode` gives for each text, computed on all cores."""
        return self._model.encode([_escape(text) for text in texts])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of any ids in [0, vocab_size): the end of text is '', bytes that are not UTF-8 become U+FFFD."""
        text = self._model.decode([int(i) for i in ids])
        return TO_UNESCAPE.sub(lambda found: UNESCAPED[found[0]], text)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train a BPE model of exactly `vocab_size` pieces on `texts`; the same texts give the same bytes.

    Raises:
        DataError: the texts are too few or too varied for that many pieces; says how many they allow.
    """
    import sentencepiece

    model = io.BytesIO()
    pieces = _Pieces(texts)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(pieces),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=1 << 20,
            character_coverage=0.9995,
            shuffle_input_sentence=False,
            hard_vocab_limit=True,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            eos_piece=EOT_PIECE,
            num_threads=4,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        if pieces.failure is not None:
            raise pieces.failure from None
        raise DataError(_explain(str(error), vocab_size)) from None
    return model.getvalue()


class _Pieces:
    """Texts as SentencePiece takes them; remembers what failed, which SentencePiece turns into a RuntimeError."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.failure: BaseException | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            for text in self._texts:
                escaped = _escape(text)
                for start in range(0, len(escaped), PIECE_CHARACTERS):
                    yield escaped[start : start + PIECE_CHARACTERS]
        except (Exception, KeyboardInterrupt) as error:
            self.failure = error
            raise


def _escape(text: str) -> str:
    return TO_ESCAPE.sub(lambda found: ESCAPED[found[0]], text)


def _explain(problem: str, vocab_size: int) -> str:
    if most := re.search(r"value <= (\d+)", problem):
        return (
            f"tokenizer.vocab_size {vocab_size}: too large, the training documents allow at most {most[1]}; "
            "lower it or add text"
        )
    if least := re.search(r"required_chars\. \d+ vs (\d+)", problem):
        return f"tokenizer.vocab_size {vocab_size}: too small, the characters of this corpus need at least {least[1]}"
    if "sentences_.empty()" in problem or "all_chars_count" in problem:
        return "no training document with text a tokenizer can be trained on; lower corpus.heldout_share or add text"
    return f"SentencePiece could not train a tokenizer: {problem}"
