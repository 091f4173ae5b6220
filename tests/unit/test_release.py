"""A release: its version is written once and dated, and the changelog lists every name that is gone."""

import re
import subprocess
from pathlib import Path

import pytest
from public_names import CHECKOUT, exists, public_names

from tost_lm.version import VERSION

CHANGELOG = (CHECKOUT / "CHANGELOG.md").read_text()
(STORED,) = Path(__file__).parent.glob("names_*.txt")
"""The names of the last released version."""
LAST = STORED.stem.removeprefix("names_").replace("_", ".")


def is_named(name: str, listed: str) -> bool:
    """Whether a name of the table stands for a stored one: it, the end of it, or what contains it; … is any text."""
    pattern = re.escape(listed).replace("…", ".*")
    return re.search(rf"(?:^|[. ]){pattern}(?:$|[.(=])", name) is not None


def test_the_changelog_lists_every_name_that_is_gone_and_no_other():
    today, stored = public_names(), STORED.read_text().splitlines()
    gone = [name for name in stored if name not in today and not exists(name)]
    since, _, _ = CHANGELOG.partition(f"\n## {LAST} (")
    rows = re.findall(r"(?m)^\| (.*`.*) \| .* \|$", since)
    listed = [name for row in rows for name in re.findall("`(.+?)`", row)]
    assert [name for name in gone if not any(is_named(name, one) for one in listed)] == []
    assert [one for one in listed if not any(is_named(name, one) for name in gone)] == []


@pytest.mark.quick
def test_the_version_has_its_date_and_citation():
    """A section above it may be unreleased."""
    released = re.findall(r"(?m)^## (\S+) \((\d{4}-\d\d-\d\d)\)$", CHANGELOG)[0]
    citation = re.findall(r"(?m)^(version|date-released): (.+)$", (CHECKOUT / "CITATION.cff").read_text())
    assert released[0] == VERSION
    assert citation == [("version", VERSION), ("date-released", released[1])]


@pytest.mark.quick
def test_a_tag_of_this_commit_is_that_of_the_version():
    listing = ["git", "tag", "--points-at", "HEAD", "v*"]
    tags = subprocess.run(listing, cwd=CHECKOUT, capture_output=True, text=True).stdout.split()
    assert tags in ([], [f"v{VERSION}"])
