"""The table of benchmarks.evaluation."""

from benchmarks.evaluation import HARNESS, ONE_BY_ONE, OURS, PRODUCTS, table_row

CELL = {"task": "lambada_openai@lm-eval", "examples": 100, "of": "tost", "tokens": 8200}


def test_ratios_are_medians_of_the_rounds_own():
    seconds = {OURS: [1.0, 2.0, 4.0], ONE_BY_ONE: [3.0, 4.0, 8.4], PRODUCTS: [0.5, 0.5, 1.0]}
    row = table_row({**CELL, "seconds": seconds})
    assert (row["rival"], row[OURS], row["the rival's"]) == (ONE_BY_ONE, "2 s", "4 s")
    assert (row["ratio"], row["at best"]) == ("2.10", "8.00")


def test_the_harness_has_no_ceiling_and_failures_are_shown():
    row = table_row({**CELL, "of": "gpt2", "seconds": {OURS: [1.0], HARNESS: [1.5]}})
    assert (row["model"], row["ratio"], row["at best"]) == ("GPT-2", "1.50", "–")
    failed = table_row({**CELL, "failed": "out of memory"})
    assert failed["rival"] == "out of memory"
    assert failed.keys() == row.keys()
