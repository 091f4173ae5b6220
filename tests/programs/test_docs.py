"""The README and docs/: every block of code runs, and every link has a target.

Blocks that need a GPU, a network, a cluster or an installation are only checked for existing programs and settings.
Blocks that take minutes, or repeat another with other settings, are slow tests.
"""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_pages import (
    BLOCKS,
    CHECKED,
    LANGUAGES,
    MINUTES_S,
    PAGES,
    QUICK,
    TAGS,
    WHOLE,
    Block,
    anchors,
    check,
    check_command,
    check_on_gpus,
    commands,
    inline_code,
    links,
    write_recipes,
)
from doc_runs import Pages
from forked import CHECKOUT

from tost_lm.errors import ConfigError
from tost_lm.parallel import launch


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    pages = Pages(tmp_path_factory.mktemp("pages"))
    yield pages
    pages.close()


SLOW = [pytest.param(block, marks=[pytest.mark.slow, pytest.mark.timeout(MINUTES_S + 100)]) for block in WHOLE]


@pytest.mark.parametrize("block", [*QUICK, *SLOW], ids=lambda block: block.name)
def test_a_block_runs(block: Block, pages: Pages):
    block.skip_if_something_is_missing()
    pages.run(block)


@pytest.mark.parametrize("block", [*CHECKED, *WHOLE], ids=lambda block: block.name)
def test_programs_and_settings_of_a_block_that_does_not_run_here_exist(block: Block):
    check(block)


@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
def test_commands_start_ranks_that_share_their_work(gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also the first command of a stranger whose machine has a GPU."""
    monkeypatch.setattr(launch, "_gpus", lambda: gpus)
    makefile = [line.removeprefix("\t$(BIN)/") for line in (CHECKOUT / "Makefile").read_text().splitlines()]
    demo = Block("Makefile", 0, "bash", (), "\n".join(line for line in makefile if line.startswith("tost ")), (), False)
    refused = []
    for page in PAGES:
        write_recipes(page, tmp_path)
    for block in [demo, *BLOCKS]:
        for command, words in commands(block.text) if block.language == "bash" else ():
            try:
                check_on_gpus(words, tmp_path)
            except ConfigError as error:
                refused.append(f"{block.name}: {command}\n{error}")
    assert refused == []


@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_environment_has_kernels_of_gpus_where_nvidia_smi_is(has_gpu: bool, tmp_path: Path):
    """What `make` would run, with the tools of a machine with a GPU and of one without."""
    for name in ("make", "sh", *(["nvidia-smi"] if has_gpu else [])):
        (tmp_path / name).symlink_to(shutil.which(name) or "/bin/true")
    making = [tmp_path / "make", "--dry-run", "--always-make", "env"]
    printed = subprocess.run(
        making, cwd=CHECKOUT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert (",gpu]'" in printed.stdout, "--target .venv/fla" in printed.stdout) == (has_gpu, not has_gpu)


@pytest.mark.parametrize("page", PAGES)
def test_programs_and_settings_of_commands_in_the_text_exist(page: str):
    for code in dict.fromkeys(inline_code(page)):
        if code.startswith(("python -m ", "torchrun ", "tost ")):
            check_command(shlex.split(code))


def test_every_block_has_a_known_language_and_known_tags():
    assert [block.name for block in BLOCKS if block.language not in LANGUAGES] == []
    assert [block.name for block in BLOCKS if not TAGS.issuperset(block.tags)] == []
    assert [block.name for block in CHECKED if block.language not in ("bash", "python")] == []


def test_every_page_is_on_the_landing_page():
    assert set(PAGES) - {"README.md", "docs/index.md"} <= {f"docs/{link}" for link in links("docs/index.md")}


def test_the_site_has_every_page_and_no_broken_link(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {page.removeprefix("docs/").replace(".md", ".html") for page in set(PAGES) - {"README.md"}}
    assert pages | {"readme.html"} <= {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.html")}
    assert '<pre class="mermaid">' in (tmp_path / "tssa.html").read_text()
    assert "<!-- tested" not in (tmp_path / "quickstart.html").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_links_have_targets(page: str):
    for link in links(page):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (CHECKOUT / page).parent / path if path else CHECKOUT / page
        assert target.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(str(Path(target).resolve().relative_to(CHECKOUT))), f"{page}: {link}"
