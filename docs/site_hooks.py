"""Hooks of mkdocs: the README becomes a page, and the pages read as on a host of Git repositories."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files


def on_files(files: Files, config: Any) -> Files:
    """Add the README as readme.md."""
    readme = (Path(config["docs_dir"]).parent / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "readme.md", content=re.sub(r"\]\(docs/", "](", readme)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Remove what only the tests read, the words behind a fence's language, and links to files outside docs/."""
    markdown = re.sub(r"(?m)^<!-- tested.*-->\n", "", markdown)
    markdown = re.sub(r"(?m)^(```\w+) .*$", r"\1", markdown)
    up = "../" * page.file.src_uri.count("/") + "../"
    links = re.compile(r"\[([^\]]*)\]\((?!https?://|#)([^)]*)\)")

    def without_source_link(link: re.Match[str]) -> str:
        text, target = link.groups()
        if target.startswith(f"{up}README.md"):
            return f"[{text}]({up[3:]}readme.md{target.removeprefix(f'{up}README.md')})"
        is_outside = target.startswith(up) or (page.file.src_uri == "readme.md" and not target.endswith(PAGES))
        return f"`{text}`" if is_outside and "#" not in target else link[0]

    return links.sub(without_source_link, markdown)


PAGES = (".md", ".png")
