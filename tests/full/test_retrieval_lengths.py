"""Retrieval examples of two million tokens of GPT-2's tokenizer: exact lengths, with the answer in the text.

`pytest -s --full tests/full/test_retrieval_lengths.py` prints the time of each task.
"""

import time

import pytest
from evaluations import RETRIEVAL, make_queries
from shared_data import GPT2_BPE, needs_shared

from tost_lm.data.tokenizers.gpt2 import gpt2_tokenizer
from tost_lm.tasks.haystacks import Text

LENGTH = 2_097_152


@needs_shared
@pytest.mark.parametrize("name", RETRIEVAL)
def test_an_example_of_two_million_tokens(name):
    tokenizer = gpt2_tokenizer(GPT2_BPE)
    line = tokenizer.encode_array("The lines of this page are short. They say little! Do they? No.\n\n" * 1000)
    text = Text("the text", (line for _ in range(LENGTH // len(line) + 1)), {})
    task = make_queries(name, tokenizer, lambda: text)
    started = time.process_time()
    example, control = task.query(LENGTH, task.depths[0], 0)
    print(f"\n{name}: {time.process_time() - started:.1f} s")
    assert len(example.prompt) + task.room == len(control.prompt) + task.room == LENGTH
    written, left = (tokenizer.decode(one.prompt.tolist()) for one in (example, control))
    assert all(f" {reference}" in written for reference in example.references)
    assert not any(f" {reference}" in left for reference in example.references)
