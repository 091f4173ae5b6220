"""The model in the Hugging Face library: importing this registers it with AutoConfig and AutoModelForCausalLM.

    import tost_lm.interop.hf
    tost_lm.interop.hf.export("runs/demo", "demo-hf")
    model = AutoModelForCausalLM.from_pretrained("demo-hf")
    tokenizer = AutoTokenizer.from_pretrained("demo-hf")
    model.generate(**tokenizer(["Once", "A long time ago"], padding=True, return_tensors="pt"), max_new_tokens=64)

The exported tokenizer starts every text with the end-of-text token. The model is `TostLM`; its cache is the state of
`TostLM`, of constant size for TSSA layers.
"""

from tost_lm.errors import install_hint

try:
    from transformers import AutoConfig, AutoModelForCausalLM
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"tost_lm.interop.hf needs transformers ({error}); {install_hint('hf')}", name=error.name
    ) from None

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Pipeline
from transformers import PreTrainedTokenizerFast

from tost_lm.checkpointing.format import CARD, flush_and_hash, publish_checkpoint, write_failure
from tost_lm.config import path_or_url
from tost_lm.data.tokenizers import HfTokenizer, SentencePieceTokenizer, Tokenizer
from tost_lm.data.tokenizers.interface import ESCAPED, PIECE_BEYOND_WORD, SPACE_MARK
from tost_lm.errors import CheckpointError
from tost_lm.files import make_temp_folder, remove_temp_folder, usual_mode
from tost_lm.inference.evaluated import EvaluatedCheckpoint
from tost_lm.inference.foreign_folder import weight_files
from tost_lm.interop.card import TRANSFORMERS_USAGE, model_card
from tost_lm.interop.hf.cache import TostCache
from tost_lm.interop.hf.model import TostConfig, TostForCausalLM
from tost_lm.mixers.plugins import plugin_files

__all__ = ["TostCache", "TostConfig", "TostForCausalLM", "export"]

AutoConfig.register(TostConfig.model_type, TostConfig)
AutoModelForCausalLM.register(TostConfig, TostForCausalLM)


def fast_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast | None:
    """A tokenizer that starts every text with the end-of-text token, as documents in training, and pads on the left.

    Special tokens in a text are plain text. Invalid UTF-8 may decode to more U+FFFD than with our tokenizer.

    Returns:
        None for a tokenizer without an equivalent: a SentencePiece model that is not BPE with byte pieces, or that puts
        a space before a text. `tost prepare tokenizer` makes none of these.
    """
    others: dict[str, Any] = {}
    if isinstance(tokenizer, SentencePieceTokenizer):
        pipeline, eot = _sentencepiece(tokenizer)
        others["add_prefix_space"] = False  # of tools that compute SentencePiece themselves, as llama.cpp does
    elif isinstance(tokenizer, HfTokenizer):
        pipeline, eot = Pipeline.from_str(tokenizer.tokenizer_json), tokenizer.eot_token
        pipeline.no_truncation()
        pipeline.no_padding()
    else:
        return None
    if pipeline is None:
        return None
    # `add_bos_token` is stored in tokenizer.json, as its post-processor.
    return PreTrainedTokenizerFast(
        tokenizer_object=pipeline, bos_token=eot, eos_token=eot, pad_token=eot, add_bos_token=True, padding_side="left",
        split_special_tokens=True, clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"], **others,
    )  # fmt: skip


def _sentencepiece(tokenizer: SentencePieceTokenizer) -> tuple[Pipeline | None, str]:
    model: Any = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.model_bytes)  # pyright: ignore[reportAttributeAccessIssue]
    spec, eot = model.trainer_spec, model.pieces[tokenizer.eot].piece
    if spec.model_type != spec.BPE or not spec.byte_fallback or model.normalizer_spec.add_dummy_prefix:
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
    escapes = [normalizers.Replace(character, escaped) for character, escaped in ESCAPED.items()]
    pipeline.normalizer = normalizers.Sequence([*escapes, normalizers.Replace(" ", SPACE_MARK)])
    if not any(map(PIECE_BEYOND_WORD.search, scores)):
        words = Regex(f"{SPACE_MARK}+[^{SPACE_MARK}]*")
        pipeline.pre_tokenizer = pre_tokenizers.Split(words, "isolated")  # no merge crosses words
    unescapes = [decoders.Replace(escaped, character) for character, escaped in reversed(ESCAPED.items())]
    pipeline.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *unescapes]
    )
    return pipeline, eot


USAGE = "import tost_lm.interop.hf  # pip install '.[hf]' in a checkout of tost_lm\n" + TRANSFORMERS_USAGE


def export(path: str | Path, folder: str | Path) -> None:
    """Write the model of a run folder, a step folder or an export, with its tokenizer and a model card.

    `AutoModelForCausalLM`, `AutoTokenizer` and every program of this package read the folder. The exported tokenizer
    starts every text with the end-of-text token, as `tost generate` does. The card, README.md, has the records
    of the run and the evaluations of this checkpoint.

    Raises:
        CheckpointError, DataError: the checkpoint or its tokenizer cannot be read, or `folder` exists or cannot be
            written.
        ConfigError: the settings of the run are from another version, or `folder` is a URL.
    """
    path_or_url("folder", folder, takes_urls=False)
    folder, evaluated = Path(folder), EvaluatedCheckpoint.find(Path(path))
    if folder.exists():
        raise CheckpointError(f"{folder}: exists already; give a new folder, or remove it")
    tokenizer = evaluated.tokenizer()
    model = TostForCausalLM.from_run(evaluated.checkpoint)
    fast = fast_tokenizer(tokenizer)
    usage = {} if fast is None else {"usage": USAGE}
    card = model_card(evaluated.checkpoint, folder.name, evaluated.home, evaluated.cited_results(), **usage)
    try:
        aside = make_temp_folder(folder)
        model.save_pretrained(aside)
        for path in weight_files(aside):
            usual_mode(path)
        if fast is None:
            print(f"{folder}: no tokenizer.json: the Hugging Face library has no equivalent of this tokenizer")
        else:
            fast.save_pretrained(aside)
        (aside / CARD).write_text(card)
        others = {tokenizer.file_name: tokenizer.model_bytes, **plugin_files(model.config.pattern)}
        for name, content in others.items():
            (aside / name).write_bytes(content)
        read = {"config.json", *others, *(path.name for path in weight_files(aside))}
        publish_checkpoint(aside, folder, {name: flush_and_hash(aside / name) for name in read})
    except (OSError, SafetensorError) as error:
        remove_temp_folder(folder)
        raise CheckpointError(f"{folder}: cannot be written: {write_failure(error)[1]}") from None
