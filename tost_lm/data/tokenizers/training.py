"""Training a SentencePiece BPE tokenizer."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import IO

from tost_lm.data.tokenizers.sentencepiece_bpe import ESCAPE, SPACE_MARK, escape
from tost_lm.errors import ConfigError, DataError

EOT_PIECE = "<|endoftext|>"
OWN_PIECE = re.compile(rf"<unk>|{re.escape(EOT_PIECE)}|<0x[0-9A-F]{{2}}>")
OWN_PIECES = 258  # <unk>, the end of text, and the bytes
PIECE_CHARACTERS = 4000  # whole documents would pass SentencePiece's limits, lines would hide newlines from merges
EXPLAINED = 3  # exit code of the training process when it says what is wrong
LOGGED = re.compile(rb"Alphabet size=(?P<characters>\d+)|(?:Merged|Added): .*?(?:merges|size)=(?P<merges>\d+)")

Report = Callable[[int, int], None]
"""(pieces that the vocabulary has so far, that it is to have) → None; called now and then, from another thread."""


def symbol_pieces(user_symbols: Sequence[str]) -> list[str]:
    """The texts of `tokenizer.user_symbols` as SentencePiece writes them.

    Raises:
        ConfigError: one is empty, there twice, a piece of SentencePiece's own, or has a character that its pieces
            cannot have.
    """
    for symbol in user_symbols:
        problem = None
        if not symbol:
            problem = "is empty"
        elif user_symbols.count(symbol) > 1:
            problem = "is there more than once"
        elif OWN_PIECE.fullmatch(symbol):
            problem = "is a piece that every SentencePiece model here has"
        elif found := re.search(f"[\0{SPACE_MARK}{ESCAPE}\ud800-\udfff]", symbol):
            problem = f"has the character U+{ord(found[0]):04X}, which no piece can have"
        if problem:
            raise ConfigError(f"tokenizer.user_symbols: {symbol!r} {problem}; take it out")
    return [symbol.replace(" ", SPACE_MARK) for symbol in user_symbols]


def train_sentencepiece(
    texts: Iterable[str], vocab_size: int, symbols: Sequence[str] = (), report: Report = lambda done, total: None
) -> bytes:
    """Train a BPE model of exactly `vocab_size` pieces on `texts`; the same texts in one order give the same bytes.

    `symbols` come from `symbol_pieces`. SentencePiece runs in a process of its own, which does not outlive this call.

    Raises:
        DataError: the texts are too few or too varied for that many pieces; says how many they allow.
    """
    program = Path(__file__).with_name("training_process.py")
    options = {"vocab_size": vocab_size, "user_symbols": list(symbols), "eot_piece": EOT_PIECE}
    with subprocess.Popen(
        [sys.executable, "-P", str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for this process, which ends that one
    ) as trainer:
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        assert trainer.stderr is not None
        log = _Log(trainer.stderr, OWN_PIECES + len(symbols), vocab_size, report)
        try:
            _feed(trainer.stdin, options, texts)
            output = trainer.stdout.read()
        except BaseException:
            trainer.kill()
            _close(trainer.stdin)
            raise
        finally:
            log.join()
    if log.failure is not None:
        raise log.failure
    if trainer.returncode == EXPLAINED:
        raise DataError(_explain(output.decode(errors="replace"), vocab_size))
    if trainer.returncode:
        raise DataError(
            f"SentencePiece's training ended with exit code {trainer.returncode} (-9: out of memory; lower "
            f"tokenizer.sample_bytes): {log.last.decode(errors='replace').strip()}"
        )
    return output


def _feed(pipe: IO[bytes], options: dict[str, object], texts: Iterable[str]) -> None:
    """Write the options and the texts, and close the pipe."""
    for data in chain([json.dumps(options).encode() + b"\n"], _pieces(texts)):
        try:
            pipe.write(data)
        except BrokenPipeError:
            break  # the trainer says why on stdout
    _close(pipe)


def _pieces(texts: Iterable[str]) -> Iterator[bytes]:
    """The texts cut into pieces, each behind its length."""
    for text in texts:
        escaped = escape(text)
        for start in range(0, len(escaped), PIECE_CHARACTERS):
            piece = escaped[start : start + PIECE_CHARACTERS].encode()
            yield len(piece).to_bytes(4, "little") + piece


def _close(pipe: IO[bytes]) -> None:
    with suppress(BrokenPipeError):  # bytes that nobody will read
        pipe.close()


class _Log(Thread):
    """Reads the trainer's log to its end, so that the trainer never waits, and reports the pieces it tells of."""

    def __init__(self, pipe: IO[bytes], pieces: int, vocab_size: int, report: Report) -> None:
        super().__init__(daemon=True)
        self._pipe = pipe
        self._pieces = pieces
        self._vocab_size = vocab_size
        self._report = report
        self.last = b""
        self.failure: Exception | None = None
        self.start()

    def run(self) -> None:
        for line in self._pipe:
            self.last = line
            if (found := LOGGED.search(line)) and self.failure is None:
                if found["characters"]:
                    self._pieces += int(found["characters"])
                try:
                    self._report(min(self._pieces + int(found["merges"] or 0), self._vocab_size), self._vocab_size)
                except Exception as error:  # raised where the training is awaited
                    self.failure = error


def _explain(problem: str, vocab_size: int) -> str:
    if most := re.search(r"value <= (\d+)", problem):
        return (
            f"tokenizer.vocab_size {vocab_size}: too large, the training documents allow at most {most[1]}; "
            "lower it or add text"
        )
    if least := re.search(r"required_chars\. \d+ vs (\d+)", problem):
        return f"tokenizer.vocab_size {vocab_size}: too small, the characters of this corpus need at least {least[1]}"
    if "sentences_.empty()" in problem or "all_chars_count" in problem:
        return "no training document with text a tokenizer can be trained on; lower corpus.valid_share or add text"
    return f"SentencePiece could not train a tokenizer: {problem}"
