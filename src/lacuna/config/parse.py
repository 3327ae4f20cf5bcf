"""Turns TOML and flags into one checked, frozen `Config`, and that back into TOML."""

import os
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import shorten
from typing import Any

from pydantic import ValidationError

from lacuna.config.aliases import MEANT, OPPOSITE, REFUSED, RENAMED
from lacuna.config.checks import problems_of
from lacuna.config.documents import CurriculumStage, Source
from lacuna.config.errors import UserError, did_you_mean, explained, nearby
from lacuna.config.fields import RECIPES, Words, packaged, read_value, shown
from lacuna.config.optimizers import OptimizerGroup
from lacuna.config.sections import SECTIONS, Config

# Canonical dotted name of every setting -> its type, bounds and default.
FIELDS = {
    f"{section}.{name}": field
    for section, table in SECTIONS.items()
    for name, field in table.model_fields.items()
}

# Every name that a setting may be given under -> its canonical name.
SPELLINGS = RENAMED | {setting: setting for setting in FIELDS}


# A command line that sets one of these and names no file takes nothing from the quickstart.
_OWN = {"model.name_or_path", "model.config", "data.dataset", "data.sources", "data.data_files"}


def load_config(path: str | None, flags: Sequence[str]) -> Config:
    """The configuration of a run from a TOML file, then flags.

    Without a file it is the embedded quickstart, unless the flags name a model or data: then it
    begins with defaults alone. A flag is `--section.setting value`, where the word `none` means the
    default. Raises one `UserError` for everything that is wrong, with a line for each.
    """
    problems: list[str] = []
    late: list[str] = []
    flagged = _read_settings(_words_by_flag(flags, late), "on the command line", late)
    given: dict[str, tuple[Any, str]] = {}
    job: dict[str, Any] = {}
    if path or not _OWN & {setting for setting, (value, _) in flagged.items() if value}:
        file = Path(packaged(path)).expanduser() if path else RECIPES / "quickstart.toml"
        given = _read_toml(file, f"in {path or 'the quickstart recipe'}", problems)
        job["name"] = file.stem
    given |= flagged
    folder = given.get("job.dump_folder", ("",))[0]
    if folder:
        job["name"] = os.path.basename(os.path.abspath(folder))
    tables: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    tables["job"] = job
    for setting, (value, _) in given.items():
        section, name = setting.split(".")
        if value is not None:
            tables[section][name] = value
    config = Config.model_validate(tables)
    problems += late
    wrong = [setting for setting in FIELDS if any(setting in problem for problem in problems)]
    problems += [
        rule
        for rule in problems_of(config)
        if not any(name in rule.partition(": ")[0] for name in wrong)
    ]
    if problems:
        raise UserError("\n".join(problems))
    return config


def _words_by_flag(flags: Sequence[str], problems: list[str]) -> list[tuple[str, Words]]:
    """Each flag's name, with underscores, and the words that follow it up to the next flag.

    Of a flag that is given twice the last words count.
    """
    found: list[tuple[str, list[str]]] = []
    for word in flags:
        if word.startswith("--"):
            name, *words = word[2:].split("=", 1)
            found.append((name.replace("-", "_"), words))
        elif found:
            found[-1][1].append(word)
        else:
            mend = f"write --section.setting {word}"
            if word.startswith("-"):
                mend = f"write -{word}"
            elif word.endswith(".toml"):
                mend = "one TOML file is all that a run takes"
            problems.append(f"{word}: a word without a flag; {mend}")
    return [(name, Words(words)) for name, words in dict(found).items()]


def _read_toml(file: Path, where: str, problems: list[str]) -> dict[str, tuple[Any, str]]:
    """The settings that the TOML file gives, in the form that `_read_settings` returns."""
    mend = nearby(file, (path.name for path in RECIPES.glob("*.toml")))
    if file.exists():
        mend = "give a TOML file"
    if Path(file, "config.toml").exists():
        mend = f"give {file / 'config.toml'}"
    absent = explained(f"{file}: cannot be read", OSError, mend=mend)
    deep = f"{file}: tables within tables, deeper than any setting"
    nested = explained(deep, RecursionError, mend="mend it there")
    with absent, nested, explained(f"{file}: is not valid TOML", ValueError, mend="mend it there"):
        return _read_settings(
            _flatten(tomllib.loads(file.read_text(encoding="utf-8-sig"))), where, problems
        )


def _flatten(tables: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The dotted name and the value of everything in the TOML file.

    A value that is no table of settings comes under its own name, unchanged.
    """
    sections = {name.partition(".")[0] for name in SPELLINGS}
    for section, table in tables.items():
        if isinstance(table, dict) and (table or section.replace("-", "_") in sections):
            for name, value in table.items():
                yield f"{section}.{name}".replace("-", "_"), value
        else:
            yield section, table


def _read_settings(
    entries: Iterable[tuple[str, Any]], where: str, problems: list[str]
) -> dict[str, tuple[Any, str]]:
    """The settings given in one place: canonical name -> value, and how it was written there.

    The value None stands for the default. What is wrong is added to `problems`.
    """
    given: dict[str, tuple[Any, str]] = {}
    for spelling, raw in entries:
        try:
            setting = _canonical_name(spelling, where)
            value = read_value(FIELDS[setting], raw)
        except ValidationError as error:
            problems += [_message_of(detail, setting, spelling, where) for detail in error.errors()]
        except ValueError as error:
            problems.append(f"{spelling}: {error}")
        else:
            if spelling in OPPOSITE and value is not None:
                value = not value
            meant = f"{spelling} = {shown(value)}"
            first, first_meant = given.setdefault(setting, (value, meant))
            if first != value:
                problems.append(
                    f"{setting}: given twice {where}, as {first_meant} and as {meant}; keep one"
                )
    return given


def _canonical_name(name: str, where: str) -> str:
    """The setting that a name stands for.

    Raises `ValueError`, which says why or names the nearest setting, where there is none.
    """
    if name in SPELLINGS:
        return SPELLINGS[name]
    for pattern, reason in REFUSED.items():
        if fnmatchcase(name, pattern):
            raise ValueError(f"is not accepted: {reason} ({where}; leave it out)")

    def likeness(known: str) -> float:
        pairs = ((name, known), (name.rpartition(".")[2], known.rpartition(".")[2]))
        return sum(SequenceMatcher(None, *pair).ratio() for pair in pairs)

    nearest = MEANT.get(name.rpartition(".")[2]) or SPELLINGS[max(SPELLINGS, key=likeness)]
    raise ValueError(f"there is no such setting ({where}); the nearest is {nearest}")


def _message_of(detail: Any, setting: str, spelling: str, where: str) -> str:
    """The message for one error that pydantic found.

    It says which setting is wrong, what it should be, what was given, and where.
    """
    part = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in detail["loc"])
    said = detail["msg"].removeprefix("Input ").removeprefix("Value error, ")
    wanted = said.partition(", unable")[0].replace("valid tuple", "list")
    value = detail["input"]
    kind = detail["type"]
    hint = ""
    if kind in ("int_type", "float_type", "bool_type") and isinstance(value, str):
        hint = "; write it without quotes"
    elif kind == "missing":
        wanted = "it must be given"
    elif kind == "literal_error":
        hint = did_you_mean(str(value), detail["ctx"]["expected"].split("'"))
    elif kind == "extra_forbidden":
        wanted = "there is no such setting"
        tables = Source, CurriculumStage, OptimizerGroup
        known = {name for table in tables for name in table.model_fields}
        hint = did_you_mean(str(detail["loc"][-1]), known)
    name = f", as {spelling}" if spelling != setting else ""
    return f"{setting}{part}: {wanted} (got {shorten(shown(value), 100)} {where}{name}){hint}"


def to_toml(config: Config) -> str:
    """Every setting as TOML, which `load_config` reads back to an equal configuration."""
    lines: list[str] = []
    for name, table in config.model_dump().items():
        lines += [f"[{name}]", *_toml_lines(name, table), ""]
    return "\n".join(lines)


def _toml_lines(name: str, table: dict[str, Any]) -> Iterator[str]:
    """The lines of a table: its settings, and after them its lists of tables."""
    lists = {
        key: value
        for key, value in table.items()
        if isinstance(value, tuple) and {*map(type, value)} == {dict}
    }
    for key, value in table.items():
        if key not in lists:
            yield f"# {key} is not set" if value is None else f"{key} = {shown(value)}"
    for key, tables in lists.items():
        for each in tables:
            yield from ("", f"[[{name}.{key}]]", *_toml_lines(f"{name}.{key}", each))
