"""The tokenizer in a folder of the Hugging Face library, read and written."""

from pathlib import Path

from tost_lm.data.tokenizers import HfTokenizer, Tokenizer
from tost_lm.data.tokenizers.hf import eos_token, hf_tokenizer
from tost_lm.data.tokenizers.lossless import FORMS
from tost_lm.errors import DataError
from tost_lm.inference.foreign_folder import CONFIG
from tost_lm.inference.hugging_face import transformers_library

KEPT_FILES = ("*token*", "vocab.*", "merges.*", "chat_template.*", "generation_config.json")
"""Files of tokenizer and generation beside a model."""


def read_their_tokenizer(folder: Path) -> HfTokenizer:
    """The tokenizer of a model folder, with the end-of-text token of `eos_token`.

    Raises:
        DataError: there is none, it is damaged or not lossless, or its folder names no such token.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"{folder}: no {path.name}; add that of the model")
    if (token := eos_token(folder)) is None:
        raise DataError(f"{folder / CONFIG}: eos_token_id is no token of {path.name}; correct it")
    return hf_tokenizer(path, token, FORMS[-1])


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Write that of the library, if there is one. Texts begin with the end-of-text token if they did in training.

    Tools that compute SentencePiece themselves read its own file.
    """
    if isinstance(tokenizer, HfTokenizer):
        library = transformers_library()
        import tokenizers

        pipeline = tokenizers.Tokenizer.from_str(tokenizer.tokenizer_json)
        fast = library.PreTrainedTokenizerFast(tokenizer_object=pipeline, eos_token=tokenizer.eot_token)
        fast.save_pretrained(folder)
    else:
        from tost_lm.interop.hf import fast_tokenizer

        if fast := fast_tokenizer(tokenizer):
            fast.save_pretrained(folder)
            (folder / tokenizer.file_name).write_bytes(tokenizer.model_bytes)


def files_of_tokenizer(like: Path, tokenizer: Tokenizer) -> list[Path]:
    """The files of tokenizer, chat template and generation in a folder. Raises DataError: its tokenizer is another."""
    whole = like / "tokenizer.json"
    text = whole.read_text("utf-8") if whole.is_file() else None
    if not isinstance(tokenizer, HfTokenizer) or text != tokenizer.tokenizer_json:
        raise DataError(
            f"convert.like {like}: its tokenizer.json is not the model's; give the folder that it came from"
        )
    return sorted({path for pattern in KEPT_FILES for path in like.glob(pattern) if path.is_file()})
