"""What a run may be asked to train for: the tasks that come with lacuna, and objectives of the user's own."""

from lacuna.config.errors import did_you_mean
from lacuna.config.imported import imported

# What the tasks that come with lacuna are trained on; distillation.data says it for distill.
TASKS = {
    "pretrain": "texts",
    "sft": "conversations",
    "distill": "texts",
    "preference": "preferences",
}
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
    "prepare",
    "next_step",
)


def known_task(task: str) -> str:
    """The task, if it can be had. Raises `ValueError` otherwise."""
    if ":" in task:
        objective = imported(task)
        missing = [part for part in PARTS if not hasattr(objective, part)]
        if missing:
            raise ValueError(f"{task} has no {', '.join(missing)}, which the loop asks for")
        if objective.trains_on not in TASKS.values():
            raise ValueError(
                f"{task}.trains_on is {objective.trains_on!r}; set texts, conversations or preferences"
            )
    elif task not in TASKS:
        alike = did_you_mean(task, TASKS)
        mend = alike or "; choose one, or an objective of your own as module:name"
        raise ValueError(f"only {', '.join(TASKS)} are available yet{mend}")
    return task


def trains_on(task: str) -> str:
    """What a task learns from: texts, conversations or preferences."""
    return TASKS[task] if task in TASKS else imported(task).trains_on
