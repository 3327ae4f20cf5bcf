"""Rules about settings that are refused: which settings, when, and why."""

from collections.abc import Callable
from dataclasses import dataclass

from lacuna.config.fields import Section
from lacuna.config.sections import Config
from lacuna.config.task import TASKS

Predicate = Callable[[Config], object]


@dataclass(frozen=True)
class Rule:
    """These settings are refused, for this reason, where `applies` returns something true."""

    settings: tuple[str, ...]
    applies: Predicate
    reason: str


def is_given(setting: str, beside: Predicate = lambda _: True) -> Predicate:
    """A predicate: the setting is neither false, empty nor 0, and the condition `beside` holds."""
    section, name = setting.split(".")
    return lambda config: getattr(getattr(config, section), name) and beside(config)


def is_changed(setting: str, beside: Predicate) -> Predicate:
    """A predicate: the setting does not have its default, and the condition `beside` holds."""
    section, name = setting.split(".")

    def applies(config: Config) -> object:
        table = getattr(config, section)
        return getattr(table, name) != getattr(type(table)(), name) and beside(config)

    return applies


def refused_for(task: str, setting: str, reason: str, is_wrong: Predicate | None = None) -> Rule:
    """A rule that refuses a setting for a task: one that is wrong, or has not its default."""
    wrong = is_wrong or is_changed(setting, lambda config: True)
    return Rule(
        (setting, "job.task"), lambda config: config.job.task == task and wrong(config), reason
    )


def only_for(tasks: tuple[str, ...], section: str, kind: type[Section]) -> list[Rule]:
    """A rule for each setting of a section: it is refused with other tasks of lacuna's own."""
    others = {*TASKS} - {*tasks}
    return [
        Rule(
            (f"{section}.{name}", "job.task"),
            is_changed(f"{section}.{name}", lambda config: config.job.task in others),
            f"only {' or '.join(tasks)} takes the first; set the second to it, or drop the first",
        )
        for name in kind.model_fields
    ]


def rule_for_each(
    settings: tuple[str, ...], other: str, applies: Predicate, reason: str
) -> list[Rule]:
    """A rule for each of the settings: if given, it is refused beside the `other` setting."""
    return [Rule((setting, other), is_given(setting, applies), reason) for setting in settings]
