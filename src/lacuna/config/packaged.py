"""The recipes and model configurations that ship with the package, by file name."""

import os
from pathlib import Path

RECIPES = Path(__file__).parent.parent / "recipes"


def packaged(name: str) -> str:
    """The path of the file `name` of the recipes, where there is no such file here; else `name` itself."""
    return name if os.path.exists(name) or name not in os.listdir(RECIPES) else str(RECIPES / name)


def recipe_names() -> list[str]:
    """The recipes that `lacuna train NAME` finds anywhere."""
    return sorted(path.name for path in RECIPES.glob("*.toml"))
