"""Problems with settings: whose they are, the file's or the command line's; one line for each; and how to unset one."""

import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, model_validator

from tost_lm.config import Section, load_config, path_or_url, recipes, toml_value
from tost_lm.data.settings import CorpusConfig, DataPrepConfig
from tost_lm.errors import ConfigError
from tost_lm.inference.settings import GenerateConfig
from tost_lm.model.config import ModelConfig
from tost_lm.parallel.settings import ParallelConfig
from tost_lm.pretrain.plan.settings import PlanConfig
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.tasks.settings import EvalConfig


class Sizes(Section):
    low: int = 1
    high: int = 9
    tile: Annotated[int, Field(gt=0)] | Literal["auto"] | None = None
    positions: Literal["keep", "none"] | None = None
    weights: dict[str, float] | None = None
    name: str = "x"
    files: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _in_order(self) -> "Sizes":
        if self.low > self.high:
            raise ValueError(f"sizes.low {self.low} is above sizes.high {self.high}; lower it")
        return self


class Tree(Section):
    sizes: Sizes = Sizes()
    parallel: ParallelConfig = ParallelConfig()


def problems(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    path = tmp_path / "some.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(Tree, path, overrides)
    return [line.replace(str(path), "FILE") for line in str(error.value).splitlines()]


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("sizes.lo = 1", ["sizes.hi=1"], ["FILE: sizes.lo: unknown", "command line: sizes.hi: unknown"]),
        ("sizes.lo = 1", ["sizes.low=2"], ["FILE: sizes.lo: unknown key (did you mean sizes.low?)"]),
        ("sizes.low = 'a'", ["sizes.high='b'"], ["FILE: sizes.low: input", "command line: sizes.high: input"]),
        ("sizes.low = 'a'", ["sizes.low='b'"], ["command line: sizes.low: input should be a valid integer, got 'b'"]),
        ("sizes.low = 10", [], ["FILE: sizes.low 10 is above"]),
        ("sizes.low = 10", ["sizes.name=y"], ["FILE: sizes.low 10 is above"]),
        ("sizes.low = 5", ["sizes.high=3"], ["command line: sizes.low 5 is above sizes.high 3; lower it"]),
        ("", ["size.low=3"], ["command line: size: unknown key (did you mean sizes?)"]),
        ("", ['sizes.weights={a = "b"}'], ["command line: sizes.weights.a: input should be a valid number, got 'b'"]),
        (
            "",
            ["sizes.files=a.py"],
            ["command line: sizes.files: input should be a valid array, got 'a.py'; write 'sizes.files=[\"a.py\"]'"],
        ),
        ("", ["sizes.weights.a=b"], ["command line: sizes.weights.a: input should be a valid number, got 'b'"]),
    ],
)
def test_a_problem_is_that_of_the_file_or_of_the_command_line(
    tmp_path: Path, text: str, overrides: list[str], expected: list[str]
):
    found = problems(tmp_path, text, *overrides)
    assert len(found) == len(expected)
    assert all(line.startswith(start) for line, start in zip(found, expected, strict=True)), found


@pytest.mark.parametrize(
    ("value", "wanted"), [("-5", "greater than 0 or 'auto', got -5"), ("x", "a valid integer or 'auto', got 'x'")]
)
def test_a_setting_of_several_types_has_one_line_without_their_names(tmp_path: Path, value: str, wanted: str):
    assert problems(tmp_path, "", f"sizes.tile={value}") == [f"command line: sizes.tile: input should be {wanted}"]


def test_a_wrong_preset_is_one_line_with_all_of_them_and_the_nearest():
    with pytest.raises(ConfigError) as error:
        load_config(ModelConfig, None, ["preset=tost-bas"])
    line = str(error.value)
    assert line.startswith("command line: preset: input should be 'tost-base', 'tost-medium', ")
    assert line.endswith(" or 'gpt2-base-layerscale', got 'tost-bas' (did you mean tost-base?)")
    with pytest.raises(ConfigError) as error:
        load_config(PlanConfig, recipes()["demo"], ["cluster.preset=a100"])
    assert str(error.value) == (
        "command line: cluster.preset: input should be 'a100-sxm', 'h100-sxm', 'h100-pcie', 'h200-sxm' or 'b200-sxm', "
        "got 'a100' (did you mean a100-sxm?)"
    )
    with pytest.raises(ConfigError, match="layers: must be set"):
        load_config(ModelConfig, None, ["heads=2"])


def test_none_unsets_what_may_be_unset(tmp_path: Path):
    path = tmp_path / "some.toml"
    path.write_text("[sizes]\ntile = 5\npositions = 'keep'\nweights = {a = 1.0}")
    unset = [f"sizes.{name}=none" for name in ("tile", "positions", "weights", "name")]
    sizes = load_config(Tree, path, unset).sizes
    assert (sizes.tile, sizes.positions, sizes.weights, sizes.name) == (None, "none", None, "none")
    assert problems(tmp_path, "", "sizes.low=none") == [
        "command line: sizes.low: input should be a valid integer, got 'none'"
    ]


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        (DataPrepConfig, "shards.folder", "s3://bucket/x"),
        (EvalConfig, "sets", '{wikitext2 = "https://host/x"}'),
        (PretrainConfig, "run.folder", "s3://bucket/x"),
        (PretrainConfig, "evaluation.sets", '{wikitext2 = "S3://bucket/x"}'),
        (PretrainConfig, "model.plugins", '["a.py", "s3://x.py"]'),
    ],
)
def test_urls_are_no_files(section: type[Section], name: str, value: str):
    with pytest.raises(ConfigError) as error:
        load_config(section, None, [f"{name}={value}"])
    url = re.search(r"[\w+]+://[\w/.*]+", value)
    assert url
    problem = f"{name}: URLs are not supported: {url[0]}; give the path of a local copy or of a mount"
    assert f"command line: {problem}" in str(error.value).splitlines()


def test_other_texts_may_be_urls():
    sample = load_config(GenerateConfig, None, ["sample.prompt=http://host/x", 'sample.stop=["s3://"]']).sample
    assert (sample.prompt, sample.stop) == ("http://host/x", ["s3://"])
    source = "hf://datasets/some/name@refs/convert/parquet"
    assert load_config(CorpusConfig, None, [f"source={source}"]).source == source


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:planted@bucket", "s3://key:ab/planted@bucket", "s3:/key:ab/planted@bucket", "s3://key:12/planted@b",
        "s3://key:ab cd/planted@bucket", "s3://key:ab\n/planted@bucket", "s3://key:ab?c/planted#d@bucket",
        "s3://key%3Aab%2Fplanted%40bucket/x", "s3://:planted/b@bucket", "gs://key:planted/bucket", "s3://planted@b/x",
        "s3://bucket/x?X-Amz-Signature=planted", "s3://bucket/x?part=1&token=a/planted", "https://me:ab/planted@host/x",
        "https://me:a b@planted/x",
    ],
)  # fmt: skip
def test_credentials_in_a_url_are_refused_and_not_printed(url: str):
    for path in (url, Path(url)):
        with pytest.raises(ConfigError, match=r"URLs? ?(are not supported)?: (s3|gs|https)://\[redacted\]; ") as error:
            path_or_url("argument", path)
        assert "planted" not in str(error.value)
    with pytest.raises(ConfigError) as error:
        load_config(CorpusConfig, None, [f"source={toml_value(url)}"])
    assert "planted" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "file:///a@b:c/d@e", "s3://bucket/user@host:1/x", "s3://bucket/key=3/x", "s3://b/a*[1]?x=1", "gs://b/%2F",
        "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/name/x", "memory://x",
    ],
)  # fmt: skip
def test_other_signs_in_urls_are_no_credentials(url: str):
    assert str(path_or_url("argument", url)) == str(path_or_url("argument", Path(url))) == url
