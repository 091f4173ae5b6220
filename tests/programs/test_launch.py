"""`launch.ranks`: a program starts its ranks itself, forwards signals to them and exits with their code."""

import ipaddress
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from forked import ENVIRONMENT, LIMIT_S, wait_until
from programs import run

LONG = ["train.steps=100000", "checkpoint.interval=100000", "launch.ranks=2"]


@contextmanager
def launched(*words: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tost_lm.cli.main", *words]
    with subprocess.Popen(
        command, cwd=cwd, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            for rank in psutil.Process(process.pid).children() if process.poll() is None else []:
                rank.kill()
            process.kill()


def wait_for_a_step(process: subprocess.Popen[str], folder: Path) -> None:
    rows = folder / "runs/tiny/metrics.jsonl"
    wait_until(lambda: rows.exists() and rows.stat().st_size, process)


@pytest.mark.slow
def test_no_other_machine_can_connect_to_a_launch_or_its_ranks(workplace: Path):
    with launched("train", "run.toml", *LONG, cwd=workplace) as process:
        wait_for_a_step(process, workplace)
        launcher = psutil.Process(process.pid)
        listening = [
            (connection.laddr.ip, "launcher" if of == launcher else "rank")
            for of in [launcher, *launcher.children(recursive=True)]
            for connection in of.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
    assert listening[0] == ("127.0.0.1", "launcher")  # the store
    assert [of for _, of in listening].count("launcher") == 1
    assert len(listening) >= 3  # gloo's of two ranks
    assert {ipaddress.ip_address(address).is_loopback for address, _ in listening} == {True}


@pytest.mark.slow
def test_gloo_on_one_node_does_not_follow_the_host_name(tmp_path: Path):
    addresses = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET
    ]
    outside = next((address for address in addresses if not address.startswith("127.")), None)
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', str(outside)]
    if not outside or subprocess.run([*named, "true"], check=False).returncode:
        pytest.skip("needs a network interface and the right to set a host name")
    script = (
        "import psutil\nfrom tost_lm.parallel.mesh import start_world\nstart_world('cpu')\n"
        "print({c.laddr.ip for c in psutil.Process().net_connections('tcp') if c.status == psutil.CONN_LISTEN})"
    )
    command = [*named, sys.executable, "-c", script]
    assert subprocess.check_output(command, cwd=tmp_path, env=ENVIRONMENT, text=True) == "{'127.0.0.1'}\n"


@pytest.mark.slow
def test_sigterm_saves_on_all_ranks_and_exits_with_75(workplace: Path):
    with launched("train", "run.toml", *LONG, cwd=workplace) as process:
        wait_for_a_step(process, workplace)
        process.terminate()
        _, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, errors) == (75, "")
    assert "stopped on SIGTERM with everything saved" in (workplace / "runs/tiny/log.txt").read_text()


@pytest.mark.parametrize("is_training", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranks_end_with_a_killed_launcher(workplace: Path, is_training: bool):
    """Also while they start, when nothing watches the store yet."""
    with launched("train", "run.toml", *LONG, cwd=workplace) as process:
        if is_training:
            wait_for_a_step(process, workplace)
        while len(ranks := psutil.Process(process.pid).children()) < 2:
            time.sleep(0.01)
        process.kill()
        assert not psutil.wait_procs(ranks, timeout=LIMIT_S)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["train", "run.toml", "launch.ranks=2", "data.folder=nowhere"],
        ["eval", "nowhere", "text", "text.file=run.toml", "parallel.sequence=2"],
    ],
)
def test_an_error_of_all_ranks_is_printed_once(workplace: Path, words: list[str]):
    with launched(*words, cwd=workplace) as process:
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2
    assert re.fullmatch(r"error: nowhere.*\n", errors)


IMPORTED = """
import sys
from pathlib import Path
from tost_lm.pretrain.loggers import Logger, register

class Modules(Logger):
    def __init__(self, launch, settings):
        pass

    def log(self, row):
        pass

    def close(self):
        Path("modules").write_text(" ".join(sys.modules))

register(Modules)
"""


@pytest.mark.parametrize(("engine", "libraries"), [("deepspeed", {"torch", "deepspeed"}), ("fsdp", {"torch"})])
def test_sequence_ranks_import_their_engine_alone(workplace: Path, engine: str, libraries: set[str]):
    (workplace / "imported.py").write_text(IMPORTED)
    words = ["train", "run.toml", "train.steps=1", "launch.ranks=2", "parallel.sequence=2", f"parallel.engine={engine}"]
    with launched(*words, 'run.loggers=["imported.py"]', cwd=workplace) as process:
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    imported = {"torch", "deepspeed", "megatron", "transformers"} & {*(workplace / "modules").read_text().split()}
    assert imported == libraries


STAGES = 'stages=[{name="long", from_step=1}]'
TRAP = "from pathlib import Path\nPath('ran').open('a').write(__name__)\nraise ImportError\n"


@pytest.mark.parametrize(
    "words",
    [
        ["prepare", "shards", "data.toml", "shards.folder=again", "shards.workers=2"],
        pytest.param(["train", "run.toml", "train.steps=2", STAGES], marks=pytest.mark.slow),
        pytest.param(["train", "run.toml", "train.steps=2", STAGES, "launch.ranks=2"], marks=pytest.mark.slow),
        pytest.param(["eval", "runs/tiny", "heldout", "launch.ranks=2"], marks=pytest.mark.slow),
    ],
)
def test_no_module_of_the_working_folder_runs(prepared: Path, workplace: Path, words: list[str]):
    """Neither in the command, nor in its ranks, workers and later stages."""
    for name in ("data.toml", "corpus.jsonl"):
        (workplace / name).symlink_to(prepared / name)
    if words[0] == "eval":
        run("tost train", "run.toml", "train.steps=2", cwd=workplace)
    for name in ("random", "secrets", "tempfile", "socket", "pickle", "psutil", "tomllib"):
        (workplace / f"{name}.py").write_text(TRAP)
    script = workplace / "bin/tost"  # as pip installs it
    script.parent.mkdir()
    script.write_text('from tost_lm.cli.main import main\nif __name__ == "__main__":\n    main()\n')
    done = subprocess.run(
        [sys.executable, str(script), *words], cwd=workplace, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not (workplace / "ran").exists(), (workplace / "ran").read_text()
