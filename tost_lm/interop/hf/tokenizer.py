"""Our tokenizers as fast tokenizers of the Hugging Face library, with the same ids."""

import base64
from typing import Any

from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Pipeline
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tost_lm.data.tokenizers import Gpt2Tokenizer, Tokenizer
from tost_lm.data.tokenizers.sentencepiece_bpe import ESCAPED, PIECE_BEYOND_WORD, SPACE_MARK

GPT2_EOT = "<|endoftext|>"


def fast_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast | None:
    """One that pads on the left with the end of text; special tokens in a text are plain text to it, as to ours.

    Of bytes that are no UTF-8 it may make more U+FFFD than ours. None: a SentencePiece model that is no BPE with byte
    pieces, or that puts a space before a text; those trained here are none of these.
    """
    pipeline, eot = _gpt2(tokenizer) if isinstance(tokenizer, Gpt2Tokenizer) else _sentencepiece(tokenizer)
    if pipeline is None:
        return None
    return PreTrainedTokenizerFast(
        tokenizer_object=pipeline, bos_token=eot, eos_token=eot, pad_token=eot, padding_side="left",
        split_special_tokens=True, clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def _gpt2(tokenizer: Tokenizer) -> tuple[Pipeline, str]:
    lines = (line.split() for line in tokenizer.model_bytes.splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    letters = bytes_to_unicode()

    def written(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [_last_merge(token, ranks) for token in ranks if len(token) > 1]
    vocab = {written(token): rank for token, rank in ranks.items()} | {GPT2_EOT: tokenizer.eot}
    pipeline = Pipeline(models.BPE(vocab, [(written(first), written(second)) for first, second in merges]))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    return pipeline, GPT2_EOT


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that this one is made of, which all merges of lower rank leave of its bytes."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        at = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], len(ranks)))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _sentencepiece(tokenizer: Tokenizer) -> tuple[Pipeline | None, str]:
    model: Any = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.model_bytes)  # pyright: ignore[reportAttributeAccessIssue]
    made, eot = model.trainer_spec, model.pieces[tokenizer.eot].piece
    if made.model_type != made.BPE or not made.byte_fallback or model.normalizer_spec.add_dummy_prefix:
        return None, eot
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == piece.NORMAL}
    merges = [
        (piece[:at], piece[at:])
        for piece in sorted(scores, key=lambda piece: -scores[piece])
        for at in range(1, len(piece))
        if piece[:at] in scores and piece[at:] in scores
    ]
    symbols = [piece.piece.replace(SPACE_MARK, " ") for piece in model.pieces if piece.type == piece.USER_DEFINED]
    names = (piece.piece for piece in model.pieces)
    ids = {name if name in scores else name.replace(SPACE_MARK, " "): i for i, name in enumerate(names)}
    pipeline = Pipeline(models.BPE(ids, merges, byte_fallback=True))
    pipeline.add_tokens([AddedToken(symbol, normalized=False) for symbol in symbols])
    disguises = [normalizers.Replace(character, disguise) for character, disguise in ESCAPED.items()]
    pipeline.normalizer = normalizers.Sequence([*disguises, normalizers.Replace(" ", SPACE_MARK)])
    if not any(map(PIECE_BEYOND_WORD.search, scores)):
        words = Regex(f"{SPACE_MARK}+[^{SPACE_MARK}]*")
        pipeline.pre_tokenizer = pre_tokenizers.Split(words, "isolated")  # each word is merged by itself
    undone = [decoders.Replace(disguise, character) for character, disguise in reversed(ESCAPED.items())]
    pipeline.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *undone]
    )
    return pipeline, eot
