"""Settings: every mistake named at once, overrides, and a resolved file that reads back as the same tree."""

from pathlib import Path

import pytest
from pydantic import Field

from tost_lm.config import Section, differences, find_recipe, load_config, to_toml
from tost_lm.errors import ConfigError
from tost_lm.pretrain.settings import PretrainConfig


class Inner(Section):
    size: int = Field(gt=0)
    """How large."""
    rate: float = 1e-3
    """How fast."""
    words: list[str] = Field(default_factory=list)
    """Some words."""
    limit: int | None = None
    """A limit."""


class Root(Section):
    inner: Inner
    other: Inner = Field(default_factory=lambda: Inner(size=1))
    weights: dict[str, float] = Field(default_factory=dict)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "some.toml"
    path.write_text(text)
    return path


def test_overrides_win_over_the_file_and_keep_their_types(tmp_path: Path):
    path = write(tmp_path, "[inner]\nsize = 3\nrate = 0.5\n")
    config = load_config(Root, path, ["inner.rate=3e-4", 'inner.words=["a b", "c"]', "other.size=7"])
    assert (config.inner.size, config.inner.rate, config.inner.words, config.other.size) == (3, 3e-4, ["a b", "c"], 7)


def test_a_file_changes_settings_of_the_one_that_it_extends(tmp_path: Path):
    (tmp_path / "base.toml").write_text("[inner]\nsize = 3\nrate = 0.5\n[weights]\na = 1.0\n")
    (tmp_path / "middle.toml").write_text('extends = "base.toml"\n[inner]\nrate = 0.25\nlimit = 4\n')
    path = write(tmp_path, 'extends = "middle.toml"\n[inner]\nlimit = 5\n[weights]\nb = 2.0\n')
    config = load_config(Root, path, ["inner.size=9"])
    assert (config.inner.size, config.inner.rate, config.inner.limit, config.weights) == (9, 0.25, 5, {"b": 2.0})


def test_a_recipe_is_extended_by_its_name(tmp_path: Path):
    path = write(tmp_path, 'extends = "delta_350m"\n[data.mixture]\nbooks = 1.0\n[optim]\nlr = 2e-4\n')
    ours, recipe = (load_config(PretrainConfig, file) for file in (path, find_recipe(Path("delta_350m"))))
    assert [line.split(":")[0] for line in differences(recipe, ours)] == [
        "data.folder",
        "optim.lr",
        "data.mixture.books",
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("extends = 3", "extends: give the name of a recipe or the path of a TOML file, not 3"),
        ('extends = "some.toml"', "extends: some.toml extends this file itself; remove one of the two lines"),
        ('extends = "delta_350"', r"delta_350: no such configuration file \(did you mean delta_350m\?\)"),
    ],
)
def test_a_file_that_cannot_be_extended_is_named(tmp_path: Path, line: str, problem: str):
    with pytest.raises(ConfigError, match=problem):
        load_config(Root, write(tmp_path, line + "\n"))


def test_all_mistakes_are_reported_at_once_each_on_its_line(tmp_path: Path):
    path = write(tmp_path, "[inner]\nsize = 0\nrat = 1.0\nwords = 3\n[othr]\nsize = 2\n")
    with pytest.raises(ConfigError) as error:
        load_config(Root, path)
    lines = str(error.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    assert sorted(line.removeprefix(f"{path}: ").split(":")[0] for line in lines) == [
        "inner.rat", "inner.size", "inner.words", "othr",
    ]  # fmt: skip
    assert "did you mean inner.rate?" in str(error.value)
    assert "did you mean other?" in str(error.value)


def test_a_key_of_another_section_is_pointed_out(tmp_path: Path):
    class Tree(Section):
        inner: Inner
        run: "Names" = Field(default_factory=lambda: Names())

    class Names(Section):
        nickname: str = "x"

    Tree.model_rebuild(_types_namespace={"Names": Names})
    with pytest.raises(ConfigError, match=r"inner\.nickname: unknown key \(did you mean run\.nickname\?\)"):
        load_config(Tree, write(tmp_path, "[inner]\nsize = 1\nnickname = 'a'\n"))


@pytest.mark.parametrize("bad", ["inner.size", "=3", "inner.=3", "inner.size.deep=3"])
def test_malformed_overrides_are_named(tmp_path: Path, bad: str):
    with pytest.raises(ConfigError, match=bad.split("=")[0] or "=3"):
        load_config(Root, write(tmp_path, "[inner]\nsize = 1\n"), [bad])


@pytest.mark.parametrize("value", ["'3'", "3.5", "true", "nan"])
def test_types_are_strict(tmp_path: Path, value: str):
    with pytest.raises(ConfigError, match=r"inner\.size"):
        load_config(Root, write(tmp_path, f"[inner]\nsize = {value}\n"))


def test_a_missing_file_suggests_a_neighbour(tmp_path: Path):
    write(tmp_path, "")
    with pytest.raises(ConfigError, match=r"soem\.toml: no such configuration file \(did you mean .*some\.toml"):
        load_config(Root, tmp_path / "soem.toml")


def test_broken_toml_names_the_file(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"some\.toml: not valid TOML"):
        load_config(Root, write(tmp_path, "[inner\n"))


def test_resolved_settings_read_back_as_the_same_tree(tmp_path: Path):
    config = load_config(Root, write(tmp_path, "[inner]\nsize = 3\nwords = ['a\"\\\\ é', '\U0001f600']\n"))
    assert load_config(Root, write(tmp_path, to_toml(config))) == config
    control = Root(inner=Inner(size=1, words=["\x00\t\x7f"]))
    assert load_config(Root, write(tmp_path, to_toml(control))) == control


def test_a_table_of_any_keys_is_read_back_and_compared(tmp_path: Path):
    weights = {"plain-1_": 1.0, "data/a.b": 0.5, 'a "quoted" é\\': 2.0, "": 3.0}
    config = Root(inner=Inner(size=1), weights=weights)
    assert load_config(Root, write(tmp_path, to_toml(config))).weights == weights
    assert load_config(Root, write(tmp_path, "[inner]\nsize = 1\n"), ['weights={"x.y" = 1}']).weights == {"x.y": 1.0}
    changed = Root(inner=Inner(size=1), weights={"data/a.b": 0.5, "plain-1_": 1.5, "new": 1.0})
    assert differences(config, changed) == [
        "weights.plain-1_: 1.0 → 1.5", 'weights.a "quoted" é\\: 2.0 → not set', "weights.: 3.0 → not set",
        "weights.new: not set → 1.0",
    ]  # fmt: skip
