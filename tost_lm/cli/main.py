"""The command `tost`: runs the module of a command, which is imported only then."""

import ast
import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from tost_lm.version import VERSION

COMMANDS = {
    "Data preparation": ["prepare tokenizer", "prepare shards", "prepare inspect"],
    "Training": ["recipes", "plan", "preflight", "train", "extend"],
    "Evaluation": [
        "eval zero-shot",
        "eval retrieval",
        "eval context",
        "eval positions",
        "eval text",
        "eval recall",
        "eval lra",
        "eval analyze",
        "eval suite",
        "eval compare",
        "eval verify",
        "eval contamination",
        "report",
    ],
    "Image classifiers": ["vision train", "vision eval", "vision analyze"],
    "Generation and other formats": ["generate", "convert", "lm-eval"],
}
_ZERO_SHOT, _RETRIEVAL = "tost eval zero-shot RUN", "tost eval retrieval RUN"
_LM_EVAL = "tost lm-eval run --model tost_lm --model_args pretrained=RUN --tasks"
_HUGGING_FACE = """python -c 'import tost_lm.interop.hf as hf; hf.export("RUN", "FOLDER")'"""
SYNONYMS = {
    **dict.fromkeys(("perplexity", "ppl", "loss", "bpb", "heldout", "validate"), _ZERO_SHOT),
    **dict.fromkeys(("needle", "niah", "passkey"), f"{_RETRIEVAL} 'retrieval.tasks=[\"needle\"]'"),
    "ruler": f"{_RETRIEVAL} 'retrieval.tasks=[\"ruler\"]', or {_LM_EVAL} ruler for RULER's own texts",
    **{name: f"{_LM_EVAL} {name}" for name in ("longbench", "mmlu", "gsm8k")},
    "wikitext": f"{_ZERO_SHOT} 'zero_shot.protocols=[\"wikitext2@lm-eval\"]'",
    "lambada": f"{_ZERO_SHOT} 'zero_shot.protocols=[\"lambada_openai@lm-eval\"]'",
    **{name: f"{_ZERO_SHOT} 'zero_shot.protocols=[\"{name}@lm-eval\"]'" for name in ("hellaswag", "piqa")},
    "mqar": "tost eval recall mqar",
    **dict.fromkeys(("benchmark", "evaluate"), "tost eval suite RUN suite"),
    "export": f"{_HUGGING_FACE}, or tost convert RUN convert.to=authors convert.folder=FOLDER",
    **dict.fromkeys(("sample", "complete", "inference", "infer", "chat"), 'tost generate RUN "PROMPT"'),
    **dict.fromkeys(("pretrain", "resume"), "tost train CONFIG"),
    **dict.fromkeys(("finetune", "fine-tune"), "tost train CONFIG train.initial_weights=RUN"),
    "tokenize": "tost prepare shards CONFIG",
    **dict.fromkeys(("estimate", "memory"), "tost plan CONFIG"),
}
"""Commands to type, by words for them that are no commands. RUN, CONFIG, FOLDER and PROMPT stand for the user's own."""
ALL = [command for commands in COMMANDS.values() for command in commands]
HELP = ("--help", "-h")


def main(*group: str) -> None:
    """Run the command (of a group, if given) that the command line names, or list the commands."""
    words = [*group, *sys.argv[1:]]
    if not words or words[0] in HELP:
        print("usage: tost COMMAND …; tost COMMAND --help lists its settings")
        for title, commands in COMMANDS.items():
            print(f"\n{title}\n{listing(commands)}")
        sys.exit(0)
    if words[0] == "--version":
        print(f"tost {VERSION}")
        sys.exit(0)
    inner = [command for command in ALL if command.startswith(f"{words[0]} ")]
    if inner and (len(words) == 1 or words[1] in HELP):
        print(listing(inner))
        sys.exit(0)
    length = 2 if inner else 1
    command = " ".join(words[:length])
    if command not in ALL:
        refuse(command)
    sys.argv[1:] = words[length:]
    import_module(module_of(command)).run()


def module_of(command: str) -> str:
    return "tost_lm.cli." + command.replace(" ", ".").replace("-", "_")


def listing(commands: list[str]) -> str:
    """A line with name and purpose for each of the commands."""
    width = max(map(len, ALL))
    return "\n".join(f"  tost {command:<{width}}  {purpose(source_of(command))}" for command in commands)


def source_of(command: str) -> Path:
    return Path(__file__).parents[2] / (module_of(command).replace(".", "/") + ".py")


def purpose(source: Path) -> str:
    """The first paragraph of a module's docstring, without an import."""
    docstring = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return docstring.split("\n\n")[0].replace("\n", " ")


def refuse(command: str) -> NoReturn:
    from tost_lm.config import EXIT_BAD_INPUT

    fix = "run tost --help"
    if meant := SYNONYMS.get(command.split()[-1].lower().replace("_", "-")):
        fix = f"write {meant}"
    elif near := get_close_matches(command, [*ALL, "prepare", "eval", "vision"], n=1):
        fix = f"did you mean tost {near[0]}? {fix}"
    print(f"error: unknown command: tost {command}; {fix}", file=sys.stderr)
    sys.exit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    main()
