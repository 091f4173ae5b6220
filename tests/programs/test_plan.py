"""The plan as a user asks for it: a table, then what does not fit in one line; nothing is written."""

import os
import re

import pytest
from forked import CHECKOUT, Forked

from tost_lm.data.loader import context_shares
from tost_lm.data.shards import Shards

RECIPE = CHECKOUT / "configs/pretrain/owt_tost_base.toml"


def test_a_plan_that_does_not_fit_shows_its_table_and_what_does(tmp_path):
    code, out, err = Forked(
        "tost plan", RECIPE, "train.micro_batch_size=60", "cluster.memory_gb=20", cwd=tmp_path
    ).finish()
    assert code == 2
    assert "| GPU memory " in out
    assert "| duration " in out
    assert err.startswith("error: a GPU needs ")
    assert "; set train.micro_batch_size=30 (" in err
    assert len(err.splitlines()) == 1
    assert os.listdir(tmp_path) == []


def test_sequence_ranks_share_attention_evenly(tmp_path):
    words = ["model.pattern=A", "model.heads=3", "train.micro_batch_size=1", "parallel.sequence=4"]
    _, out, err = Forked("tost plan", RECIPE, *words, cwd=tmp_path).finish()
    assert err == ""
    assert re.search(
        r"^\| time per step: attention .*; 4 sequence ranks share heads and queries evenly +\|$", out, re.M
    )


def test_shards_show_how_much_of_their_document_the_labels_see(workplace):
    lengths, row = Shards.open(workplace / "out/shards").lengths("train"), r"^\| labels that see half of seq_len +\| "
    words = ["run.toml", "cluster.gpus_per_node=1", "model.max_positions=8192"]
    code, out, err = Forked("tost plan", *words, cwd=workplace).finish()
    assert (code, err) == (0, "")
    epochs = 12 * 4 * 64 / sum(map(sum, lengths))  # steps, sequences and their tokens
    assert re.search(rf"^\| epochs +\| {epochs:.2f} +\| of out/shards, ", out, re.M)
    assert re.search(rf"{row}{context_shares(lengths, 64, 'concatenated', [32])[0]:.1%} ", out, re.M)
    code, out, err = Forked(
        "tost plan", *words, "train.seq_len=8192", "train.batch_tokens=8192", cwd=workplace
    ).finish()
    assert code == 0
    assert re.search(rf"{row}0.0% .* 1,024: [0-9.]+%, 4,096: 0.0%; packing concatenated", out, re.M)
    assert err.splitlines()[-1] == (
        "warning: 0.0% of the labels see 4,096 tokens of their own document, half of train.seq_len 8192; lower "
        "train.seq_len, set data.packing=best-fit or add longer documents"
    )
    _, out, _ = Forked("tost plan", *words, "data.folder=nowhere", cwd=workplace).finish()
    assert re.search(rf"{row}unknown +\| nowhere does not exist; build it with tost prepare shards", out, re.M)


def cells(table: str) -> list[list[str]]:
    """The cells of the rows of a table, without its heading."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_a_list_of_values_is_planned_row_by_row(tmp_path):
    code, out, err = Forked(
        "tost plan", RECIPE, "parallel.sequence=1,4,3", "train.micro_batch_size=12", "cluster.memory_gb=8", cwd=tmp_path
    ).finish()
    assert (code, err) == (0, "")
    one, four, three = cells(out)
    assert one[:3] == ["1", "tensor 1 × sequence 1 × data 8; 5 micro-batches of 12 sequences", "9.87 of 8"]
    assert one[3] == "0.58"  # one reduce-scatter of float32 gradients and an all-gather of bfloat16 weights
    assert one[-1].startswith("a GPU needs 9.9 GB, more than cluster.memory_gb 8; set train.micro_batch_size=")
    assert four[:2] == ["4", "tensor 1 × sequence 4 × data 2; 20 micro-batches of 12 sequences"]
    assert four[-1] == "yes"
    assert three[:7] == ["3", "impossible", "–", "–", "–", "–", "–"]
    assert three[7].startswith("parallel.tensor 1 × parallel.sequence 3 = 3 does not divide the 8 ranks")
    single = Forked("tost plan", RECIPE, "parallel.sequence=4", "train.micro_batch_size=12", cwd=tmp_path).finish()[1]
    row = dict(line[:2] for line in cells(single))
    assert four[2].split()[0] == row["GPU memory"].split()[0]
    assert four[5] == row["tokens/s"]


def test_a_run_of_stages_has_a_row_for_each_and_a_sum(tmp_path):
    words = ("delta_1b_8k_128k", "cluster.gpu_hour_price=2")
    _, listed, err = Forked("tost plan", *words, "cluster.memory_gb=60,80", cwd=tmp_path).finish()
    assert err == ""
    rows = cells(listed)
    assert [row[0] for row in rows[:4]] == ["60, start", "60, 32k", "60, 128k", "60, all stages"]
    assert rows[1][-1].startswith("a GPU needs 64.8 GB, more than cluster.memory_gb 60; set ")
    hours = [int(row[6]) for row in rows[4:]]
    assert sum(hours[:3]) == pytest.approx(hours[3], abs=2)
    code, out, err = Forked("tost plan", *words, "cluster.memory_gb=60", cwd=tmp_path).finish()
    assert (code, err.splitlines()[-1][:28]) == (2, "error: stage 32k: a GPU need")
    assert "## Stage 128k" in out
    _, out, _ = Forked("tost plan", *words, cwd=tmp_path).finish()
    whole = out.partition("## All stages")[2]
    assert f"{hours[3]} GPU hours" in whole
    ((price,),) = (re.findall(r"\| price +\| (\d+) ", whole),)
    assert int(price) == pytest.approx(2 * hours[3], abs=1)


def test_a_plan_of_a_recipe_for_cpus_has_its_ranks_and_readable_times(tmp_path):
    code, out, err = Forked("tost plan", "demo", "train.seq_len=512", cwd=tmp_path).finish()
    assert code == 0
    assert re.search(r"^\| ranks +\| 2 +\| 1 node of 2", out, re.M)
    assert not re.search(r"\de[+-]\d+ (ms|s)", out)
    assert err == (
        "warning: train.seq_len 512 in place of 256 for 8 sequences makes the batch 2 times as large: 4,096 tokens a "
        "step; set train.batch_tokens=2048 to keep its size\n"
    )


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("parallel.sequence=1,2 parallel.tensor=1,2", "several lists of values: parallel.sequence=1,2 parallel.tensor"),
        ("parallel.sequenc=1,2", "parallel.sequenc: unknown key (did you mean parallel.sequence?)"),
        ("parallel.sequence=3,5", "parallel.tensor 1 × parallel.sequence 3 = 3 does not divide the 8 ranks"),
    ],
)
def test_lists_without_a_possible_row_end_with_one_line(tmp_path, words, problem):
    code, out, err = Forked("tost plan", RECIPE, *words.split(), cwd=tmp_path).finish()
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert problem in err


def test_a_folder_with_config_json_is_planned_as_its_recipe(tmp_path):
    """In all forms that are read; 4B in a folder of images and texts is that of the recipe."""
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    text = {
        "hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True, "max_position_embeddings": 262_144,
        "rope_parameters": rope,
    }  # fmt: skip
    kinds = {
        "qwen3_5": transformers.Qwen3_5Config(text_config=text, tie_word_embeddings=True),
        "qwen3": transformers.Qwen3Config(max_position_embeddings=40_960, num_hidden_layers=8),
        "llama": transformers.LlamaConfig(max_position_embeddings=131_072, num_hidden_layers=8),
        "olmo": transformers.OlmoHybridConfig(num_hidden_layers=8),
        "moe": transformers.Qwen3_5MoeConfig(),
    }  # fmt: skip
    printed, lengths = {}, {"qwen3": 40_960, "llama": 131_072, "olmo": 65_536}
    for name, config in kinds.items():
        config.save_pretrained(tmp_path / name)
        printed[name] = Forked("tost plan", name, cwd=tmp_path).finish()
    code, out, err = printed.pop("moe")
    assert (code, out) == (2, "")
    assert err == (
        "error: moe/config.json: unsupported model_type: 'qwen3_5_moe' (Qwen3.5 with experts); train it with ms-swift "
        "or Megatron-Bridge\n"
    )
    assert printed.pop("qwen3_5") == Forked("tost plan", "qwen3_5_4b", "stages=[]", cwd=tmp_path).finish()
    for name, length in lengths.items():
        code, out, err = printed[name]
        assert (code, err) == (0, ""), name
        ((sequence, micro_batch),) = re.findall(r"sequence (\d+) × .* micro-batches of (\d+) sequence", out)
        assert int(micro_batch) * length / int(sequence) == pytest.approx(32_768, rel=0.3)
    _, out, _ = Forked("tost plan", "llama", "cluster.gpu_hour_price=2", cwd=tmp_path).finish()
    ((hours, price),) = re.findall(r"(?s)(\d+) GPU hours.*price +\| (\d+)", out)
    assert int(price) == pytest.approx(2 * int(hours), abs=1)
    code, out, err = Forked(
        "tost plan", "llama", "train.seq_len=1024", "train.micro_batch_size=8,16", cwd=tmp_path
    ).finish()
    assert (code, err) == (0, "")
    assert [row[0] for row in cells(out)] == ["8", "16"]
