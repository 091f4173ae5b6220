"""SentencePiece's training in a separate process, which can be killed and whose log can be read.

stdin: a line of JSON, then the texts, each after its length in bytes (4 bytes, little-endian). stdout: the model, or
with exit code 3 an error message. stderr: the log. training.py runs this file directly, so it imports nothing of
tost_lm.
"""

import io
import json
import sys
from collections.abc import Iterator
from typing import BinaryIO

import sentencepiece


def main() -> None:
    options = json.loads(sys.stdin.buffer.readline())
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=texts(sys.stdin.buffer),
            model_writer=model,
            vocab_size=options["vocab_size"],
            eos_piece=options["eot_piece"],
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
            num_threads=4,
            minloglevel=0,
        )
    except (RuntimeError, OSError) as error:
        sys.stdout.buffer.write(str(error).encode())
        sys.exit(3)
    sys.stdout.buffer.write(model.getvalue())


def texts(pipe: BinaryIO) -> Iterator[bytes]:
    while length := pipe.read(4):
        yield pipe.read(int.from_bytes(length, "little"))


if __name__ == "__main__":
    main()
