"""Context extension: write a trained model with more positions, for a second phase of training.

    tost extend runs/short extend.max_positions=8192 extend.positions=keep extend.denom_bias=keep \\
      extend.folder=models/long
    tost train X.toml train.initial_weights=models/long \\
      model.max_positions=8192 train.seq_len=8192

Input: a run folder (its newest valid checkpoint), a step folder or an export. Output: a model folder, and a report of
the changes to the learned tables of positions. extend.positions and extend.denom_bias have no default if the model has
such a table. This program does not train.
"""

import json
from pathlib import Path
from typing import Any, NoReturn

from tost_lm.checkpointing.format import (
    CARD,
    EXTENSION,
    MANIFEST,
    StoredTensors,
    TokenizerFile,
    read_model_config,
    verify_checkpoint,
    write_checkpoint,
)
from tost_lm.checkpointing.run_folder import find_checkpoint
from tost_lm.config import run_program
from tost_lm.errors import ConfigError
from tost_lm.files import regular_file, sha256_file, write_atomically
from tost_lm.model.config import ExtendConfig, ExtensionConfig
from tost_lm.version import VERSION


def main(path: Path, config: ExtendConfig) -> None:
    from tost_lm.data.tokenizers import find_tokenizer, read_tokenizer
    from tost_lm.interop.card import model_card

    source = find_checkpoint(path)
    for line in extend(source, config.extend, read_tokenizer(find_tokenizer(source))):
        print(line)
    folder = config.extend.folder
    if not (folder / CARD).exists():
        write_atomically(folder / CARD, model_card(folder, folder.name))


def extend(source: Path, settings: ExtensionConfig, tokenizer: TokenizerFile) -> list[str]:
    """Write the model of a checkpoint folder, extended to more positions, as a model folder.

    A folder with the result of the same extension is reused.

    Returns:
        The report, in lines.

    Raises:
        ConfigError: as `extended_config`, or the folder exists and holds something else.
        CheckpointError: the existing folder is damaged.
    """
    from tost_lm.model.extension import extended_config, extended_weights, extension_report

    old, folder = read_model_config(source), settings.folder
    new = extended_config(old, settings)
    record = {
        "tost_lm": VERSION,
        "manifest_sha256": sha256_file(source / MANIFEST),
        "extend": settings.model_dump(mode="json", exclude={"folder"}),
    }
    if _is_complete(folder, record):
        return [f"reusing {folder} (same weights, same settings)"]
    stored = StoredTensors(source, "model")

    def write_record(temp: Path) -> None:
        (temp / EXTENSION).write_text(json.dumps({**record, "source": str(source)}, indent=1))

    write_checkpoint(folder, new, extended_weights(stored, old, settings), tokenizer, write_record)
    return extension_report(old, new, settings)


def _is_complete(folder: Path, record: dict[str, Any]) -> bool:
    """Whether a folder holds the undamaged result of the extension that `record` describes."""
    if not folder.exists():
        return False
    try:
        found = json.loads(regular_file(folder / EXTENSION).read_bytes())
        same = {name: found.get(name) for name in record} == record
    except (OSError, ValueError, AttributeError):
        same = False
    if not same:
        raise ConfigError(f"{folder}: exists and is not the result of this extension; give another extend.folder")
    verify_checkpoint(folder)
    return True


def run() -> NoReturn:
    run_program(main, name="tost extend", doc=__doc__ or "", positional="RUN", config=ExtendConfig)


if __name__ == "__main__":
    run()
