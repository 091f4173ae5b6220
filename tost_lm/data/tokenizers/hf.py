"""Tokenizers of the Hugging Face library: any tokenizer.json that is lossless."""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from tost_lm.data.tokenizers.interface import BREAK, ESCAPE, SPACE_MARK, Tokenizer, escape, unescape
from tost_lm.data.tokenizers.lossless import FORMS, SHOWN, every_character, first_loss, in_form
from tost_lm.errors import DataError, first_line, install_hint, listed
from tost_lm.files import regular_file

BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
PROBES = [
    "A Bc", "a\nb", " a", "a ", " a  b\t\r\n", "\0", "don 't, n't .", "``''\"", "é漢字😀\u0130½", "<0x0A>", SPACE_MARK,
    f"{SPACE_MARK}a {SPACE_MARK}", ESCAPE, f"{ESCAPE}0{ESCAPE}2", "\ufeffx", "\ufffd", "\u3000", "e\u0301", "\ufb01",
]  # fmt: skip


class HfTokenizer(Tokenizer):
    """A tokenizer.json and the token that ends a document; special tokens in a text are plain text.

    The ids are those of the library for a text without special tokens. Texts that the tokenizer would change are
    escaped: U+2581, a leading space and names of special tokens, as far as it has this defect. Its truncation, padding
    and post-processor are not applied. `normalization` is the Unicode form that the tokenizer brings a text to, "none",
    "NFC" or "NFKC"; it is lossless for texts in this form. `vocab_size` is the largest id, of added tokens too, and 1.

    `model_bytes` are a JSON object with `eot_token` and the text of tokenizer.json as `tokenizer`.
    """

    file_name = "tokenizer.hf.json"

    def __init__(self, model_bytes: bytes) -> None:
        """Raises DataError if the bytes are not such a file, or the tokenizer has no such token or is not lossless."""
        super().__init__(model_bytes)
        try:
            content = json.loads(model_bytes)
            self.eot_token, self.tokenizer_json = str(content["eot_token"]), str(content["tokenizer"])
        except (ValueError, TypeError, KeyError):
            raise DataError("not a file that tost prepare shards wrote, or damaged; copy it again") from None
        self.pipeline = _parse(self.tokenizer_json)
        if (eot := self.pipeline.token_to_id(self.eot_token)) is None:
            raise DataError(f"tokenizer.eot_token {self.eot_token}: not in its vocabulary; {_choose(self.pipeline)}")
        self.eot = self.stop = eot
        self.pipeline.add_special_tokens([self.eot_token])  # it may be an ordinary token of the vocabulary
        self.pipeline.encode_special_tokens = True
        self.pipeline.no_truncation()
        self.pipeline.no_padding()
        vocabulary: dict[str, int] = self.pipeline.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values())
        special = {token.content for token in self.pipeline.get_added_tokens_decoder().values() if token.special}
        pieces = [name for name in vocabulary if BYTE_PIECE.fullmatch(name)]
        self._byte_ids = {int(name[1:-1], 16): vocabulary[name] for name in pieces}
        self._byte_of = {i: byte for byte, i in self._byte_ids.items()} if len(pieces) == 256 else {}
        names = sorted({*special.intersection(vocabulary), *pieces})
        # A Unigram model finds them in a text although they are not to be parsed.
        found = [re.escape(name) for name in names if self._decode(self._encode(name)) != name]
        self._names = re.compile("|".join(sorted(found, key=len, reverse=True))) if found else None
        self._drops_space = self._decode(self._encode(" a")) == "a"
        self.escapes = bool(found) or self._drops_space or SPACE_MARK not in self._decode(self._encode(SPACE_MARK))
        first, second, both = map(self._encode, ("a", "b", "a b"))
        self.adds_space = first + second == both
        self.normalization = self._check("".join(names), {vocabulary[name] for name in special})

    def __reduce__(self) -> tuple[Any, ...]:
        return HfTokenizer, (self.model_bytes,)

    def encode(self, text: str) -> list[int]:
        return self._encode(self._escape(text) if self.escapes else text)

    def decode(self, ids: Iterable[int]) -> str:
        text = self._decode(list(self._valid_utf8(map(int, ids)) if self._byte_of else map(int, ids)))
        return unescape(text) if self.escapes else text

    def _encode(self, text: str) -> list[int]:
        try:
            return self.pipeline.encode_batch_fast([text], add_special_tokens=False)[0].ids  # without offsets: faster
        except Exception as error:  # the library has no class of its own
            raise DataError(f"the tokenizer fails for {text[:SHOWN]!r}: {error}; use another tokenizer") from None

    def _decode(self, ids: list[int]) -> str:
        return self.pipeline.decode(ids, skip_special_tokens=True)

    def _valid_utf8(self, ids: Iterable[int]) -> Iterator[int]:
        """The ids with U+FFFD in place of invalid UTF-8 in byte pieces, of which the library would lose valid ones."""
        for is_byte, run in groupby(ids, self._byte_of.__contains__):
            if is_byte:
                text = bytes(map(self._byte_of.__getitem__, run)).decode(errors="replace")
                yield from map(self._byte_ids.__getitem__, text.encode())
            else:
                yield from run

    def _escape(self, text: str) -> str:
        """Escape what does not decode to itself."""
        text = escape(text)
        if self._names:
            text = self._names.sub(lambda found: found[0][0] + BREAK + found[0][1:], text)
        return BREAK + text if self._drops_space and text.startswith(" ") else text

    def check_every_character(self) -> None:
        """Raises DataError if a character of Unicode is lost. Takes half a second, so it is done before a tokenizer is
        used for the first time."""
        text = in_form(self.normalization, every_character())
        if loss := first_loss(text, self.decode(self.encode(text))):
            raise DataError(f"the tokenizer is not lossless: {loss}; use a tokenizer that changes no text")

    def _check(self, names: str, special: set[int]) -> str:
        """The Unicode form of the texts for which the tokenizer is lossless. Raises DataError if there is none."""
        loss = ""
        for form in FORMS:
            for probe in [*PROBES, "".join(PROBES), names]:
                text = in_form(form, probe)
                ids = self.encode(text)
                found = first_loss(text, self.decode(ids))
                if found or not special.isdisjoint(ids):
                    loss = loss or found or f"it reads special tokens in {text!r}"
                    break
            else:
                return form
        raise DataError(f"the tokenizer is not lossless: {loss}; use a tokenizer that changes no text")


def hf_tokenizer(path: Path, eot_token: str | None, normalization: str) -> HfTokenizer:
    """The tokenizer in the tokenizer.json at `path`, for texts in this Unicode form.

    Raises:
        DataError: the file cannot be read, is not a tokenizer or is not lossless for these texts; its package is not
            installed; or it has no token `eot_token`.
    """
    try:
        text = regular_file(path).read_text("utf-8")
    except OSError as error:
        raise DataError(
            f"tokenizer.path {path}: cannot be read: {error.strerror}; set it to a tokenizer.json"
        ) from None
    except UnicodeDecodeError:
        raise DataError(f"tokenizer.path {path}: not a tokenizer.json: not UTF-8; set it to a tokenizer.json") from None
    try:
        if eot_token is None:
            raise DataError(f"tokenizer.eot_token is not set; {_choose(_parse(text))}")
        tokenizer = HfTokenizer(json.dumps({"eot_token": eot_token, "tokenizer": text}).encode())
        tokenizer.check_every_character()
    except DataError as error:
        raise DataError(f"tokenizer.path {path}: {error}") from None
    if FORMS.index(tokenizer.normalization) > FORMS.index(normalization):
        raise DataError(
            f"tokenizer.path {path}: it brings texts to {tokenizer.normalization} and is lossless only for those; set "
            f"corpus.normalization={tokenizer.normalization}"
        )
    return tokenizer


def eos_token(folder: Path) -> str | None:
    """The end-of-text token of a folder: as of a model, else as of a tokenizer; None: it names none.

    Raises:
        DataError: a file is damaged.
    """
    try:
        model, tokenizer = (
            json.loads(path.read_text("utf-8")) if path.is_file() else {}
            for path in (folder / "config.json", folder / "tokenizer_config.json")
        )
        eos = (model if "eos_token_id" in model else model.get("text_config", {})).get("eos_token_id")
        eos = eos[0] if isinstance(eos, list) and eos else eos
        if isinstance(eos, int):
            return _parse((folder / "tokenizer.json").read_text("utf-8")).id_to_token(eos)
        named = tokenizer.get("eos_token")
        return named["content"] if isinstance(named, dict) else named
    except (OSError, ValueError, KeyError, AttributeError, OverflowError, DataError) as error:
        raise DataError(f"tokenizer.path {folder}: damaged: {first_line(error)}; copy its files again") from None


def _parse(text: str) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise DataError(f"a tokenizer.json needs the package tokenizers; {install_hint('hf')}") from None
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:
        raise DataError(f"not a tokenizer.json, or damaged: {first_line(error)}; set it to a tokenizer.json") from None


def _choose(pipeline: Any) -> str:
    """The fix where no token ends a document."""
    special = [token.content for token in pipeline.get_added_tokens_decoder().values() if token.special]
    if not special:
        return "it has no special tokens; add one that ends a document"
    return f"set it to the token that ends a document, one of {listed(special)}"
