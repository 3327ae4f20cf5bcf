"""The order in which the ranks of a pipeline work, asked of torch's schedules without processes or a model."""

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch.distributed.pipelining import schedules

from lacuna.config.errors import explained
from lacuna.config.machine import ParallelismConfig

_CELL = re.compile(r"\d+[FBIW]\d+|\(\d+F\d+;\d+B\d+\)OVERLAP_F_B|")


class Action(NamedTuple):
    """A piece of work: `kind` is F (forward), B (backward), or one of its halves I (for inputs) and W (for weights)."""

    stage: int
    kind: str
    microbatch: int


def pipeline_order(
    settings: ParallelismConfig, microbatches: int | None = None
) -> dict[int, list[Action]]:
    """What each rank of a pipeline does, in order; a schedule in a file goes before one by name.

    Without `microbatches` there is one per stage, or as many as the file has. Raises `UserError`
    for a number of micro-batches or stages that the schedule cannot take, and a file that is no
    schedule for these ranks.
    """
    pp, file = settings.pipeline_parallel_degree, settings.pipeline_parallel_schedule_csv
    setting = f"pipeline_parallel_schedule{'_csv' if file else ''}: {file or settings.pipeline_parallel_schedule}"
    mend = f"make pipeline_parallel_microbatches a multiple of {2 * pp}, and give no split points"
    problem, mend = (
        f"parallelism.{setting} cannot run on {pp} ranks",
        "give another file, or none" if file else mend,
    )
    with explained(
        problem, AssertionError, OSError, ValueError, mend=mend
    ):  # the first is how torch says no
        return (
            _order_of_file(file, pp, microbatches)
            if file
            else _order_by_name(settings, microbatches)
        )


def splits_backward(settings: ParallelismConfig) -> bool:
    """Whether the pipeline computes gradients of inputs and of weights apart, which compiled layers cannot."""
    order = pipeline_order(settings) if settings.pipeline_parallel_degree > 1 else {}
    return any(action.kind == "I" for actions in order.values() for action in actions)


def held_stages(order: dict[int, list[Action]]) -> dict[int, list[int]]:
    """The stages of each rank of a pipeline, ascending."""
    return {rank: sorted({action.stage for action in actions}) for rank, actions in order.items()}


def most_unfinished(actions: list[Action]) -> int:
    """The most forward passes, as these actions are done, that wait for their backward pass, or for its weights."""
    changes = {"F": 1, "I": 0, "B": -1, "W": -1}
    return max(itertools.accumulate((changes[action.kind] for action in actions), initial=0))


def _order_by_name(
    settings: ParallelismConfig, microbatches: int | None
) -> dict[int, list[Action]]:
    """torch's own schedule. Raises `ValueError` for stages or micro-batches that it cannot run."""
    pp, points = settings.pipeline_parallel_degree, settings.pipeline_parallel_split_points
    kind = schedules.get_schedule_class(settings.pipeline_parallel_schedule)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    usual = pp if single else 2 * pp
    stages = len(points) + 1 if points else usual
    if stages % pp or stages < usual or (single and stages > usual):
        raise ValueError(
            f"{len(points)} pipeline_parallel_split_points make {stages} stages, not {usual}"
        )
    stand_ins = _stand_ins(pp, stages)
    order = kind(stand_ins[0] if single else stand_ins, microbatches or stages).pipeline_order
    return {
        rank: _numbered(_flat(actions)) if single else _flat(actions)
        for rank, actions in order.items()
    }


def _stand_ins(pp: int, stages: int) -> list[Any]:
    """What a schedule asks of one rank's stages before it runs."""
    return [SimpleNamespace(num_stages=stages, group_size=pp, group_rank=0, submod=None)] * (
        stages // pp
    )


def _flat(actions: list[schedules._Action | None]) -> list[Action]:
    """Computation alone; a forward and a backward that overlap, one after the other."""
    parts = [part for action in actions if action for part in action.sub_actions or (action,)]
    flat = [
        Action(part.stage_index, part.computation_type.value, part.microbatch_index)
        for part in parts
    ]
    return [action for action in flat if action.kind in "FBIW"]


def _numbered(actions: list[Action]) -> list[Action]:
    """GPipe's and 1F1B's micro-batches run one after the other, but torch numbers the last rank's forwards from 1."""
    numbers = {kind: itertools.count() for kind in "FB"}
    return [action._replace(microbatch=next(numbers[action.kind])) for action in actions]


def _order_of_file(path: str, pp: int, microbatches: int | None) -> dict[int, list[Action]]:
    """The schedule in torch's compute-only CSV format: a line per rank, cells such as 0F0, 1B0, 2I1, 2W1, or empty.

    Raises `OSError`, `ValueError` or `AssertionError` for a file that is none.
    """
    rows = [line.split(",") for line in Path(path).read_text().splitlines()]
    for line, cell in ((line, cell) for line, row in enumerate(rows, 1) for cell in row):
        if not _CELL.fullmatch(cell.strip()):
            raise ValueError(
                f"{path}:{line}: {cell!r} is no action; write stage, F, B, I or W, micro-batch, as in 0F0"
            )
    torchs = {
        rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)
    }
    order = {rank: _flat(actions) for rank, actions in torchs.items()}
    done = [
        action._replace(kind=action.kind.replace("I", "B"))
        for actions in order.values()
        for action in actions
    ]
    stages, count = (1 + max((action[place] for action in done), default=0) for place in (0, 2))
    if len(set(done)) < len(done) or {len(own) for own in held_stages(order).values()} != {
        stages / pp
    }:
        raise ValueError(
            "it needs a line per rank, with equally many stages, and nothing twice (B, or I and W)"
        )
    if microbatches not in (None, count):
        raise ValueError(
            f"it has {count} micro-batches: set pipeline_parallel_microbatches to it, not {microbatches}"
        )
    # torch says what else is wrong, in the order or because something is missing; it looks over
    # what is there twice.
    schedules._PipelineScheduleRuntime(_stand_ins(pp, stages), count)._prepare_schedule_with_comms(
        torchs
    )
    return order
