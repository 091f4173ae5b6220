"""The harness's own tasks on local documents."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

import tost_lm.eval.lm_eval  # registers the model  # noqa: F401

TASKS = Path(lm_eval.tasks.__file__).parent


def run_local_task(
    folder: Path, task: str, documents: Sequence[dict[str, Any]], place: Path, model: str = "tost_lm", options: str = ""
) -> tuple[dict, list]:
    """Results and samples of the task in the file `task` of the harness, with the model in `folder`, read by the
    harness's class `model`."""
    place.mkdir()
    (place / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    (place / "task.yaml").write_text(
        f"include: {TASKS / task}\ntask: local\ndataset_path: json\ndataset_name: null\n"
        f"training_split: null\nvalidation_split: null\ntest_split: test\n"
        f"dataset_kwargs:\n  data_files:\n    test: {place}/documents.jsonl\n  cache_dir: {place}/cache\n"
    )
    manager = TaskManager(include_path=str(place), include_defaults=False)
    found: Any = simple_evaluate(
        model=model,
        model_args=f"pretrained={folder}{options}",
        tasks=["local"],
        task_manager=manager,
        bootstrap_iters=2,  # 0 would also leave out standard errors in closed form
        batch_size=1,
    )
    assert model != "tost_lm" or found["config"]["checkpoint"] == "export"
    return found["results"]["local"], found["samples"]["local"]
