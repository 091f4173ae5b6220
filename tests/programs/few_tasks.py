"""`tost lm-eval` without the harness's own tasks, whose 13,000 files it reads for ten seconds at every start."""

import functools
import runpy

from lm_eval.tasks import TaskManager

if __name__ == "__main__":
    without = functools.partialmethod(TaskManager.__init__, include_defaults=False)
    TaskManager.__init__ = without  # pyright: ignore[reportAttributeAccessIssue]
    runpy.run_module("tost_lm.eval.commands.lm_eval", run_name="__main__", alter_sys=True)
