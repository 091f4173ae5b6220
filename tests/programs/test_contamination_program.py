"""`experiments.contamination` counts and shows the test set's examples that the training shards contain."""

import json
import shutil
from pathlib import Path

from programs import refusal, run

from tost_lm.data.shards import Shards

PROGRAM = "experiments.contamination"


def test_overlapping_examples_are_counted_shown_and_written(prepared: Path, tmp_path: Path):
    folder = prepared / "out/shards"
    shards = Shards.open(folder)
    text = shards.tokenizer().decode(next(shards.documents("train", first=3)).tolist())
    quoted = " ".join(text.split()[:40])
    other = " ".join(f"word{number}" for number in range(20))
    rows = [other, f"{other} {quoted}", "two words", quoted.upper()]
    (tmp_path / "lambada.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    words = (folder, "sets.lambada_openai=lambada.jsonl")
    said = run(PROGRAM, *words, "contamination.output=overlaps.jsonl", "contamination.workers=1", cwd=tmp_path)
    assert said.splitlines()[2].split() == ["lambada_openai", "4", "3", "2", "(66.67%)"]
    assert "lambada_openai example 4: 28 of 28 13-grams; the most frequent is in 1 documents, first in train" in said
    written = [json.loads(line) for line in (tmp_path / "overlaps.jsonl").read_text().splitlines()]
    assert [(row["example"], row["found"], row["ngrams"], row["document"]) for row in written] == [
        (4, 28, 28, 3),
        (2, 28, 48, 3),
    ]
    assert written[0]["text"] in quoted.lower()

    (tmp_path / "run").mkdir()
    shutil.copytree(folder, tmp_path / "copy")
    mixture = f'[data]\nmixture = {{ "{folder}" = 1.0, "{tmp_path}/copy" = 1.0 }}\n'
    (tmp_path / "run/config.toml").write_text(mixture)
    of_both = run(PROGRAM, "run", words[1], "contamination.workers=1", cwd=tmp_path)
    assert of_both.count("(66.67%)") == 2
    assert f"{tmp_path}/copy:" in of_both

    for wrong, problem in {
        (folder,): "sets: no test set; give a file, for example sets.wikitext2=FILE",
        (folder, "sets.text8=lambada.jsonl"): "sets.text8: has no separate examples; leave it out, or give wikitext2,",
        (folder, "sets.ptb=no.txt"): "sets.ptb no.txt: no such file",
        (*words, "contamination.output=overlaps.jsonl"): "contamination.output overlaps.jsonl: exists already; give",
        (tmp_path, "sets.lambada_openai=lambada.jsonl"): "not a shard folder",
    }.items():
        assert problem in refusal(PROGRAM, *wrong, cwd=tmp_path)
