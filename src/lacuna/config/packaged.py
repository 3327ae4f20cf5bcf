"""The recipes and model configurations that ship with the package, by file name."""

import os
from importlib import resources


def packaged(name: str) -> str:
    """The path of the file `name` of the recipes, where there is no such file here; else `name` itself."""
    if os.path.exists(name) or os.path.dirname(name):
        return name
    recipe = resources.files("lacuna").joinpath("recipes", name)
    return str(recipe) if recipe.is_file() else name


def recipe_names() -> list[str]:
    """The recipes that `lacuna train NAME` finds anywhere."""
    folder = resources.files("lacuna").joinpath("recipes")
    return sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".toml"))
