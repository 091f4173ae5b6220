"""Private names of torch and DeepSpeed are used in one module each, which tests with other versions can cover."""

import ast
from collections.abc import Iterator
from pathlib import Path

LIBRARY = Path(__file__).parents[2] / "tost_lm"
PACKAGES = ("torch", "deepspeed", "megatron")
TORCH, DEEPSPEED = LIBRARY / "torch_internals.py", LIBRARY / "parallel/deepspeed.py"
OF_THE_LANGUAGE = {"_asdict", "_replace", "_fields", "_exit"}
OF_DEEPSPEED = {"fp32_partitioned_groups_flat", "__compatible_ops__", "ds_id", "ds_tensor", "cdb"}
"""Undocumented, without an underscore."""
OF_TRANSFORMERS = {"_prepare_cache_for_generation"}


def private(name: str) -> bool:
    return name in OF_DEEPSPEED or (name.startswith("_") and not name.endswith("__"))


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that a module defines: functions, classes, annotated variables, attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def uses(path: Path) -> list[str]:
    """Private names in a module that it does not define."""
    tree = ast.parse(path.read_text())
    ours = {*defined(tree), *OF_THE_LANGUAGE, *OF_TRANSFORMERS}
    found = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGES):
            found += [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            found += [part for alias in node.names for part in alias.name.split(".")]
    return sorted({name for name in found if private(name)} - ours)


def test_other_modules_use_no_private_names():
    modules = sorted({*LIBRARY.rglob("*.py")} - {TORCH, DEEPSPEED})
    assert len(modules) > 100
    assert {str(path): names for path in modules if (names := uses(path))} == {}


def test_three_names_of_deepspeed_are_used_and_listed():
    names = uses(DEEPSPEED)
    assert len(names) == 3
    assert all(name in str(ast.get_docstring(ast.parse(DEEPSPEED.read_text()))) for name in names)
