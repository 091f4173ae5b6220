"""A rank that fails, dies or falls silent ends the run on every rank, with one line that names it."""

import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import _get_default_store

from tost_lm.errors import TostError

POLL_S = 0.25  # between two looks at the other ranks
ROLL_CALL_S = 5.0  # what a rank may take to answer
STUCK_S = 10.0  # what a rank may take to end by itself; longer than run_program holds an error back
ANSWERS = "answers"
GLOO_SAYS = ("gloo/transport/", "Application timeout caused pair closure")  # NCCL and the store raise DistError
_uses = itertools.count()  # the store keeps what an earlier use said


class LostRankError(TostError):
    """What became of the ranks that broke the run: one line, the same on every rank that is left.

    `printed_here` is true on the one rank that is to print it.
    """

    def __init__(self, line: str, printed_here: bool) -> None:
        super().__init__(line)
        self.printed_here = printed_here


@contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """To be put around all that the ranks do together, in the main thread of each, until they have parted.

    An error of this rank's own is told to the others and goes on unchanged. A rank that hangs in a collective, as with
    NCCL when a peer is gone, prints the line and exits with 2 about 10 s after the others know.

    Raises:
        LostRankError: communication broke, or the launcher sent SIGTERM because of another rank. SIGTERM is ignored
            from then on, so that the line gets out.
        SystemExit: SIGTERM came while all was well, and the program has no handler for it.
    """
    if dist.get_world_size() == 1:
        yield
        return
    watch, pid = _Watch(), os.getpid()

    def terminate(*_: object) -> None:
        with suppress(dist.DistError):
            if os.getpid() == pid and watch.sees_trouble():  # a forked worker has this handler, too
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                raise watch.finding("SIGTERM")
        sys.exit(128 + signal.SIGTERM)

    # torchrun sends SIGTERM 0.1 s after a death, when a rank that waits for a live one has not noticed yet.
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield
        watch.leave("had finished")
    except LostRankError:
        raise
    except BaseException as error:
        if _is_broken_communication(error):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise watch.finding(_first_line(error)) from None
        watch.leave_with(error)
        raise
    finally:
        watch.body_is_over.set()
        if signal.getsignal(signal.SIGTERM) is terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Watch:
    """A thread that answers for this rank, whatever its main thread waits for, and finds out which ranks are lost.

    In the store: member/RANK = host, pid and machine; callers = how many saw trouble; said/RANK = its answer, or how
    it ended; verdict = the line; printers = how many ranks were to print it.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # torchrun keeps its store when it starts the ranks again.
        prefix = f"tost_lm/failures/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_uses)}"
        # A connection of its own: a request that waits holds up the others on its connection.
        self.store = PrefixStore(prefix, _get_default_store().clone())  # pyright: ignore[reportAttributeAccessIssue]
        self.launcher_holds_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        first = self.rank - int(os.environ.get("LOCAL_RANK", self.rank))
        self.node = range(first, min(self.size, first + int(os.environ.get("LOCAL_WORLD_SIZE", self.size))))
        self.machine, self.members = _machine(), dict[int, list[str]]()
        self.store.set(f"member/{self.rank}", f"{socket.gethostname()} {os.getpid()} {self.machine}")
        self.body_is_over, self.leaving, self.cause = threading.Event(), False, ""
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def sees_trouble(self) -> bool:
        return self.store.check(["callers"]) or bool(self._dead())

    def leave(self, how: str) -> None:
        self.leaving = True
        self.body_is_over.set()
        self.thread.join()
        with suppress(dist.DistError):  # the store went with a rank that left before
            self.store.set(f"said/{self.rank}", how)

    def leave_with(self, error: BaseException) -> None:
        how = f"{'failed' if isinstance(error, Exception) else 'left'}: {_first_line(error)}"
        self.leave(how)
        with suppress(dist.DistError):
            if isinstance(error, TostError):
                self.store.add("printers", 1)  # this rank prints it
            self.store.compare_set("verdict", "", f"rank {self.rank} {how}")
            self.store.add("callers", 1)
            time.sleep(2 * POLL_S)  # the store may go with this process: let the others read first

    def finding(self, cause: str) -> LostRankError:
        self.cause = cause
        self.body_is_over.set()
        self.thread.join()
        return self.found

    def _watch(self) -> None:
        while not self.body_is_over.wait(POLL_S):
            try:
                if self.sees_trouble():
                    break
            except dist.DistError:
                if not self.launcher_holds_store:
                    break
                self.body_is_over.wait()  # the ranks can go on without it
        if self.leaving:
            return
        self.found = self._find_out()
        if not self.body_is_over.wait(STUCK_S):
            if self.found.printed_here:
                print(f"error: {self.found}", file=sys.stderr, flush=True)
            os._exit(2)

    def _find_out(self) -> LostRankError:
        try:
            self._call_the_roll()
            line = self.store.get("verdict").decode()
            printed_here = not self.leaving and self.store.add("printers", 1) == 1
        except dist.DistError:
            holder = f"the launcher on {os.environ['MASTER_ADDR']}" if self.launcher_holds_store else self._name(0)
            line = f"{holder} was lost: it held the store through which the ranks meet"
            left = [rank for rank in self.node if (rank or self.launcher_holds_store) and not self._is_dead(rank)]
            printed_here = self.rank == left[0]
        time.sleep(2 * POLL_S)
        return LostRankError(line, printed_here)

    def _call_the_roll(self) -> None:
        self.store.set(f"said/{self.rank}", ANSWERS)
        everybody = [f"said/{rank}" for rank in range(self.size)]
        calls = self.store.add("callers", 1) == 1
        deadline = time.monotonic() + ROLL_CALL_S + (0 if calls else 2)  # the caller may die, too
        while not self.store.check(["verdict"]):
            for rank in self._dead():
                self.store.set(f"said/{rank}", "was lost: its process is gone")
            if (calls and self.store.check(everybody)) or self.leaving or time.monotonic() > deadline:
                self.store.compare_set("verdict", "", self._verdict())
            time.sleep(0.05)

    def _verdict(self) -> str:
        self._meet(range(self.size))
        said = [self._said(rank) or "was lost: it does not answer" for rank in range(self.size)]
        ended = [f"{self._name(rank)} {how}" for rank, how in enumerate(said) if how != ANSWERS]
        if not ended:
            return f"communication broke, though every rank answers: {self.cause}"
        return "; ".join(ended[:8]) + (f"; and {len(ended) - 8} ranks more" if len(ended) > 8 else "")

    def _dead(self) -> list[int]:
        """The ranks of this node that ended without a word."""
        self._meet(self.node)
        return [rank for rank in self.node if self._is_dead(rank) and self._said(rank) in (None, ANSWERS)]

    def _meet(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank not in self.members and self.store.check([f"member/{rank}"]):
                self.members[rank] = self.store.get(f"member/{rank}").decode().split()

    def _said(self, rank: int) -> str | None:
        key = f"said/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else None

    def _is_dead(self, rank: int) -> bool:
        _, pid, machine = self.members.get(rank, ("", "", ""))
        return machine == self.machine and not Path("/proc", pid).exists()

    def _name(self, rank: int) -> str:
        return f"rank {rank}" + (" ({}, pid {})".format(*self.members[rank]) if rank in self.members else "")


def _machine() -> str:
    """The same for processes to which process ids mean the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"  # without /proc nothing is known of the others


def _is_broken_communication(error: BaseException | None) -> bool:
    """Whether this error, or one that it was raised from, is the process group's."""
    if not isinstance(error, Exception):
        return False
    if isinstance(error, dist.DistError) or any(text in str(error) for text in GLOO_SAYS):
        return True
    return _is_broken_communication(error.__cause__ or (None if error.__suppress_context__ else error.__context__))


def _first_line(error: BaseException) -> str:
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
