"""Multiple choice by our tasks and by the harness's own tasks on the same files: the same scores."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from evaluations import scored
from local_tasks import TASKS, run_local_task

import tost_lm
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.inference.ranks import Ranks
from tost_lm.tasks.data_sets import DATA_SETS
from tost_lm.tasks.scored import rows_of

WORDS = [
    "the", "lines", "Page", "say", "little.", "They", "do?", "of", "this", "short", "No.", "é", "文", "it's", "(so)",
]  # fmt: skip
FILES = {
    "hellaswag": "hellaswag/hellaswag.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "piqa": "piqa/piqa.yaml",
}


def drawn(draws: random.Random, most: int = 9) -> str:
    return " ".join(draws.choices(WORDS, k=draws.randint(1, most)))


def hellaswag(draws: random.Random) -> list[dict[str, Any]]:
    rows = [
        {
            "ind": number, "activity_label": drawn(draws, 2), "ctx_a": drawn(draws), "ctx_b": drawn(draws, 3),
            "endings": [drawn(draws) for _ in range(4)], "label": str(number % 4), "split": "val",
        }
        for number in range(24)
    ]  # fmt: skip
    rows[0] |= {"ctx_a": "[header] How to do it [title] Say little. [step] They  are short.", "ctx_b": ""}
    rows[1] |= {"ctx_b": "éIT is  [x]", "endings": [" [substeps] it is. ", "No  [title] page", "a] b", "[x] lines"]}
    rows[2] |= {"activity_label": "[a", "ctx_a": "b]", "ctx_b": ""}  # the whole context is in brackets
    return rows


def arc(draws: random.Random) -> list[dict[str, Any]]:
    labels = ["ABCD", "1234", "ABC", "ABCDE"]
    return [
        {
            "id": f"Q_{number}", "question": f"{drawn(draws)}\u2028'and' \"so\"\n{{{{x}}}}",
            "choices": {"text": [drawn(draws) for _ in labels[number % 4]], "label": [*labels[number % 4]]},
            "answerKey": draws.choice(labels[number % 4]),
        }
        for number in range(24)
    ]  # fmt: skip


def piqa(draws: random.Random) -> list[dict[str, Any]]:
    rows = [
        {"goal": drawn(draws), "sol1": drawn(draws), "sol2": drawn(draws), "label": number % 2} for number in range(24)
    ]
    rows[0] |= {"goal": ""}
    rows[1] |= {"sol1": "", "label": 0}
    rows[2] |= {"sol2": "1 "}
    return rows


@pytest.mark.parametrize(
    ("data_set", "make_rows", "window"),
    [("hellaswag", hellaswag, 256), ("arc_easy", arc, 256), ("arc_challenge", arc, 48), ("piqa", piqa, 256)],
)
def test_scores_are_those_of_the_harness(
    make_export: Callable[..., Path],
    tokenizer: Tokenizer,
    tmp_path: Path,
    data_set: str,
    make_rows: Callable[[random.Random], list[dict[str, Any]]],
    window: int,
):
    folder, task = make_export(max_positions=window), scored(f"{data_set}@lm-eval")
    theirs, samples = run_local_task(folder, FILES[data_set], make_rows(random.Random(2)), tmp_path / "harness")
    examples = task.examples(tmp_path / "harness/documents.jsonl", tokenizer, window)
    cut = [request.inputs == window for example in examples for request in example.requests]
    assert any(cut) == (window < 256)
    rows = rows_of(Ranks(), tost_lm.load(folder), task, examples)
    for row, sample in zip(rows, sorted(samples, key=lambda sample: sample["doc_id"]), strict=True):
        log_likelihoods = [answers[0][0] for answers in sample["resps"]]
        np.testing.assert_allclose(row["nats"], -np.array(log_likelihoods), rtol=1e-6)
        assert (row["right"], row["normalized_right"]) == (sample["acc"], sample["acc_norm"])
    ours = task.totals(rows)
    assert any(row["chosen"] != row["normalized_chosen"] for row in rows)
    for measure, name in (("accuracy", "acc"), ("normalized_accuracy", "acc_norm")):
        assert 0 < ours[measure] < 1
        assert theirs[f"{name},none"] == pytest.approx(ours[measure], rel=1e-12)
        assert theirs[f"{name}_stderr,none"] == pytest.approx(ours[f"{measure}_standard_error"], rel=1e-12)


def test_the_sets_on_the_hub_are_those_of_the_harness():
    class Loader(yaml.SafeLoader):
        """Reads `!function` as a string."""

    Loader.add_constructor("!function", lambda loader, node: str(node.value))
    for data_set, file in FILES.items():
        task = yaml.load((TASKS / file).read_text(), Loader)
        if "include" in task:
            task = yaml.load((TASKS / file).with_name(task["include"]).read_text(), Loader) | task
        hub = DATA_SETS[data_set].hub
        assert hub
        assert (hub.name, hub.subset) == (task["dataset_path"], task.get("dataset_name"))
        assert hub.split == (task.get("test_split") or task["validation_split"])
