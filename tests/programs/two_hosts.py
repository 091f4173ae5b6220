"""Two hosts on one machine: network namespaces joined by a veth pair, each with its own addresses and loopback."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

INTERFACE = "eth0"


class Host:
    """One of the two; what is started on it writes stdout and stderr to a file."""

    def __init__(self, namespace: str, address: str) -> None:
        self.namespace = namespace
        self.address = address

    def start(
        self, command: list[str], log: Path, *, cwd: Path, environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *command],
                cwd=cwd,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def cut_off(self) -> None:
        """From the other one, for good."""
        _ip("-n", self.namespace, "link", "set", INTERFACE, "down")

    def bytes_received(self) -> int:
        """The bytes that came over the veth pair."""
        (link,) = json.loads(_ip("-n", self.namespace, "-s", "-j", "link", "show", INTERFACE))
        return link["stats64"]["rx"]["bytes"]


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make them, and leave neither a namespace nor a process behind. Skips where the machine does not allow it."""
    if not shutil.which("ip"):
        pytest.skip("two hosts need the ip command of iproute2")
    unique = f"tost-{os.getpid()}-{secrets.token_hex(2)}"
    hosts = Host(f"{unique}-0", "10.77.0.1"), Host(f"{unique}-1", "10.77.0.2")
    first, second = (host.namespace for host in hosts)
    with contextlib.ExitStack() as cleanup:
        try:
            for namespace in (first, second):
                _ip("netns", "add", namespace)
                cleanup.callback(_remove, namespace)
            _ip("-n", first, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", second)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"two hosts need the right to make network namespaces: {error.stderr.strip()}")
        for host in hosts:
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            for interface in (INTERFACE, "lo"):
                _ip("-n", host.namespace, "link", "set", interface, "up")
        yield hosts


def _remove(namespace: str) -> None:
    for pid in _ip("netns", "pids", namespace).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _ip("netns", "delete", namespace)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
