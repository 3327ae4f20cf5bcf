"""The order in which a pipeline's ranks work, asked of torch's schedules without a model."""

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
    """What a rank does with a micro-batch in a stage.

    Its kind is F (forward), B (backward), or a half of that: I (for inputs) or W (for weights).
    """

    stage: int
    kind: str
    microbatch: int


def pipeline_order(
    settings: ParallelismConfig, microbatches: int | None = None
) -> dict[int, list[Action]]:
    """The actions of each rank of a pipeline, in order.

    A schedule in a file takes precedence over one by name. Without `microbatches` there is one for
    each stage, or as many as the file has. Raises `UserError` for a number of micro-batches or
    stages that the schedule cannot take, and for a file that is no schedule for these ranks.
    """
    pp = settings.pipeline_parallel_degree
    file = settings.pipeline_parallel_schedule_csv
    named = f"pipeline_parallel_schedule: {settings.pipeline_parallel_schedule}"
    mend = f"make pipeline_parallel_microbatches a multiple of {2 * pp}, and give no split points"
    if file:
        named = f"pipeline_parallel_schedule_csv: {file}"
        mend = "give another file, or none"
    problem = f"parallelism.{named} cannot run on {pp} ranks"
    # An AssertionError is how torch says no.
    with explained(problem, AssertionError, OSError, ValueError, mend=mend):
        if file:
            return _order_of_file(file, pp, microbatches)
        return _order_by_name(settings, microbatches)


def splits_backward(settings: ParallelismConfig) -> bool:
    """Whether the pipeline computes the gradients of inputs and of weights apart.

    Compiled layers cannot do that.
    """
    order = pipeline_order(settings) if settings.pipeline_parallel_degree > 1 else {}
    return any(action.kind == "I" for actions in order.values() for action in actions)


def held_stages(order: dict[int, list[Action]]) -> dict[int, list[int]]:
    """The stages of each rank of a pipeline, ascending."""
    return {rank: sorted({action.stage for action in actions}) for rank, actions in order.items()}


def most_unfinished(actions: list[Action]) -> int:
    """The most micro-batches that have gone forward and not wholly backward, over all actions."""
    changes = {"F": 1, "I": 0, "B": -1, "W": -1}
    return max(itertools.accumulate((changes[action.kind] for action in actions), initial=0))


def _order_by_name(
    settings: ParallelismConfig, microbatches: int | None
) -> dict[int, list[Action]]:
    """The order of torch's own schedule.

    Raises `ValueError` for a number of stages or micro-batches that it cannot run.
    """
    pp = settings.pipeline_parallel_degree
    points = settings.pipeline_parallel_split_points
    kind: Any = schedules.get_schedule_class(settings.pipeline_parallel_schedule)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    usual = pp if single else 2 * pp
    stages = len(points) + 1 if points else usual
    if stages % pp or stages < usual or (single and stages > usual):
        raise ValueError(
            f"{len(points)} pipeline_parallel_split_points make {stages} stages, not {usual}"
        )
    own = _stand_ins(pp, stages)
    order = kind(own[0] if single else own, microbatches or stages).pipeline_order
    computed = {rank: _computations_of(actions) for rank, actions in order.items()}
    if single:
        return {rank: _number_in_order(actions) for rank, actions in computed.items()}
    return computed


def _stand_ins(pp: int, stages: int) -> list[Any]:
    """Objects with what a schedule asks of one rank's stages before it runs."""
    stand_in = SimpleNamespace(num_stages=stages, group_size=pp, group_rank=0, submod=None)
    return [stand_in] * (stages // pp)


def _computations_of(actions: list[schedules._Action | None]) -> list[Action]:
    """The computations among torch's actions; overlapping ones come one after the other."""
    parts = [part for action in actions if action for part in action.sub_actions or (action,)]
    return [
        Action(part.stage_index, part.computation_type.value, part.microbatch_index)
        for part in parts
        if part.computation_type.value in "FBIW" and part.microbatch_index is not None
    ]


def _number_in_order(actions: list[Action]) -> list[Action]:
    """The actions with their micro-batches numbered from 0, in the order in which they run.

    torch numbers the micro-batches of GPipe's and 1F1B's last rank from 1.
    """
    numbers = {kind: itertools.count() for kind in "FB"}
    return [action._replace(microbatch=next(numbers[action.kind])) for action in actions]


def _order_of_file(path: str, pp: int, microbatches: int | None) -> dict[int, list[Action]]:
    """Reads a schedule in torch's compute-only CSV format.

    The file has a line for each rank, of cells such as 0F0, 1B0, 2I1, 2W1, or empty ones. Raises
    `OSError`, `ValueError` or `AssertionError` for a file that is no such schedule.
    """
    written: dict[int, list[Any]] = {}
    for rank, line in enumerate(Path(path).read_text().splitlines()):
        for cell in line.split(","):
            if not _CELL.fullmatch(cell.strip()):
                raise ValueError(
                    f"{path}:{rank + 1}: {cell!r} is no action; write stage, F, B, I or W, "
                    "micro-batch, as in 0F0"
                )
        written[rank] = [schedules._Action.from_str(cell) for cell in line.split(",")]
    order = {rank: _computations_of(actions) for rank, actions in written.items()}
    done = [
        action._replace(kind=action.kind.replace("I", "B"))
        for actions in order.values()
        for action in actions
    ]
    stages = 1 + max((action.stage for action in done), default=0)
    count = 1 + max((action.microbatch for action in done), default=0)
    of_each_rank = {len(own) for own in held_stages(order).values()}
    if len(set(done)) < len(done) or of_each_rank != {stages / pp}:
        raise ValueError(
            "it needs a line per rank, with equally many stages, and nothing twice (B, or I and W)"
        )
    if microbatches not in (None, count):
        raise ValueError(
            f"it has {count} micro-batches: set pipeline_parallel_microbatches to it, not "
            f"{microbatches}"
        )
    # torch says what else is wrong with the order, or what is missing. It does not see what is
    # there twice, which is refused above.
    runtime = schedules._PipelineScheduleRuntime(_stand_ins(pp, stages), count)
    runtime._prepare_schedule_with_comms(written)
    return order
