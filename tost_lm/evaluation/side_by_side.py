"""Tables of models and published results for each protocol, and which of them are comparable."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tost_lm.errors import ConfigError
from tost_lm.evaluation.published import PUBLISHED, condition, why_models_not_comparable, why_not_comparable
from tost_lm.evaluation.subject import HUB, hub_home
from tost_lm.markdown import escape, format_result, table


def side_by_side(homes: Sequence[Path]) -> str:
    """Markdown for all test sets with results in any of these folders.

    Raises:
        ConfigError: a folder has no results, or damaged ones.
    """
    found = {path: read_results(_home(path)) for path in homes}
    protocols = list(dict.fromkeys(name for results in found.values() for name in results))
    return "\n\n".join(text for name in protocols for text in _section(name, found))


def read_results(home: Path) -> dict[str, dict[str, Any]]:
    """The results of `tost eval zero-shot` on test sets, by protocol. Raises ConfigError when there are none."""
    found = {}
    for path in sorted(home.glob("eval/*@*/results.json")):
        try:
            results = json.loads(path.read_bytes())
        except ValueError:
            raise ConfigError(f"{path}: damaged; delete it and run tost eval zero-shot again") from None
        if isinstance(results, dict) and "by_token" in results:
            found[path.parent.name] = results
    if not found:
        raise ConfigError(f"{home}: no results on test sets; run tost eval zero-shot {home}")
    return found


def _section(protocol: str, found: Mapping[Path, dict[str, dict[str, Any]]]) -> Iterator[str]:
    measured = {home: results[protocol] for home, results in found.items() if protocol in results}
    first = next(iter(measured.values()))
    rows = []
    published = [row for row in PUBLISHED if row.protocol == protocol]
    measures = dict.fromkeys([first["headline"], *(row.measure for row in published)])
    for measure in measures:
        for home, results in measured.items():
            result, why = format_result(measure, results["model"]), why_models_not_comparable(first, results)
            rows.append((str(home), measure, result, results["identity"]["checkpoint"], _verdict(why)))
        for row in published:
            if row.measure != measure:
                continue
            verdicts = {
                home: _verdict(why_not_comparable(row, results), condition(results))
                for home, results in measured.items()
            }
            same = len(set(verdicts.values())) == 1
            verdict = next(iter(verdicts.values())) if same else "; ".join(f"{h}: {v}" for h, v in verdicts.items())
            rows.append(
                (row.model, row.measure, format_result(row.measure, {row.measure: row.value}), row.source, verdict)
            )
    yield f"## {escape(protocol)}"
    yield table(
        ("model", "measure", "result", "checkpoint or source", "comparable"),
        [(model, measure.replace("_", " "), *rest) for model, measure, *rest in rows],
    )


def _home(path: Path) -> Path:
    """The folder with the results of a run, model folder or hub model. Raises ConfigError when it does not exist."""
    if str(path).startswith(HUB):
        return hub_home(path)
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder; give runs, exports, folders of Hugging Face models or hub:NAME")
    return path.parent.parent if path.absolute().parent.name == "checkpoints" else path


def _verdict(why_not: str, condition: str = "") -> str:
    return f"no: {why_not}" if why_not else f"yes, {condition}" if condition else "yes"
