"""GPT-2's byte pair encoding, computed by tiktoken."""

import json
import re
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tost_lm.data.tokenizers.interface import Tokenizer
from tost_lm.errors import DataError, install_hint
from tost_lm.files import regular_file, sha256_file

RANKS = 50_256
RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
# The two published files of GPT-2's tokenizer.
SOURCES_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
SPACES = re.compile("[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+")  # what \s matches in tiktoken
LONG = 100_000  # tiktoken fails at ten times as many


class Gpt2Tokenizer(Tokenizer):
    """GPT-2's 50,256 byte pair tokens and its end-of-text id; `<|endoftext|>` in a text is plain text.

    `model_bytes` are lines "base64 rank", tiktoken's format; they do not depend on the source of the files.
    """

    file_name = "tokenizer.tiktoken"

    def __init__(self, model_bytes: bytes) -> None:
        """Raises DataError if the bytes are not GPT-2's ranks, or tiktoken is not installed."""
        super().__init__(model_bytes)
        if self.sha256 != RANKS_SHA256:
            raise DataError("not GPT-2's tokenizer, or damaged (its SHA-256 differs); replace it")
        _tiktoken()
        self.eot = RANKS
        self.vocab_size = RANKS + 1

    @cached_property
    def _encoding(self) -> Any:
        """Made on first use, because the process that builds shards does not encode."""
        from tiktoken_ext.openai_public import r50k_pat_str  # GPT-2's pattern, under its later name

        lines = (line.split() for line in self.model_bytes.splitlines())
        return _tiktoken().Encoding(
            "gpt2 from a file",  # under a name that tiktoken knows, unpickling would download it
            pat_str=r50k_pat_str,
            mergeable_ranks={a2b_base64(token): int(rank) for token, rank in lines},
            special_tokens={"<|endoftext|>": RANKS},
        )

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> "np.ndarray":
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:  # its regular expression fails on a long run of spaces before other text
            texts = _split_at_long_spaces(text)
            return np.concatenate([self._encoding.encode_to_numpy(text, disallowed_special=()) for text in texts])

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoding.decode([i for i in map(int, ids) if i != self.eot], errors="replace")


def gpt2_tokenizer(folder: Path | None, setting: str = "tokenizer.path") -> Gpt2Tokenizer:
    """GPT-2's tokenizer from encoder.json and vocab.bpe in `folder`; None: tiktoken downloads them.

    Args:
        setting: the setting that gives the folder, for messages.

    Raises:
        DataError: a file is missing or not the published one, the download fails, or tiktoken is not installed.
    """
    tokens = _read_tokens(folder, setting) if folder else _download_tokens(setting)
    lines = (b2a_base64(token, newline=False) + f" {rank}\n".encode() for rank, token in enumerate(tokens))
    return Gpt2Tokenizer(b"".join(lines))


def _read_tokens(folder: Path, setting: str) -> list[bytes]:
    """The bytes of each token, in the order of ranks."""
    for name, sha256 in SOURCES_SHA256.items():
        path = folder / name
        try:
            if sha256_file(path) != sha256:
                raise DataError(f"{path}: not GPT-2's, or damaged: its SHA-256 is not {sha256}; download it again")
        except OSError as error:
            raise DataError(
                f"{setting} {folder}: {name} cannot be read: {error.strerror}; set it to the folder of "
                "GPT-2's encoder.json and vocab.bpe"
            ) from None
    # encoder.json has one printable character for each byte: the byte's own, or else one from U+0100.
    printable = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
    byte_of = {chr(byte): byte for byte in printable}
    byte_of |= {chr(256 + n): byte for n, byte in enumerate(sorted(set(range(256)) - set(printable)))}
    ids: dict[str, int] = json.loads(regular_file(folder / "encoder.json").read_bytes())
    return [bytes(byte_of[character] for character in token) for token in sorted(ids, key=ids.__getitem__)[:RANKS]]


def _download_tokens(setting: str) -> list[bytes]:
    """The bytes of each token, in the order of ranks."""
    try:
        encoding = _tiktoken().get_encoding("gpt2")
    except (OSError, ValueError) as error:  # network errors are OSErrors; a damaged download is a ValueError
        problem = str(error).partition("\n")[0]
        raise DataError(
            f"GPT-2's tokenizer cannot be downloaded: {problem}; set {setting} to a folder with its encoder.json and "
            "vocab.bpe"
        ) from None
    return [encoding.decode_single_token_bytes(rank) for rank in range(RANKS)]


def _split_at_long_spaces(text: str) -> Iterator[str]:
    """The text cut where GPT-2 cuts it too: before a run of spaces, and before its last space if text follows."""
    start = 0
    for run in SPACES.finditer(text):
        if len(run[0]) > LONG:
            end = run.end() - (run.end() < len(text))
            yield text[start : run.start()]
            yield text[run.start() : end]
            start = end
    yield text[start:]


def _tiktoken() -> Any:
    try:
        import tiktoken
    except ImportError:
        raise DataError(f"GPT-2's tokenizer needs the package tiktoken; {install_hint('gpt2')}") from None
    return tiktoken
