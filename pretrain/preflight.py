"""Look at all nodes before a long run: what differs between them, what is missing, which link is slow.

    torchrun --standalone --nproc-per-node 2 -m pretrain.preflight configs/pretrain/demo.toml

Give it what pretrain.train is given, on every node alike. It compares versions, settings and shards, looks for room on
the disk and one shared runs/, measures how fast the ranks reach each other, and prints a row for each node, then `ok`
or a line for each problem. It takes seconds and leaves nothing behind.
"""

import os
from importlib.util import find_spec
from pathlib import Path

from tost_lm.config import run_program
from tost_lm.errors import ConfigError
from tost_lm.training.config import PretrainConfig

BYTES_PER_PARAMETER = 12  # of a checkpoint: the weight and AdamW's two moments, in float32


def main(path: Path, config: PretrainConfig) -> None:
    if not find_spec("psutil"):
        raise ConfigError("the preflight needs psutil: pip install 'tost-lm[train]'")
    from tost_lm.parallel.agreement import error_of_all_ranks
    from tost_lm.parallel.preflight import look_at_nodes

    say = print if os.environ.get("RANK", "0") == "0" else lambda line: None
    findings = look_at_nodes(
        config,
        device=config.run.device,
        shards_folders=config.data.folders,
        runs_folder=config.run_folder.parent,
        disk_bytes=checkpoint_bytes(config),
    )
    say(findings.table)
    for line in findings.warnings:
        say(f"warning: {line}")
    if findings.problems:
        raise error_of_all_ranks(findings.problems)
    say("ok")


def checkpoint_bytes(config: PretrainConfig) -> int:
    """What the run's checkpoints will take beside those that are there: as many as are kept, and one being written."""
    import torch

    from tost_lm.model.lm import TostLM

    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in TostLM(config.model).parameters())
    there = sum(file.stat().st_size for file in (config.run_folder / "checkpoints").rglob("*") if file.is_file())
    return (config.checkpoint.keep + 1) * parameters * BYTES_PER_PARAMETER - there


if __name__ == "__main__":
    run_program(main, name="pretrain.preflight", doc=__doc__ or "", takes="CONFIG", config=PretrainConfig)
