"""Small tokenizers of the Hugging Face library, trained on a few lines."""

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tost_lm.data.tokenizers import HfTokenizer

EOT = "<|endoftext|>"
TEXTS = [f"Page {n}. The lines of this page are short.\n  They say little! Do they?\nNo.\t{n * n}" for n in range(60)]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(texts: Sequence[str] = TEXTS, normalizer: Any = None) -> Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen."""
    pipeline = Tokenizer(models.BPE())
    if normalizer:
        pipeline.normalizer = normalizer
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<pad>", EOT], initial_alphabet=alphabet, show_progress=False
    )
    pipeline.train_from_iterator(texts, trainer)
    return pipeline


def metaspace_unigram(byte_fallback: bool = True) -> Tokenizer:
    """Unigram with a space before every text, as T5; with byte pieces."""
    pipeline = Tokenizer(models.Unigram())
    pipeline.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=100, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    pipeline.train_from_iterator(TEXTS, trainer)
    pipeline.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    if byte_fallback:
        tree = json.loads(pipeline.to_str())
        tree["model"] |= {"byte_fallback": True, "vocab": [*tree["model"]["vocab"], *([name, -20.0] for name in BYTES)]}
        pipeline = Tokenizer.from_str(json.dumps(tree))
    return pipeline


def prefixed_bpe(texts: Sequence[str] = TEXTS) -> Tokenizer:
    """BPE of characters with byte pieces, a space before every text and `<s>` before every document, as Llama 2."""
    mark = "\u2581"
    pipeline = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    pipeline.normalizer = normalizers.Sequence([normalizers.Prepend(mark), normalizers.Replace(" ", mark)])
    pipeline.decoder = decoders.Sequence(
        [decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>", *BYTES], show_progress=False, max_token_length=8
    )
    pipeline.train_from_iterator((word for text in texts for word in text.replace(mark, "").split(" ")), trainer)
    tree = json.loads(pipeline.to_str())
    tree["added_tokens"] = tree["added_tokens"][:3]
    pipeline = Tokenizer.from_str(json.dumps(tree))
    pipeline.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return pipeline


def with_added(pipeline: Tokenizer, *contents: str) -> Tokenizer:
    """A copy with further tokens that are found in texts."""
    copy = Tokenizer.from_str(pipeline.to_str())
    copy.add_tokens([AddedToken(content, normalized=False) for content in contents])
    return copy


def made(pipeline: Tokenizer, eot_token: str = EOT) -> HfTokenizer:
    """The tokenizer as it is stored in a shard folder."""
    return HfTokenizer(json.dumps({"eot_token": eot_token, "tokenizer": pipeline.to_str()}).encode())
