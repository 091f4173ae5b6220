"""The evaluation programs on a trained run: results, files, reuse, other checkpoints, and mistakes."""

import json
import re
import shutil
from pathlib import Path

import pytest
from programs import linked, refusal, run, snapshot

import tost_lm
from tost_lm.checkpointing.format import write_checkpoint
from tost_lm.data.tokenizers import find_tokenizer, read_tokenizer
from tost_lm.files import read_rows
from tost_lm.testing import FLOAT32_REORDERED

HELDOUT, NEEDLE, SAMPLE = "eval/heldout@bpb", "eval/needle@keys", "eval/sample"
NEEDLES = ("needle", "needle.samples=2", "needle.depths=[1.0]", "needle.keys=1", "needle.lengths=[64]")
COMMANDS = [
    ("tost eval", ("heldout",)),
    ("tost eval", NEEDLES),
    ("tost generate", ("sample.tokens=20", "sample.prompt=some words")),
    ("tost report", ()),
]


@pytest.fixture(scope="module")
def evaluated(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/tiny, trained, evaluated, and with a report."""
    folder = linked(prepared, tmp_path_factory.mktemp("evaluated"))
    run("tost train", "run.toml", cwd=folder)
    for program, words in COMMANDS:
        run(program, "runs/tiny", *words, cwd=folder)
    return folder


@pytest.fixture
def copy(evaluated: Path, tmp_path: Path) -> Path:
    """The same, to change."""
    shutil.copytree(evaluated, tmp_path / "copy", symlinks=True)
    return tmp_path / "copy"


def results(folder: Path, protocol: str) -> dict:
    return json.loads((folder / protocol / "results.json").read_text())


@pytest.mark.quick
def test_results_add_up_and_files_exist(evaluated: Path):
    home = evaluated / "runs/tiny"
    heldout = results(home, HELDOUT)
    rows = read_rows(home / HELDOUT / "rows.jsonl")
    valid = json.loads((evaluated / "out/shards/manifest.json").read_text())["splits"]["valid"]
    assert len(rows) == valid["documents"] == heldout["model"]["documents"]
    assert sum(row["bytes"] for row in rows) == valid["bytes"] == heldout["model"]["bytes"]
    assert sum(row["tokens"] for row in rows) == valid["tokens"] - valid["documents"]
    assert sum(row["nats"] for row in rows) == pytest.approx(heldout["model"]["nats"], rel=1e-12)
    assert all(len(cell["depths"]) == 1 for cell in results(home, NEEDLE)["cells"])
    assert results(home, SAMPLE)["tokens"] <= 20
    page = (home / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "| training tokens | 3,072 |" in (home / "report.md").read_text()


def test_two_ranks_measure_the_same_as_one_process(copy: Path):
    texts = ["some words of a text, and a word", "a long text " * 40 + "and words", "it said words"]
    (copy / "lambada.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (copy / "wiki.test.raw").write_text(" \n = Title = \n \n" + " Some words , of a text . \n" * 20)
    test_sets = ["wikitext2@lm-eval", "wikitext2@hf-stride32", "lambada_openai@lm-eval"]
    sets = {"wikitext2": "wiki.test.raw", "lambada_openai": "lambada.jsonl"}
    words = [*test_sets, "heldout", *(f"sets.{name}={file}" for name, file in sets.items())]
    output = run("tost eval", "runs/tiny", *words, cwd=copy)
    assert output.count("wrote ") == 3
    assert "reusing runs/tiny/eval/heldout@bpb" in output
    for name in test_sets:
        assert re.search(rf"{name}: .*, not the published file \(SHA-256 [0-9a-f]{{64}}\)\n", output)
    homes = [copy / "runs/tiny" / HELDOUT, *(copy / "runs/tiny/eval" / name for name in test_sets)]
    assert [results(home, ".")["published_file"] for home in homes[1:]] == [False] * 3
    alone = [(results(home, "."), read_rows(home / "rows.jsonl")) for home in homes]
    assert [len(rows) for _, rows in alone[1:]] == [1, alone[2][0]["model"]["examples"], 3]
    assert alone[1][0]["model"]["words"] == 3 + 20 * 7 + 2  # it counts the empty strings around spaces
    assert run("tost eval", "runs/tiny", *words, cwd=copy).count("reusing ") == 4
    for home in homes:
        shutil.rmtree(home)
    others = ["parallel.sequence=2", "zero_shot.batch_tokens=100"]
    output = run("tost eval", "runs/tiny", *words, *others, cwd=copy, ranks=2)
    assert output.count("wrote ") == output.count(": scoring ") == 4
    for home, (before, rows) in zip(homes, alone, strict=True):
        after = results(home, ".")
        assert after["identity"] == before["identity"]
        assert after["model"] == pytest.approx(before["model"], rel=FLOAT32_REORDERED, abs=FLOAT32_REORDERED)
        for row, row_alone in zip(read_rows(home / "rows.jsonl"), rows, strict=True):
            assert row.pop("nats", 0) == pytest.approx(row_alone.pop("nats", 0), rel=FLOAT32_REORDERED)
            assert row == row_alone
    (copy / "lambada.jsonl").write_text('{"text": "other words"}\n')
    assert run("tost eval", "runs/tiny", *words, cwd=copy).count("wrote ") == 1


def test_bfloat16_is_another_result_near_that_of_float32(copy: Path):
    before = results(copy / "runs/tiny", HELDOUT)["model"]["nats"]
    words = ("heldout", "dtype=bfloat16", "parallel.sequence=2")
    output = run("tost eval", "runs/tiny", *words, cwd=copy, ranks=2)
    assert f"{HELDOUT}/results.json has another dtype and will be replaced\n" in output
    nats = results(copy / "runs/tiny", HELDOUT)["model"]["nats"]
    assert nats != before
    assert nats == pytest.approx(before, rel=2**-8)
    assert "reusing " in run("tost eval", "runs/tiny", "heldout", "dtype=bfloat16", cwd=copy)


def test_copies_of_the_model_share_texts_and_sequences(copy: Path):
    home = copy / "runs/tiny" / NEEDLE
    alone = results(home, ".")["cells"]
    for file in ("results.json", "lengths/00000064.json"):
        (home / file).unlink()
    sequences = ["positions.times=1", "positions.sequences=3"]
    assert "reading 3 sequences of 64 tokens\n" in run("tost eval", "runs/tiny", "positions", *sequences, cwd=copy)
    by_position = results(copy / "runs/tiny", "eval/positions")["by_position"]
    (copy / "runs/tiny/eval/positions/results.json").unlink()
    output = run("tost eval", "runs/tiny", "positions", *NEEDLES, *sequences, cwd=copy, ranks=2)
    assert results(copy / "runs/tiny", "eval/positions")["by_position"] == by_position
    assert output.count("| needle@keys | ") == len(alone) == 1
    assert "with 2 texts of a length, the 95 % interval of an accuracy is up to 9% to 91%; raise needle.s" in output
    (both,), (cell,) = results(home, ".")["cells"], alone
    same = {**cell.pop("depths")[0], **cell}
    assert {**both.pop("depths")[0], **both} == pytest.approx(same, rel=FLOAT32_REORDERED, abs=FLOAT32_REORDERED)
    output = run("tost eval", "runs/tiny", *NEEDLES, "needle.threshold=0.000001", cwd=copy)
    assert "needle@keys: reusing 1 of 1 lengths" in output
    assert results(home, ".")["effective_length"]["high"] == 64

    error = refusal("tost eval", "runs/tiny", "records@numbers", cwd=copy)
    assert "64 tokens are too few for records@numbers, whose texts without a haystack take" in error


def test_a_prompt_from_a_file_is_gone_on_with(copy: Path):
    (copy / "prompt.txt").write_text("some words")  # what it was generated from before
    before = results(copy / "runs/tiny", SAMPLE)
    output = run("tost generate", "runs/tiny", "sample.prompt_file=prompt.txt", "sample.tokens=20", cwd=copy)
    sample = results(copy / "runs/tiny", SAMPLE)
    assert (sample["prompt"], sample["text"]) == (before["prompt"], before["text"])
    assert (copy / "runs/tiny" / SAMPLE / "text.txt").read_text() == sample["text"]
    assert output.startswith(
        f"some words{sample['text']}\nstate after the prompt of {sample['prompt_tokens']} tokens: "
    )


def test_a_prompt_behind_the_run_a_stop_and_draws(copy: Path):
    whole = results(copy / "runs/tiny", SAMPLE)["text"]
    [stop, *_] = re.findall("[ -~]{2}", whole[2:])
    words = ("runs/tiny", "some words", "sample.tokens=20")
    run("tost generate", *words, f"sample.stop={json.dumps(['never', stop])}", cwd=copy)
    stopped = results(copy / "runs/tiny", SAMPLE)
    assert stopped["prompt"] == "some words"
    assert stopped["text"] == whole[: whole.index(stop)]
    assert 0 < stopped["tokens"] < 20
    run("tost generate", *words, "sample.temperature=5.0", "sample.seed=2", "sample.top_p=1e-9", cwd=copy)
    assert results(copy / "runs/tiny", SAMPLE)["text"] == whole
    run("tost report", "runs/tiny", cwd=copy)
    assert "Continuation (temperature 5, top_p 1e-09, " in (copy / "runs/tiny/report.md").read_text()


def test_the_parallel_layout_must_fit_the_ranks(evaluated: Path):
    assert refusal("tost generate", "runs/tiny", cwd=evaluated, RANK="0", WORLD_SIZE="4") == (
        "parallel.tensor 1 × parallel.sequence 1 = 1 does not fit the 4 ranks of this launch; set them so that their "
        "product is 4, or set launch.ranks to 1"
    )
    output = refusal("tost eval", "runs/tiny", "heldout", "parallel.tensor=3", cwd=evaluated, RANK="0", WORLD_SIZE="4")
    assert output.endswith("so that their product divides 4, or set launch.ranks to 3")


def test_results_are_reused_until_a_setting_changes(copy: Path):
    home = copy / "runs/tiny"
    before = snapshot(home / "eval")
    for program, words in COMMANDS[:3]:
        assert "reusing runs/tiny/eval/" in run(program, "runs/tiny", *words, cwd=copy)
    assert snapshot(home / "eval") == before
    assert "reusing" not in run("tost eval", "runs/tiny", "heldout", "heldout.max_documents=2", cwd=copy)
    assert results(home, HELDOUT)["model"]["documents"] == 2
    step = home / "checkpoints/step_00000004"
    assert f"wrote {home}/{HELDOUT}" in run("tost eval", step, "heldout", cwd=copy)
    assert results(home, HELDOUT)["identity"]["checkpoint"] == "step_00000004"
    run("tost report", "runs/tiny", cwd=copy)
    assert "not the newest checkpoint" in (home / "report.md").read_text()


@pytest.mark.quick
def test_a_flipped_bit_in_the_held_out_text_is_noticed(copy: Path, prepared: Path):
    shutil.copytree(prepared / "out/shards", copy / "shards")
    shard = copy / "shards/valid_00000.bin"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    output = refusal("tost eval", "runs/tiny", "heldout", "heldout.shards=shards", cwd=copy)
    assert "valid_00000.bin: damaged" in output


def test_linked_token_files_have_no_bits_per_byte(evaluated: Path, tmp_path: Path):
    prefix, folder = evaluated / "out/shards/train_00000", tmp_path / "linked"
    run(
        "tost prepare shards", f"corpus.source={prefix}", "corpus.valid_fraction=0.1", f"shards.folder={folder}",
        f"tokenizer.path={evaluated}/out/tokenizer.model", cwd=tmp_path,
    )  # fmt: skip
    words = (evaluated / "runs/tiny", f"heldout.shards={folder}")
    refused = refusal("tost eval", words[0], "heldout", *words[1:], cwd=tmp_path)
    assert f"heldout@bpb: {folder} links token files, so the bytes of its documents are unknown; give " in refused
    shown = run("tost prepare inspect", folder, "inspect.documents=1", cwd=tmp_path)
    assert "-  -\n" in shown


def test_an_export_has_its_own_results(copy: Path):
    step = copy / "runs/tiny/checkpoints/step_00000012"
    model = tost_lm.load(step)
    write_checkpoint(copy / "export", model.config, model.state_dict(), read_tokenizer(find_tokenizer(step)))
    assert "give heldout.shards=FOLDER" in refusal("tost eval", "export", "heldout", cwd=copy)
    run("tost eval", "export", "heldout", "heldout.shards=out/shards", "heldout.max_documents=1", cwd=copy)
    assert results(copy / "export", HELDOUT)["model"]["documents"] == 1


@pytest.mark.parametrize(
    ("program", "words", "problem"),
    [
        (
            "tost eval",
            ["nowhere", "heldout"],
            "nowhere: no such folder; give a run folder, a step folder, an export or a",
        ),
        ("tost eval", ["out", "heldout"], "out: not a checkpoint"),
        ("tost eval", ["runs/tiny"], "TASK is missing; write tost eval RUN TASK… before any section.key=value"),
        ("tost eval", ["runs/tiny", "heldout", "heldout.shards=runs"], "runs: not a shard folder"),
        ("tost eval", ["runs/tiny", "needle", "needle.lengths=[128]"], "128 exceeds the model's positions (64)"),
        ("tost eval", ["runs/tiny", "needle", "needle.depths=[2]"], "depths: input should be less than or equal to 1"),
        ("tost generate", ["runs/tiny", "a", "sample.prompt_file=b"], "give one of them"),
        ("tost generate", ["runs/tiny", "a", "sample.top_k=5"], "set it above 0, or leave them out"),
        ("tost report", ["runs/tiny", "report.folder=x"], "report.folder needs several runs: runs/tiny;"),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(evaluated: Path, program: str, words: list[str], problem: str):
    before = snapshot(evaluated / "runs")
    output = refusal(program, *words, cwd=evaluated)
    assert problem in output
    assert "\n" not in output
    assert snapshot(evaluated / "runs") == before
