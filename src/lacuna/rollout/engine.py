"""Completions of many prompts at a time: a cache in pages, one token of all sequences a step."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from lacuna.config import UserError
from lacuna.rollout.drawing import Asked, Completion, Drawing, uniform_numbers
from lacuna.rollout.pages import SIZE, Kept, Pool
from lacuna.rollout.passes import Steps, no_rows, prompt_logits

# Tokens of prompts in one forward pass, unless one prompt has more.
_PACK = 8192
# The share of a GPU's free memory that pages may have.
_SHARE = 0.8
# What layers keep of a token, by their names, by the model.
_kept: WeakKeyDictionary[PreTrainedModel, dict[str, Kept]] = WeakKeyDictionary()


class Prompt:
    """A prompt whose completions are made, and what is kept of it until they are.

    Attributes:
        pages: those with its keys and values, while some completion needs them.
        logits: what follows it, [vocabulary], until all completions have begun.
        done: the completions that are made, by their number.
    """

    def __init__(self, asked: Asked, size: int) -> None:
        self.asked = asked
        self.pages: list[int] = []
        self.logits: Tensor | None = None
        self.done: dict[int, Completion] = {}
        length = len(asked.tokens)
        is_shared = len(asked.seeds) > 1
        # Pages that the prompt fills are shared; the only completion of a prompt has all its pages.
        self.shared = length // size if is_shared else 0
        self.own = -(-(length + asked.limit) // size) - self.shared
        self.read = -(-length // size) if is_shared else 0

    def shares_part_of_page(self, size: int) -> bool:
        """Whether each completion goes on in a copy of a page that the prompt does not fill."""
        return bool(self.read) and len(self.asked.tokens) % size > 0


@dataclass
class Running:
    """A completion under way: its prompt, its number, the pages that it sees, and its tokens."""

    prompt: Prompt
    number: int
    table: list[int]
    made: int = 1


def complete_in_pages(
    model: PreTrainedModel,
    asked: Sequence[Asked],
    drawing: Drawing,
    ends: Sequence[int],
    rows: int,
    device: torch.device,
    graphs: bool = True,
    compiled: bool = False,
    size: int = SIZE,
    every: int | None = None,
    listen: Callable[[list[int]], None] | None = None,
    small: bool = False,
) -> list[list[Completion]]:
    """All completions of what is `asked` by a `model` whose attention is `PAGED`.

    `rows` of them run at a time; whenever one has ended, which is looked up after `every` so many
    tokens, the next begins. The keys and values of a prompt are computed once, in pages of `size`
    tokens. On a GPU steps are replayed from CUDA graphs where these are wanted and can be had; with
    `compiled` the layers are, if the model has that, and so is drawing. `listen` is given what one
    completion has so far. `small` pages are in float8. Raises `UserError` where memory is short.
    """
    prompts = [Prompt(one, size) for one in asked]
    waiting = deque((one, number) for one in prompts for number in range(len(one.asked.seeds)))
    if not waiting:
        return [[] for _ in asked]
    rows = min(rows, len(waiting))
    every = every or (8 if device.type == "cuda" else 1)
    longest = max(one.shared + one.own for one in prompts)
    running: list[Running] = []
    count = _pages_for(model, prompts, rows, size, device, graphs, small)
    with Pool(count, size, small) as pool:
        if compiled:
            for name, kept in _kept_by(model, device).items():
                pool.make(model.get_submodule(name), kept, device)
        empty = no_rows(rows, longest, max(one.limit for one in asked), device)
        steps = Steps(model, empty, drawing, ends, graphs, compiled)
        while waiting or running:
            running += _begin(
                model, steps, len(running), _admit(waiting, running, rows, pool), pool
            )
            count = min(every, max(one.prompt.asked.limit - one.made for one in running))
            alive = steps.run(len(running), count)
            if listen is not None:
                listen(steps.results([0])[0][0])
            _finish(running, alive, steps, ends, pool)
            for one in running:
                one.made += count
            running = [one for one, goes_on in zip(running, alive, strict=True) if goes_on]
    return [[one.done[number] for number in range(len(one.asked.seeds))] for one in prompts]


def _pages_for(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    rows: int,
    size: int,
    device: torch.device,
    alone: bool,
    small: bool,
) -> int:
    """How many pages there should be: as many as can be needed at a time, if memory has them.

    Ranks that do not generate `alone` gather weights in each pass, and must make the same ones.
    """
    own = sorted((one.own for one in prompts for _ in one.asked.seeds), reverse=True)
    read = sorted((one.read for one in prompts), reverse=True)
    fewest = min(len(one.asked.seeds) for one in prompts if one.asked.seeds)
    # Prompts of which only a few completions still run keep their pages: there is room for some.
    wanted = 1 + sum(own[:rows]) + sum(read[: 2 * rows // fewest + 2])
    if device.type != "cuda":
        return wanted
    kept = _kept_by(model, device).values()
    each = size * sum(one.size_of_token(small) for one in kept)
    if torch.cuda.mem_get_info(device)[0] * _SHARE < wanted * each:
        torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    room = torch.tensor(int(_SHARE * free) // each, device=device)
    if dist.is_initialized() and not alone:
        dist.all_reduce(room, dist.ReduceOp.MIN)
    return min(wanted, int(room))


def _kept_by(model: PreTrainedModel, device: torch.device) -> dict[str, Kept]:
    """What the layers of a model keep of a token, by their names; a pass finds it, once."""
    if model not in _kept:
        with Pool(2) as pool:
            prompt_logits(model, [([0], [1])], pool, device)
            names = {module: name for name, module in model.named_modules()}
            _kept[model] = {names[module]: one for module, one in pool.kept().items()}
    return _kept[model]


def _admit(
    waiting: deque[tuple[Prompt, int]], running: Sequence[Running], rows: int, pool: Pool
) -> list[Running]:
    """Gives pages to the next completions, for which there are rows and pages.

    Raises `UserError` where there are not enough pages for one.
    """
    new: list[Running] = []
    while waiting and len(running) + len(new) < rows:
        prompt, number = waiting[0]
        of_prompt = 0 if prompt.pages else prompt.read
        if of_prompt + prompt.own > len(pool.free):
            break
        waiting.popleft()
        prompt.pages = prompt.pages or pool.take(of_prompt)
        new.append(Running(prompt, number, prompt.pages[: prompt.shared] + pool.take(prompt.own)))
    if not new and not running:
        asked = waiting[0][0].asked
        raise UserError(
            "the device's memory has no room for the keys and values of "
            f"{len(asked.tokens) + asked.limit} tokens: ask for fewer."
        )
    return new


def _begin(
    model: PreTrainedModel, steps: Steps, start: int, new: list[Running], pool: Pool
) -> list[Running]:
    """Reads the prompts of new completions, unless that is done, and draws their first tokens.

    Returns these completions.
    """
    if not new:
        return new
    _read([one for one in new if one.prompt.logits is None], model, pool, steps)
    copied = [one for one in new if one.prompt.shares_part_of_page(pool.size)]
    sources = [one.prompt.pages[-1] for one in copied]
    pool.copy(sources, [one.table[one.prompt.shared] for one in copied])
    asked = [one.prompt.asked for one in new]
    seeds = [one.seeds[each.number] for one, each in zip(asked, new, strict=True)]
    steps.begin(
        start,
        torch.stack([one.prompt.logits for one in new if one.prompt.logits is not None]),
        [len(one.tokens) for one in asked],
        [one.limit for one in asked],
        uniform_numbers(seeds, steps.rows.uniform.shape[1]),
        [one.table for one in new],
    )
    for one in new:
        if one.number == len(one.prompt.asked.seeds) - 1:
            one.prompt.logits = None
    return new


def _read(new: Sequence[Running], model: PreTrainedModel, pool: Pool, steps: Steps) -> None:
    """Computes the keys and values of the prompts of these, each once, and what follows them."""
    left = [*{id(one.prompt): one for one in new}.values()]
    while left:
        lengths = accumulate(len(one.prompt.asked.tokens) for one in left)
        count = max(sum(length <= _PACK for length in lengths), 1)
        read = [(one.prompt.asked.tokens, one.prompt.pages or one.table) for one in left[:count]]
        found = prompt_logits(model, read, pool, steps.device, steps.is_compiled)
        for one, logits in zip(left, found, strict=False):
            one.prompt.logits = logits
        left = left[count:]


def _finish(
    running: Sequence[Running],
    alive: Sequence[bool],
    steps: Steps,
    ends: Sequence[int],
    pool: Pool,
) -> None:
    """Notes the completions that do not go on, and frees their rows and pages."""
    rows = [row for row, goes_on in enumerate(alive) if not goes_on]
    if not rows:
        return
    for row, (tokens, logprobs) in zip(rows, steps.results(rows), strict=True):
        prompt = running[row].prompt
        prompt.done[running[row].number] = Completion(tokens, logprobs, tokens[-1] in ends)
        pool.free += running[row].table[prompt.shared :]
        if len(prompt.done) == len(prompt.asked.seeds):
            pool.free += prompt.pages
            prompt.pages = []
    steps.keep([row for row, goes_on in enumerate(alive) if goes_on])
