"""Check all nodes before a long run: differences between them, missing files and disk space.

    tost preflight configs/pretrain/demo.toml
    torchrun --nnodes N … -m tost_lm.pretrain.commands.preflight CONFIG      (several nodes)

It takes the arguments of `tost train`, equal on every node. It compares versions, settings and shards, checks disk
space and the shared runs/ folder, and measures the bandwidth of an all_reduce. It prints a row for each node, then `ok`
or a line for each problem. It takes seconds and leaves no files.
"""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from tost_lm.checkpointing.run_folder import require_disk_space_for_run, step_folders, step_of
from tost_lm.command_line import run_program
from tost_lm.errors import ConfigError, install_hint
from tost_lm.parallel.launch import start_ranks
from tost_lm.pretrain.plan.memory import checkpoint_bytes
from tost_lm.pretrain.settings import PretrainConfig


def main(path: Path, config: PretrainConfig) -> None:
    if not find_spec("psutil"):
        raise ConfigError(f"psutil is not installed; {install_hint('train')}")
    from tost_lm.pretrain.checks import check_stages, ranks_to_start

    start_ranks("preflight", ranks_to_start(config))
    from tost_lm.parallel.agreement import error_of_all_ranks
    from tost_lm.parallel.preflight import check_nodes

    stages = config.in_stages()
    result = check_nodes(
        config,
        device=config.run.device,
        shards_folders=list(dict.fromkeys(folder for stage in stages for folder in stage.config.data.folders)),
        runs_folder=config.run_folder.parent,
        check_disk=lambda: require_disk_space_for_run(
            config.run_folder,
            config.checkpoint,
            int(checkpoint_bytes(config)),
            max((step_of(folder) or 0 for folder in step_folders(config.run_folder)), default=0),
            stages[-1].config.last_step,
            keeps_best=config.validation.interval is not None,
        ),
        check_data=lambda: check_stages(stages),
    )
    if os.environ.get("RANK", "0") == "0":
        print(result.table, *["ok"] * (not result.problems), sep="\n")
    if result.problems:
        raise error_of_all_ranks(result.problems)


def run() -> NoReturn:
    run_program(main, name="tost preflight", doc=__doc__ or "", positional="CONFIG", config=PretrainConfig)


if __name__ == "__main__":
    run()
