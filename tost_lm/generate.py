"""Text from a trained model, token by token from its state: a prompt and a text of any length in constant memory.

    python -m tost_lm.generate runs/demo "def main(" sample.tokens=64 'sample.stop=["\\n\\n"]'
    python -m tost_lm.generate runs/demo "def main(" sample.temperature=0.8 sample.top_k=50 sample.top_p=0.95
    python -m tost_lm.generate runs/long sample.prompt_file=book.txt sample.tokens=1000000 sample.temperature=0.8
    torchrun --standalone --nproc-per-node 4 -m tost_lm.generate runs/demo parallel.tensor=2 parallel.sequence=2

A prompt that looks like a setting, x=1, is given as sample.prompt='"x=1"'.
Prints the prompt (of a long one its end) and, as it comes, what the model goes on with. The text goes to
eval/sample/text.txt beside the checkpoint's other results, its beginning, speed and size of the state to results.json.
"""

import os
import time
from pathlib import Path

from tost_lm.config import run_program
from tost_lm.evaluation.config import GenerateConfig

PROMPT_CHARACTERS, TEXT_CHARACTERS = 2_000, 20_000  # of what results.json, and the report, show


def main(path: Path, config: GenerateConfig) -> None:
    from tost_lm.evaluation.ranks import joined_ranks
    from tost_lm.evaluation.subject import SAMPLE, Subject

    started = time.monotonic()
    sample = config.sample
    with joined_ranks(config.parallel) as ranks:
        subject = Subject.find(path)

        from tost_lm.evaluation.text import TextFile, ids_of

        file = TextFile.check(sample.prompt_file, "sample.prompt_file") if sample.prompt_file else None
        identity = subject.identity(config, None) | {"prompt_sha256": file.sha256 if file else None}
        if results := ranks.reusable(subject, SAMPLE, identity):
            print(results["prompt"] + results["text"])
            if results["characters"] > len(results["text"]):
                print(f"… the whole text is {subject.results_path(SAMPLE).with_name('text.txt')}")
            return

        from tost_lm.evaluation.generation import Continuation, Sampling, state_bytes, tell
        from tost_lm.files import writing_whole
        from tost_lm.model.streaming import PIECE_TOKENS, in_pieces, read

        tokenizer = subject.tokenizer()
        model = ranks.load(subject)
        prompt_ids = ids_of(tokenizer, file.blocks() if file else [sample.prompt])
        output = read(model, in_pieces(prompt_ids, PIECE_TOKENS))
        prompt = file.end(PROMPT_CHARACTERS) if file else sample.prompt[-PROMPT_CHARACTERS:]
        print(prompt, end="", flush=True)
        sampling = Sampling(sample.temperature, sample.top_k, sample.top_p, sample.seed)
        continuation = Continuation(model, output, tokenizer, sample.tokens, sampling, sample.stop)
        began = time.monotonic()
        whole_text = subject.results_path(SAMPLE).with_name("text.txt")
        with writing_whole(whole_text) if ranks.rank == 0 else open(os.devnull, "wb") as target:
            told = tell(continuation, target, TEXT_CHARACTERS)
        seconds = time.monotonic() - began
    if ranks.rank > 0:
        return

    assert output.state is not None
    prompt_tokens, kept = output.state.positions[0], state_bytes(output.state, ranks.tensor_ranks)
    print(f"\nstate after the prompt of {prompt_tokens:,} tokens: {kept:,} bytes")
    results = {
        "prompt": prompt,
        "prompt_tokens": prompt_tokens,
        **told,
        "tokens": continuation.tokens,
        "tokens_per_second": continuation.tokens / seconds,
        "pattern": model.config.pattern,
        "window": model.config.window,
        "state_bytes_after_prompt": kept,
    }
    subject.write_results(SAMPLE, identity, started, results)


if __name__ == "__main__":
    run_program(
        main, name="tost_lm.generate", doc=__doc__ or "", takes="RUN", config=GenerateConfig, prompt="sample.prompt"
    )
