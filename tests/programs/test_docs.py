"""The README and docs/ as a reader uses them: every block of code runs, every link leads somewhere.

Blocks that need a GPU, a network, a cluster or an installation are only looked at; those that take minutes run in
tests/full/test_docs_whole.py.
"""

import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_pages import (
    BLOCKS,
    LANGUAGES,
    LOOKED_AT,
    PAGES,
    QUICK,
    SHOWN,
    TAGS,
    WHOLE,
    Block,
    Pages,
    anchors,
    inline_code,
    links,
    look_at,
    look_at_command,
)
from forked import CHECKOUT


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    pages = Pages(tmp_path_factory.mktemp("pages"))
    yield pages
    pages.close()


@pytest.mark.parametrize("block", QUICK, ids=lambda block: block.name)
def test_a_block_runs(block: Block, pages: Pages):
    if block.lacks:
        pytest.skip(block.lacks)
    pages.run(block)


@pytest.mark.parametrize("block", LOOKED_AT, ids=lambda block: block.name)
def test_a_block_that_cannot_run_here_names_programs_and_settings_that_exist(block: Block):
    look_at(block)


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_text_name_programs_and_settings_that_exist(page: str):
    for code in dict.fromkeys(inline_code(page)):
        if code.startswith(("python -m ", "torchrun ")):
            look_at_command(shlex.split(code))


def test_every_block_says_what_it_is():
    assert [block.name for block in BLOCKS if block.language not in LANGUAGES] == []
    assert [block.name for block in BLOCKS if not TAGS.issuperset(block.tags)] == []
    assert [block.name for block in LOOKED_AT if block.language not in ("bash", "python")] == []


def test_every_block_is_run_here_or_in_the_full_suite_or_cannot_be():
    kinds = Counter(block.name for kind in (QUICK, WHOLE, LOOKED_AT, SHOWN) for block in kind)
    assert kinds == Counter(block.name for block in BLOCKS)
    assert "WHOLE, ids=" in (CHECKOUT / "tests/full/test_docs_whole.py").read_text()


def test_every_page_is_listed_in_the_readme():
    assert set(PAGES) - {"README.md"} <= set(links("README.md"))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str):
    for link in links(page):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (CHECKOUT / page).parent / path if path else CHECKOUT / page
        assert target.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(str(Path(target).resolve().relative_to(CHECKOUT))), f"{page}: {link}"
