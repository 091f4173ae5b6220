"""Zero-shot scores of a checkpoint on test sets, and on held-out text with byte n-gram baselines (heldout@bpb).

    tost eval zero-shot runs/demo
    tost eval zero-shot runs/base 'zero_shot.protocols=["wikitext2@hf-stride1024", "lambada_openai@lm-eval"]' \\
      sets.wikitext2=wiki.test.raw sets.lambada_openai=lambada_test.jsonl
    tost eval zero-shot runs/demo launch.ranks=8 parallel.tensor=2 parallel.sequence=2

    wikitext2@hf-strideN, wikitext103@hf-strideN   perplexity per token of all rows, windows N tokens apart
    wikitext2@lm-eval, wikitext103@lm-eval         perplexity per word of each page, detokenized
    lambada_openai@lm-eval, lambada_standard@lm-eval, lambada_openai@last-token    accuracy of the last word or token
    cbt_cn@gpt2, cbt_ne@gpt2                       accuracy of the missing word among ten
    hellaswag@lm-eval, arc_easy@lm-eval, arc_challenge@lm-eval, piqa@lm-eval       accuracy of multiple choice, also
                                                   normalized by the length of the choices
    ptb@megatron                                   perplexity per word, detokenized
    owt@nanogpt                                    nats per token of nanoGPT's val.bin
    enwik8@bpb, text8@bpc                          bits per byte of the last 5,000,000
    owt@tost, wikitext2@tost, wikitext103@tost, lambada_standard@tost, ptb@tost, lambada_openai@tost, cbt_cn@tost,
    cbt_ne@tost                                    as the ToST authors' released code, comparable only with their table

Writes eval/PROTOCOL/results.json (the totals, with denominators and standard errors) and rows.jsonl (a line per
example); for heldout@bpb documents.jsonl. Existing results for the same checkpoint and file are reused. A file of
another format is rejected; the results record whether a file is the published one.
"""

import time
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tost_lm.config import run_program
from tost_lm.eval.settings import ZeroShotConfig
from tost_lm.files import write_rows
from tost_lm.parallel.graceful_stop import terminable
from tost_lm.parallel.launch import ranks_of_launch, start_ranks

if TYPE_CHECKING:
    from tost_lm.inference.generation import LanguageModel
    from tost_lm.inference.ranks import Ranks
    from tost_lm.inference.subject import Subject


def main(path: Path, config: ZeroShotConfig) -> None:
    from tost_lm.eval.data_sets import find_set_file
    from tost_lm.eval.protocols import find_protocol
    from tost_lm.eval.zero_shot import score_protocol
    from tost_lm.inference.hugging_face import find_subject
    from tost_lm.inference.protocol_names import HELDOUT
    from tost_lm.inference.ranks import joined_ranks

    names = list(dict.fromkeys(config.zero_shot.protocols))
    protocols = [find_protocol(name) for name in names if name != HELDOUT]
    finish = None
    start_ranks("eval zero-shot", ranks_of_launch(config.parallel.model_ranks, config.launch))
    with joined_ranks(config.parallel, copies=True, graceful_stop=True) as ranks:
        files = [find_set_file(protocol.data_set, config.sets) for protocol in protocols]
        subject = find_subject(path)
        load = cache(lambda: ranks.load(subject))
        for protocol, file in zip(protocols, files, strict=True):
            settings = config.zero_shot
            score_protocol(ranks, subject, load, protocol, file, settings.window_tokens, settings.batch_tokens)
        if HELDOUT in names:
            finish = score_heldout(ranks, subject, config, load)
    if finish and ranks.rank == 0:
        finish()  # on one rank


def score_heldout(
    ranks: "Ranks", subject: "Subject", config: ZeroShotConfig, load: "Callable[[], LanguageModel]"
) -> Callable[[], None] | None:
    """Score the held-out documents. Returns a function that trains the baselines and writes; None: results exist."""
    from tost_lm.inference.protocol_names import HELDOUT

    started = time.monotonic()
    shards = subject.open_shards(config.heldout.shards)
    identity = subject.identity(config.heldout, shards)
    identity["settings"] |= {"window_tokens": config.zero_shot.window_tokens}
    if ranks.reusable(subject, HELDOUT, identity):
        return None

    from tost_lm.eval.zero_shot import window_of
    from tost_lm.inference.likelihood import score_documents

    tokenizer = shards.tokenizer()
    documents = list(islice(shards.documents("valid"), config.heldout.max_documents or None))
    texts = [tokenizer.decode(tokens.tolist()).encode() for tokens in documents]
    print(f"scoring {len(documents):,} held-out documents, {sum(map(len, documents)):,} tokens", flush=True)
    model = load()
    window = window_of(model.config, config.zero_shot.window_tokens)
    sizes = [len(text) for text in texts]
    scores = score_documents(model, documents, sizes, tokenizer.eot, window, config.zero_shot.batch_tokens, ranks)

    def finish() -> None:
        from tost_lm.inference.likelihood import BASELINES, ByteNgrams, first_bytes

        totals = scores.totals()
        print("counting byte n-grams of the training text", flush=True)
        training = (tokenizer.decode(tokens.tolist()).encode() for tokens in shards.documents("train"))
        ngrams = ByteNgrams(first_bytes(training, config.heldout.baseline_bytes))
        baselines = [scores.against(name, bits) for name, bits in zip(BASELINES, ngrams.bits(texts), strict=True)]

        rows = [
            {"document": number, "tokens": int(tokens), "bytes": int(size), "nats": float(nats)}
            for number, (tokens, size, nats) in enumerate(zip(scores.tokens, scores.bytes, scores.nats, strict=True))
        ]
        write_rows(subject.results_path(HELDOUT).with_name("documents.jsonl"), rows)
        print(
            f"{totals['bits_per_byte']:.4f} ± {totals['bits_per_byte_standard_error']:.4f} bits/byte, "
            f"{totals['nats_per_token']:.4f} nats/token, perplexity {totals['perplexity_per_token']:,.2f} over "
            f"{totals['documents']} documents, {totals['bytes']:,} bytes"
        )
        for row in baselines:
            print(
                f"{row['bits_per_byte']:.4f} bits/byte  {row['name']} from {ngrams.bytes:,} bytes of the training text"
            )
        results = {
            "model": totals,
            "headline": "bits_per_byte",
            "window_tokens": window,
            "heldout_documents": shards.manifest["splits"]["valid"]["documents"],
            "baselines": baselines,
            "baseline_training_bytes": ngrams.bytes,
        }
        subject.write_results(HELDOUT, identity, started, results)

    return finish


def run() -> NoReturn:
    run_program(
        terminable(main),
        name="tost eval zero-shot",
        doc=__doc__ or "",
        positional="RUN",
        config=ZeroShotConfig,
    )


if __name__ == "__main__":
    run()
