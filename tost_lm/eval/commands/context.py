"""Use of the context by length: copying, gain per token, many-shot mapping and answers from passages, with controls.

    tost eval context runs/demo
    tost eval context runs/long 'context.tasks=["copying@text", "context_gain@text"]' context.haystack=book.txt \\
      'context.lengths=[1024, 4096, 16384]' context.samples=200
    tost eval context runs/long 'context.tasks=["passages@own-words"]' 'context.passages=[1, 8, 64]' launch.ranks=4

    copying@text                  a passage and its repetition, by distance; control: another passage
    context_gain@text             the same tokens with and without the first half of the length; control: another text
    many_shot_seen@own-words      words and permuted labels, 8 to 4,096 shots; the word of the question is in the shots
    many_shot_unseen@own-words    the same with another word of a kind in the shots; control of both: random labels
    passages@own-words            k passages, one has the answer; control: a passage about somebody else instead

Lengths are exact in tokens, and include the answer. Each cell is written to eval/TASK/cells/ as soon as it is measured,
with all its examples. The scores of a task are in eval/TASK/results.json, with chance level and standard errors. A cell
that exists for this checkpoint, text and seed is not measured again. On more than tensor × sequence ranks, the copies
of the model share the cells.
"""

from functools import partial
from pathlib import Path
from typing import NoReturn

from tost_lm.config import run_program
from tost_lm.eval.suite_settings import ContextConfig
from tost_lm.parallel.graceful_stop import terminable
from tost_lm.parallel.launch import ranks_of_launch, start_ranks


def main(path: Path, config: ContextConfig) -> None:
    from tost_lm.eval.context import cell_lengths, make_tasks, settings_of
    from tost_lm.eval.retrieval import find_text
    from tost_lm.eval.retrieval.grid import measure_tasks
    from tost_lm.inference.hugging_face import find_subject
    from tost_lm.inference.ranks import joined_ranks

    start_ranks("eval context", ranks_of_launch(config.parallel.model_ranks, config.launch))
    with joined_ranks(config.parallel, copies=True, graceful_stop=True) as ranks:
        subject, settings = find_subject(path), config.context
        tokenizer = subject.lossless_tokenizer()
        text = partial(find_text, settings.haystack, config.heldout.shards, subject, "context")
        tasks = make_tasks(settings, tokenizer, text)
        chosen = [(task, settings_of(task, settings)) for task in tasks]
        lengths = partial(cell_lengths, settings)
        measure_tasks(ranks, subject, tokenizer, chosen, lengths, settings.samples_folder, "context")


def run() -> NoReturn:
    run_program(
        terminable(main),
        name="tost eval context",
        doc=__doc__ or "",
        positional="RUN",
        config=ContextConfig,
    )


if __name__ == "__main__":
    run()
