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
TEXT_CHARACTERS = 4000  # documents exceed SentencePiece's limits; single lines would hide newlines from merges
EXIT_FAILED = 3  # exit code of the training process when its stdout is an error message
LOGGED = re.compile(rb"Alphabet size=(?P<characters>\d+)|(?:Merged|Added): .*?(?:merges|size)=(?P<merges>\d+)")

Report = Callable[[int, int], None]
"""Called from another thread with the pieces in the vocabulary so far and the final number."""


def symbol_pieces(user_symbols: Sequence[str]) -> list[str]:
    """The texts of `tokenizer.user_symbols` as SentencePiece pieces.

    Raises:
        ConfigError: a symbol is empty, repeated, a piece of every model, or has a character that no piece can have.
    """
    for symbol in user_symbols:
        problem = None
        if not symbol:
            problem = "is empty"
        elif user_symbols.count(symbol) > 1:
            problem = "is repeated"
        elif OWN_PIECE.fullmatch(symbol):
            problem = "is already a piece of every model"
        elif found := re.search(f"[\0{SPACE_MARK}{ESCAPE}\ud800-\udfff]", symbol):
            problem = f"has the character U+{ord(found[0]):04X}, which no piece can have"
        if problem:
            raise ConfigError(f"tokenizer.user_symbols: {symbol!r} {problem}; remove it")
    return [symbol.replace(" ", SPACE_MARK) for symbol in user_symbols]


def train_sentencepiece(
    texts: Iterable[str], vocab_size: int, symbols: Sequence[str] = (), report: Report = lambda done, total: None
) -> bytes:
    """Train a BPE model of exactly `vocab_size` pieces on `texts` and return its bytes. Deterministic.

    `symbols` come from `symbol_pieces`. SentencePiece runs in a separate process that ends with this call.

    Raises:
        DataError: the texts do not allow this vocabulary size; the message has the possible size.
    """
    program = Path(__file__).with_name("training_process.py")
    options = {"vocab_size": vocab_size, "user_symbols": list(symbols), "eot_piece": EOT_PIECE}
    with subprocess.Popen(
        [sys.executable, "-P", str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches only this process, which then kills the trainer
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
    if trainer.returncode == EXIT_FAILED:
        raise DataError(_explain(output.decode(errors="replace"), vocab_size))
    if trainer.returncode:
        raise DataError(
            f"SentencePiece's training failed with exit code {trainer.returncode} (-9: out of memory; lower "
            f"tokenizer.sample_bytes): {log.last.decode(errors='replace').strip()}"
        )
    return output


def _feed(pipe: IO[bytes], options: dict[str, object], texts: Iterable[str]) -> None:
    """Write the options and the texts, and close the pipe."""
    for data in chain([json.dumps(options).encode() + b"\n"], _framed(texts)):
        try:
            pipe.write(data)
        except BrokenPipeError:
            break  # the trainer reports the reason on stdout
    _close(pipe)


def _framed(texts: Iterable[str]) -> Iterator[bytes]:
    """Short texts, each after its length in bytes."""
    for text in texts:
        escaped = escape(text)
        for start in range(0, len(escaped), TEXT_CHARACTERS):
            data = escaped[start : start + TEXT_CHARACTERS].encode()
            yield len(data).to_bytes(4, "little") + data


def _close(pipe: IO[bytes]) -> None:
    with suppress(BrokenPipeError):  # the trainer has ended
        pipe.close()


class _Log(Thread):
    """Reads the trainer's log, so that the trainer never blocks, and reports its progress."""

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
                except Exception as error:  # train_sentencepiece raises it
                    self.failure = error


def _explain(problem: str, vocab_size: int) -> str:
    if most := re.search(r"value <= (\d+)", problem):
        return f"tokenizer.vocab_size {vocab_size}: too large for this training text; set at most {most[1]} or add text"
    if least := re.search(r"required_chars\. \d+ vs (\d+)", problem):
        return f"tokenizer.vocab_size {vocab_size}: too small for the characters of this text; set at least {least[1]}"
    if "sentences_.empty()" in problem or "all_chars_count" in problem:
        return "no training text; add text or lower corpus.valid_fraction"
    return f"SentencePiece's training failed: {problem}"
