"""Multi-query associative recall (protocol mqar@zoology): trains and tests small models of several patterns.

    tost eval recall configs/eval/mqar.toml
    tost eval recall configs/eval/mqar.toml 'recall.patterns=["T"]' model.tssa.membership=energy-mean

Prints a table of accuracy at held-out queries by pattern, and the accuracy of guessing. The result of each model is
written to runs/NAME/eval/mqar@zoology/results.json as soon as it is trained; a model that has a result is not trained
again.
"""

from pathlib import Path
from typing import NoReturn

from tost_lm.config import run_program
from tost_lm.eval.recall_settings import RecallConfig
from tost_lm.parallel.graceful_stop import terminable


def main(path: Path, config: RecallConfig) -> None:
    from tost_lm.eval.recall import measure, recall_table

    results = measure(config)
    print(f"\n{recall_table(config, results)}")


def run() -> NoReturn:
    run_program(
        terminable(main),
        name="tost eval recall",
        doc=__doc__ or "",
        positional="CONFIG",
        config=RecallConfig,
    )


if __name__ == "__main__":
    run()
