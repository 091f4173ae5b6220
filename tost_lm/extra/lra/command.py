"""Long-Range Arena: trains and tests encoders of several mixers with equal parameters on one task (protocol TASK@lra).

    tost eval lra configs/eval/lra_small.toml
    tost eval lra configs/eval/lra.toml data.task=text data.folder=aclImdb lra.name=text

Prints the plan of all trainings, then a table of test accuracy by mixer beside the most frequent class, a bag of tokens
and published results. The result of each model is written to runs/NAME/eval/TASK@lra/results.json as soon as it is
trained; a model that has a result is not trained again. ListOps is generated, the other tasks read the files of their
releases.
"""

from pathlib import Path
from typing import NoReturn

from tost_lm.config import run_program
from tost_lm.extra.lra.settings import LraConfig
from tost_lm.parallel.graceful_stop import terminable


def main(path: Path, config: LraConfig) -> None:
    from tost_lm.extra.lra.experiment import measure, plan
    from tost_lm.extra.lra.tables import plan_table, results_table
    from tost_lm.extra.lra.tasks import load

    task = load(config)
    print(f"{plan_table(config, task, plan(config, task))}\n", flush=True)
    results = measure(config, task)
    print(f"\n{results_table(config, task, results)}")


def run() -> NoReturn:
    run_program(
        terminable(main),
        name="tost eval lra",
        doc=__doc__ or "",
        positional="CONFIG",
        config=LraConfig,
    )


if __name__ == "__main__":
    run()
