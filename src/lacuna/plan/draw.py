"""`lacuna plan --draw`: which rank holds what, and when the ranks of a pipeline work."""

import io
import math
import os
import re
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from itertools import pairwise, product

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from torch import nn
from transformers import PreTrainedModel

from lacuna.config import Config, explained
from lacuna.config.console import open_console
from lacuna.config.machine import ParallelismConfig
from lacuna.config.sections import TrainingConfig
from lacuna.data import run_tokenizer
from lacuna.model.architecture import decoder_layers
from lacuna.model.build import build_meta_model
from lacuna.parallel.batch import resolve_batch
from lacuna.parallel.fsdp import reshard_after_forward
from lacuna.parallel.mesh import AXES, Layout, resolve_layout
from lacuna.parallel.precision import compute_dtype
from lacuna.parallel.schedule import Action, held_stages, pipeline_order
from lacuna.parallel.stages import stage_ranges, stages_by_module

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
    """Prints mesh and timeline, and draws them in plan.svg in the run folder.

    `device` is the kind that will run. Raises `UserError` for a layout, batch or schedule that the
    run would refuse.
    """
    layout = resolve_layout(config.parallelism, processes)
    batch = resolve_batch(config.training, config.parallelism, config.optimizer, layout)
    tokenizer = run_tokenizer(config.model, config.conversations)
    model = build_meta_model(config, tokenizer, layout, device)
    order = pipeline_order(config.parallelism, batch.accumulation) if layout.pp > 1 else {}
    held = held_stages(order) or {0: [0]}
    points = config.parallelism.pipeline_parallel_split_points
    sequences = batch.micro_batch * batch.accumulation
    rows = list(holdings(points, layout, model, sequences, held))
    words = explain(
        config.parallelism,
        config.training,
        layout,
        decoder_layers(model),
        batch.accumulation,
        device,
    )
    timeline = simulate(order)
    lines = [timeline_line(rank, ends, makespan(timeline)) for rank, ends in timeline.items()]
    if timeline:
        words.append(
            f"Pipeline: {batch.accumulation} micro-batches take {makespan(timeline)} units, 1 for "
            "F (forward), 2 for B (backward), 1 for its halves I (inputs) and W (weights); small "
            "letters are a rank's later stages. The ranks wait (·) "
            f"{bubble_share(timeline):.1%} of the time: the bubble."
        )
    terminal = open_console(config.metrics)
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit():  # a width that the user asks for
        terminal.width = int(columns)
    width = max([WIDTH, *map(len, lines)])
    picture = Console(record=True, file=io.StringIO(), width=width, highlight=False)
    more = f"… {len(rows)} ranks, all in plan.svg\n" if len(rows) > LISTED_RANKS else ""
    _print_drawing(terminal, [*words, "", _holdings_table(rows[:LISTED_RANKS]), more], lines)
    _print_drawing(picture, [*words, "", _holdings_table(rows), ""], lines)
    path = os.path.join(str(config.job.dump_folder), "plan.svg")
    with explained(f"job.dump_folder: cannot write {path}", OSError, mend="choose another"):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        picture.save_svg(path, title=f"lacuna plan {config.job.name}", code_format=SVG)
    terminal.print(f"Also drawn in {path}.", soft_wrap=True, markup=False)


def _holdings_table(rows: list[tuple[str, ...]]) -> Table:
    """A table of what ranks hold, with a title over each column."""
    titles = ("rank", "place", "layers (pp)", "parameters (fsdp, tp)", "rows (dp)", "tokens (cp)")
    table = Table(*titles, box=None)
    for row in rows:
        table.add_row(*row)
    return table


def _print_drawing(console: Console, parts: list[RenderableType], timeline: list[Text]) -> None:
    """Prints the parts one below the other, then the timeline, whose lines are not wrapped."""
    console.print(*parts, sep="\n", width=WIDTH)
    console.print(*timeline, sep="\n", no_wrap=True, overflow="ellipsis")


def holdings(
    split_points: Sequence[str],
    layout: Layout,
    model: PreTrainedModel,
    sequences: int,
    held: dict[int, list[int]],
) -> Iterator[tuple[str, ...]]:
    """A row for every rank: its place, the pipeline stages it holds, and its share of a step.

    `held` has the stages of each pipeline rank; `sequences` is what a data-parallel rank has of a
    step.
    """
    layers = decoder_layers(model)
    ranges = stage_ranges(split_points, sum(map(len, held.values())), model, layers)
    names = [f"{part[0]}–{part[-1]}" for part in ranges]
    names[0] = f"embedding, {names[0]}"
    names[-1] += ", head"
    weights: list[set[nn.Parameter]] = [set() for _ in ranges]
    for module, home in stages_by_module(model, layers, ranges).items():
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
    parallelism: ParallelismConfig,
    training: TrainingConfig,
    layout: Layout,
    layers: nn.ModuleList,
    microbatches: int,
    device: str,
) -> list[str]:
    """What a mesh is, how a matrix is split, and what resharding costs and saves here."""
    shards = layout.dp_shard * layout.cp
    held = math.ceil(len(layers) / layout.pp)
    dtype = compute_dtype(training, device)
    name, matrix = max(layers[0].named_parameters(), key=lambda named: named[1].numel())
    parameters = sum(parameter.numel() for parameter in layers[0].parameters())
    gib = parameters / layout.tp * dtype.itemsize / 2**30
    kept = "keeps them" if shards > 1 else "has but one shard"
    gives_back = reshard_after_forward(parallelism, training, layout)
    choice = "gives them back" if gives_back else kept
    grid = " × ".join(f"{axis} {getattr(layout, axis)}" for axis in AXES)
    kept_times = held if layout.pp > 1 else held * microbatches
    return [
        f"Mesh: the ranks in a grid of {grid}, the last axis fastest; dp is dp_replicate × "
        "dp_shard, fsdp is dp_shard × cp. A column names the axes that divide it: ranks whose "
        "places differ on these hold other parts of it, and exchange them.",
        f"Splitting: of the {matrix.numel():,} parameters of {name} in a layer, a rank "
        f"computes with 1/{layout.tp} (tp), and stores 1/{shards} of that (fsdp): "
        f"{matrix.numel() // layout.tp // shards:,}.",
        f"Resharding: to compute with a layer, a rank gathers its {shards} shards, {gib:.3g} GiB "
        f"in {dtype}: {kept_times} times a step if it keeps them until the backward pass, up to "
        f"{2 * held * microbatches} times if it gives them back in between, which takes "
        f"{gib * max(held - 2, 0):.3g} GiB less memory. This run {choice}.",
    ]


def simulate(order: dict[int, list[Action]]) -> dict[int, dict[Action, int]]:
    """When each action of each rank ends, in units.

    An action starts as soon as its rank is free and its inputs are sent, which takes no time. In
    the order of a rank every action comes after those of the same stage that it needs: torch's
    check sees to that.
    """
    every = {action for actions in order.values() for action in actions}
    awaited: dict[Action, set[Action]] = {}
    for actions in order.values():
        for action in actions:
            stage, kind, number = action
            sent = [(stage + 1, half, number) for half in "BI"]
            if kind == "F":
                sent = [(stage - 1, "F", number)]
            awaited[action] = {one for one in every if one in sent}
        for before, action in pairwise(actions):
            awaited[action].add(before)
    ends: dict[Action, int] = {}
    for action in TopologicalSorter(awaited).static_order():
        start = max((ends[earlier] for earlier in awaited[action]), default=0)
        ends[action] = start + UNITS[action.kind]
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
    line = Text(f"pp {rank:<3} ")
    now = 0
    first = next(iter(ends)).stage
    for (stage, kind, microbatch), end in ends.items():
        label = f"{kind if stage == first else kind.lower()}{microbatch}"
        line.append("·".ljust(cell) * (end - UNITS[kind] - now), "dim")
        line.append(label.ljust(cell * UNITS[kind] - 1, "─"), STYLES[kind]).append(" ")
        now = end
    return line.append("·".ljust(cell) * (last - now), "dim")
