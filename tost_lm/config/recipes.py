"""The recipes and cluster scripts that are installed with the package, by name."""

from pathlib import Path

from tost_lm.errors import ConfigError

RECIPES = Path(__file__).parents[1] / "recipes"
SCRIPTS = ("launch.sh", "train.sbatch", "hostfile")


def recipes() -> dict[str, Path]:
    """File by name: recipes without `.toml`, then the scripts of `configs/cluster`."""
    named = {path.stem: path for path in sorted(RECIPES.glob("*/*.toml"))}
    return named | {name: RECIPES / "cluster" / name for name in SCRIPTS}


def find_recipe(path: Path) -> Path:
    """The file of a recipe if `path` is its name; any other path unchanged.

    Raises:
        ConfigError: the working folder has a file of this name, too.
    """
    if (recipe := recipes().get(str(path))) is None:
        return path
    for file in (path, path.with_name(f"{path.name}.toml")):
        if file.exists():
            raise ConfigError(
                f"{path}: is a recipe, and {file} exists here; write {file.absolute()} for the file, or move it away "
                "to use the recipe"
            )
    return recipe
