"""Models that others wrote as ours, and ours as the authors' code reads them.

    python -m tost_lm.convert ckpt.pt convert.folder=models/tost convert.gpt2=gpt2_bpe
    python -m tost_lm.convert gpt2 convert.folder=models/gpt2
    python -m tost_lm.convert runs/base convert.folder=models/theirs convert.to=authors

Takes a ckpt.pt of the released code (arXiv 2412.17810), token statistics or softmax; a folder that the Hugging Face
library saved GPT-2 to; or, with convert.to=authors, a run folder (its newest valid checkpoint), a step folder or an
export. Writes a model folder, which every program reads, or a folder with a ckpt.pt. The logits stay as they are, to
rounding. A ckpt.pt may come from anywhere: one that would run code when it is read is refused, and nothing of it runs.
"""

import re
from pathlib import Path

from tost_lm.config import run_program
from tost_lm.errors import CheckpointError, ConfigError, DataError
from tost_lm.interop.convert_config import ConversionConfig, ConvertConfig


def main(path: Path, config: ConvertConfig) -> None:
    how = config.convert
    if how.folder.exists():
        raise ConfigError(f"{how.folder}: exists already; give another convert.folder")
    write = _write_theirs if how.to == "authors" else _write_ours
    for line in write(path, how):
        print(line)


def _write_ours(source: Path, how: ConversionConfig) -> list[str]:
    from tost_lm.data.tokenizers.gpt2 import gpt2_tokenizer
    from tost_lm.interop.gpt2 import CONFIG, read_gpt2_tokenizer
    from tost_lm.interop.load import read_foreign
    from tost_lm.model.checkpoint import write_checkpoint

    foreign = read_foreign(source)
    if foreign is None:
        hint = "; for a model of ours give convert.to=authors" if source.is_dir() else ""
        raise CheckpointError(f"{source}: neither a ckpt.pt nor a folder with GPT-2's {CONFIG}{hint}")
    config, weights, trained = foreign
    own_tokenizer = read_gpt2_tokenizer(source) if source.is_dir() and not how.gpt2 else None
    try:
        tokenizer = own_tokenizer or gpt2_tokenizer(how.gpt2)
    except DataError as error:
        raise DataError(str(error).replace("tokenizer.path", "convert.gpt2")) from None
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"{source}: has a vocabulary of {config.vocab_size}, and GPT-2's tokenizer one of {tokenizer.vocab_size}"
        )
    write_checkpoint(how.folder, config, weights, tokenizer)
    kind = {"T": "token statistics", "A": "softmax attention"}[config.pattern]
    count = sum(weight.numel() for name, weight in weights.items() if name != "positions.weight")
    return [
        f"{source}: {config.layers} layers of {kind}, width {config.width}, {config.heads} heads, vocabulary "
        f"{config.vocab_size:,}, {config.max_positions:,} positions; {count:,} parameters without positions{trained}",
        f"written to {how.folder}: python -m tost_lm.generate {how.folder}",
    ]


def _write_theirs(source: Path, how: ConversionConfig) -> list[str]:
    from tost_lm.data.tokenizers import find_tokenizer
    from tost_lm.interop.authors import to_authors, write_authors
    from tost_lm.model.checkpoint import StoredTensors, find_checkpoint, read_model_config

    checkpoint = find_checkpoint(source)
    step = re.fullmatch(r"step_(\d{8})", checkpoint.name)  # an export does not say
    theirs = to_authors(
        read_model_config(checkpoint), StoredTensors(checkpoint, "model"), iterations=int(step[1]) if step else 0
    )
    tokenizer = find_tokenizer(checkpoint)
    write_authors(how.folder, theirs)
    return [
        f"{checkpoint}: written to {how.folder / 'ckpt.pt'}, which the released code samples from; no optimizer",
        f"its tokens are those of {tokenizer}, which a ckpt.pt has no place for",
    ]


if __name__ == "__main__":
    run_program(main, name="tost_lm.convert", doc=__doc__ or "", takes="SOURCE", config=ConvertConfig)
