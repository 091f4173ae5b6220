"""Names and texts of others are only text in Markdown, and in the page that is made of it."""

from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt

from tost_lm.markdown import code, escape, table

HOSTILE = [
    "![x](http://a/b.png)",
    "[x](javascript:alert(1))",
    "<img src=x onerror=alert(1)>",
    "</td></table><script>alert(1)</script>",
    "`![x](b.png)` `` <b>x</b>",
    "``",
    "a | b || c",
    "<http://a/b> &lt;b&gt; &#60;",
    "# **x** _y_ ~~z~~ \\",
    "[x]: http://a/b",
]


class Rendered(HTMLParser):
    """Tags and text, by a renderer that leaves HTML in the text as it is."""

    def __init__(self, markdown: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(markdown))

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_text_becomes_a_tag(text: str):
    for markdown, tags in (
        (f"## {escape(text)}", {"h2"}),
        (f"Run {escape(text)} twice.", {"p"}),
        (f"Run {code(text)} twice.", {"p", "code"}),
        (table((text,), [(text,)]), {"table", "thead", "tbody", "tr", "th", "td"}),
    ):
        rendered = Rendered(markdown)
        assert rendered.tags == tags
        assert text in rendered.text


def test_a_text_of_several_lines_stays_in_its_paragraph():
    for markdown in (escape("one\n\n# two\n"), code("one\n\n# two\n"), f"| {escape('one' + chr(10) + '| two')} |"):
        assert "\n" not in markdown


@pytest.mark.parametrize("address", ["http://a.b/c", "https://a.b", "ftp://a.b", "www.a.b/c"])
def test_an_address_is_not_linked_by_readers_that_link_bare_ones(address: str):
    """GitHub links a text that begins with one of these."""
    assert not any(beginning in escape(address) for beginning in ("http://", "https://", "ftp://", "www."))
    assert address in Rendered(escape(address)).text
