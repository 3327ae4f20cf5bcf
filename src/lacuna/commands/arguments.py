"""The words after a command: its options, the settings of a run, and the help for both."""

import argparse
import os
import textwrap
from collections.abc import Iterable
from itertools import takewhile

from lacuna.config import Config, UserError, load_config
from lacuna.config.errors import did_you_mean
from lacuna.config.fields import RECIPES, shown
from lacuna.config.sections import SECTIONS

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
        unknown = message.partition("unrecognized arguments: ")[2].partition(" ")[0]
        guess = did_you_mean(unknown, self._option_string_actions) or "."
        said = f"{unknown} is not understood{guess}" if unknown else f"{message}."
        raise UserError(f"{self.prog}: {said} See {self.prog} --help.")


def parse_run(
    command: str, doc: str, words: list[str], *flag: str
) -> tuple[argparse.Namespace, Config]:
    """The options among `words`, and the configuration of the run that the other words describe.

    The options are `gpus`, `cpus`, and the command's own `flag` in all its spellings. A TOML file
    comes first or, as with flame, after `--job.config_file`. With `--cpus`, this process and those
    that it starts use no GPU. Where the words ask for help, this prints all paragraphs of `doc` but
    the first, and exits. Raises `UserError` for whatever is wrong.
    """
    asked = [place for place, word in enumerate(words) if word in ("-h", "--help")]
    if asked:
        _print_help(command, doc, words[asked[0] + 1 :])
        raise SystemExit
    parser = CommandParser(prog=f"lacuna {command}", add_help=False, allow_abbrev=False)
    if flag:
        parser.add_argument(*flag, action="store_true")
    processes = parser.add_mutually_exclusive_group()
    processes.add_argument("--gpus", type=_process_count)
    processes.add_argument("--cpus", type=_process_count)
    parser.add_argument("--job.config_file", "--job.config-file", dest="file")
    options, rest = parser.parse_known_args(words)
    file = rest.pop(0) if rest and not rest[0].startswith("-") else options.file
    if options.file and os.path.normpath(options.file) != os.path.normpath(file):
        raise UserError(
            f"--job.config_file: there are different TOML files, {options.file} and {file}: give "
            "one."
        )
    config = load_config(file, rest)
    if options.cpus:
        os.environ["LACUNA_DEVICE"] = "cpu"
    return options, config


def _print_help(command: str, doc: str, words: list[str]) -> None:
    """Prints the help of a command, or of the sections of settings that `words` begin with.

    The help of `train` lists all settings.
    """
    sections = [
        word.replace("-", "_").partition(".")[0]
        for word in takewhile(lambda word: not word.startswith("-"), words)
    ]
    for section in sections:
        if section not in SECTIONS:
            guess = did_you_mean(section, SECTIONS) or ";"
            raise UserError(
                f"--help {section}: there is no such section{guess} there are "
                f"{', '.join(SECTIONS)}."
            )
    if sections:
        print(help_text(sections=sections).strip(), flush=True)
        return
    recipes = sorted(file.name for file in RECIPES.glob("*.toml"))
    named = textwrap.fill(f"Recipes: {', '.join(recipes)}", 100)
    print(
        doc.partition("\n\n")[2],
        named,
        "Settings: lacuna train --help tells all; --help lora grpo, say, those of two sections.",
        sep="\n",
        flush=True,
    )
    if command == "train":
        print(
            "In the TOML file or as flags; the word none is the default, where it is no value "
            "itself.",
            help_text(),
            "\nThe names that flame and torchtitan use (training.dataset, experimental.*, ...) "
            "work too.",
            sep="\n",
        )


def help_text(width: int = 100, sections: Iterable[str] = Config.model_fields) -> str:
    """The flags of the sections with type, default and description, as lines of this width."""
    lines = []
    for section in sections:
        schema = SECTIONS[section].model_json_schema()
        lines += ["", f"[{section}]  {schema['description']}"]
        for name, field in schema["properties"].items():
            kind = field.get("anyOf", [field])[0]
            words = kind.get("enum", [kind.get("const", _TYPES[kind["type"]])])
            lines.append(f"  --{section}.{name} {'|'.join(map(str, words))}")
            about = " ".join(field["description"].split())
            if field.get("default") not in (None, []):
                about += f" (default: {shown(field['default'])})"
            lines.append(textwrap.indent(textwrap.fill(about, width - 6), " " * 6))
    return "\n".join(lines)


def _process_count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wants a number of processes of at least 1, not {text!r}")
    return int(text)
