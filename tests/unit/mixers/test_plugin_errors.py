"""Plugins: what is refused, in one line that names the file, and what is never run."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import CHECKOUT

from tost_lm.checkpointing.format import flush_and_hash, publish_checkpoint, read_model_config, write_checkpoint
from tost_lm.config import load_config, validate
from tost_lm.errors import CheckpointError, ConfigError
from tost_lm.files import sha256_bytes
from tost_lm.mixers.plugins import run_plugin
from tost_lm.mixers.registry import SPECS
from tost_lm.model import ModelConfig, TostLM
from tost_lm.model.flops import flops_per_token, parameters

pytestmark = pytest.mark.quick

EMA = (CHECKOUT / "experiments/gated_ema.py").read_text()
SHAPE = {"layers": 2, "heads": 2, "width": 16, "vocab_size": 40, "max_positions": 16, "positions": "none"}
MARKER = "from pathlib import Path\nPath('marker').touch()\n"


@pytest.fixture(autouse=True)
def _only_the_mixers_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TOST_PLUGINS", raising=False)
    spec, modules = dict(SPECS), set(sys.modules)
    yield
    SPECS.clear()
    SPECS.update(spec)
    for name in set(sys.modules) - modules:
        if name.startswith("tost_plugin_"):
            del sys.modules[name]


def write(text: str = EMA, name: str = "mine.py") -> Path:
    Path(name).write_text(text)
    return Path(name)


def config(pattern: str = "E", **settings) -> ModelConfig:
    return validate(ModelConfig, {**SHAPE, "pattern": pattern, **settings}, "test")


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as error:
        run_plugin(path)
    message = str(error.value)
    assert message.startswith(f"plugin {path}")
    assert "\n" not in message
    assert ";" in message
    return message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"E", "gated', '"D", "gated', "the letter D is taken by gated delta rule; choose another letter"),
        ('"E", "gated', '"EM", "gated', "its letter is 'EM'; choose a capital letter"),
        ("register(EmaSpec(), GatedEma)", "", "registers no mixer; call tost_lm.mixers.plugins.register in it"),
        ("import math", "import maths", "ModuleNotFoundError: No module named 'maths' (line 11); correct the file"),
        ("import math", "import sys; sys.exit(0)", "SystemExit: 0 (line 11); correct the file"),
        ("    def description(", "    def described(", "TypeError: Can't instantiate abstract class EmaSpec"),
        ("GatedEma(TokenMixer)", "GatedEma(nn.Module)", "GatedEma is no TokenMixer; derive it from"),
        ("letter, name, tag, settings =", "letter, name, _, settings =", "its spec has no tag; set it"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_refused_in_one_line(old: str, new: str, message: str):
    assert EMA.count(old) == 1
    assert message in refused(write(EMA.replace(old, new)))
    assert "E" not in SPECS


def test_a_layer_that_cannot_be_counted_is_named():
    forward = "        projected_BTE = self.in_proj(x_BTC)"
    run_plugin(write(EMA.replace(forward, f"        x_BTC.numpy()\n{forward}")))
    line = EMA[: EMA.index(forward)].count("\n") + 1
    said = rf"plugin mine.py: counted on tensors without values .* \(line {line}\); correct the file$"
    with pytest.raises(ConfigError, match=said):
        flops_per_token(config(), 8)


def test_a_missing_file_and_a_letter_of_another_plugin_are_named():
    assert "cannot be read: No such file or directory" in refused(Path("nowhere.py"))
    run_plugin(write())
    run_plugin(write(name="copy.py"))  # the same text is the same plugin
    assert "the letter E is taken by gated EMA" in refused(write(EMA + "\n", "other.py"))


def test_settings_that_the_user_gives_run_the_file_and_no_others_do():
    write(MARKER + EMA)
    Path("model.toml").write_text("plugins = ['mine.py']\npattern = 'E'\nlayers = 1\nheads = 2\nwidth = 8\n")
    for read in (
        lambda: load_config(ModelConfig, Path("model.toml")),
        lambda: config(plugins=["mine.py"]),
        lambda: ModelConfig(layers=1, heads=2, width=8, pattern="E", plugins=[Path("mine.py")]),
    ):
        with pytest.raises(ValueError, match=r"invalid model.pattern: 'E'.* or name the file .* in model.plugins"):
            read()
    assert not Path("marker").exists()
    assert load_config(ModelConfig, Path("model.toml"), from_user=True).letters == "E"
    assert Path("marker").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"E": {"longest": "x"}}, "test: model.plugin_settings.E.longest: input should be a valid number, got 'x'"),
        ({"E": {"longest": 3}}, "test: model.plugin_settings.E.longest: input should be greater than or equal to 4"),
        ({"E": {"longst": 9}}, "test: model.plugin_settings.E.longst: unknown key (did you mean longest?)"),
        ({"Z": {"longest": 9}}, "test: model.plugin_settings.Z: no plugin has this letter; name its file in"),
        ({"D": {"qk_heads": 9}}, "test: model.plugin_settings.D: no plugin has this letter; name its file in"),
        (
            {"E": {"sha256": "0"}},
            "test: model.plugin_settings.E.sha256: the model needs the plugin with SHA-256 0, and",
        ),
    ],
)
def test_settings_of_a_plugin_are_strict(settings: dict, message: str):
    run_plugin(write())
    with pytest.raises(ConfigError) as error:
        config(plugin_settings=settings)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_layer_gets_its_settings_and_its_parameters_are_counted():
    run_plugin(write())
    assert config().plugin_settings["E"] == {"sha256": sha256_bytes(EMA.encode()), "longest": 512.0}
    model = TostLM(config("ET", plugin_settings={"E": {"longest": 8.0}}, tssa={"denom_bias": "none"}))
    assert model.blocks[0].mixer.longest == 8.0  # pyright: ignore
    assert parameters(model.config).total == sum(p.numel() for p in model.parameters())
    assert model.config.layer_kinds.startswith("pattern ET: ")
    assert config("T").plugin_settings == {}
    assert "plugin_settings" not in config("T").in_use()


def test_a_crafted_checkpoint_runs_nothing():
    folder = Path("saved")
    run_plugin(write())
    model = TostLM(config(plugins=["mine.py"]))
    write_checkpoint(folder, model.config, model.state_dict(), None)
    assert "mine.py" not in (folder / "model.json").read_text()
    del SPECS["E"]  # like a new process
    (folder / "mixer_E.py").write_text(MARKER + EMA)
    settings = (folder / "model.json").read_text()
    (folder / "model.json").write_text(settings.replace("{", '{"plugins": ["saved/mixer_E.py"],', 1))
    files = {path.name: flush_and_hash(path) for path in folder.iterdir() if path.name != "manifest.json"}
    publish_checkpoint(folder, Path("crafted"), files)
    with pytest.raises(CheckpointError, match="its E layers need the plugin mixer_E"):
        read_model_config(Path("crafted"))
    (Path("crafted") / "mixer_E.py").unlink()
    with pytest.raises(ConfigError, match=r"invalid model.pattern: 'E'"):
        read_model_config(Path("crafted"))
    assert not Path("marker").exists()
