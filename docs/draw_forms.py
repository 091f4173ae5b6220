"""Draw docs/figures/forms.png: gain from context on text and associative recall, of our operators and their rivals.

python docs/draw_forms.py

Reads the results of `python -m benchmarks.forms` in benchmarks/results/forms: text at 3 M tokens, a dot for each seed,
and MQAR.
"""

import json
from pathlib import Path
from statistics import mean

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

CHECKOUT = Path(__file__).parents[1]
SHOWN = {"published": "published TSSA", "slots": "slot memory", "hybrid": "hybrid", "softmax": "softmax attention"}
TOKENS, LR = 3_000_000, 4e-3


def draw() -> Figure:
    results = [json.loads(path.read_text()) for path in (CHECKOUT / "benchmarks/results/forms").glob("*.json")]
    figure, (gains, recall) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for place, (name, label) in enumerate(SHOWN.items()):
        runs = [result for result in results if result["run"]["name"] == name]
        found = [
            run["context_gain"] for run in runs if (run["run"].get("tokens"), run["run"].get("lr")) == (TOKENS, LR)
        ]
        gains.bar(place, mean(found), color=f"C{place}", alpha=0.7)
        gains.plot([place] * len(found), found, "k.")
        by_pairs = {run["run"]["pairs"]: 100 * run["accuracy"] for run in runs if run["run"]["task"] == "mqar"}
        recall.plot(sorted(by_pairs), [by_pairs[pairs] for pairs in sorted(by_pairs)], marker="o", label=label)
    gains.set_xticks(range(len(SHOWN)), [label.replace(" ", "\n") for label in SHOWN.values()])
    gains.axhline(0, color="0.5", linewidth=1)
    gains.set_ylabel("nats per token")
    gains.set_title("gain from 512 instead of 64 tokens of context", fontsize=10)
    recall.set_xscale("log", base=2)
    recall.set_xticks([4, 8, 16], ["4", "8", "16"])
    recall.set_ylim(0, 105)
    recall.set_xlabel("pairs of key and value")
    recall.set_ylabel("correct answers [%]")
    recall.set_title("associative recall (MQAR)", fontsize=10)
    recall.legend(loc="center right")
    return figure


if __name__ == "__main__":
    draw().savefig(CHECKOUT / "docs/figures/forms.png", dpi=120, metadata={"Software": None})
