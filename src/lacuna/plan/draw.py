"""`lacuna plan --draw`: the mesh with which rank holds what, and the pipeline's timeline, on the screen and as SVG."""

import io
import os
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import pairwise, product

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.table import Table
from rich.text import Text
from torch import nn
from transformers import PreTrainedModel

from lacuna.config import Config, explained
from lacuna.data import run_tokenizer
from lacuna.model.architecture import decoder_layers
from lacuna.model.build import plan_model
from lacuna.parallel.fsdp import reshard_after_forward
from lacuna.parallel.mesh import AXES, Layout, resolve_layout
from lacuna.parallel.precision import compute_dtype
from lacuna.parallel.schedule import Action, held_stages, pipeline_order
from lacuna.parallel.stages import homes_of, stage_ranges
from lacuna.train.metrics import open_console
from lacuna.train.setup import plan_batch

# How long an action takes, in forward passes of one stage: a backward pass is two matrix products
# for one.
UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}
STYLES = {
    "F": "#14171a on #9ecbff",
    "B": "#14171a on #a6e3a1",
    "I": "#14171a on #8be0d8",
    "W": "#14171a on #f5c26b",
}
LISTED_RANKS = 32
WIDTH = 120
# rich's picture, but without fonts from elsewhere, and as large as its text instead of as its
# window.
SVG = re.sub("@font-face {{.*?}}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
SVG = SVG.replace("viewBox", 'width="{width}" height="{height}" viewBox')


def draw(config: Config, processes: int, device: str) -> None:
    """Prints mesh and timeline, and draws them in plan.svg in the run folder; `device` is the kind that will run.

    Raises `UserError` for a layout, batch or schedule that the run would refuse.
    """
    layout = resolve_layout(config.parallelism, processes)
    plan = plan_batch(config, layout)
    model = plan_model(config, run_tokenizer(config), layout, device)
    order = pipeline_order(config.parallelism, plan.accumulation) if layout.pp > 1 else {}
    rows = list(
        holdings(
            config,
            layout,
            model,
            plan.micro_batch * plan.accumulation,
            held_stages(order) or {0: [0]},
        )
    )
    words = explain(config, layout, decoder_layers(model), plan.accumulation, device)
    timeline = simulate(order)
    lines = [timeline_line(rank, ends, makespan(timeline)) for rank, ends in timeline.items()]
    if timeline:
        words.append(
            f"Pipeline: {plan.accumulation} micro-batches take {makespan(timeline)} units, 1 for F (forward), 2 for B "
            f"(backward), 1 for its halves I (inputs) and W (weights); small letters are a rank's later stages. The "
            f"ranks wait (·) {bubble_share(timeline):.1%} of the time: the bubble."
        )
    terminal = open_console(config)
    if (
        columns := os.environ.get("COLUMNS", "")
    ).isdigit():  # a drawing is laid out for who asks for a width
        terminal.width = int(columns)
    picture = Console(
        record=True, file=io.StringIO(), width=max([WIDTH, *map(len, lines)]), highlight=False
    )
    for console, listed in ((terminal, rows[:LISTED_RANKS]), (picture, rows)):
        table = Table(
            "rank",
            "place",
            "layers (pp)",
            "parameters (fsdp, tp)",
            "rows (dp)",
            "tokens (cp)",
            box=None,
        )
        for row in listed:
            table.add_row(*row)
        more = f"… {len(rows)} ranks, all in plan.svg\n" if len(listed) < len(rows) else ""
        console.print(*words, "", table, more, sep="\n", width=WIDTH)
        console.print(*lines, sep="\n", no_wrap=True, overflow="ellipsis")
    path = os.path.join(str(config.job.dump_folder), "plan.svg")
    with explained(f"job.dump_folder: cannot write {path}", OSError, mend="choose another"):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        picture.save_svg(path, title=f"lacuna plan {config.job.name}", code_format=SVG)
    terminal.print(f"Also drawn in {path}.", soft_wrap=True, markup=False)


def holdings(
    config: Config,
    layout: Layout,
    model: PreTrainedModel,
    sequences: int,
    held: dict[int, list[int]],
) -> Iterator[tuple[str, ...]]:
    """A row for every rank, of what it holds: the stages `held` by its place in a pipeline, `sequences` of a step."""
    points, layers = config.parallelism.pipeline_parallel_split_points, decoder_layers(model)
    ranges = stage_ranges(points, sum(map(len, held.values())), model, layers)
    names = [f"{part[0]}–{part[-1]}" for part in ranges]
    names[0] = f"embedding, {names[0]}"
    names[-1] += ", head"
    path = [module for module in model.modules() if layers in module.modules()]
    weights: list[set[nn.Parameter]] = [set() for _ in ranges]
    for module, home in homes_of(model, path, ranges).items():
        for stage in home:
            weights[stage].update(module.parameters())
    sizes = [sum(weight.numel() for weight in own) for own in weights]
    for rank, place in enumerate(product(*(range(getattr(layout, axis)) for axis in AXES))):
        pp, replicate, shard, cp, _ = place
        numel = sum(sizes[stage] for stage in held[pp]) / (layout.dp_shard * layout.cp * layout.tp)
        first = sequences * (replicate * layout.dp_shard + shard)
        yield (
            str(rank),
            ", ".join(map(str, place)),
            ", ".join(names[stage] for stage in held[pp]),
            f"{numel / 1e6:,.2f} M",
            f"{first}–{first + sequences - 1}",
            f"chunks {cp}, {2 * layout.cp - 1 - cp} of {2 * layout.cp}" if layout.cp > 1 else "all",
        )


def explain(
    config: Config, layout: Layout, layers: nn.ModuleList, microbatches: int, device: str
) -> list[str]:
    """What a mesh is, how a matrix is split, and what resharding costs and saves here."""
    shards, held = layout.dp_shard * layout.cp, -(-len(layers) // layout.pp)
    dtype = compute_dtype(config.training, device)
    name, matrix = max(layers[0].named_parameters(), key=lambda named: named[1].numel())
    gib = (
        sum(parameter.numel() for parameter in layers[0].parameters())
        / layout.tp
        * dtype.itemsize
        / 2**30
    )
    kept = "keeps them" if shards > 1 else "has but one shard"
    gives_back = reshard_after_forward(config.parallelism, config.training, layout)
    choice = "gives them back" if gives_back else kept
    return [
        f"Mesh: the ranks in a grid of {' × '.join(f'{axis} {getattr(layout, axis)}' for axis in AXES)}, the last axis "
        "fastest; dp is dp_replicate × dp_shard, fsdp is dp_shard × cp. A column names the axes that divide it: ranks "
        "whose places differ on these hold other parts of it, and exchange them.",
        f"Splitting: of the {matrix.numel():,} parameters of {name} in a layer, a rank computes with 1/{layout.tp} "
        f"(tp), and stores 1/{shards} of that (fsdp): {matrix.numel() // layout.tp // shards:,}.",
        f"Resharding: to compute with a layer, a rank gathers its {shards} shards, {gib:.3g} GiB in {dtype}: "
        f"{held if layout.pp > 1 else held * microbatches} times a step if it keeps them until the backward pass, up "
        f"to {2 * held * microbatches} times if it gives them back in between, which takes "
        f"{gib * max(held - 2, 0):.3g} GiB less memory. This run {choice}.",
    ]


def simulate(order: dict[int, list[Action]]) -> dict[int, dict[Action, int]]:
    """When each action of each rank ends, in units, if it starts as soon as its rank is free and its inputs are sent.

    Sending takes no time. The order of a rank must have every action after those of the same stage
    that it needs, as torch's check sees to.
    """
    every = {action for actions in order.values() for action in actions}
    awaited: dict[Action, set[Action]] = {}
    for actions in order.values():
        for before, action in pairwise([None, *actions]):
            stage, kind, number = action
            sent = (
                [(stage - 1, "F", number)]
                if kind == "F"
                else [(stage + 1, half, number) for half in "BI"]
            )
            awaited[action] = every.intersection([before, *sent])
    ends: dict[Action, int] = {}
    for action in TopologicalSorter(awaited).static_order():
        ends[action] = (
            max((ends[earlier] for earlier in awaited[action]), default=0) + UNITS[action.kind]
        )
    return {rank: {action: ends[action] for action in actions} for rank, actions in order.items()}


def makespan(timeline: dict[int, dict[Action, int]]) -> int:
    """When the last rank is done, in units."""
    return max(max(ends.values()) for ends in timeline.values())


def bubble_share(timeline: dict[int, dict[Action, int]]) -> float:
    """The share of the ranks' time in which they wait."""
    busy = sum(UNITS[action.kind] for ends in timeline.values() for action in ends)
    return 1 - busy / (len(timeline) * makespan(timeline))


def timeline_line(rank: int, ends: dict[Action, int], last: int) -> Text:
    """A rank's line of the timeline until `last`, with a cell for every unit."""
    cell = 2 + len(str(max(action.microbatch for action in ends)))
    line, now, first = Text(f"pp {rank:<3} "), 0, next(iter(ends)).stage
    for (stage, kind, microbatch), end in ends.items():
        label = f"{kind if stage == first else kind.lower()}{microbatch}"
        line.append("·".ljust(cell) * (end - UNITS[kind] - now), "dim")
        line.append(label.ljust(cell * UNITS[kind] - 1, "─"), STYLES[kind]).append(" ")
        now = end
    return line.append("·".ljust(cell) * (last - now), "dim")
