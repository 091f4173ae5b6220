"""Folders of the Hugging Face library: export, tokenizer, and generation."""

import gzip
import io
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from builds import LOSSLESS, trained_elsewhere
from evaluations import scored
from hf_tokenizers import EOT, byte_level, made, metaspace_unigram, prefixed_bpe, with_added
from other_forms import OTHER_FORMS, other_forms
from public_layers import run_in_torch
from server_names import read_by_vllm, written
from shared_data import SHARED, gpt2_tokenizer, needs_shared
from transformers import AutoModelForCausalLM, AutoTokenizer

import tost_lm
from tost_lm.checkpointing.format import read_model_config
from tost_lm.data.tokenizers import SentencePieceTokenizer, Tokenizer
from tost_lm.data.tokenizers.interface import ESCAPE, SPACE_MARK
from tost_lm.data.tokenizers.training import train_sentencepiece
from tost_lm.errors import CheckpointError
from tost_lm.inference.evaluated import EvaluatedCheckpoint
from tost_lm.inference.generation import generate_text
from tost_lm.inference.hugging_face import HuggingFaceCheckpoint, find_evaluated
from tost_lm.interop.hf import TostForCausalLM, export, fast_tokenizer
from tost_lm.interop.llama import FORM as LLAMA
from tost_lm.interop.olmo_hybrid import FORM as OLMO_HYBRID
from tost_lm.interop.public_form import PublicForm
from tost_lm.interop.qwen3 import FORM as QWEN3
from tost_lm.interop.qwen3_5 import FORM as QWEN3_5
from tost_lm.testing import FLOAT32_REORDERED, assert_close

PAGES = "The lines of this page\n  are short;\n    12, 345 of them.  They say little!\n" * 40
ODD = [
    "", " ", "  a", "\n \n\t x ", "a" + SPACE_MARK + " b" + ESCAPE + "1" + ESCAPE, "<|endoftext|></s><unk><0x41>",
    "don't I'LL 123 ٣ é e\u0301 漢字 \U0001f600\ufb01\xa0\u3000\0", "the line   the b<x>\n  the",
]  # fmt: skip


PLAIN = {**other_forms(), "positions": "none", "layer_scale": 0.0, "bias": False, "norm": "rms"}
OF_HEADS = {"qk_norm": True, "rope_theta": 500.0}
FORMS: dict[str, tuple[PublicForm, dict[str, Any]]] = {
    "llama": (LLAMA, {**PLAIN, "pattern": "A", "softmax": {"rope_theta": 500.0}}),
    "qwen3": (QWEN3, {**PLAIN, "pattern": "A", "softmax": OF_HEADS}),
    "qwen3_5": (QWEN3_5, {
        **PLAIN, "pattern": "DA", "norm": "rms-zero-centered", "softmax": {**OF_HEADS, "gate": True, "rope_theta": 0.0},
    }),
    "olmo_hybrid": (OLMO_HYBRID, {
        **PLAIN, "pattern": "DA", "norm_after": "A", "softmax": {"qk_norm": "all-heads", "rope_theta": 0.0},
    }),
}  # fmt: skip


def write(form: PublicForm, run: Path, folder: Path) -> None:
    form.write_from(run, folder, None)


def drawn_texts() -> list[str]:
    draw = random.Random(0)
    ranges = [(32, 33), (1, 128), (128, 0x3000), (0x4E00, 0xD800), (0xE000, 0x1FFFF)]
    return ["".join(chr(draw.randrange(*draw.choice(ranges))) for _ in range(80)) for _ in range(300)]


def book() -> str:
    with gzip.open(SHARED / "books/valid.jsonl.gz", "rt") as lines:
        return json.loads(next(lines))["text"][:200_000]


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(300, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", FORMS)
def test_a_model_in_a_public_form_is_written_with_its_tokenizer(
    make_export: Callable[..., Path], tmp_path: Path, tokens: torch.Tensor, name: str
):
    form, settings = FORMS[name]
    run, folder = make_export(**settings), tmp_path / "theirs"
    write(form, run, folder)
    theirs, ours = AutoModelForCausalLM.from_pretrained(folder), tost_lm.load(run)
    with torch.no_grad(), run_in_torch(sys.modules[type(theirs).__module__], torch.float32):
        assert_close(ours(tokens).logits, theirs(tokens).logits, FLOAT32_REORDERED)
    limited = bool(ours.config.softmax.rope_theta)
    assert theirs.config.max_position_embeddings == (ours.config.context_length if limited else 1 << 20)
    tokenizer, their_tokenizer = tost_lm.load_tokenizer(run), AutoTokenizer.from_pretrained(folder)
    for text in (PAGES, *ODD):
        assert their_tokenizer(text)["input_ids"] == [tokenizer.eot, *tokenizer.encode(text)]
    assert theirs.generation_config.bos_token_id == theirs.generation_config.eos_token_id == tokenizer.eot
    card = (folder / "README.md").read_text()
    assert "in the format of transformers" in card
    assert "tost_lm.load" not in card


@pytest.mark.quick
@pytest.mark.parametrize("name", FORMS)
def test_the_names_of_weights_are_those_that_vllm_reads(make_export: Callable[..., Path], tmp_path: Path, name: str):
    """tests/full/test_servers.py loads such folders in vLLM itself."""
    form, settings = FORMS[name]
    write(form, make_export(**settings), tmp_path / "theirs")
    assert written(tmp_path / "theirs") == read_by_vllm(name.replace("_", "-"), tmp_path / "theirs")


@pytest.mark.parametrize("exported", [True, False])
def test_tools_with_their_own_sentencepiece_find_its_model_and_add_no_space(
    make_export: Callable[..., Path], tmp_path: Path, tokenizer: Tokenizer, *, exported: bool
):
    """llama.cpp reads both, and adds a space where no file says otherwise."""
    form, settings = FORMS["llama"]
    run, folder = make_export(**settings), tmp_path / "theirs"
    export(run, folder) if exported else write(form, run, folder)
    assert (folder / "tokenizer.model").read_bytes() == tokenizer.model_bytes
    assert json.loads((folder / "tokenizer_config.json").read_text())["add_prefix_space"] is False
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    assert model.encode("The lines of this page") == tokenizer.encode("The lines of this page")


def test_every_written_file_can_be_read_as_its_folder(make_export: Callable[..., Path], tmp_path: Path):
    before = os.umask(0o027)
    try:
        form, settings = FORMS["olmo_hybrid"]
        run = make_export(**settings)
        write(form, run, tmp_path / "theirs")
        export(run, tmp_path / "exported")
    finally:
        os.umask(before)
    for name in ("theirs", "exported"):
        assert {oct(path.stat().st_mode & 0o777) for path in (tmp_path / name).iterdir()} == {"0o640"}, name


def test_an_export_is_read_by_the_library_and_by_us(
    make_export: Callable[..., Path], tmp_path: Path, tokens: torch.Tensor
):
    run, folder = make_export(positions="none", tssa={"denom_bias": "head"}), tmp_path / "hf"
    export(run, folder)
    ours = tost_lm.load(run)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert type(theirs) is TostForCausalLM
    expected = ours(tokens).logits
    assert torch.equal(theirs(tokens).logits, expected)
    assert torch.equal(tost_lm.load(folder)(tokens).logits, expected)
    assert read_model_config(folder).in_use() == ours.config.in_use()
    evaluated = find_evaluated(folder)
    assert type(evaluated) is EvaluatedCheckpoint
    assert torch.equal(evaluated.load("cpu")(tokens).logits, expected)
    assert evaluated.tokenizer().model_bytes == EvaluatedCheckpoint.find(run).tokenizer().model_bytes
    assert evaluated.hashes()["checkpoint_sha256"]


def test_exported_generation_equals_native_generation(make_export: Callable[..., Path], tmp_path: Path):
    run = make_export(max_positions=64)
    ours, tokenizer = tost_lm.load(run), tost_lm.load_tokenizer(run)
    export(run, tmp_path / "hf")
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    their_tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "hf")
    prompts = ["", " ", "The page.", "They say little! Do", "No.\n", "Page 7", "</s> or <|endoftext|>?", "漢字 é"]
    native = ["".join(generate_text(ours, tokenizer, prompt, 9)) for prompt in prompts]
    assert len(set(native)) > 4

    def continued(inputs: dict[str, Any]) -> list[str]:
        """Texts by our tokenizer: the library's decoder turns more of invalid UTF-8 into U+FFFD."""
        output = theirs.generate(**inputs, max_new_tokens=9, output_scores=True, return_dict_in_generate=True)
        # The model has three more rows than the tokenizer has ids.
        assert torch.isneginf(torch.stack(output.scores)[..., tokenizer.vocab_size :]).all()
        start = inputs["input_ids"].shape[1] if inputs else 1
        return [tokenizer.decode(ids) for ids in output.sequences[:, start:].tolist()]

    padded = their_tokenizer(prompts, padding=True, return_tensors="pt")
    assert padded.keys() == {"input_ids", "attention_mask"}
    assert continued(padded) == native
    for prompt, expected in zip(prompts, native, strict=True):
        inputs = their_tokenizer(prompt, return_tensors="pt")
        assert inputs["input_ids"].tolist() == [[tokenizer.eot, *tokenizer.encode(prompt)]]
        assert continued(inputs) == [expected]
    assert continued({}) == native[:1]


def test_an_export_is_scored_without_a_second_end_of_text(make_export: Callable[..., Path], tmp_path: Path):
    """Read as a model folder, and as any Hugging Face model after the manifest is removed."""
    run, texts = make_export(), tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("The lines of", "They say little! No.")))
    export(run, tmp_path / "hf")
    shutil.copytree(tmp_path / "hf", tmp_path / "theirs")
    (tmp_path / "theirs/manifest.json").unlink()

    def requests(folder: Path) -> list[list[list[int]]]:
        examples = scored("lambada_openai@lm-eval").examples(texts, find_evaluated(folder).tokenizer(), 16)
        return [[one.requests[0].context.tolist(), one.requests[0].target.tolist()] for one in examples]

    assert type(find_evaluated(tmp_path / "theirs")) is HuggingFaceCheckpoint
    assert requests(run) == requests(tmp_path / "hf") == requests(tmp_path / "theirs")


@pytest.mark.quick
@pytest.mark.parametrize("model", [{"pattern": "TA"}, {"pattern": "DA"}, {**OTHER_FORMS, "heads": 4}])
def test_exported_weights_are_the_same_bits(
    make_export: Callable[..., Path], tmp_path: Path, tokens: torch.Tensor, model: dict[str, Any]
):
    expected = tost_lm.load(made := make_export(**model))(tokens).logits
    export(made, tmp_path / "hf")
    for read in (tost_lm.load, TostForCausalLM.from_pretrained):
        assert torch.equal(read(tmp_path / "hf")(tokens).logits, expected)


def test_damaged_weights_are_refused(make_export: Callable[..., Path], tmp_path: Path):
    export(make_export(), tmp_path / "hf")
    path = tmp_path / "hf/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(CheckpointError, match=r"hf/model\.safetensors: damaged"):
        tost_lm.load(tmp_path / "hf")


def test_no_folder_is_overwritten(make_export: Callable[..., Path], tmp_path: Path):
    run = make_export()
    before = sorted(path.name for path in run.iterdir())
    with pytest.raises(CheckpointError, match="export: exists already; give a new folder"):
        export(run, run)
    assert sorted(path.name for path in run.iterdir()) == before
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file/hf: cannot be written: Not a directory"):
        export(run, tmp_path / "file/hf")


def check_ids(tokenizer: Tokenizer, folder: Path, texts: list[str]) -> None:
    made = fast_tokenizer(tokenizer)
    assert made is not None
    made.save_pretrained(folder)
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    assert (len(theirs), theirs.eos_token_id, theirs.pad_token_id) == (tokenizer.vocab_size, *[tokenizer.eot] * 2)
    for text in texts:
        ids = tokenizer.encode(text)
        assert theirs.encode(text) == [tokenizer.eot, *ids]
        assert theirs.encode(text, add_special_tokens=False) == ids
        assert theirs.decode([*ids, tokenizer.eot], skip_special_tokens=True) == text


def test_ids_are_those_of_our_tokenizer(tokenizer: Tokenizer, tmp_path: Path):
    check_ids(tokenizer, tmp_path, [PAGES, *ODD, *drawn_texts()])


def test_ids_are_those_of_our_tokenizer_with_user_symbols(tmp_path: Path):
    symbols = ["    ", "  ", "the", "the l", "<x>", "\n  "]
    trained = trained_elsewhere(PAGES.splitlines(), 340, symbols, **LOSSLESS, add_dummy_prefix=False)
    check_ids(trained, tmp_path, [PAGES, *ODD, *drawn_texts()])


def test_a_tokenizer_json_is_exported_with_its_ids(make_export: Callable[..., Path], tmp_path: Path):
    truncating = with_added(byte_level(), "lines", "<|user|>")
    truncating.enable_truncation(8)
    cases = {"byte-level": (made(truncating), ODD), "unigram": (made(metaspace_unigram(), "</s>"), ["", "漢字 é"])}
    cases["prefixed"] = (made(prefixed_bpe(), "</s>"), ["", " a  b\n", "漢字 é"])
    for name, (tokenizer, texts) in cases.items():
        check_ids(tokenizer, tmp_path / name, [PAGES, *texts])
    tokenizer = cases["byte-level"][0]
    run = make_export(tokenizer)
    export(run, tmp_path / "hf")
    assert tost_lm.load_tokenizer(run).model_bytes == tost_lm.load_tokenizer(tmp_path / "hf").model_bytes
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs.encode(f"{PAGES}{EOT}") == [tokenizer.eot, *tokenizer.encode(f"{PAGES}{EOT}")]
    native = "".join(generate_text(tost_lm.load(run), tost_lm.load_tokenizer(run), "The page", 5))
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = model.generate(**theirs("The page", return_tensors="pt"), max_new_tokens=5)[0]
    assert tokenizer.decode(ids.tolist()) == f"The page{native}"


@needs_shared
def test_ids_are_those_of_gpt2(tmp_path: Path):
    check_ids(gpt2_tokenizer(), tmp_path, [PAGES, *ODD, *drawn_texts()])


@needs_shared
def test_ids_of_a_book_are_those_of_our_tokenizer(tmp_path: Path):
    text = book()
    check_ids(SentencePieceTokenizer(train_sentencepiece([text], 2000)), tmp_path, [text])


def test_a_tokenizer_without_an_equivalent_is_exported_without_tokenizer_json(
    make_export: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
        sentence_iterator=iter([PAGES] * 3), model_writer=model, vocab_size=300, model_type="unigram",
        byte_fallback=True, normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    tokenizer = SentencePieceTokenizer(model.getvalue())
    export(make_export(tokenizer), tmp_path / "hf")
    assert (
        "hf: no tokenizer.json: the Hugging Face library has no equivalent of this tokenizer" in capsys.readouterr().out
    )
    assert not (tmp_path / "hf/tokenizer.json").exists()
    assert find_evaluated(tmp_path / "hf").tokenizer().model_bytes == tokenizer.model_bytes
