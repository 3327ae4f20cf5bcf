"""Forward passes of generating: prompts packed, and then one token of every sequence at a time."""

import inspect
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch._inductor.config
from torch import Tensor
from torch._dynamo import maybe_mark_dynamic
from transformers import PreTrainedModel

from lacuna.parallel.partial_attention import Part
from lacuna.rollout.drawing import Drawing, draw
from lacuna.rollout.pages import Pool
from lacuna.rollout.recording import can_record, record

# No fewer sequences than this are worth a CUDA graph of their own.
_LEAST = 16
# The kinds of steps of each model that have been recorded, so that all of their code is compiled.
_recorded: WeakKeyDictionary[PreTrainedModel, set[tuple[Any, ...]]] = WeakKeyDictionary()


def prompt_logits(
    model: PreTrainedModel,
    prompts: Sequence[tuple[list[int], list[int]]],
    pool: Pool,
    device: torch.device,
    compiled: bool = False,
) -> Tensor:
    """What follows each of the `prompts`, tokens and their pages: [prompts, vocabulary].

    All are packed into one row; their keys and values are written to the pages, which all layers
    have already if these are `compiled`.
    """
    size = pool.size
    ids = [token for tokens, _ in prompts for token in tokens]
    positions = [place for tokens, _ in prompts for place in range(len(tokens))]
    places = [
        pages[place // size] * size + place % size
        for tokens, pages in prompts
        for place in range(len(tokens))
    ]
    lengths = [len(tokens) for tokens, _ in prompts]
    is_alone = len(prompts) == 1 and not compiled  # which is attention of another kind
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    maybe_mark_dynamic(bounds, 0)
    last = bounds[1:].long() - 1
    where = torch.tensor(places, device=device)
    options: dict[str, Any] = {} if compiled else {"pool": pool}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = last
    # What differs in size from the prompts before is compiled once more, for all sizes.
    with torch.compiler.set_stance("default" if compiled else "force_eager"):
        logits: Tensor = model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            places=where,
            parts=(Part(bounds, bounds, max(lengths), len(ids), whole=is_alone),),
            **options,
        ).logits[0]
    return logits if len(logits) == len(prompts) else logits[last]


class Rows(NamedTuple):
    """What is known of sequences that run, on the device, so that a step can be a CUDA graph.

    Attributes:
        tokens: the newest of each [rows], and their `positions` [rows].
        counts: how many each has [rows], and its `limits` [rows].
        alive: whether it goes on [rows].
        uniform: the numbers by which it draws, float64 [rows, most].
        said: its tokens [rows, most + 1], and their `logprobs` [rows, most + 1]. The last column is
            for rows that have ended.
        pages: those with its keys and values, int32 [rows, longest].
    """

    tokens: Tensor
    positions: Tensor
    counts: Tensor
    limits: Tensor
    alive: Tensor
    uniform: Tensor
    said: Tensor
    logprobs: Tensor
    pages: Tensor

    def first(self, count: int, start: int = 0) -> "Rows":
        """So many rows from the `start` on, of whose widths compiled code is to be independent."""
        part = Rows(*(tensor[start : start + count] for tensor in self))
        for tensor in (part.uniform, part.said, part.logprobs, part.pages):
            maybe_mark_dynamic(tensor, 1)
        return part


def no_rows(count: int, pages: int, most: int, device: torch.device) -> Rows:
    """Rows of which none goes on."""
    whole = partial(torch.zeros, dtype=torch.long, device=device)
    return Rows(
        tokens=whole(count),
        positions=whole(count),
        counts=whole(count),
        limits=whole(count),
        alive=torch.zeros(count, dtype=torch.bool, device=device),
        uniform=torch.zeros(count, most, dtype=torch.float64, device=device),
        said=whole(count, most + 1),
        logprobs=torch.zeros(count, most + 1, device=device),
        pages=torch.zeros(count, pages, dtype=torch.int32, device=device),
    )


def take(rows: Rows, ends: Tensor, logits: Tensor, drawing: Drawing) -> None:
    """Draws a token for each row by `logits` [rows, vocabulary], and notes it, in place."""
    most = rows.uniform.shape[1]
    uniform = rows.uniform.gather(1, rows.counts.clamp(max=most - 1)[:, None])[:, 0]
    tokens, logprobs = draw(logits, uniform, drawing)
    columns = torch.where(rows.alive, rows.counts, most)
    numbers = torch.arange(len(columns), device=logits.device)
    rows.said[numbers, columns] = tokens
    rows.logprobs[numbers, columns] = logprobs
    rows.tokens.copy_(tokens)
    rows.positions.add_(rows.alive)
    rows.counts.add_(rows.alive)
    ended = (tokens[:, None] == ends).any(1) | (rows.counts >= rows.limits)
    rows.alive.logical_and_(~ended)


class Steps:
    """The sequences that run, in the first rows, and how all of them get a token at once."""

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Rows,
        drawing: Drawing,
        ends: Sequence[int],
        graphs: bool,
        compiled: bool,
    ) -> None:
        self.device = rows.tokens.device
        self.model = model
        self.rows = rows
        self.drawing = drawing
        self.is_compiled = compiled
        self.stance = "default" if compiled else "force_eager"
        self.take = torch.compile(take) if compiled else take
        self.ends = torch.tensor(sorted({*ends}), dtype=torch.long, device=self.device)
        self.wants_graphs = graphs
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.sizes = [len(rows.tokens)]
        while self.sizes[-1] >= 4 * _LEAST:
            self.sizes.append(self.sizes[-1] // 4)

    def begin(
        self,
        start: int,
        logits: Tensor,
        lengths: Sequence[int],
        limits: Sequence[int],
        uniform: Tensor,
        tables: Sequence[list[int]],
    ) -> None:
        """Lets sequences run in the rows from the `start` on, and draws the first token of each.

        `logits` are what follows their prompts, `lengths` those of the prompts, and `tables` the
        pages of each.
        """
        rows = self.rows.first(len(lengths), start)
        width = rows.pages.shape[1]
        padded = [table + [0] * (width - len(table)) for table in tables]
        rows.positions.copy_(torch.tensor(lengths) - 1)
        rows.counts.zero_()
        rows.limits.copy_(torch.tensor(limits))
        rows.alive.fill_(True)
        rows.uniform.copy_(uniform)
        rows.pages.copy_(torch.tensor(padded))
        take(rows, self.ends, logits, self.drawing)

    def _step(self, count: int) -> None:
        """One more token for each of the first rows that goes on."""
        rows = self.rows.first(count)
        with torch.compiler.set_stance(self.stance):
            # Norms and rotations of queries and of keys become one kernel, of which each costs most
            # by being started. Drawing has sums of a length that varies, for which it cannot be.
            with torch._inductor.config.patch(combo_kernels=True):
                logits = self.model(
                    input_ids=rows.tokens[:, None],
                    position_ids=rows.positions[:, None],
                    use_cache=False,
                    page_table=rows.pages,
                    new_positions=rows.positions,
                ).logits[:, -1]
            self.take(rows, self.ends, logits, self.drawing)

    def run(self, running: int, count: int) -> list[bool]:
        """Makes `count` steps of the first `running` rows; whether each of them goes on."""
        size = min(size for size in self.sizes if size >= running)
        known = _recorded.setdefault(self.model, set())
        for _ in range(count):
            if self._kind(size) in known:
                self._record(size)
            if size in self.graphs:
                self.graphs[size].replay()
                continue
            self._step(size)
            self._record(size)
            if size in self.graphs:
                known.add(self._kind(size))
        return self.rows.alive[:running].tolist()

    def _kind(self, size: int) -> tuple[Any, ...]:
        """All that the code of a step of so many rows of a model depends on."""
        widths = self.rows.uniform.shape[1], self.rows.pages.shape[1]
        return size, *widths, self.drawing, len(self.ends), self.stance

    def _record(self, size: int) -> None:
        """Records a step of so many rows, if that is wanted, can be, and is not done."""
        if size in self.graphs or not self.wants_graphs or not can_record(self.device):
            return
        graph = record(partial(self._step, size), self.device)
        if graph is not None:
            self.graphs[size] = graph

    def results(self, numbers: Sequence[int]) -> list[tuple[list[int], list[float]]]:
        """The tokens of the rows of these numbers so far, and their log-probabilities."""
        own = torch.tensor(numbers, dtype=torch.long, device=self.device)
        counts = self.rows.counts[own].tolist()
        # Most have much less than there is room for.
        longest = max(counts, default=0)
        found = (tensor[own, :longest].tolist() for tensor in (self.rows.said, self.rows.logprobs))
        return [
            (said[:count], logprobs[:count])
            for count, said, logprobs in zip(counts, *found, strict=True)
        ]

    def keep(self, numbers: Sequence[int]) -> None:
        """Moves the rows of these numbers to the front; the others hold nothing any more."""
        own = torch.tensor(numbers, dtype=torch.long, device=self.device)
        for tensor in self.rows:
            kept = tensor[own]
            tensor.zero_()
            tensor[: len(numbers)] = kept
