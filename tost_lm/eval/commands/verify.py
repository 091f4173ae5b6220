"""Checks the scorer: GPT-2 124M must reproduce its known metrics on WikiText-2 and LAMBADA.

    tost eval verify hub:openai-community/gpt2
    tost eval verify models/gpt2 sets.wikitext2=wiki.test.raw sets.lambada_openai=lambada_test.jsonl

Measures four protocols as `tost eval zero-shot` does, and prints each metric with its known value. The exit code is 2
if one differs by more than 0.2 %.
"""

from functools import cache
from pathlib import Path
from typing import NoReturn

from tost_lm.config import run_program
from tost_lm.errors import ConfigError, TostError
from tost_lm.eval.settings import VerifyConfig
from tost_lm.parallel.graceful_stop import terminable
from tost_lm.parallel.launch import ranks_of_launch, start_ranks


def main(path: Path, config: VerifyConfig) -> None:
    from tost_lm.eval.data_sets import find_set_file
    from tost_lm.eval.protocols import find_protocol
    from tost_lm.eval.published import GPT2_PARAMETERS, KNOWN_OF_GPT2, is_reached, read_results
    from tost_lm.eval.zero_shot import score_protocol
    from tost_lm.inference.hugging_face import find_subject
    from tost_lm.inference.ranks import joined_ranks

    start_ranks("eval verify", ranks_of_launch(config.parallel.model_ranks, config.launch))
    with joined_ranks(config.parallel, copies=True, graceful_stop=True) as ranks:
        subject = find_subject(path)
        load = cache(lambda: ranks.load(subject))
        parameters = sum(p.numel() for p in load().parameters())
        if parameters != GPT2_PARAMETERS:
            raise ConfigError(
                f"{path}: {parameters:,} parameters, but GPT-2 124M has {GPT2_PARAMETERS:,}; give GPT-2 124M"
            )
        for name in dict.fromkeys(row.protocol for row in KNOWN_OF_GPT2):
            protocol = find_protocol(name)
            file = find_set_file(protocol.data_set, config.sets)
            score_protocol(ranks, subject, load, protocol, file)
    if ranks.rank > 0:
        return

    measured = read_results(subject.home)
    off = []
    for known in KNOWN_OF_GPT2:
        value = measured[known.protocol]["model"][known.measure]
        print(f"{known.protocol} {known.measure} {value:.4f}, known value {known.value:g}")
        if not is_reached(known, value):
            off.append(f"{known.protocol}: {known.measure} is {value:.4f}, not the known value {known.value:g}")
    if off:
        raise TostError("\n".join(off))


def run() -> NoReturn:
    run_program(
        terminable(main),
        name="tost eval verify",
        doc=__doc__ or "",
        positional="RUN",
        config=VerifyConfig,
    )


if __name__ == "__main__":
    run()
