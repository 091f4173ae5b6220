"""Scores of a copier, of guesses, and of a model against forward passes over all tokens."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from evaluations import RETRIEVAL

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import CheckpointError
from tost_lm.tasks import answers
from tost_lm.tasks.answers import Scorer, Scores, model_scorer, score_texts
from tost_lm.tasks.over_texts import totals_of
from tost_lm.tasks.queries import AskedText, KeyedQueries, Question
from tost_lm.tasks.task import Row


def rows_of(task: KeyedQueries, scorer: Scorer, length: int, samples: int) -> list[Row]:
    return [row for rows in score_texts(task, scorer, length, range(samples)).values() for row in rows]


def chooser(tokenizer: Tokenizer, choose) -> Scorer:
    """A scorer that answers with the value that `choose` gives, for the values in a text and a question, or none."""

    def score(texts: Sequence[AskedText], room: int) -> list[Scores]:
        found = []
        for questions in zip(*(text.asked for text in texts), strict=True):
            values = [[one.references[0] for one in text.questions] for text in texts]
            chosen = [choose(own, one) for own, one in zip(values, questions, strict=True)]
            generated = [tokenizer.encode(f" {value}") if value else [] for value in chosen]
            assert max(map(len, generated)) <= room
            nats = np.array(
                [
                    [float(ids != list(option)) for option in one.options]
                    for ids, one in zip(generated, questions, strict=True)
                ]
            )
            found.append(Scores(generated, nats, nats == 0))
        return found

    return score


def copied(values: Sequence[str], question: Question) -> str | None:
    return question.references[0] if question.references[0] in values else None


@pytest.mark.parametrize("name", RETRIEVAL)
def test_copying_is_right_with_the_needles_only(make_task, tokenizer, name):
    rows = rows_of(make_task(name), chooser(tokenizer, copied), 1500, 5)
    scores = totals_of(rows)
    assert scores["found_share"] == scores["exact_accuracy"] == scores["choice_accuracy"] == 1
    assert scores["control_found_share"] == scores["control_exact_accuracy"] == scores["answer_nats"] == 0
    assert scores["control_answer_nats"] == 1
    assert [row["sample"] for row in rows] == np.repeat(range(5), 6).tolist()
    assert [row["condition"] for row in rows[:6]] == ["needle"] * 3 + ["control"] * 3
    assert [row["depth"] for row in rows[:6]] == [0, 0.5, 1] * 2


@pytest.mark.parametrize("depths", [(0.0, 0.3, 0.6, 1.0), (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)])
def test_a_guess_among_the_words_of_the_text_scores_chance(make_task, tokenizer, depths):
    task, draws = make_task(depths=depths), np.random.default_rng(0)
    guess = chooser(tokenizer, lambda values, question: values[draws.integers(len(values))])
    scores = totals_of(rows_of(task, guess, 400, 80))
    error = (task.chance * (1 - task.chance) / (80 * len(depths))) ** 0.5
    for key in ("choice_accuracy", "found_share"):
        assert scores[key] == pytest.approx(task.chance, abs=4 * error)
        assert scores[f"control_{key}"] == 0  # its words are not in the text


def test_questions_of_a_text_count_as_one_example():
    """Of two texts with four questions each, all of one right and none of the other."""
    rows = [
        {"sample": n // 4, "condition": "needle", "choice": n < 4, "nats_per_token": 1.0, "depth": n % 4 / 4}
        for n in range(8)
    ]
    rows += [row | {"condition": "control", "choice": False, "nats_per_token": 3.0} for row in rows]
    scores = totals_of(rows)
    assert (scores["choice_accuracy"], scores["choice_accuracy_standard_error"]) == (0.5, 0.5)
    assert (scores["gain_over_control"], scores["gain_over_control_standard_error"]) == (2, 0)
    assert totals_of(rows[:4])["choice_accuracy_standard_error"] is None


def test_found_is_the_fraction_of_references_in_the_text(make_task, tokenizer):
    task = make_task(depths=(0.5,))
    asked = task.asked

    def with_more(length: int, sample: int) -> AskedText:
        text = asked(length, sample)
        return replace(text, questions=tuple(replace(one, references=("Ab", "cd")) for one in text.questions))

    task.asked = with_more
    texts = [" xAB ", " none"]

    def half_right(texts_read: Sequence[AskedText], room: int) -> list[Scores]:
        generated = [tokenizer.encode(texts[0]), [*tokenizer.encode(texts[1]), tokenizer.eot, *tokenizer.encode("ab")]]
        return [Scores(generated, np.ones((2, 5)), np.zeros((2, 5))) for _ in texts_read[0].asked]

    rows = rows_of(task, half_right, 300, 2)
    assert [row["found"] for row in rows if row["condition"] == "needle"] == [0.5, 0]  # an end of text ends it
    assert rows[2]["generated"] == " none"


@pytest.mark.parametrize("pattern", ["T", "A", "DA"])
@torch.inference_mode()
def test_scores_from_the_shared_state_equal_passes_over_all_tokens(
    make_task, make_model, tokenizer, monkeypatch, pattern
):
    task, samples = make_task(), 2
    length, vocab_size = task.needed + 20, tokenizer.vocab_size
    monkeypatch.setattr(answers, "TILE_TOKENS", 50)
    model = make_model(pattern, vocab_size=vocab_size + 6, max_positions=length).double()
    texts = [task.asked(length, sample) for sample in range(samples)]
    for asked, scores in zip(
        zip(*(text.asked for text in texts), strict=True),
        model_scorer(model, vocab_size)(texts, task.room),
        strict=True,
    ):
        for i, question in enumerate(asked):
            prompt = [*texts[i].context.tolist(), *question.ids.tolist()]
            for j, ids in enumerate(question.options):
                logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
                nats = -torch.log_softmax(logits, -1)[range(len(ids)), ids].sum().item()
                assert scores.nats[i, j] == pytest.approx(nats, rel=1e-9)
                tops = logits[:, :vocab_size].argmax(-1).tolist()
                assert scores.top_share[i, j] == np.mean([top == own for top, own in zip(tops, ids, strict=True)])
            text = list(prompt)
            for _ in range(task.room):
                text.append(int(model(torch.tensor([text])).logits[0, -1, :vocab_size].argmax()))
            assert scores.generated[i] == text[len(prompt) :]


def test_generation_ends_with_the_last_text_of_a_batch(make_task, make_model, tokenizer):
    task, length = make_task(), 300
    model = make_model(vocab_size=tokenizer.vocab_size, max_positions=length).double()
    texts = [task.asked(length, sample) for sample in range(2)]
    whole = model_scorer(model, tokenizer.vocab_size)(texts, task.room)[0].generated
    eot = whole[1][1]
    ends = max(text.index(eot) + 1 if eot in text else task.room for text in whole)
    assert 1 < ends < task.room
    short = model_scorer(model, tokenizer.vocab_size, eot)(texts, task.room)[0].generated
    assert short == [text[:ends] for text in whole]


def test_texts_of_one_shape_are_read_in_batches(make_task, tokenizer, monkeypatch):
    monkeypatch.setattr(answers, "TOKENS_AT_ONCE", 3 * 400)
    task, read = make_task(), []
    asked = task.asked

    def scorer(texts: Sequence[AskedText], room: int) -> list[Scores]:
        read.append(len(texts))
        return chooser(tokenizer, copied)(texts, room)

    task.asked = lambda length, sample: asked(length + (sample >= 4), sample)
    rows = rows_of(task, scorer, 400 + task.room, 9)
    assert read == [3, 1, 3, 2]
    assert list(dict.fromkeys(row["sample"] for row in rows)) == [*range(9)]


def test_a_generated_text_without_finite_logits_is_an_error(make_task, make_model, tokenizer):
    """Only the embedding of the first generated id is damaged, which no text and no answer has."""
    task = make_task(depths=(0.5,))
    length = task.needed + 20
    model = make_model(vocab_size=tokenizer.vocab_size, max_positions=length, tied_head=False)
    scorer, text = model_scorer(model, tokenizer.vocab_size), task.asked(length, 0)
    first = scorer([text], task.room)[0].generated[0][0]
    options = [i for option in text.asked[0].options for i in option]
    assert first not in {*text.context, *text.asked[0].ids, *options}
    model.embedding.weight.data[first] = torch.nan
    with pytest.raises(CheckpointError, match="the model: its logits are not finite"):
        scorer([text], task.room)
