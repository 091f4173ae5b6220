"""Text from a trained model, token by token from its state.

    python -m tost_lm.generate runs/demo sample.prompt="def main(" sample.tokens=64
    torchrun --standalone --nproc-per-node 4 -m tost_lm.generate runs/demo parallel.tensor=2 parallel.sequence=2

Prints the prompt and what the model goes on with; the text, speed and size of the state go to
eval/sample/results.json beside the checkpoint's other results.
"""

import time
from pathlib import Path

from tost_lm.config import run_program
from tost_lm.evaluation.config import GenerateConfig


def main(path: Path, config: GenerateConfig) -> None:
    from tost_lm.evaluation.ranks import joined_ranks
    from tost_lm.evaluation.subject import SAMPLE, Subject

    started = time.monotonic()
    sample = config.sample
    with joined_ranks(config.parallel) as ranks:
        subject = Subject.find(path)
        identity = subject.identity(config, None)
        if results := ranks.reusable(subject, SAMPLE, identity):
            print(results["prompt"] + results["text"])
            return

        import torch

        from tost_lm.data.tokenizers import find_tokenizer, read_tokenizer
        from tost_lm.evaluation.generation import generate, state_bytes

        tokenizer = read_tokenizer(find_tokenizer(subject.checkpoint))
        model = ranks.load(subject.checkpoint)
        prompt_ids = [tokenizer.eot, *tokenizer.encode(sample.prompt)]
        began = time.monotonic()
        ids = generate(
            model, prompt_ids, sample.tokens, sample.temperature, sample.seed, tokenizer.eot, tokenizer.vocab_size
        )
        seconds = time.monotonic() - began
        with torch.inference_mode():
            state = model(torch.tensor([prompt_ids], device=next(model.parameters()).device)).state
    if ranks.rank > 0:
        return

    text = tokenizer.decode(ids)
    print(sample.prompt + text)
    results = {
        "prompt": sample.prompt,
        "text": text,
        "prompt_tokens": len(prompt_ids),
        "tokens": len(ids),
        "tokens_per_second": len(ids) / seconds,
        "pattern": model.config.pattern,
        "window": model.config.window,
        "state_bytes_after_prompt": state_bytes(state, ranks.tensor_ranks),
    }
    subject.write_results(SAMPLE, identity, started, results)


if __name__ == "__main__":
    run_program(main, name="tost_lm.generate", doc=__doc__ or "", takes="RUN", config=GenerateConfig)
