"""TOML and flags to one checked, frozen `Config`."""

import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lacuna.config.aliases import CONVERTED, IMPLIED, NOT_YET_SECTIONS, REFUSED, RENAMED
from lacuna.config.checks import problems_of
from lacuna.config.documents import Source
from lacuna.config.errors import UserError, did_you_mean, nearby
from lacuna.config.packaged import packaged
from lacuna.config.sections import Config
from lacuna.config.values import choices, from_words

FIELDS = {
    f"{section}.{name}": info.annotation
    for section, table in Config.model_fields.items()
    for name, info in table.annotation.model_fields.items()
}
"""Canonical dotted name of every setting -> its type."""

_FLAGS = "on the command line"
_CONFIG_FILE = "job.config_file"
_UNSET = object()


@dataclass(frozen=True)
class Given:
    """A value somebody gave: under which name, where, and what it brings along."""

    value: Any
    spelling: str
    where: str
    implied: dict[str, Any] = field(default_factory=dict)


def load_config(path: str | None, flags: Sequence[str]) -> Config:
    """The configuration of a run from a TOML file (None: the embedded quickstart), then flags.

    A flag is `--section.setting value`, where the word `none` means the default. Raises one UserError that
    tells everything that is wrong, a line each.
    """
    problems: list[str] = []
    words = list(_words_by_flag(flags, problems))
    path = _chosen_file(path, [values for name, values in words if name == _CONFIG_FILE])
    recipe = resources.files("lacuna").joinpath("recipes", "quickstart.toml")
    file = Path(str(recipe) if path is None else packaged(path)).expanduser()
    where = f"in {path or 'the quickstart recipe'}"
    in_file = _resolve(_flatten(_read(file), where, problems), where, problems)
    typed = _typed([(name, values) for name, values in words if name != _CONFIG_FILE], problems)
    given = in_file | _resolve(typed, _FLAGS, problems)
    for entry in list(given.values()):
        for setting, value in entry.implied.items():
            given.setdefault(setting, Given(value, entry.spelling, entry.where))
    given = {setting: entry for setting, entry in given.items() if entry.value is not _UNSET}
    config = _validated(given, file.stem, problems)
    wrong = [setting for setting in FIELDS if any(setting in problem for problem in problems)]
    problems += [rule for rule in problems_of(config) if not any(name in rule.partition(": ")[0] for name in wrong)]
    if problems:
        raise UserError("\n".join(problems))
    return config


def _words_by_flag(flags: Sequence[str], problems: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag's name, with underscores, and the words up to the next flag."""
    name, words = None, []
    for word in flags:
        if word.startswith("--"):
            if name is not None:
                yield name, words
            spelling, equals, value = word[2:].partition("=")
            name, words = spelling.replace("-", "_"), [value] if equals else []
        elif name is None:
            problems.append(f"{word}: a word without a flag; write --section.setting {word}")
        else:
            words.append(word)
    if name is not None:
        yield name, words


def _chosen_file(path: str | None, flagged: list[list[str]]) -> str | None:
    """The one TOML file among the positional one and those of `--job.config_file`."""
    if any(len(words) != 1 for words in flagged):
        raise UserError(f"{_CONFIG_FILE}: needs one value, the path of a TOML file")
    files = [words[0] for words in flagged] + ([path] if path is not None else [])
    if len({Path(file) for file in files}) > 1:
        raise UserError(f"{_CONFIG_FILE}: different TOML files are given, {' and '.join(files)}; keep one")
    return files[0] if files else None


def _read(file: Path) -> dict[str, Any]:
    """The tables of the TOML file."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file}: there is no such TOML file{nearby(file)}") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); give a TOML file") from None
    except ValueError as error:
        raise UserError(f"{file}: is not valid TOML: {error}") from None


def _flatten(tables: dict[str, Any], where: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Dotted name and value of everything in the TOML file."""
    sections = {name.partition(".")[0] for name in [*FIELDS, *RENAMED]}
    for section, table in tables.items():
        section = section.replace("-", "_")
        if not isinstance(table, dict) or (not table and section not in sections):
            problems.append(_unknown(section, where))
            continue
        for name, value in table.items():
            yield f"{section}.{name.replace('-', '_')}", value


def _typed(flags: Iterable[tuple[str, list[str]]], problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Dotted name and value of every flag; unknown names are left for `_resolve` to report."""
    for name, words in flags:
        setting = RENAMED.get(name, name)
        if setting not in FIELDS and name not in CONVERTED:
            yield name, words
            continue
        annotation = FIELDS[setting] if setting in FIELDS else bool if True in CONVERTED[name] else str
        if words == ["none"] and "none" not in choices(annotation):
            yield name, _UNSET
            continue
        try:
            yield name, from_words(annotation, words)
        except ValueError as error:
            problems.append(f"{name}: {error}")


def _resolve(entries: Iterable[tuple[str, Any]], where: str, problems: list[str]) -> dict[str, Given]:
    """Everything given in one place under its canonical name."""
    given: dict[str, Given] = {}
    for spelling, value in entries:
        if spelling in FIELDS or spelling in RENAMED:
            meaning = {RENAMED.get(spelling, spelling): value}
        elif spelling in CONVERTED:
            known = CONVERTED[spelling]
            if value is _UNSET or not isinstance(value, (bool, str)) or value not in known:
                names = ", ".join(str(name).lower() for name in known)
                problems.append(f"{spelling}: should be one of {names} (got {_shown(value)} {where})")
                continue
            meaning = known[value]
        else:
            problems.append(_unknown(spelling, where))
            continue
        for setting, canonical in meaning.items():
            first = given.get(setting)
            if first is not None and first.value != canonical:
                problems.append(
                    f"{setting}: given twice {where}, as {first.spelling} = {_shown(first.value)} "
                    f"and as {spelling} = {_shown(canonical)}; keep one"
                )
            implied = IMPLIED.get((spelling, value), {}) if spelling in CONVERTED else {}
            given[setting] = Given(canonical, spelling, where, implied)
    return given


def _unknown(name: str, where: str) -> str:
    """Why a name is not a setting, and which setting is nearest to it."""
    section, _, last = name.rpartition(".")
    if name in REFUSED:
        return f"{name}: is not accepted: {REFUSED[name]} ({where}; leave it out)"
    if (section or name) in NOT_YET_SECTIONS:
        return f"{name}: the section {section or name} is not available yet ({where}; leave it out)"

    def likeness(known: str) -> float:
        return (
            difflib.SequenceMatcher(None, name, known).ratio()
            + difflib.SequenceMatcher(None, last, known.rpartition(".")[2]).ratio()
        )

    guess = max([*FIELDS, *RENAMED, *CONVERTED], key=likeness)
    return f"{name}: there is no such setting ({where}); the nearest is {RENAMED.get(guess, guess)}"


def _validated(given: dict[str, Given], name: str, problems: list[str]) -> Config:
    """The configuration of everything whose type and bounds are right; the rest is added to `problems`."""
    tables: dict[str, dict[str, Any]] = {"job": {}}
    for setting, entry in given.items():
        section, _, field_name = setting.partition(".")
        tables.setdefault(section, {})[field_name] = entry.value
    tables["job"].setdefault("name", name)
    tables["job"].setdefault("dump_folder", f"outputs/{tables['job']['name']}")
    try:
        return Config.model_validate(tables)
    except ValidationError as error:
        wrong = set()
        for detail in error.errors():
            setting = ".".join(str(part) for part in detail["loc"][:2])
            problems.append(_explained(detail, given[setting]))
            wrong.add(setting)
    return _validated({setting: e for setting, e in given.items() if setting not in wrong}, name, problems)


def _explained(detail: Any, entry: Given) -> str:
    """A line for one finding of pydantic: the setting, what is wanted, what was given and where."""
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"])[1:]
    wanted = detail["msg"].replace("Input should", "should").replace("valid tuple", "list")
    wanted = wanted.removeprefix("Value error, ")
    value = detail["input"]
    kind, hint = detail["type"], ""
    if kind in ("int_type", "float_type", "bool_type") and isinstance(value, str) and entry.where != _FLAGS:
        hint = "; write it without quotes"
    elif kind == "literal_error":
        hint = did_you_mean(str(value), map(str, choices(FIELDS[name])))
    elif kind == "extra_forbidden":
        hint = did_you_mean(str(detail["loc"][-1]), Source.model_fields)
    spelling = f", as {entry.spelling}" if entry.spelling != ".".join(map(str, detail["loc"][:2])) else ""
    return f"{name}: {wanted} (got {_shown(value)} {entry.where}{spelling}){hint}"


def _shown(value: Any) -> str:
    return "none" if value is _UNSET else json.dumps(value, default=str, ensure_ascii=False)
