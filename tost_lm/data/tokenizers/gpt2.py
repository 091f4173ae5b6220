"""GPT-2's byte pair encoding, as the tokenizer.json that its two published files make."""

import json
from pathlib import Path

from tost_lm.data.tokenizers.hf import HfTokenizer
from tost_lm.errors import DataError, first_line, install_hint
from tost_lm.files import regular_file, sha256_bytes

EOT = "<|endoftext|>"
VOCAB_SIZE = 50_257
REPOSITORY = "openai-community/gpt2"
SOURCES = {
    "encoder.json": ("vocab.json", "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),
    "vocab.bpe": ("merges.txt", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
}
"""The two published files: the name of each in the REPOSITORY of the Hugging Face hub, and its SHA-256."""


def gpt2_tokenizer(folder: Path | None, setting: str = "tokenizer.path") -> HfTokenizer:
    """GPT-2's tokenizer from encoder.json and vocab.bpe in `folder`; None: download them. Both give the same file.

    Args:
        setting: the setting that gives the folder, for messages.

    Raises:
        DataError: a file is missing or not the published one, the download fails, or a package is not installed.
    """
    encoder, merges = (_read(folder, name, setting) for name in SOURCES)
    vocab: dict[str, int] = json.loads(encoder)
    eot = {"id": vocab[EOT], "content": EOT, "special": True, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tree = {  # written here, because what the library writes depends on its version
        "version": "1.0",
        "added_tokens": [eot | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges.decode().splitlines()[1:]},
    }
    return HfTokenizer(json.dumps({"eot_token": EOT, "tokenizer": json.dumps(tree)}).encode())


def _read(folder: Path | None, name: str, setting: str) -> bytes:
    """The published file of this name."""
    there, sha256 = SOURCES[name]
    path = folder / name if folder else _download(there, setting)
    try:
        data = regular_file(path).read_bytes()
    except OSError as error:
        raise DataError(
            f"{setting} {folder}: {name} cannot be read: {error.strerror}; set it to the folder of GPT-2's "
            "encoder.json and vocab.bpe"
        ) from None
    if sha256_bytes(data) != sha256:
        raise DataError(f"{path}: not GPT-2's, or damaged: its SHA-256 is not {sha256}; download it again")
    return data


def _download(name: str, setting: str) -> Path:
    try:
        import huggingface_hub

        return Path(huggingface_hub.hf_hub_download(REPOSITORY, name))
    except ImportError:
        raise DataError(f"GPT-2's tokenizer needs the package tokenizers; {install_hint('hf')}") from None
    except Exception as error:  # the client raises its own errors and those of the network
        raise DataError(
            f"GPT-2's tokenizer cannot be downloaded: {first_line(error)}; set {setting} to a folder with its "
            "encoder.json and vocab.bpe"
        ) from None
