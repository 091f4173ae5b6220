"""SentencePiece's training, as a program of its own, which `training.train_sentencepiece` starts.

It reads the texts from its input, a pickled list, and writes the model to its output, or the message of an error.
"""

import io
import pickle
import sys

import sentencepiece


def main(vocab_size: int) -> None:
    texts, model = pickle.load(sys.stdin.buffer), io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            vocab_size=vocab_size,
            eos_piece="<|endoftext|>",
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
            minloglevel=3,
        )
    except (RuntimeError, OSError) as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(model.getvalue())


if __name__ == "__main__":
    main(int(sys.argv[1]))
