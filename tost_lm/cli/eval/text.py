"""Score of a checkpoint on any text file, read as one stream in constant memory (protocol text@bpb).

    tost eval text runs/long text.file=book.txt
    tost eval text runs/long text.file=book.txt parallel.sequence=2      (two ranks)

Each token is predicted from all tokens before it in the file. A model with learned positions reads no more tokens than
it has positions. Writes eval/text@bpb/results.json: nats per token, perplexity, bits per byte, and the size of the
state.
"""

import time
from pathlib import Path
from typing import NoReturn

from tost_lm.config import run_program
from tost_lm.evaluation.config import ScoreTextConfig
from tost_lm.evaluation.stop import terminable
from tost_lm.parallel.launch import ranks_of_launch, start_ranks


def main(path: Path, config: ScoreTextConfig) -> None:
    from tost_lm.evaluation.ranks import joined_ranks
    from tost_lm.evaluation.subject import TEXT, Subject

    started = time.monotonic()
    start_ranks("eval text", ranks_of_launch(config.parallel.model_ranks))
    with joined_ranks(config.parallel, graceful_stop=True) as ranks:
        subject = Subject.find(path)

        from tost_lm.evaluation.generation import state_bytes
        from tost_lm.evaluation.text import TextFile, score_text

        text = TextFile.check(config.text.file, "text.file")
        identity = subject.identity(config, None) | {"text_sha256": text.sha256}
        if ranks.reusable(subject, TEXT, identity):
            return
        print(f"scoring {text.path}, {text.bytes:,} bytes", flush=True)
        model = ranks.load(subject)
        scores, state = score_text(model, subject.tokenizer(), text, ranks)
    if ranks.rank > 0:
        return

    size = state_bytes(state, ranks.tensor_ranks)
    print(
        f"{scores['bits_per_byte']:.4f} bits/byte, {scores['nats_per_token']:.4f} nats/token, perplexity "
        f"{scores['perplexity_per_token']:,.2f} over {scores['tokens']:,} tokens, {scores['bytes']:,} bytes"
    )
    print(f"final state: {size:,} bytes")
    results = {"model": scores, "pattern": model.config.pattern, "window": model.config.window, "state_bytes": size}
    subject.write_results(TEXT, identity, started, results)


def run() -> NoReturn:
    run_program(
        terminable(main),
        name="tost eval text",
        doc=__doc__ or "",
        positional="RUN",
        config=ScoreTextConfig,
    )


if __name__ == "__main__":
    run()
