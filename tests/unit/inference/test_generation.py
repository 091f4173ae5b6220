"""Generation from the state equals recomputation of the whole text for every token."""

import io
import re

import pytest
import torch

from tost_lm.errors import ConfigError
from tost_lm.inference.generation import Sampling, generate, generate_text, print_stream, sampler, until
from tost_lm.model.streaming import prefill

pytestmark = pytest.mark.quick

PROMPT = [1, 7, 23, 5]
NO_STOP = 10**6
PATTERNS = pytest.mark.parametrize("pattern", ["T", "A", "TA"])


def generated(model, tokens: int = 12, temperature: float = 0.0, seed: int = 0, stop_id: int = NO_STOP, vocab_size=40):
    output = prefill(model, [torch.tensor([PROMPT])])
    return list(generate(model, output, tokens, Sampling(temperature, seed=seed), stop_id, vocab_size))


@torch.inference_mode()
def recomputed(model, tokens: int, vocab_size: int) -> list[int]:
    ids = list(PROMPT)
    for _ in range(tokens):
        best, second = model(torch.tensor([ids])).logits[0, -1, :vocab_size].topk(2).values
        assert best - second > 1e-3, "two ids are equally likely, so the comparison is void"
        ids.append(int(model(torch.tensor([ids])).logits[0, -1, :vocab_size].argmax()))
    return ids[len(PROMPT) :]


@PATTERNS
def test_greedy_equals_recomputing_every_prefix(make_model, pattern):
    model = make_model(pattern, seed=1)
    ids = generated(model)
    assert ids == recomputed(model, 12, vocab_size=40)
    assert len(set(ids)) > 2


@PATTERNS
def test_rows_of_a_padded_vocabulary_are_never_chosen(make_model, pattern):
    model = make_model(pattern)
    highest = max(generated(model))
    ids = generated(model, vocab_size=highest)
    assert ids == recomputed(model, 12, vocab_size=highest)
    assert max(ids) < highest


def test_generation_ends_before_the_stop_id(make_model):
    model = make_model()
    ids = generated(model)
    assert generated(model, stop_id=ids[5]) == ids[: ids.index(ids[5])]


def test_draws_follow_the_softmax(make_model):
    model = make_model()
    with torch.inference_mode():
        logits_BV = model(torch.tensor([PROMPT])).logits[:, -1]
    expected = torch.softmax(logits_BV[0] / 4, dim=-1)
    drawn = torch.cat([sampler(Sampling(4.0), torch.Generator().manual_seed(seed))(logits_BV) for seed in range(400)])
    for seed in range(5):
        assert generated(model, tokens=1, temperature=4.0, seed=seed) == [drawn[seed]]
    frequencies = torch.bincount(drawn, minlength=40) / 400
    assert (frequencies - expected).abs().max() < 4 * 0.5 / 20


def draws(sampling: Sampling, logits: list[float], count: int = 2000) -> list[float]:
    """Frequency of each id."""
    logits_BV = torch.tensor([logits]).expand(count, -1)
    drawn = sampler(sampling, torch.Generator().manual_seed(0))(logits_BV)
    return (torch.bincount(drawn, minlength=len(logits)) / count).tolist()


def test_top_k_and_top_p_keep_the_most_likely():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().tolist()
    assert draws(Sampling(1.0, top_k=2), logits) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.05)
    assert draws(Sampling(1.0, top_k=99), logits) == pytest.approx([0.1, 0.4, 0.2, 0.3], abs=0.05)
    assert draws(Sampling(1.0, top_p=0.69), logits) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.05)
    assert draws(Sampling(1.0, top_p=0.71), logits) == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9], abs=0.05)
    # top_p applies after top_k, which leaves 4/7 and 3/7, and after temperature.
    assert draws(Sampling(1.0, top_k=2, top_p=0.5), logits) == [0, 1, 0, 0]
    assert draws(Sampling(0.5, top_p=0.5), logits) == [0, 1, 0, 0]  # 16/30
    assert draws(Sampling(1.0, top_p=1e-9), logits) == [0, 1, 0, 0]


@pytest.mark.parametrize("sampling", [Sampling(-1.0), Sampling(1.0, top_k=0), Sampling(1.0, top_p=0.0)])
def test_invalid_sampling_is_refused_before_the_first_token(make_model, sampling: Sampling):
    model = make_model()
    with pytest.raises(ConfigError, match="invalid; set temperature >= 0, top_k to None or >= 1, and 0 < top_p <= 1"):
        generate(model, prefill(model, [torch.tensor([PROMPT])]), 5, sampling, NO_STOP, 40)


@pytest.mark.parametrize(
    ("texts", "stops", "expected"),
    [
        (["ab", "c"], [], ["ab", "c", ""]),
        (["ab", "cd", "e"], ["bc"], ["a", ""]),
        (["ab", "bd", "e"], ["bc"], ["a", "bbd", "e", ""]),
        (["a", "b", "c", "d"], ["abcx", "cd"], ["", "", "", "ab"]),
        (["abcd"], ["d", "b"], ["a"]),
        (["x", "", "\n", "\ny"], ["\n\n"], ["x", "", "", ""]),
    ],
)
def test_a_text_ends_before_the_first_stop(texts, stops, expected):
    assert list(until(iter(texts), stops)) == expected


def test_text_decodes_the_ids_up_to_a_stop(make_model, tokenizer):
    model = make_model(vocab_size=tokenizer.vocab_size, max_positions=64)
    prompt = torch.tensor([[tokenizer.eot, *tokenizer.encode("Page 7.")]])
    ids = list(generate(model, prefill(model, [prompt]), 40, Sampling(), tokenizer.eot, tokenizer.vocab_size))
    whole = generate_text(model, tokenizer, "Page 7.", 40)
    text = "".join(whole)
    assert text == tokenizer.decode(ids)
    assert whole.tokens == len(ids)
    [stop, *_] = re.findall("[ -~]{2}", text[4:])
    shorter = generate_text(model, tokenizer, "Page 7.", 40, stops=["never", stop])
    assert "".join(shorter) == text[: text.index(stop)]
    assert stop in tokenizer.decode(ids[: shorter.tokens])
    assert stop not in tokenizer.decode(ids[: shorter.tokens - 1])
    with pytest.raises(ConfigError, match="a stop string is empty; leave it out"):
        generate_text(model, tokenizer, "Page 7.", 40, stops=["x", ""])


def test_text_is_printed_as_it_arrives_and_only_its_start_is_kept(capsys):
    target, printed = io.BytesIO(), []

    def texts():
        for text in ("ab", "", "çd", "e"):
            yield text
            printed.append(capsys.readouterr().out)

    assert print_stream(texts(), target, 3) == {"text": "abç", "characters": 5}
    assert printed == ["ab", "", "çd", "e"]
    assert target.getvalue().decode() == "abçde"
