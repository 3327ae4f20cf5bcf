"""The words after a command: its options, those that describe a run, and the help of all of these."""

import argparse
import os
import re
import textwrap
from collections.abc import Iterable

from lacuna.config import Config, UserError, load_config
from lacuna.config.errors import did_you_mean, refuse
from lacuna.config.fields import RECIPES, shown

_TYPES = {
    "boolean": "true|false",
    "integer": "int",
    "number": "float",
    "array": "list",
    "string": "text",
}
TRUST = "run the Python code that the model comes with, if any"


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose complaints are `UserError`s."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{self.prog}: {message}. See {self.prog} --help.")


def parse_run(
    command: str, doc: str, words: list[str], *flag: str
) -> tuple[argparse.Namespace, Config]:
    """The options of `words`, which are `flag` (under all its names), `gpus` and `cpus`, and the run of the rest.

    The file comes first or, as with flame, after `--job.config_file`, if there is one. With
    `--cpus` this process and those it starts use no GPU. Prints what follows the first paragraph of
    `doc`, and ends, where help is asked for. Raises `UserError` for whatever is wrong.
    """
    if asked := [place for place, word in enumerate(words) if word in ("-h", "--help")]:
        _print_help(command, doc, words[asked[0] + 1 :])
        raise SystemExit
    parser = CommandParser(prog=f"lacuna {command}", add_help=False, allow_abbrev=False)
    if flag:
        parser.add_argument(*flag, action="store_true")
    processes = parser.add_mutually_exclusive_group()
    processes.add_argument("--gpus", type=_count)
    processes.add_argument("--cpus", type=_count)
    parser.add_argument("--job.config_file", "--job.config-file", dest="file")
    options, rest = parser.parse_known_args(words)
    file = rest.pop(0) if rest and not rest[0].startswith("-") else options.file
    if options.file and os.path.normpath(options.file) != os.path.normpath(file):
        raise UserError(
            f"--job.config_file: there are different TOML files, {options.file} and {file}: give one."
        )
    config = load_config(file, rest)
    if options.cpus:
        os.environ["LACUNA_DEVICE"] = "cpu"
    return options, config


def _print_help(command: str, doc: str, words: list[str]) -> None:
    """Prints the usage, which for `train` lists all settings; or those of the section that is asked for, alone."""
    if words and not words[0].startswith("-"):
        section, known = words[0].replace("-", "_").partition(".")[0], Config.model_fields
        guess = did_you_mean(section, known) or ";"
        refuse(
            {
                f"--help {section}: there is no such section{guess} there are {', '.join(known)}": section
                not in known
            }
        )
        print(help_text(sections=[section]).strip(), flush=True)
        return
    recipes = sorted(file.name for file in RECIPES.glob("*.toml"))
    print(doc.partition("\n\n")[2], f"Recipes: {', '.join(recipes)}", sep="\n")
    print(
        "Settings: lacuna train --help tells all; --help SECTION, as in --help lora, those of one.",
        flush=True,
    )
    if command == "train":
        print(
            "In the TOML file or as flags; the word none is the default, where it is no value itself."
        )
        print(help_text(), flush=True)
        print(
            "\nThe names that flame and torchtitan use (training.dataset, experimental.*, ...) work too."
        )


def help_text(width: int = 100, sections: Iterable[str] = Config.model_fields) -> str:
    """Every flag of the sections with its type, default and description as plain text, a group per section."""
    lines = []
    for section in sections:
        schema = Config.model_fields[section].annotation.model_json_schema()
        lines += ["", f"[{section}]  {schema['description']}"]
        for name, field in schema["properties"].items():
            default = (
                ""
                if field.get("default") in (None, [])
                else f" (default: {shown(field['default'])})"
            )
            kind = field.get("anyOf", [field])[0]
            words = kind.get("enum", [kind.get("const", _TYPES[kind["type"]])])
            lines.append(f"  --{section}.{name} {'|'.join(map(str, words))}")
            lines.append(
                textwrap.indent(
                    textwrap.fill(re.sub(r"\s+", " ", field["description"] + default), width - 6),
                    " " * 6,
                )
            )
    return "\n".join(lines)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wants a number of processes of at least 1, not {text!r}")
    return int(text)
