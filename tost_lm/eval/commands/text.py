"""Score of a checkpoint on any text file, read as one stream in constant memory (protocol text@bpb).

    tost eval text runs/long text.file=book.txt
    tost eval text runs/long text.file=book.txt launch.ranks=4      (four sequence ranks)

Each token is predicted from all tokens before it in the file. Memory does not grow with the text, except that softmax
layers without a window keep keys and values of all tokens. A model with learned positions reads no more tokens than it
has positions. The position is saved every 10 seconds: run the same command again to resume. Writes
eval/text@bpb/results.json: nats per token, perplexity, bits per byte, and the size of the state.
"""

import time
from pathlib import Path
from typing import NoReturn

from tost_lm.config import run_program
from tost_lm.eval.settings import ScoreTextConfig
from tost_lm.parallel.graceful_stop import terminable
from tost_lm.parallel.launch import ranks_of_launch, start_ranks
from tost_lm.progress import Progress


def main(path: Path, config: ScoreTextConfig) -> None:
    from tost_lm.inference.protocol_names import TEXT
    from tost_lm.inference.ranks import joined_ranks
    from tost_lm.inference.subject import Subject

    started = time.monotonic()
    launch = config.launch if config.launch.ranks or config.starts_sequence_ranks else None
    size = ranks_of_launch(config.parallel.model_ranks, launch)
    start_ranks("eval text", size)
    with joined_ranks(config.layout(size), graceful_stop=True) as ranks:
        subject = Subject.find(path)

        from tost_lm.inference.generation import state_bytes
        from tost_lm.inference.text import SavedPosition, TextFile, score_text

        text = TextFile.check(config.text.file, "text.file")
        identity = subject.identity(config, None) | {"text_sha256": text.sha256}
        if ranks.reusable(subject, TEXT, identity):
            return
        print(f"scoring {text.path}, {text.bytes:,} bytes", flush=True)
        model = ranks.load(subject)
        if model.config.kept_tokens is None and model.config.position_limit is None:
            print("the model keeps all tokens: memory and time per token grow with the text", flush=True)
        saved = SavedPosition(subject.results_path(TEXT).with_name("position.pt"), identity, ranks)
        with Progress("scoring", "tokens") as progress:
            report = progress if ranks.rank == 0 else None
            scores, state = score_text(model, subject.lossless_tokenizer(), text, ranks, saved, report)
    if ranks.rank > 0:
        return

    bytes_of_state = state_bytes(state, ranks.tensor_ranks)
    print(
        f"{scores['bits_per_byte']:.4f} bits/byte, {scores['nats_per_token']:.4f} nats/token, perplexity "
        f"{scores['perplexity_per_token']:,.2f} over {scores['tokens']:,} tokens, {scores['bytes']:,} bytes"
    )
    print(f"final state: {bytes_of_state:,} bytes")
    results = {
        "model": scores,
        "kept_tokens": model.config.kept_tokens,
        "state_bytes": bytes_of_state,
    }
    subject.write_results(TEXT, identity, started, results)
    saved.remove()


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
