"""The blocks of the README and of docs/ that take minutes, after the earlier blocks of their page."""

from collections.abc import Iterator

import pytest
from doc_pages import MINUTES_S, WHOLE, Block
from doc_runs import Pages

pytestmark = pytest.mark.timeout(MINUTES_S + 100)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    pages = Pages(tmp_path_factory.mktemp("pages"))
    yield pages
    pages.close()


@pytest.mark.parametrize("block", WHOLE, ids=lambda block: block.name)
def test_a_block_runs(block: Block, pages: Pages):
    block.skip_if_something_is_missing()
    pages.run(block)
