"""The documentation: today's names, and a list of commands that is that of the programs."""

import ast
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).parents[2]
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]


def test_the_package_and_the_recipes_name_commands_as_today():
    files = [CHECKOUT / "Makefile", *(CHECKOUT / "tost_lm").rglob("*.py"), *(CHECKOUT / "configs").rglob("*.*")]
    modules = r"(?<![\w./])(pretrain|data_prep)\.[a-z]|-m eval\.|(?<![\w.])tost_lm\.(generate|convert|lm_eval)\b"
    assert [str(path) for path in files if path.is_file() and re.search(modules, path.read_text())] == []


def test_commands_of_the_readme_run_in_any_folder():
    blocks = re.findall(r"(?ms)^```bash\n(.*?)^```", PAGES[0].read_text())
    assert blocks
    assert [block for block in blocks if "configs/" in block] == []


def test_packages_are_installed_from_a_checkout_by_extras_that_exist():
    named: set[str] = set()
    others = [CHECKOUT / name for name in ("CHANGELOG.md", "Makefile")]
    for path in [*PAGES, *others, *(CHECKOUT / "tost_lm").rglob("*.py")]:
        text = path.read_text()
        assert not re.search(r"pip install\s+['\"]?tost", text), f"{path}: no package index has the project"
        for names in re.findall(r"(?:install_hint\(['\"]|'\.\[)([a-z0-9,-]+)", text):
            named.update(names.split(","))
    assert named >= {"train", "hf", "dev"}
    assert named <= tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()


def script(name: str) -> Any:
    """A script of docs/, imported."""
    spec = importlib.util.spec_from_file_location(name, CHECKOUT / f"docs/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_current():
    stale = [path.name for path, text in script("render").pages().items() if path.read_text() != text]
    assert stale == [], "run python docs/render.py"


def test_the_architecture_page_has_the_layers_that_imports_obey():
    """import-linter checks that the layers of pyproject.toml are those of the imports."""
    contract = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layers = [set(re.findall(r"\w+", layer.replace("tost_lm.", ""))) for layer in contract["layers"]]
    layers = [*layers[:12], set().union(*layers[12:])]
    page = (CHECKOUT / "docs/architecture.md").read_text()
    listed = re.findall(r"^\| (`(?:tost_lm\.|benchmarks)[^|]*) \|", page.split("## Import direction")[1], re.MULTILINE)
    *upper, lowest = [set(re.findall(r"`(?:tost_lm\.)?(\w+)`", row)) for row in listed]
    assert upper == layers[:12]
    assert lowest < layers[12]


@pytest.mark.parametrize("name", ["memory", "length", "positions", "traffic"])
def test_figures_have_lines_over_lengths(name: str):
    figures = script("draw").FIGURES
    lines = [line for axis in figures[name]().axes for line in axis.get_lines() if not line.get_label().startswith("_")]
    assert len(lines) >= 4
    assert min(len(line.get_xdata()) for line in lines) >= 2
    assert (CHECKOUT / f"docs/figures/{name}.png").is_file()


def test_lines_that_the_page_on_symptoms_quotes_are_those_of_the_programs():
    """Between numbers, names and ellipses, each has words that stand in a string of the package."""
    strings = "\n".join(text for path in (CHECKOUT / "tost_lm").rglob("*.py") for text in strings_of(path))
    quotes = re.findall(r"(?m)^> (.+(?:\n> .+)*)", (CHECKOUT / "docs/symptoms.md").read_text())
    assert len(quotes) >= 7
    for quote in quotes:
        pieces = re.split(
            r", or |rank \d+|[\d/.,]+ ?|…|: |\(|\)|; |, |runs/NAME|data/\S*|\bnan\b", quote.replace("\n> ", " ")
        )
        known = [
            piece for piece in map(str.strip, pieces) if len(piece.split()) >= 3 or piece in ("skipped", "straggler")
        ]
        assert [piece for piece in known if piece not in strings] == [], quote


def strings_of(path: Path) -> Iterator[str]:
    """The constant parts of the strings in a file, adjacent ones joined."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_reading_path_takes_an_hour():
    page = (CHECKOUT / "docs/architecture.md").read_text().split("updated weight\n")[1].split("\nBeside it")[0]
    total = 0
    for path, named in re.findall(r"(?m)^\d\. \[(\S+)\]\(\S+\)(?: \((.+)\))?:", page):
        lines = len((CHECKOUT / path).read_text().splitlines())
        if names := re.findall(r"`(\w+)`", named):
            nodes = {node.name: node for node in ast.parse((CHECKOUT / path).read_text()).body if hasattr(node, "name")}
            lines = sum(nodes[name].end_lineno - nodes[name].lineno + 1 for name in names)
        print(f"{lines:5,} {path} {named}")
        total += lines
    print(f"{total:5,}")
    assert 500 < total <= 1200


def test_the_readme_is_short():
    text = (CHECKOUT / "README.md").read_text().split("\n## Reference")[0]
    text = re.sub(r"(?ms)^```.*?^```$|<!--.*?-->", "", text)
    assert len(text.split()) <= 700
    assert len(re.findall(r"(?m)^\|[-| :]+\|$", text)) == 1, "one table before the reference part"
