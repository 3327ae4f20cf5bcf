"""When each rank of a pipeline works and when it waits, computed from the order that its schedule gives."""

from typing import NamedTuple

from lacuna.parallel.schedule import Action

# How long an action takes, in forward passes of one stage: a backward pass is two matrix products for one.
UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}


class Slot(NamedTuple):
    """An action and its time."""

    action: Action
    start: int
    end: int


def simulate(order: dict[int, list[Action]]) -> dict[int, list[Slot]]:
    """Starts every action as soon as its rank is free and the stage before has sent; sending takes no time.

    The order of a rank must have every action after those of the same stage that it needs, as torch's check sees to.
    """
    stages = {action.stage for actions in order.values() for action in actions}
    done: dict[Action, int] = {}
    timeline: dict[int, list[Slot]] = {rank: [] for rank in order}
    while any(len(slots) < len(order[rank]) for rank, slots in timeline.items()):
        for rank, slots in timeline.items():
            for action in order[rank][len(slots) :]:
                stage, kind, microbatch = action
                # In `done`, B stands for I too: either gives the gradient that the stage before waits for.
                sender = Action(stage - 1, "F", microbatch) if kind == "F" else Action(stage + 1, "B", microbatch)
                if sender.stage in stages and sender not in done:
                    break
                start = max(done.get(sender, 0), slots[-1].end if slots else 0)
                slots.append(Slot(action, start, start + UNITS[kind]))
                done[action._replace(kind=kind.replace("I", "B"))] = slots[-1].end
    return timeline


def makespan(timeline: dict[int, list[Slot]]) -> int:
    """When the last rank is done, in units."""
    return max(slots[-1].end for slots in timeline.values())


def bubble_share(timeline: dict[int, list[Slot]]) -> float:
    """The share of the ranks' time in which they wait."""
    busy = sum(slot.end - slot.start for slots in timeline.values() for slot in slots)
    return 1 - busy / (len(timeline) * makespan(timeline))
