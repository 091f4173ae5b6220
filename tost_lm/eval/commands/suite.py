"""All results of a model in one table: runs several evaluation programs, with published results beside their own.

    tost eval suite runs/demo configs/eval/suite_demo.toml
    tost eval suite runs/base configs/eval/suite.toml launch.ranks=8 sets.wikitext2=wiki.test.raw

Each of the sections [zero_shot], [retrieval], [context], [positions] and [text] of the file runs the program of this
name, in this order. The sections are those of the programs. All settings, test sets and texts are checked before the
first program starts. A program that fails does not stop the others; it is named at the end, and the exit code is 2.
Ctrl-C ends the program that runs. The same command resumes: each program reuses its valid results.

Writes eval/suite.md and eval/suite.html: metrics with standard errors, chance levels and controls, number of examples,
lengths, published results, and whether these are comparable, or why not.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tost_lm.config import run_program
from tost_lm.errors import ConfigError, TostError
from tost_lm.eval.suite_settings import SuiteConfig, steps_of
from tost_lm.parallel.graceful_stop import terminable

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(path: Path, config: SuiteConfig) -> None:
    from tost_lm.eval.suite import check_steps
    from tost_lm.inference.subject import HUB
    from tost_lm.report import require_packages

    if "RANK" in os.environ:
        raise ConfigError("tost eval suite starts the ranks itself; run it without a launcher, with launch.ranks=N")
    require_packages()
    steps = steps_of(config)
    subject = check_steps(path, steps)
    # Of a run in training, all programs read the same checkpoint.
    target = str(path if str(path).startswith(HUB) else subject.checkpoint)
    failed: dict[str, int] = {}
    for number, step in enumerate(steps, start=1):
        words = [*step.command.split(), target, *step.overrides]
        print(f"\n[{number}/{len(steps)}] tost {shlex.join(words)}", flush=True)
        if code := run_command(words):
            failed[step.command] = code

    from tost_lm.eval.suite import write_suite

    page = write_suite(subject, steps, failed, target)
    print(f"\nwrote {page.with_suffix('.md')} and {page.name}")
    if failed:
        lines = [
            f"tost {command}: exit code {code}; run the same command to resume" for command, code in failed.items()
        ]
        raise TostError("\n".join(lines))


def run_command(words: Sequence[str]) -> int:
    """The exit code of a command of `tost` in a process of its own.

    A signal to this process is forwarded to it, and this process exits after it.
    """
    received: list[int] = []
    children: list[subprocess.Popen[bytes]] = []

    def forward(signum: int, frame: Any) -> None:
        received.append(signum)
        for child in children:
            child.send_signal(signum)

    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    for signum, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup
            signal.signal(signum, forward)
    # A session of its own: a terminal sends Ctrl-C to all processes of this one, and the child would get it twice.
    child = subprocess.Popen([sys.executable, "-m", "tost_lm.cli.main", *words], start_new_session=True)
    children.append(child)
    if received:
        child.send_signal(received[0])
    code = child.wait()
    for signum, handler in before.items():
        signal.signal(signum, handler)
    code = code if code >= 0 else 128 - code
    if received:
        ended_by = 128 + received[0]
        if code != ended_by:  # else it has printed this line
            print("\ninterrupted; run the same command to resume", file=sys.stderr)
        sys.exit(ended_by)
    return code


def run() -> NoReturn:
    run_program(
        terminable(main),
        name="tost eval suite",
        doc=__doc__ or "",
        positional="RUN CONFIG",
        config=SuiteConfig,
    )


if __name__ == "__main__":
    run()
