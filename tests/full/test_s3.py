"""Runs on S3 (moto's server) behind a network that drops and slows connections: killed ten times, nothing is lost."""

import random
import shutil
import signal
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from forked import LIMIT_S, Forked
from programs import curve, refusal, run, weights, write_tiny_run
from public_models import write_olmo_hybrid

s3fs: Any = pytest.importorskip("s3fs")
moto_server: Any = pytest.importorskip("moto.server")
KEY, SECRET = "plantedKeyId3f9a", "plantedSecret3f9a"
KILLS = 10


class Network(socketserver.ThreadingTCPServer):
    """Passes connections on to a server. It drops a fraction of them after some bytes, and slows down all."""

    daemon_threads, allow_reuse_address = True, True

    def __init__(self, server: tuple[str, int]) -> None:
        self.server, self.draws, self.dropped, self.drops, self.delay_s = server, random.Random(0), 0.0, 0, 0.0
        super().__init__(("127.0.0.1", 0), _Connection)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Network)
        with socket.create_connection(self.server.server) as upstream:
            threading.Thread(target=self._pass, args=(self.request, upstream), daemon=True).start()
            self._pass(upstream, self.request)

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        network = self.server
        assert isinstance(network, Network)
        limit = network.draws.randrange(1, 50_000) if network.draws.random() < network.dropped else None
        with suppress(OSError):
            while data := source.recv(1 << 14):
                time.sleep(network.delay_s)
                if limit is not None and (limit := limit - len(data)) < 0:
                    network.drops += 1
                    break
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def network() -> Iterator[Network]:
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    with Network(server.get_host_and_port()) as network:
        threading.Thread(target=network.serve_forever, daemon=True).start()
        yield network
        urlopen(Request(f"{network.url}/moto-api/reset", method="POST")).close()  # the state is that of the process
        network.shutdown()
    server.stop()


@pytest.fixture
def environment(network: Network, workplace: Path) -> dict[str, Any]:
    return {
        "AWS_ENDPOINT_URL": network.url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "eu-west-1", "TOST_CACHE": str(workplace / "cache"),
    }  # fmt: skip


@pytest.fixture
def bucket(network: Network, workplace: Path) -> Any:
    """The file system, with the shards in s3://bucket/shards."""
    options = {"key": KEY, "secret": SECRET, "endpoint_url": network.url, "client_kwargs": {"region_name": "eu-west-1"}}
    system = s3fs.S3FileSystem(**options, use_listings_cache=False, skip_instance_cache=True)
    system.mkdir("bucket")
    system.put(f"{workplace}/out/shards/", "bucket/shards/", recursive=True)
    return system


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    write_tiny_run(folder)
    return folder


@pytest.fixture
def workplace(prepared: Path, tmp_path: Path) -> Path:
    (tmp_path / "out").symlink_to(prepared / "out")
    text = (prepared / "run.toml").read_text().replace("steps = 12", "steps = 100").replace("lr = 1e-2", "lr = 1e-3")
    (tmp_path / "run.toml").write_text(text)
    return tmp_path


WORDS = ("run.toml", "data.folder=s3://bucket/shards", "checkpoint.upload=s3://bucket/runs")


def steps(bucket: Any, runs: str = "runs") -> list[str]:
    with suppress(FileNotFoundError):
        found = bucket.find(f"bucket/{runs}/tiny/checkpoints")
        return sorted(name.split("/")[-2] for name in found if name.endswith("manifest.json"))
    return []


def until(condition: Callable[[], bool], program: Forked) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, program.output()
        time.sleep(0.02)


def test_a_run_that_is_killed_ten_times_is_that_of_local_files(
    workplace: Path, network: Network, bucket: Any, environment: dict[str, Any], record_fault: Any
):
    run("tost train", "run.toml", "run.name=local", cwd=workplace)
    network.dropped, network.delay_s = 0.02, 0.002
    said, seen, draws = "", {}, random.Random(1)

    def collect() -> None:
        """Read what the run has recorded, before its folder is gone."""
        with suppress(OSError):
            for row in curve(workplace):
                assert seen.setdefault(row[0], row) == row

    for _ in range(KILLS):
        before = steps(bucket)
        started = Forked("tost train", *WORDS, cwd=workplace, **environment)
        until(lambda before=before: max(steps(bucket), default="") > max(before, default=""), started)
        time.sleep(0.3 * draws.random())
        started.send_signal(signal.SIGKILL)
        said += "".join(map(str, started.finish()[1:]))
        collect()
        shutil.rmtree(workplace / "runs/tiny")
        if draws.random() < 0.5:
            shutil.rmtree(workplace / "cache", ignore_errors=True)
    said += run("tost train", *WORDS, cwd=workplace, **environment)
    collect()
    local = curve(workplace, "local")
    assert [*seen.values()] == [row for row in local if row[0] in seen]
    assert max(seen) == 100
    assert weights(workplace, "tiny") == weights(workplace, "local")
    assert steps(bucket) == sorted(path.name for path in (workplace / "runs/tiny/checkpoints").iterdir())
    assert network.drops > 0
    files = [path for path in workplace.rglob("*") if path.is_file()]
    assert {"env.json", "log.txt", "README.md"} <= {path.name for path in files}
    texts = [said.encode(), *(path.read_bytes() for path in files), *bucket.cat(bucket.find("bucket/runs")).values()]
    assert not [text for text in texts if KEY.encode() in text or SECRET.encode() in text]
    record_fault("SIGKILL of a run on S3, without its folder afterwards", KILLS, "resumes with the same losses")


def test_a_wrong_object_and_a_lost_storage_are_one_line(
    workplace: Path, network: Network, bucket: Any, environment: dict[str, Any]
):
    shard = "bucket/shards/train_00000.bin"
    data = bucket.cat_file(shard)
    bucket.pipe_file(shard, bytes(2) + data[2:] if data[:2] != bytes(2) else b"\1\0" + data[2:])
    refused = refusal("tost train", *WORDS, cwd=workplace, **environment)
    assert refused.startswith("s3://bucket/shards/train_00000.bin: damaged between bytes 0 and ")
    assert refused.count("\n") == 0
    bucket.pipe_file(shard, data)
    run("tost train", *WORDS, "run.stop_at_step=8", cwd=workplace, **environment)
    for changed in ({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, {"AWS_ENDPOINT_URL": network.url + "0"}):
        refused = refusal("tost train", *WORDS, cwd=workplace, **{**environment, **changed})
        assert refused.startswith("s3://bucket/runs/tiny")
        assert refused.count("\n") == 0
        assert SECRET not in refused
    words = ("run.toml", "run.name=other", "data.folder=s3://nowhere/shards")
    refused = refusal("tost train", *words, cwd=workplace, **environment)
    assert refused == "s3://nowhere/shards: no such file or folder; correct the URL"


def test_a_later_launch_takes_the_url_over(workplace: Path, bucket: Any, environment: dict[str, Any]):
    words = (*WORDS, "train.steps=100000", "optim.schedule=constant")
    first = Forked("tost train", *words, cwd=workplace, **environment)
    until(lambda: bool(steps(bucket)), first)
    later = Forked("tost train", *words, "run.folder=others", cwd=workplace, **environment)
    code, _, errors = first.finish()
    assert code == 2
    assert errors.startswith("error: s3://bucket/runs/tiny: a later launch uploads there (host ")
    later.send_signal(signal.SIGTERM)
    assert later.finish()[0] == 75
    for path in (workplace / "others/tiny/checkpoints" / steps(bucket)[-1]).iterdir():
        assert bucket.cat_file(f"bucket/runs/tiny/checkpoints/{path.parent.name}/{path.name}") == path.read_bytes()


@pytest.mark.parametrize("name", ["runs[1]", "runs*", "run?1"])
def test_wildcards_in_names_are_literal(workplace: Path, bucket: Any, environment: dict[str, Any], name: str):
    for step in range(4, 13, 4):
        bucket.pipe_file(f"bucket/runs1/tiny/checkpoints/step_{step:08d}/manifest.json", b"of another run")
    others = bucket.find("bucket/runs1")
    words = ("run.toml", f"checkpoint.upload=s3://bucket/{name}", "checkpoint.keep_latest_k=2")
    run("tost train", *words, "train.steps=12", "run.stop_at_step=10", cwd=workplace, **environment)
    assert steps(bucket, name) == ["step_00000008", "step_00000010"]
    shutil.rmtree(workplace / "runs/tiny")
    said = run("tost train", *words, "train.steps=12", cwd=workplace, **environment)
    assert f"fetching s3://bucket/{name}/tiny/checkpoints/step_00000010" in said
    assert steps(bucket, name) == ["step_00000010", "step_00000012"]
    run("tost generate", f"s3://bucket/{name}/tiny", "x = ", "sample.tokens=8", cwd=workplace, **environment)
    assert bucket.find("bucket/runs1") == others


def test_models_corpora_and_tokenizers(workplace: Path, prepared: Path, bucket: Any, environment: dict[str, Any]):
    run("tost train", *WORDS, "train.steps=8", cwd=workplace, **environment)
    words = ("x = ", "sample.tokens=8")
    texts = [
        run("tost generate", model, *words, cwd=workplace, **environment).partition("\nstate after")[0]
        for model in ("runs/tiny", "s3://bucket/runs/tiny")
    ]
    assert texts[0] == texts[1]
    run("tost eval", "s3://bucket/runs/tiny", "heldout", cwd=workplace, **environment)
    write_olmo_hybrid(workplace / "olmo")
    run("tost convert", "olmo", "convert.folder=s3://bucket/models/tiny", cwd=workplace, **environment)
    assert bucket.exists("bucket/models/tiny/manifest.json")
    bucket.put_file(str(prepared / "corpus.jsonl"), "bucket/corpus/corpus.jsonl")
    run("tost prepare shards", prepared / "data.toml", "corpus.source=s3://bucket/corpus", "shards.folder=again",
        "tokenizer.path=s3://bucket/shards/tokenizer.model", "tokenizer.vocab_size=none",
        cwd=workplace, **environment)  # fmt: skip
    for path in (workplace / "out/shards").glob("*.bin"):
        assert (workplace / "again" / path.name).read_bytes() == path.read_bytes()
