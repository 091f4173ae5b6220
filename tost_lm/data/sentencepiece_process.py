"""SentencePiece's training, in a process of its own, which starts fast because it imports nothing else."""

import io
from multiprocessing.connection import Connection

EOT_PIECE = "<|endoftext|>"


def train(texts: list[str], vocab_size: int, sender: Connection) -> None:
    """Send the model of `training.train_sentencepiece`, or the message of an error."""
    import sentencepiece  # --help answers without it

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            vocab_size=vocab_size,
            eos_piece=EOT_PIECE,
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
        sender.send(str(error))
    else:
        sender.send(model.getvalue())
