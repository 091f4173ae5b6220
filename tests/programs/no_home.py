"""`no_home WORDS`: runs `tost WORDS` as a user without a home, whose number no system file names."""

import os
import pwd
import runpy


def unknown(uid: int) -> None:
    raise KeyError(f"getpwuid(): uid not found: {uid}")


if __name__ == "__main__":
    for name in ("HOME", "USER", "LOGNAME"):
        os.environ.pop(name, None)
    pwd.getpwuid = unknown  # pyright: ignore[reportAttributeAccessIssue]
    runpy.run_module("tost_lm.cli.main", run_name="__main__")
