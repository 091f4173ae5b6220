"""Credentials in a URL: no program prints them."""

from pathlib import Path

import pytest
from programs import refusal_here

pytestmark = pytest.mark.quick

SECRET = "planted3f9a"


@pytest.mark.parametrize(
    "words",
    [
        ("tost train", "run.toml", "data.folder={url}"),
        ("tost train", "run.toml", 'data.mixture={{"{url}" = 1.0}}'),
        ("tost train", "run.toml", "checkpoint.upload={url}"),
        ("tost train", "run.toml", "run.folder={url}"),
        ("tost train", "run.toml", "train.steps={url}"),
        ("tost train", "run.toml", "{url}=1"),
        ("tost train", "{url}"),
        ("tost eval", "{url}", "heldout"),
        ("tost generate", "{url}", "x = "),
        ("tost convert", "{url}", "convert.folder=x"),
        ("tost convert", "runs/x", "convert.folder={url}"),
        ("tost prepare inspect", "{url}"),
    ],
)
def test_no_error_line_shows_a_secret_with_a_slash(workplace: Path, words: tuple[str, ...]):
    for url in (
        f"s3://key:ab/{SECRET}@bucket/x",
        f"s3://key:ab?{SECRET}#/c@bucket",
        f"s3://b/x?X-Amz-Signature={SECRET}",
    ):
        refused = refusal_here(*(word.format(url=url) for word in words), cwd=workplace)
        assert SECRET not in refused
