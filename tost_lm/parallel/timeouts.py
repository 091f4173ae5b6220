"""All timeouts [s] of ranks that wait for each other. They are derived from `run.timeout_seconds` so that they fire in
order. The watchdog's constants bound how late a failure is noticed. `Timeouts` has those that depend on the run.
"""

from dataclasses import dataclass

POLL_S = 0.05  # between two looks at the store while a rank waits for the line
CHECK_S = 0.25  # between two checks for lost ranks
WRITE_S = 1.0  # between two writes of a heartbeat to its file, unless a phase begins that not every step has
ANSWER_S = 1.25  # for a rank to answer: it takes CHECK_S on a machine that is not busy
READ_S = 0.15  # for the other ranks to read the line before the store ends with this process
EXIT_S = 0.35  # for the main thread to raise the line before its process is ended
FAILED_EXIT_S = 10.0  # the same while a rank that failed prints its own error, which run_program may delay by 5 s
DUMP_S = 1.0  # for the flight record: a file system may hang
GIL_S = 2.0  # the same while it holds the GIL
STORE_S = 3.0  # for a response of the store
SUSPENDED_S = STORE_S + 0.5  # a longer gap between two checks means that this process was suspended
GRACE_S = 5.0  # between the heartbeat timeout and the backends', which end a process without a line
START_S = 600.0  # minimum before the first step: imports, compilers and file systems are slow
CLOSE_S = 60.0  # maximum for loggers at the end, because a time limit may be near


@dataclass(frozen=True)
class Timeouts:
    """Time limits of a run with `run.timeout_seconds = heartbeat`."""

    heartbeat: float = 600.0
    """For a tile of a step, and for a rank to write its shard of a checkpoint."""

    @property
    def start(self) -> float:
        """For the rendezvous, and for everything before the first step."""
        return max(self.heartbeat, START_S)

    def of_phase(self, phase: str) -> float:
        """Heartbeat timeout in a phase."""
        return self.start if phase == "building" else self.heartbeat

    @property
    def collective(self) -> float:
        """For a collective: after the watchdog has named the rank that hangs."""
        return self.heartbeat + GRACE_S

    @property
    def save(self) -> float:
        """For a whole checkpoint: the other ranks wait for rank 0, which waits for their shards."""
        return 2 * self.heartbeat

    @property
    def close(self) -> float:
        """For loggers to end, while the other ranks wait."""
        return min(self.heartbeat / 2, CLOSE_S)
