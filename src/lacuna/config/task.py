"""What a run may train for: the tasks that come with lacuna, and objectives of the user's own."""

from inspect import signature

from lacuna.config.errors import did_you_mean
from lacuna.config.user_code import import_attribute

# Task that comes with lacuna -> what it is trained on (for distill, distillation.data decides).
TASKS = {
    "pretrain": "texts",
    "sft": "conversations",
    "distill": "texts",
    "preference": "preferences",
    "grpo": "prompts",
    "reward": "preferences",
    "ppo": "prompts",
}
# Task -> the section of its settings, where that has another name.
SECTIONS = {"distill": "distillation"}
# What the loop asks of an objective.
PARTS = (
    "trains_on",
    "denominator",
    "loss",
    "held_out_loss",
    "annotate",
    "report",
    "report_held_out",
    "state_dict",
    "load_state_dict",
    "check",
    "frozen_models",
    "prepare",
    "next_step",
)


def known_task(task: str) -> str:
    """The task itself, if it is one that can run. Raises `ValueError` otherwise."""
    if ":" in task:
        objective = import_attribute(task)
        missing = [part for part in PARTS if not hasattr(objective, part)]
        if missing:
            raise ValueError(f"{task} has no {', '.join(missing)}, which the loop asks for")
        if objective.trains_on not in TASKS.values():
            raise ValueError(
                f"{task}.trains_on is {objective.trains_on!r}; set texts, conversations, "
                "preferences or prompts"
            )
        try:
            signature(objective).bind()
        except TypeError as error:
            raise ValueError(
                f"{task} cannot be called without arguments ({error}); name a class that takes none"
            ) from error
    elif task not in TASKS:
        alike = did_you_mean(task, TASKS)
        mend = alike or "; choose one, or an objective of your own as module:name"
        raise ValueError(f"there is no such task, but {', '.join(TASKS)}{mend}")
    return task


def trains_on(task: str) -> str:
    """What a task learns from: texts, conversations, preferences or prompts."""
    return TASKS[task] if task in TASKS else import_attribute(task).trains_on
