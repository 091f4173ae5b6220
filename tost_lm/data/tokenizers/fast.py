"""Byte-level BPE of a tokenizer.json by tiktoken, which is many times as fast as the library and gives the same ids."""

import json
import re
from collections.abc import Iterable
from itertools import chain, pairwise
from typing import Any

import numpy as np

from tost_lm.data.tokenizers.hf import PROBES, HfTokenizer
from tost_lm.data.tokenizers.interface import Tokenizer
from tost_lm.data.tokenizers.lossless import SHOWN, every_character, in_form
from tost_lm.errors import install_hint

# The pattern that ByteLevel has built in; it is faster without backtracking.
GPT2_PATTERN = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s+(?!\S)|\s"
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = sorted({*range(256)}.difference(PRINTABLE))
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + number): byte for number, byte in enumerate(OTHERS)}
"""The byte that each character of a byte-level vocabulary stands for."""
ESCAPED = r"\\(?:[rntsSdD]|[pP]\{\w+\}|[^\w\s])"
# What means the same to the library and to tiktoken: not ^, $, \w, flags for a rest, possessive {}, sets of classes.
ALIKE = re.compile(
    rf"(?:[^\\^$\[\](){{}}]|{ESCAPED}|\[\^?(?:[^\\\[\]&~-]|(?<!-)-(?!-)|{ESCAPED})+\]|"
    r"\((?:\?(?:i?:|<?[=!])|(?!\?))|\)|\{\d+(?:,\d*)?\}(?![+?]))*"
)
LATIN_IN_LOWER_CASE = " '\u017f '\u212a"  # other characters that a pattern without case may take for s and k


class UnsuitableError(Exception):
    """Why tiktoken cannot run a tokenizer."""


def fastest(tokenizer: Tokenizer, sample: Iterable[str]) -> tuple[Tokenizer, str]:
    """The fastest implementation of a tokenizer, and a line that says which and why; '' if there is only one.

    Args:
        sample: texts for which tiktoken must give the library's ids; read only if it can run the tokenizer.
    """
    if not isinstance(tokenizer, HfTokenizer):
        return tokenizer, ""
    try:
        fast = TiktokenTokenizer(tokenizer)
        size = fast.check(sample)
    except UnsuitableError as error:
        return tokenizer, f"tokenizing with the library tokenizers, not tiktoken: {error}"
    return fast, f"tokenizing with tiktoken: the library's ids for each token, each character, {size:,} bytes of corpus"


class TiktokenTokenizer(Tokenizer):
    """A tokenizer.json whose texts tiktoken encodes. The library encodes those that tiktoken cannot."""

    def __init__(self, library: HfTokenizer) -> None:
        """Raises UnsuitableError if tiktoken is not installed or does not do what the file says."""
        super().__init__(library.model_bytes)
        try:
            import tiktoken
        except ImportError:
            raise UnsuitableError(f"it is not installed; {install_hint('train')}") from None
        self.library, self.file_name = library, library.file_name
        self.vocab_size, self.eot, self.stop = library.vocab_size, library.eot, library.stop
        self.adds_space = library.adds_space
        tree = json.loads(library.tokenizer_json)
        if library.escapes or tree.get("normalizer") not in (None, {"type": "NFC"}, {"type": "NFKC"}):
            raise UnsuitableError("it changes texts by more than NFC or NFKC")
        self._normalizer = library.pipeline.normalizer
        found = _added_tokens(library)
        self._found = frozenset(found)
        special = found | {library.eot_token: library.eot}  # not found in texts, but without any it is slow
        pattern, ranks = _pattern(tree.get("pre_tokenizer")), _ranks(tree["model"])
        try:
            self.encoding = tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        except ValueError as error:
            raise UnsuitableError(f"{error}") from None

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> "np.ndarray":
        if self._normalizer and not text.isascii() and self._normalizer.normalize_str(text) != text:
            return self.library.encode_array(text)
        try:
            return self.encoding.encode_to_numpy(text, allowed_special=self._found, disallowed_special=())
        except ValueError:  # a run of spaces that is too long for its regular expressions
            return self.library.encode_array(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self.library.decode(ids)

    def check(self, sample: Iterable[str]) -> int:
        """Compare the ids of all tokens, all characters and the texts of a sample; returns the bytes of the sample.

        Raises:
            UnsuitableError: a text has other ids.
        """
        characters = in_form(self.library.normalization, every_character())
        tokens = (token.decode(errors="ignore") for token in self.encoding.token_byte_values())
        for text in chain((characters, "".join(PROBES), LATIN_IN_LOWER_CASE), self._found, tokens):
            self._compare(text)
        return sum(map(self._compare, sample))

    def _compare(self, text: str) -> int:
        ids, wanted = self.encode(text), self.library.encode(text)
        if ids != wanted:
            same = next((n for n, pair in enumerate(zip(ids, wanted, strict=False)) if len({*pair}) > 1), 0)
            raise UnsuitableError(f"it gives other ids for {self.decode(wanted[max(same - 1, 0) :])[:SHOWN]!r}")
        return len(text.encode())


def _added_tokens(library: HfTokenizer) -> dict[str, int]:
    """The added tokens that the library finds in texts, with their ids: those that are not special."""
    tokens = library.pipeline.get_added_tokens_decoder()
    found = {token.content: i for i, token in tokens.items() if not token.special}
    names = sorted(token.content for token in tokens.values())
    overlap = {name[0] for name in names}.intersection("".join(name[1:] for name in names))
    overlap |= {name for name, following in pairwise(names) if following.startswith(name)}
    alone = all(name.isascii() for name in found) and not any(
        token.lstrip or token.rstrip or token.single_word for token in tokens.values() if not token.special
    )
    if found and (overlap or not alone):
        raise UnsuitableError("its added tokens may overlap, or depend on the text beside them")
    return found


def _pattern(pre_tokenizer: Any) -> str:
    """The regular expression that finds the words of a text."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}:
            return GPT2_PATTERN
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
            ],
        }:
            if ALIKE.fullmatch(pattern):
                return pattern
            raise UnsuitableError("its pattern may mean something else to tiktoken")
    raise UnsuitableError(
        "its pre-tokenizer is not ByteLevel, alone or after one pattern, without a space before texts"
    )


def _ranks(model: dict[str, Any]) -> dict[bytes, int]:
    """The tokens that the model gives, with their ids, by which tiktoken orders merges.

    tiktoken merges any two tokens that make a third, and looks whole words up first. The ids are the same if merges are
    in the order of ids, after those of their parts, and make each token. A token that they do not make is left out, or,
    if the library looks words up, must have all the merges that would make it.
    """
    import tokenizers

    if model["type"] != "BPE" or any(map(model.get, ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))):
        raise UnsuitableError("its model is not plain BPE")
    vocab: dict[str, int] = model["vocab"]
    if BYTE_OF.keys() - vocab.keys() or len(vocab) > len({*vocab.values()}):
        raise UnsuitableError("its vocabulary lacks bytes, or two tokens have one id")
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    made = [vocab[first + second] for first, second in merges]
    late = (len(part) > 1 and vocab[part] >= i for i, pair in zip(made, merges, strict=True) for part in pair)
    if any(one > other for one, other in pairwise(made)) or any(late):
        raise UnsuitableError("its merges are not in the order of their ids")
    names = [name for name in vocab if name and BYTE_OF.keys() >= set(name)]
    merging = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    encodings = merging.encode_batch_fast(names, add_special_tokens=False)
    unmade = {name for name, found in zip(names, encodings, strict=True) if found.ids != [vocab[name]]}
    if not model.get("ignore_merges"):
        names = [name for name in names if name not in unmade]
    listed = set(merges)
    for name in unmade.intersection(names):
        pairs = ((name[:cut], name[cut:]) for cut in range(1, len(name)))
        if any(pair not in listed and vocab.keys() >= {*pair} for pair in pairs):
            raise UnsuitableError(f"no merges make its token {name!r}")
    return {bytes(map(BYTE_OF.__getitem__, name)): vocab[name] for name in names}
