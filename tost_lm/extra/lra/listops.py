"""ListOps (arXiv 1804.06028) as the Long-Range Arena specifies it: the value of a nested expression of lists.

    [MAX 2 9 [MIN 4 7 ] 0 ]        → 9

Operators are MIN, MAX, MED (the median, rounded down) and SM (the sum modulo 10). An expression is an operator with
probability ¼ and else a digit; at `max_depth` it is a digit. An operator has 2 to `max_args` arguments. Operators,
digits and numbers of arguments are uniformly distributed. Examples whose number of tokens is not between `min_length`
and `max_length` (both excluded) are dropped, and so are repeated ones.

Files are those of the release, `basic_train.tsv`, `basic_val.tsv` and `basic_test.tsv`: a header, then lines of source,
tab and target. The source has parentheses around each pair of an expression's binary tree, which are no tokens.
"""

import json
from pathlib import Path
from random import Random

import xxhash

from tost_lm.extra.lra.settings import ListOpsConfig
from tost_lm.files import atomic_writer, make_temp_folder, publish_folder, write_atomically

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
OPERATOR_PROBABILITY = 0.25
TOKENS = (*"0123456789", *OPERATORS, "]")
"""Tokens by id."""
HEADER = "Source\tTarget"
SETTINGS = "listops.json"
FILES = {"test": "basic_test.tsv", "valid": "basic_val.tsv", "train": "basic_train.tsv"}
"""In the order in which one stream of random numbers draws them, so the test split depends on the seed alone."""


class _TooLongError(Exception):
    """An expression has too many tokens already."""


def generate(config: ListOpsConfig, folder: Path) -> None:
    """Write all examples, a pure function of the settings. The folder appears when it is complete."""
    print(f"generating ListOps in {folder}", flush=True)
    temp = make_temp_folder(folder)
    draws, known = Random(config.seed), set()
    for name, file in FILES.items():
        with atomic_writer(temp / file) as lines:
            lines.write(f"{HEADER}\r\n".encode())
            for done in range(getattr(config, name)):
                lines.write(_new_example(draws, config, known).encode())
                if (done + 1) % 10_000 == 0:
                    print(f"  {name}: {done + 1:,} examples", flush=True)
    write_atomically(temp / SETTINGS, json.dumps(config.model_dump(), indent=1) + "\n")
    publish_folder(temp, folder)


def _new_example(draws: Random, config: ListOpsConfig, known: set[int]) -> str:
    """A line that was not drawn before."""
    while True:
        pieces: list[str] = []
        try:
            length, value = draw_expression(draws, config, 1, pieces)
        except _TooLongError:
            continue
        if config.min_length < length < config.max_length:
            line = f"{' '.join(pieces)}\t{value}\r\n"
            digest = xxhash.xxh3_128_intdigest(line.encode())
            if digest not in known:
                known.add(digest)
                return line


def draw_expression(draws: Random, config: ListOpsConfig, depth: int, pieces: list[str]) -> tuple[int, int]:
    """Append an expression to `pieces`, tokens and parentheses; return its number of tokens and its value."""
    if depth >= config.max_depth or draws.random() >= OPERATOR_PROBABILITY:
        value = int(10 * draws.random())
        pieces.append(str(value))
        return 1, value
    operator = OPERATORS[int(len(OPERATORS) * draws.random())]
    arguments = 2 + int((config.max_args - 1) * draws.random())
    pieces += ["("] * (arguments + 1) + [operator]
    length, values = 2, []
    for _ in range(arguments):
        its_length, value = draw_expression(draws, config, depth + 1, pieces)
        pieces.append(")")
        values.append(value)
        length += its_length
        if length >= config.max_length:
            raise _TooLongError
    pieces += ["]", ")"]
    return length, apply(operator, values)


def apply(operator: str, values: list[int]) -> int:
    """The value of an operator's list."""
    match operator:
        case "[MIN":
            return min(values)
        case "[MAX":
            return max(values)
        case "[MED":
            ordered, middle = sorted(values), len(values) // 2
            return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) // 2
        case _:
            return sum(values) % 10
