"""Files of a cell's examples, so that they are generated once for all ranks, calls and models with the same tokenizer.

    FOLDER/TASK/length_00001024_depth_0.50-IDENTITY.npy     the prompts, int32 [samples, 2, T]: example and control
    FOLDER/TASK/length_00001024_depth_0.50-IDENTITY.json    questions and answers, and the XXH3-128 of the prompts

The JSON file is written last, and has a hash of its own.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tost_lm.evaluation.ranks import Ranks
from tost_lm.evaluation.retrieval.tasks import Example, Task
from tost_lm.files import atomic_writer, manifest_bytes, write_atomically, xxh3_file

POLL_S = 0.1


class StoredExamples(Sequence[tuple[Example, Example]]):
    """Examples and their controls, each read from the file when it is used."""

    def __init__(self, prompts_S2T: np.ndarray, facts: list[list[dict[str, Any]]], xxh3: str):
        self._prompts_S2T, self._facts = prompts_S2T, facts
        self.xxh3 = xxh3
        """Hex XXH3-128 of the file of prompts, which identifies the examples in results."""

    def __len__(self) -> int:
        return len(self._facts)

    def __getitem__(self, sample: Any) -> Any:
        if isinstance(sample, slice):
            return [self[i] for i in range(*sample.indices(len(self)))]
        prompts_2T, facts = self._prompts_S2T[sample].astype(np.int64), self._facts[sample]
        example, control = (
            Example(
                prompt=prompt_T,
                question=of["question"],
                references=tuple(of["references"]),
                options=tuple(map(tuple, of["options"])),
                right=of["right"],
            )
            for prompt_T, of in zip(prompts_2T, facts, strict=True)
        )
        return example, control


def stored_examples(
    folder: Path, task: Task, name: str, identity: dict[str, Any], ranks: Ranks, length: int, depth: float | None
) -> StoredExamples:
    """The examples of a cell; all ranks of a copy of the model call it.

    If no valid file has this identity, the first rank of the copy writes it, and the others wait for it.

    Args:
        name: of the cell's files, without a suffix.
        identity: everything that the examples depend on, as JSON; `samples` is their number.
    """
    key = xxhash.xxh3_64_hexdigest(json.dumps(identity, sort_keys=True).encode())
    prompts, answers = (folder / task.name / f"{name}-{key}.{suffix}" for suffix in ("npy", "json"))
    while (found := _read(prompts, answers, identity)) is None:
        if ranks.is_first_of_copy:
            _write(prompts, answers, identity, task, length, depth)
        else:
            time.sleep(POLL_S)
    return found


def _read(prompts: Path, answers: Path, identity: dict[str, Any]) -> StoredExamples | None:
    """None: the files are missing or damaged."""
    try:
        data = answers.read_bytes()
        stored = json.loads(data)
        del stored["xxh3"]
        xxh3 = stored["prompts_xxh3"]
        if data != manifest_bytes(stored) or stored["identity"] != identity or xxh3_file(prompts) != xxh3:
            return None
        return StoredExamples(np.load(prompts, mmap_mode="r"), stored["examples"], xxh3)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(
    prompts: Path, answers: Path, identity: dict[str, Any], task: Task, length: int, depth: float | None
) -> None:
    samples, facts = identity["samples"], []
    header = {"descr": "<i4", "fortran_order": False, "shape": (samples, 2, length - task.room)}
    with atomic_writer(prompts) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for sample in range(samples):
            pair = task.example(length, depth, sample)
            for example in pair:
                file.write(example.prompt.astype("<i4").tobytes())
            facts.append([{key: value for key, value in vars(example).items() if key != "prompt"} for example in pair])
    stored = {"identity": identity, "prompts_xxh3": xxh3_file(prompts), "examples": facts}
    write_atomically(answers, manifest_bytes(stored))
