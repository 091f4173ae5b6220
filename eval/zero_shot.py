"""Held-out score of a checkpoint, beside byte n-gram baselines of the same training text (protocol heldout@bpb).

    python -m eval.zero_shot runs/demo
    torchrun --standalone --nproc-per-node 4 -m eval.zero_shot runs/demo parallel.tensor=2 parallel.sequence=2

Writes eval/heldout@bpb/results.json (nats a token, perplexity, bits a byte) and documents.jsonl (a row a document).
"""

import time
from itertools import islice
from pathlib import Path

from tost_lm.config import run_program
from tost_lm.evaluation.config import ZeroShotConfig
from tost_lm.files import write_rows


def main(path: Path, config: ZeroShotConfig) -> None:
    from tost_lm.evaluation.ranks import joined_ranks
    from tost_lm.evaluation.subject import HELDOUT, Subject

    started = time.monotonic()
    with joined_ranks(config.parallel) as ranks:
        subject = Subject.find(path)
        shards = subject.open_shards(config.heldout.shards)
        identity = subject.identity(config, shards)
        if ranks.reusable(subject, HELDOUT, identity):
            return

        from tost_lm.evaluation.scoring import score_documents

        tokenizer = shards.tokenizer()
        documents = list(islice(shards.documents("valid"), config.heldout.max_documents or None))
        texts = [tokenizer.decode(tokens.tolist()).encode() for tokens in documents]
        print(f"scoring {len(documents):,} held-out documents, {sum(map(len, documents)):,} tokens", flush=True)

        model = ranks.load(subject.checkpoint)
        scores = score_documents(
            model, documents, [len(text) for text in texts], tokenizer.eot, config.heldout.batch_sequences
        )
    if ranks.rank > 0:
        return  # what is left is for one

    from tost_lm.evaluation.ngram import NAMES, ByteNgrams, limited

    totals = scores.totals()
    print("counting byte n-grams of the training text", flush=True)
    training = (tokenizer.decode(tokens.tolist()).encode() for tokens in shards.documents("train"))
    ngrams = ByteNgrams(limited(training, config.heldout.baseline_bytes))
    baselines = [scores.against(name, bits) for name, bits in zip(NAMES, ngrams.bits(texts), strict=True)]

    rows = [
        {"document": number, "tokens": int(tokens), "bytes": int(size), "nats": float(nats)}
        for number, (tokens, size, nats) in enumerate(zip(scores.tokens, scores.bytes, scores.nats, strict=True))
    ]
    write_rows(subject.results_path(HELDOUT).with_name("documents.jsonl"), rows)
    print(
        f"{totals['bits_per_byte']:.4f} ± {totals['bits_per_byte_standard_error']:.4f} bits/byte, "
        f"{totals['nats_per_token']:.4f} nats/token over {totals['documents']} documents, {totals['bytes']:,} bytes"
    )
    for row in baselines:
        print(f"{row['bits_per_byte']:.4f} bits/byte  {row['name']} of {ngrams.bytes:,} bytes of the training text")
    results = {
        "model": totals,
        "heldout_documents": shards.manifest["splits"]["valid"]["documents"],
        "baselines": baselines,
        "baseline_training_bytes": ngrams.bytes,
    }
    subject.write_results(HELDOUT, identity, started, results)


if __name__ == "__main__":
    run_program(main, name="eval.zero_shot", doc=__doc__ or "", takes="RUN", config=ZeroShotConfig)
