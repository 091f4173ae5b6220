"""Scratch: the scripts with the fork server's tost, python and torchrun."""
import os, subprocess, shutil
from pathlib import Path
import pytest
import test_readers_pages as t
from doc_runs import Checkout

checkouts = {}
def environment_of(folder):
    assert not (folder / ".venv").is_symlink()
    checkouts[folder] = c = Checkout(folder)
    e = dict(c._environment)
    e["PATH"] = os.pathsep.join([str(folder.parent / "programs"), e["PATH"]])
    e |= {"DS_ACCELERATOR": "cpu"}
    return e
t.environment_of = environment_of
real = Path.symlink_to
def symlink_to(self, target, *a, **k):
    if self.name == ".venv":
        self.mkdir(); return
    return real(self, target, *a, **k)
Path.symlink_to = symlink_to
quick_start = t.quick_start
PAGES = os.environ.get("ONLY", "").split() or list(t.PAGES)
pytestmark = pytest.mark.timeout(3600)
@pytest.mark.parametrize("reader", PAGES)
def test_page(reader, quick_start):
    t.test_the_page_of_a_reader_runs_to_its_end(reader, quick_start)
