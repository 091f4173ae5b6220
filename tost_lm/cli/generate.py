"""Generate text from a trained model, token by token from its state.

    tost generate runs/demo "def main(" sample.tokens=64 'sample.stop=["\\n\\n"]'
    tost generate runs/demo "def main(" sample.temperature=0.8 sample.top_k=50 sample.top_p=0.95
    tost generate runs/long sample.prompt_file=book.txt sample.tokens=1000000 sample.temperature=0.8
    tost generate runs/demo parallel.tensor=2 parallel.sequence=2      (four ranks)

Give a prompt that looks like a setting, x=1, as sample.prompt='"x=1"'. The prompt follows an end-of-text token, as
documents do in training, and may be empty. Prints the prompt (the end of a long one) and streams the generated text. A
terminal gets control characters as escapes.
Writes the text to eval/sample/text.txt beside the checkpoint's other results, and its beginning, the speed and the size
of the state to results.json. Memory does not grow with the text, except for softmax layers without a window.
"""

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tost_lm.command_line import run_program
from tost_lm.inference.settings import GenerateConfig
from tost_lm.parallel.launch import ranks_of_launch, start_ranks
from tost_lm.progress import ProgressBar

if TYPE_CHECKING:
    from torch import Tensor

PROMPT_CHARACTERS, TEXT_CHARACTERS = 2_000, 20_000  # kept in results.json, for the report


def main(path: Path, config: GenerateConfig) -> None:
    from tost_lm.inference.evaluated import SAMPLE
    from tost_lm.inference.hugging_face import find_evaluated
    from tost_lm.inference.ranks import joined_ranks

    started = time.monotonic()
    sample = config.sample
    start_ranks("generate", ranks_of_launch(config.parallel.model_ranks))
    with joined_ranks(config.parallel) as ranks:
        evaluated = find_evaluated(path)

        from tost_lm.inference.generation import Continuation, Sampling, print_stream, print_text, state_bytes
        from tost_lm.inference.text_file import TextFile, ids_of

        file = TextFile.check(sample.prompt_file, "sample.prompt_file") if sample.prompt_file else None
        identity = evaluated.identity(config, None) | {"prompt_sha256": file.sha256 if file else None}
        if results := ranks.reusable(evaluated, SAMPLE, identity):
            print_text(results["prompt"] + results["text"] + "\n")
            if results["characters"] > len(results["text"]):
                print(f"… full text: {evaluated.results_path(SAMPLE).with_name('text.txt')}")
            return

        from tost_lm.files import atomic_writer
        from tost_lm.model.streaming import TILE_TOKENS, in_tiles, prefill

        tokenizer = evaluated.tokenizer()
        model = ranks.load(evaluated)
        prompt_ids = ids_of(tokenizer, file.blocks() if file else [sample.prompt])
        tiles = in_tiles(prompt_ids, TILE_TOKENS)
        with ProgressBar("reading the prompt", "tokens") as progress:
            output = prefill(model, tiles if ranks.rank else _reported(tiles, progress))
        assert output.state is not None
        prompt_tokens, bytes_of_state = output.state.positions[0], state_bytes(output.state, ranks.tensor_ranks)
        prompt = file.end(PROMPT_CHARACTERS) if file else sample.prompt[-PROMPT_CHARACTERS:]
        sampling = Sampling(sample.temperature, sample.top_k, sample.top_p, sample.seed)
        continuation = Continuation(model, output, tokenizer, sample.tokens, sampling, sample.stop)
        del output  # decoding has a copy of its state
        print_text(prompt)
        generation_started = time.monotonic()
        text_path = evaluated.results_path(SAMPLE).with_name("text.txt")
        with atomic_writer(text_path) if ranks.rank == 0 else open(os.devnull, "wb") as target:
            generated = print_stream(continuation, target, TEXT_CHARACTERS)
        seconds = time.monotonic() - generation_started
    if ranks.rank > 0:
        return

    print(f"\nstate after the prompt of {prompt_tokens:,} tokens: {bytes_of_state:,} bytes")
    results = {
        "prompt": prompt,
        "prompt_tokens": prompt_tokens,
        **generated,
        "tokens": continuation.tokens,
        "tokens_per_second": continuation.tokens / seconds,
        "kept_tokens": model.config.kept_tokens,
        "state_bytes_after_prompt": bytes_of_state,
    }
    evaluated.write_results(SAMPLE, identity, started, results)


def _reported(tiles: "Iterable[Tensor]", progress: ProgressBar) -> "Iterator[Tensor]":
    read = 0
    for tile in tiles:
        progress(read, None)
        yield tile
        read += tile.shape[1]


def run() -> NoReturn:
    run_program(
        main,
        name="tost generate",
        doc=__doc__ or "",
        positional="RUN",
        config=GenerateConfig,
        prompt="sample.prompt",
        takes_urls=True,
    )


if __name__ == "__main__":
    run()
