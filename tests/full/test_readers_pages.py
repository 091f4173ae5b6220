"""The pages of docs/index.md where readers begin: a script of all blocks of each runs to its end in a fresh clone.

`make pages` runs all, `make pages PAGE=cluster` one. A script follows the quick start, in one shell, with the commands
themselves; words of the page's comments make them short. What this machine has no part of is replaced:

- installations: by this environment, with the package of the clone; `make release-check` installs the package
- `hf download`: by random models of the same forms, and a small tokenizer for that of GPT-2
- Slurm: by a job of one node with two CPU ranks, which runs at once; launches on two nodes: by one on this node
- RULER of the harness: by the one of its tasks that needs no network

Without ../shared/data, whose tokenizer a ckpt.pt of the released code needs, the block that trains one is left out.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from doc_pages import FIRST, Block, blocks_of, with_words
from doc_runs import load_recipe, write_files
from forked import CHECKOUT
from public_models import qwen3_5, write_llama, write_olmo_hybrid, write_with_images

pytestmark = pytest.mark.timeout(3600)

PAGES = {
    "one_gpu": ["docs/one_gpu.md"],
    "own_corpus": ["docs/tutorials/own_corpus.md"],
    "cluster": ["docs/cluster.md"],
    "own_mixer": ["docs/tutorials/own_mixer.md"],
    "public_models": ["docs/tutorials/evaluate_model.md", "docs/tutorials/public_hybrid.md", "docs/qwen3_5.md"],
}
"""The pages of each reader."""
OF_THIS_MACHINE = {
    "cluster": {
        "NODES=2 NODE_RANK=I RANKS_PER_NODE=8": "NODES=1 NODE_RANK=0 RANKS_PER_NODE=2",
        "--node_rank I": "--node_rank 0", "node-0": "127.0.0.1", "eth0": "lo",
        "WANDB_MODE=online": "WANDB_MODE=offline",
        "launch.sh delta_350m": "launch.sh delta_350m run.name=launched",
        "commands.train delta_350m": "commands.train delta_350m run.name=launched_by_deepspeed",
    },
    "network": {
        "--tasks ruler": "--tasks niah_single_1 --limit 2", "[4096, 8192]": "[512]",
    },
}  # fmt: skip
"""Text of blocks with a tag, and what stands for it here."""
PROGRAMS = {
    "hf": 'cp -r "../public/${2#*/}" "$4"',
    "sbatch": """
while [[ "$1" == --* ]]; do shift; done
export SLURM_SUBMIT_DIR=$PWD SLURM_JOB_ID=$$ SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 SLURM_GPUS_ON_NODE=2
SLURM_JOB_NODELIST=127.0.0.1 SLURM_CPUS_PER_TASK=1 exec bash "$@"
""",
    "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    "scontrol": 'echo "${@: -1}"',
    "scancel": ":",
}
"""Programs that stand for those of the hub and of Slurm."""


MARK, END = "== block ", "the end"


@pytest.fixture(scope="module")
def quick_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh clone in which the quick start has run; beside it, what readers bring or download."""
    home = tmp_path_factory.mktemp("readers")
    subprocess.run(["git", "clone", "--quiet", CHECKOUT, home / "clone"], check=True)
    (home / "clone/.venv").symlink_to(sys.prefix)
    (home / "programs").mkdir()
    for name, text in PROGRAMS.items():
        (home / "programs" / name).write_text(f"#!/usr/bin/env bash\nset -euo pipefail\n{text}\n")
        (home / "programs" / name).chmod(0o755)
    write_olmo_hybrid(home / "public/Olmo-Hybrid-7B")
    write_llama(home / "public/SmolLM2-135M-Instruct")
    tied = qwen3_5(max_position_embeddings=262_144, tie_word_embeddings=True)
    write_with_images(home / "public/Qwen3.5-4B", tied)
    run_script([FIRST], home / "clone")
    return home


@pytest.mark.parametrize("reader", PAGES)
def test_the_page_of_a_reader_runs_to_its_end(reader: str, quick_start: Path):
    folder = quick_start / reader
    shutil.copytree(quick_start / "clone", folder, symlinks=True)
    write_files(folder)
    (folder / "web").symlink_to("books")
    if reader == "public_models":
        (folder / "runs/mine").symlink_to("demo")
    if not (folder / "gpt2").exists():
        (folder / "gpt2").symlink_to("../public/SmolLM2-135M-Instruct")
    (folder / "configs/cluster/hostfile").write_text("127.0.0.1 slots=2\n")
    run_script(PAGES[reader], folder)


def environment_of(folder: Path) -> dict[str, str]:
    path = os.pathsep.join(map(str, [folder.parent / "programs", folder / ".venv/bin", os.environ["PATH"]]))
    return {**os.environ, "PATH": path, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}


def run_script(pages: list[str], folder: Path) -> None:
    """Run the blocks of pages as one script. Its file stays beside the folder."""
    blocks = [block for page in pages for block in blocks_of(page) if block.language in ("bash", "python", "toml")]
    script = folder.with_suffix(".sh")
    script.write_text("\n".join(["set -euo pipefail", *map(lines_of, blocks), f"echo '{MARK}{END}'"]))
    started, block = time.monotonic(), "the beginning"
    with subprocess.Popen(
        ["bash", script],
        cwd=folder,
        env=environment_of(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        printed = []
        for line in process.stdout or ():
            if line.startswith(MARK):
                block, printed = line.removeprefix(MARK).strip(), []
                print(f"{time.monotonic() - started:6.0f} s  {block}", flush=True)
            printed.append(line)
    assert (process.returncode, block) == (0, END), f"{block} failed, in {script}:\n{''.join(printed)}"


def lines_of(block: Block) -> str:
    """The lines of a block in the script."""
    text = block.text
    if block.language == "toml":
        load_recipe(block)
        text = ""
    elif block.language == "python":
        text = f"cat > {block.file or '_page.py'} << 'END_OF_PYTHON'\n{text}END_OF_PYTHON"
        text += "" if block.file else "\npython _page.py"
    elif "install" in block.tags or (block.missing and "ckpt.pt" in text):
        text = ""
    else:
        for tag in block.tags:
            for ours, here in OF_THIS_MACHINE.get(tag, {}).items():
                text = text.replace(ours, here)
        text = with_words(text, block.words)
    return f"echo '{MARK}{block.name}'\n{text}\n"
