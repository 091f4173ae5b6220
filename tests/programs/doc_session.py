"""Python of a page in a process of its own: `doc_session SCRIPT.py` runs a file, `doc_session ADDRESS` many blocks."""

import runpy
import sys
import traceback
from multiprocessing.connection import Client


def serve(address: str) -> None:
    """Run the blocks that come, in one namespace, and answer each with its traceback or None."""
    namespace = {"__name__": "__main__"}
    with Client(address, "AF_UNIX") as asker:
        while (block := asker.recv()) is not None:
            text, name = block
            problem = None
            try:
                exec(compile(text, name, "exec"), namespace)
            except BaseException:
                problem = traceback.format_exc()
            asker.send(problem)


if __name__ == "__main__":
    target = sys.argv[1]
    if target.endswith(".py"):
        sys.path.insert(0, ".")
        runpy.run_path(target, run_name="__main__")
    else:
        serve(target)
