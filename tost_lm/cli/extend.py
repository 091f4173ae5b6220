"""Context extension: write a trained model with more positions, for a second phase of training.

    tost extend runs/short extend.max_positions=8192 extend.positions=keep extend.denom_bias=keep \\
      extend.folder=models/long
    tost train X.toml train.initial_weights=models/long \\
      model.max_positions=8192 train.seq_len=8192

Input: a run folder (its newest valid checkpoint), a step folder or an export. Output: a model folder, and a report of
the changes to the learned tables of positions. extend.positions and extend.denom_bias have no default if the model has
such a table. This program does not train.
"""

from pathlib import Path
from typing import NoReturn

from tost_lm.config import run_program
from tost_lm.model.extension_config import ExtendConfig


def main(path: Path, config: ExtendConfig) -> None:
    from tost_lm.data.tokenizers import find_tokenizer, read_tokenizer
    from tost_lm.files import write_atomically
    from tost_lm.model.checkpoint import CARD, find_checkpoint
    from tost_lm.model.extension import extend
    from tost_lm.training.card import model_card

    source = find_checkpoint(path)
    for line in extend(source, config.extend, read_tokenizer(find_tokenizer(source))):
        print(line)
    folder = config.extend.folder
    if not (folder / CARD).exists():
        write_atomically(folder / CARD, model_card(folder, folder.name))


def run() -> NoReturn:
    run_program(main, name="tost extend", doc=__doc__ or "", positional="RUN", config=ExtendConfig)


if __name__ == "__main__":
    run()
