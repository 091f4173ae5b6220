"""Runs `tost prepare shards`."""

from tost_lm.cli.prepare.shards import run

if __name__ == "__main__":
    run()
