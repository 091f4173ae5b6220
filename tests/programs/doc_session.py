"""Runs Python of a page in its own process: a file (`doc_session SCRIPT.py`) or many blocks (`doc_session ADDRESS`)."""

import runpy
import sys
import traceback
from multiprocessing.connection import Client


def serve(address: str) -> None:
    """Run the blocks that arrive, in one namespace, and send back a traceback or None for each."""
    namespace = {"__name__": "__main__"}
    with Client(address, "AF_UNIX") as client:
        while (block := client.recv()) is not None:
            text, name = block
            problem = None
            try:
                exec(compile(text, name, "exec"), namespace)
            except BaseException:
                problem = traceback.format_exc()
            client.send(problem)


if __name__ == "__main__":
    target = sys.argv[1]
    sys.path.insert(0, "")  # as Python does
    if target.endswith(".py"):
        runpy.run_path(target, run_name="__main__")
    else:
        serve(target)
