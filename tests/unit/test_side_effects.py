"""Importing and calling the package leaves the process as it was: only programs set what is shared."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LIBRARY = Path(__file__).parents[2] / "tost_lm"
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.Try, ast.FunctionDef, ast.ClassDef, ast.AnnAssign, ast.Assert)
ALLOWED = (
    "if TYPE_CHECKING:", "if __name__ ",
    "AutoConfig.register(", "AutoModelForCausalLM.register(", "register_model(",  # with other libraries
)  # fmt: skip


def effects(module: ast.Module) -> Iterator[str]:
    """What an import runs, other than imports and definitions of the module's own names."""
    for node in module.body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, DEFINITIONS) or ast.unparse(node).startswith(ALLOWED):
            continue
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        parts = [part for target in targets for part in ast.walk(target)]
        if not parts or any(isinstance(part, ast.Attribute | ast.Call) for part in parts):
            yield ast.unparse(node)


def test_an_import_only_defines_names():
    files = sorted(LIBRARY.rglob("*.py"))
    assert len(files) > 200
    assert [(str(file), text) for file in files for text in effects(ast.parse(file.read_text()))] == []


PROGRAM = """
import os, sys, warnings
from contextlib import suppress
from importlib import import_module
import torch
sys.path.append(os.path.join(sys.prefix, "fla"))
modules = [torch, torch.nn.functional, warnings]
with suppress(ImportError):
    modules += map(import_module, ("fla.ops.common.chunk_o", "fla.ops.gated_delta_rule.chunk"))

def state():
    kernels = ("flash", "mem_efficient", "math", "cudnn")
    return {
        "kernels": [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in kernels],
        "modes": [torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()],
        "precision": [torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()],
        "environment": [*os.environ.items()], "warnings": [*warnings.filters],
        **{str(x): dict(vars(x)) for x in (torch.Tensor, *modules)},
    }

before = state()
from tost_lm.mixers.delta import fla
from tost_lm.model import ModelConfig, TostLM
from tost_lm.optim.interface import optimizer_of
from tost_lm.optim.settings import OptimConfig
from tost_lm.pretrain.tiled import tiled_backward
model, muon = TostLM(ModelConfig(pattern="TDA", layers=3, heads=2, width=8, vocab_size=8)), OptimConfig(kind="muon")
tokens = torch.zeros(1, 8, dtype=torch.int64)
model(tokens, labels=tokens).loss.backward()
tiled_backward(model, tokens, tokens, 4)
optimizer_of(muon).build(model, muon).step()
if len(modules) > 3:
    fla._chunks_without_guard()
after = state()
for name, found in before.items():  # imported modules may be new
    assert found.items() <= after[name].items() if isinstance(found, dict) else found == after[name], name
"""


def test_training_a_model_changes_nothing_that_is_shared():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
