"""A token mixer of the user's own, that of docs/tutorials/own_mixer.md, in all programs, as a user runs them."""

import json
import os
import re
from pathlib import Path

import pytest
from forked import CHECKOUT, Forked
from programs import linked, losses, refusal, run

from tost_lm.config import load_config
from tost_lm.files import read_rows, sha256_bytes
from tost_lm.model.flops import parameters
from tost_lm.pretrain.plan.activations import costs_of
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.testing import FLOAT32_REORDERED

EMA = (CHECKOUT / "experiments/gated_ema.py").read_text()
MARKED = f"from pathlib import Path\nPath('marker').touch()\n{EMA}"
WORDS = ["run.toml", 'model.plugins=["gated_ema.py"]', "model.pattern=EA", "model.positions=none",
         "model.softmax.window=16"]  # fmt: skip
BOTH = ['model.plugins=["gated_ema.py", "hgrn2.py"]', "model.pattern=EHA"]
STEPS = 12


@pytest.fixture
def folder(workplace: Path) -> Path:
    (workplace / "gated_ema.py").write_text(EMA)
    (workplace / "hgrn2.py").symlink_to(CHECKOUT / "experiments/hgrn2.py")
    return workplace


@pytest.fixture(scope="module")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run `tiny` of a plugin that leaves the file `marker` when it runs."""
    folder = linked(prepared, tmp_path_factory.mktemp("trained"))
    (folder / "gated_ema.py").write_text(MARKED)
    (folder / "book.txt").write_text("the words of a short text " * 9)
    run("tost train", *WORDS, "train.steps=2", cwd=folder)
    assert (folder / "marker").exists()
    return folder


@pytest.mark.slow
def test_a_run_resumes_in_tiles_and_on_tensor_sequence_and_data_ranks(folder: Path):
    words = [*WORDS[:1], *BOTH, *WORDS[3:], "model.layers=3", "data.packing=best-fit"]
    run("tost train", *words, "run.name=whole", cwd=folder)
    words.append("run.name=parts")
    run("tost train", *words, "memory.tile_tokens=22", "run.stop_at_step=4", cwd=folder)
    ranks = ["parallel.sequence=2", "memory.tile_tokens=17"]
    said = run("tost train", *words, *ranks, "run.stop_at_step=8", cwd=folder, ranks=4)
    assert "4 ranks (tensor 1 × sequence 2 × data 2) on cpu" in said
    assert "exactly in 4 tiles of 17 tokens, resuming" in said
    run("tost train", *words, "parallel.tensor=2", cwd=folder, ranks=2)
    assert len(losses(folder, "parts")) == STEPS
    assert losses(folder, "parts") == pytest.approx(losses(folder, "whole"), rel=FLOAT32_REORDERED)
    step = folder / "runs/parts/checkpoints/step_00000012"
    assert (step / "mixer_E.py").read_text() == EMA
    assert "mixer_E.py" in json.loads((step / "manifest.json").read_text())["files"]
    assert "\n- gated-ema\n" in (step / "README.md").read_text()


def test_counts_of_a_layer(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    words = [*BOTH, "model.layers=3", "model.width=64", "model.heads=4", "train.seq_len=256", "model.max_positions=256"]
    config = load_config(PretrainConfig, Path("run.toml"), words, from_user=True)
    ema, hgrn2 = (costs_of(config, spec) for spec, _ in config.model.mixers if spec.plugin)
    assert (ema.state, hgrn2.state) == (4 * 64, 8 * 64**2 / 4)  # in float32
    # Of the scans of 256 tokens, and of 16 chunks with a state each.
    assert ema.stored == pytest.approx(64 * (3 * 4 + 4 * (6 + 8)), rel=0.02)
    assert hgrn2.stored == pytest.approx(64 * (272 + 4 + (9 + 4 * 4) * 64 / 4 / 16), rel=0.02)
    # Three projections, one out, and a rate or two.
    assert [parameters(config.model.model_copy(update={"pattern": letter})).mixers / 3 for letter in "EH"] == [
        4 * 64**2 + 64, 4 * 64**2 + 2 * 64,
    ]  # fmt: skip


def test_a_layer_without_its_kernels_is_said_once(folder: Path):
    method = '    def missing_kernels(self):\n        return "no kernels here; install them"\n\n'
    before, forward = EMA.split("    def forward(", 1)
    (folder / "gated_ema.py").write_text(f"{before}{method}    def forward({forward}")
    said = run("tost train", *WORDS, "train.steps=2", "model.layers=4", cwd=folder, ranks=2)
    assert said.count("warning: layers of this model are slow here: no kernels here; install them\n") == 1


SLEEPS = '        import os, time\n        time.sleep(0.05 * (os.environ["RANK"] == "1"))\n'


@pytest.mark.parametrize(
    "parallel",
    [
        ["parallel.sequence=2"],
        pytest.param([], marks=pytest.mark.slow),
        pytest.param(["parallel.engine=fsdp", "parallel.zero_stage=3"], marks=pytest.mark.slow),
    ],
)
def test_a_slow_rank_is_named(folder: Path, parallel: list[str]):
    forward = "    def forward(self, x_BTC, state, info):\n"
    (folder / "gated_ema.py").write_text(EMA.replace(forward, forward + SLEEPS))
    said = run("tost train", *WORDS, *parallel, "train.steps=4", cwd=folder, ranks=2)
    [(step, times, seconds)] = re.findall(
        rf"step (\d)/4  straggler: rank 1 \({os.uname().nodename}\), (\S+) times as slow .* has (\S+) s of forw", said
    )
    assert int(step) >= 3
    assert float(times) >= 1.2
    assert float(seconds) >= 2 * 0.05  # a rank has at least two micro-batches
    rows = read_rows(folder / "runs/tiny/metrics.jsonl")
    assert [row.get("slowest_rank") for row in rows] == [None, 1, 1, 1]


def test_the_plan_counts_the_plugin(folder: Path):
    said = run("tost plan", *WORDS, "launch.ranks=2", "parallel.sequence=2", cwd=folder)
    assert "0.01 M" in said
    assert refusal("tost plan", *WORDS, "model.plugin_settings.E.longst=9", cwd=folder) == (
        "command line: model.plugin_settings.E.longst: unknown key (did you mean longest?)"
    )


@pytest.mark.quick
def test_no_program_runs_a_plugin_that_is_not_named(trained: Path):
    (trained / "marker").unlink()
    step = "runs/tiny/checkpoints/step_00000002"
    expected = (
        f"mixer_E.py (SHA-256 {sha256_bytes(MARKED.encode())}), which is stored there and is not run; read it and "
    )
    others = ["run.toml", "run.name=other", "model.positions=none"]
    for program, *words in (
        ("tost generate", "runs/tiny", "the "),
        ("tost eval", step, "text", "text.file=book.txt"),
        ("tost train", *others, "train.initial_weights=runs/tiny"),
        ("tost train", *others, f"train.branch_from={step}"),
        ("tost report", "runs/tiny"),
    ):
        assert expected + f"set TOST_PLUGINS={step}/mixer_E.py" in refusal(program, *words, cwd=trained)
    assert not (trained / "marker").exists()
    said = run("tost generate", "runs/tiny", "the ", "sample.tokens=3", cwd=trained, TOST_PLUGINS=f"{step}/mixer_E.py")
    assert "the " in said
    assert (trained / "marker").exists()


def test_a_plugin_does_not_end_the_program_and_ctrl_c_does(folder: Path):
    expected = "command line: plugin gated_ema.py: SystemExit: {} (line 1); correct the file"
    for code in (0, 3):
        (folder / "gated_ema.py").write_text(f"raise SystemExit({code})")
        assert refusal("tost train", *WORDS, cwd=folder) == expected.format(code)
    (folder / "gated_ema.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    code, _, errors = Forked("tost train", *WORDS, cwd=folder).finish()
    assert (code, errors) == (130, "\ninterrupted; run the same command to resume\n")


def test_another_text_is_refused(trained: Path):
    (trained / "changed.py").write_text(MARKED + "# changed\n")
    hashes = f"SHA-256 {sha256_bytes(MARKED.encode())}, and the one that is named has "
    said = refusal("tost generate", "runs/tiny", "the ", cwd=trained, TOST_PLUGINS="changed.py")
    assert hashes in said
    words = [WORDS[0], 'model.plugins=["changed.py"]', *WORDS[2:], "train.steps=2"]
    said = refusal("tost train", *words, cwd=trained)
    assert f'model.plugin_settings.E.sha256: "{sha256_bytes(MARKED.encode())}" → ' in said
    (trained / "copy.py").write_text(MARKED)
    words[1] = 'model.plugins=["copy.py"]'
    assert "nothing is left to train" in run("tost train", *words, cwd=trained)


USE = """
import sys, torch, gated_ema, tost_lm, tost_lm.interop.hf
from transformers import AutoModelForCausalLM

model = tost_lm.load("runs/tiny")
tost_lm.interop.hf.export("runs/tiny", "theirs")
ids = torch.arange(40)[None]
expected = model(ids).logits
for other in (AutoModelForCausalLM.from_pretrained("theirs").eval(), tost_lm.load("theirs")):
    torch.testing.assert_close(other(ids).logits, expected, rtol=0, atol=0)
"""


@pytest.mark.slow
def test_python_imports_the_file_and_an_export_has_it(trained: Path):
    (trained / "use.py").write_text(USE)
    run("doc_session", "use.py", cwd=trained)
    assert (trained / "theirs/mixer_E.py").read_text() == MARKED
    card = (trained / "theirs/README.md").read_text()
    assert "import tost_lm.interop.hf  # pip install '.[hf]' in a checkout of tost_lm\n" in card
    assert "read mixer_E.py, then set TOST_PLUGINS=mixer_E.py" in card
    said = refusal("tost generate", "theirs", "the ", cwd=trained)
    assert said.startswith("theirs: its E layers need the plugin mixer_E.py (SHA-256 ")
    run("tost generate", "theirs", "the ", "sample.tokens=3", cwd=trained, TOST_PLUGINS="gated_ema.py")
