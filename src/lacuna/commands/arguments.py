"""The words after a command: its options, and those that describe a run."""

import argparse
import os
from collections.abc import Sequence

from lacuna.config import Config, UserError, load_config


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose complaints are `UserError`s."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{self.prog}: {message}. See {self.prog} --help.")


def asks_for_help(words: Sequence[str]) -> bool:
    """Whether the help is wanted instead of the command."""
    return "-h" in words or "--help" in words


def parse_run(parser: CommandParser, words: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """The options of `parser` with `gpus` and `cpus` beside them, and the run that a file and settings describe.

    The file comes first, if there is one. With `--cpus` this process and those it starts use no GPU. Raises
    `UserError` for whatever is wrong.
    """
    parser.add_argument("--gpus", type=_count)
    parser.add_argument("--cpus", type=_count)
    options, rest = parser.parse_known_args(list(words))
    if options.gpus and options.cpus:
        raise UserError("--gpus and --cpus exclude each other: give one.")
    path = rest.pop(0) if rest and not rest[0].startswith("-") else None
    config = load_config(path, rest)
    if options.cpus:
        os.environ["LACUNA_DEVICE"] = "cpu"
    return options, config


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wants a number of processes of at least 1, not {text!r}")
    return int(text)
