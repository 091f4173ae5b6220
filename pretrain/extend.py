"""Make a trained model read longer sequences, for a second phase of pre-training.

    python -m pretrain.extend runs/short extend.max_positions=8192 extend.positions=keep extend.denom_bias=keep \\
      extend.folder=models/long
    torchrun --standalone --nproc-per-node 8 -m pretrain.train X.toml train.initial_weights=models/long \\
      model.max_positions=8192 train.sequence_tokens=8192

Takes a run folder (its newest valid checkpoint), a step folder or an export; writes a model folder, and tells what has
become of what the model had learned for each position, and what that promises. There is no default where the model has
such a table. Nothing is trained here.
"""

from pathlib import Path

from tost_lm.config import run_program
from tost_lm.model.extension_config import ExtendConfig


def main(path: Path, config: ExtendConfig) -> None:
    from tost_lm.data.tokenizers import find_tokenizer, read_tokenizer
    from tost_lm.model.checkpoint import find_checkpoint
    from tost_lm.model.extension import extend

    source = find_checkpoint(path)
    for line in extend(source, config.extend, read_tokenizer(find_tokenizer(source))):
        print(line)


if __name__ == "__main__":
    run_program(main, name="pretrain.extend", doc=__doc__ or "", takes="RUN", config=ExtendConfig)
