"""Docstrings are sentences or noun phrases that can be read alone."""

import ast
from pathlib import Path

FOLDERS = [Path(__file__).parents[2] / name for name in ("tost_lm", "benchmarks", "experiments", "tests")]


def test_no_docstring_begins_in_the_middle_of_a_thought():
    texts = [
        (path, node.value.value)
        for folder in FOLDERS
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    assert len(texts) > 2000
    assert not [(str(path), text) for path, text in texts if text.startswith(("Of ", "As ", "What ", "So many "))]
