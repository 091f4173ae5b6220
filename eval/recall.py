"""Multi-query associative recall: trains small models of several patterns on it and tests them (protocol mqar@zoology).

    python -m eval.recall configs/eval/mqar.toml
    python -m eval.recall configs/eval/mqar.toml 'recall.patterns=["T"]' model.membership=energy-mean

Prints a table of accuracy at held-out queries by pattern, beside guessing. Each trained model's result goes to
runs/NAME/eval/mqar@zoology/results.json when it is there; a model whose settings stand there is not trained again.
"""

from pathlib import Path

from tost_lm.config import run_program
from tost_lm.evaluation.recall_config import RecallConfig


def main(path: Path, config: RecallConfig) -> None:
    from tost_lm.evaluation.recall import measure, recall_table

    results = measure(config)
    print(f"\n{recall_table(config, results)}")


if __name__ == "__main__":
    run_program(main, name="eval.recall", doc=__doc__ or "", takes="CONFIG", config=RecallConfig)
