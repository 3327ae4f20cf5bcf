"""Completions of many prompts at a time: a cache in pages, one token of all sequences a step."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lacuna.config import UserError
from lacuna.rollout.drawing import Drawing, uniform_numbers
from lacuna.rollout.pages import SIZE, Pool
from lacuna.rollout.passes import Steps, no_rows, prompt_logits

# Tokens of prompts in one forward pass, unless one prompt has more.
_PACK = 8192
# The share of a GPU's free memory that pages may have.
_SHARE = 0.8


@dataclass(frozen=True)
class Completion:
    """What the model said: its tokens, and with what log-probability it drew each of them.

    The last token is one that ends an answer where the completion `ended`; otherwise there was no
    room for more.
    """

    tokens: list[int]
    logprobs: list[float]
    ended: bool


@dataclass
class Asked:
    """A prompt that is to be completed.

    Attributes:
        seeds: one for each completion that is wanted.
        limit: the longest completion, in tokens.
        pages: those with its keys and values, while some completion needs them.
        logits: what follows it, [vocabulary], until all completions have begun.
        done: the completions that are made, by their number.
    """

    tokens: list[int]
    seeds: Sequence[int]
    limit: int
    pages: list[int] = field(default_factory=list)
    logits: Tensor | None = None
    done: dict[int, Completion] = field(default_factory=dict)

    def whole_pages(self, size: int) -> int:
        """How many pages all completions share, since the prompt fills them."""
        return 0 if len(self.seeds) == 1 else len(self.tokens) // size

    def own_pages(self, size: int) -> int:
        """How many pages each completion has for itself."""
        return -(-(len(self.tokens) + self.limit) // size) - self.whole_pages(size)

    def prompt_pages(self, size: int) -> int:
        """How many pages the prompt has besides."""
        return 0 if len(self.seeds) == 1 else -(-len(self.tokens) // size)


@dataclass
class Running:
    """A completion under way: its prompt, its number, the pages that it sees, and its tokens."""

    prompt: Asked
    number: int
    table: list[int]
    made: int = 1


def complete(
    model: PreTrainedModel,
    asked: Sequence[Asked],
    drawing: Drawing,
    ends: Sequence[int],
    rows: int,
    graphs: bool = True,
    compiled: bool = False,
    size: int = SIZE,
    every: int | None = None,
    listen: Callable[[list[int]], None] | None = None,
) -> list[list[Completion]]:
    """All completions of the prompts `asked`, by a `model` whose attention is `PAGED`.

    `rows` of them run at a time; whenever one has ended, which is looked up after `every` so many
    tokens, the next begins. The keys and values of a prompt are computed once, in pages of `size`
    tokens. On a GPU steps are replayed from CUDA graphs where these are wanted and can be had; with
    `compiled` the layers are, if the model has that, and so is drawing. `listen` is given the
    tokens so far, where there is one completion. Raises `UserError` where one does not fit into
    memory.
    """
    waiting = deque((prompt, number) for prompt in asked for number in range(len(prompt.seeds)))
    if not waiting:
        return [[] for _ in asked]
    rows = min(rows, len(waiting))
    every = every or (8 if model.device.type == "cuda" else 1)
    table = max(prompt.whole_pages(size) + prompt.own_pages(size) for prompt in asked)
    most = max(prompt.limit for prompt in asked)
    running: list[Running] = []
    with Pool(_pages_for(model, asked, rows, size), size) as pool:
        empty = no_rows(rows, table, most, model.device)
        steps = Steps(model, empty, drawing, ends, graphs, compiled)
        while waiting or running:
            new = _admit(waiting, rows - len(running), pool)
            if not new and not running:
                raise UserError(
                    "the device's memory has no room for the keys and values of "
                    f"{len(waiting[0][0].tokens) + waiting[0][0].limit} tokens: ask for fewer."
                )
            _begin(model, steps, len(running), new, pool)
            running += new
            count = min(every, max(one.prompt.limit - one.made for one in running))
            alive = steps.run(len(running), count)
            if listen is not None:
                listen(steps.results([0])[0][0])
            _finish(running, alive, steps, ends, pool)
            for one in running:
                one.made += count
            running = [one for one, goes_on in zip(running, alive, strict=True) if goes_on]
    return [[prompt.done[number] for number in range(len(prompt.seeds))] for prompt in asked]


def _pages_for(model: PreTrainedModel, asked: Sequence[Asked], rows: int, size: int) -> int:
    """How many pages there should be: as many as can be needed at a time, if memory has them."""
    own = sorted((one.own_pages(size) for one in asked for _ in one.seeds), reverse=True)
    shared = sorted((one.prompt_pages(size) for one in asked), reverse=True)
    least = min(len(one.seeds) for one in asked)
    # The first and the last prompt of those under way may have fewer completions running.
    wanted = 1 + sum(own[:rows]) + sum(shared[: rows // least + 2])
    if model.device.type != "cuda":
        return wanted
    with Pool(2, size) as pool:
        prompt_logits(model, [([0], [1])], pool)
        each = pool.bytes_per_page()
    free, _ = torch.cuda.mem_get_info(model.device)
    free += torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    return min(wanted, int(_SHARE * free) // each)


def _admit(waiting: deque[tuple[Asked, int]], rows: int, pool: Pool) -> list[Running]:
    """Gives pages to the next completions, for which there are so many free rows."""
    new: list[Running] = []
    while waiting and len(new) < rows:
        prompt, number = waiting[0]
        of_prompt = 0 if prompt.pages else prompt.prompt_pages(pool.size)
        of_completion = prompt.own_pages(pool.size)
        if of_prompt + of_completion > len(pool.free):
            break
        waiting.popleft()
        prompt.pages = prompt.pages or pool.take(of_prompt)
        shared = prompt.pages[: prompt.whole_pages(pool.size)]
        new.append(Running(prompt, number, shared + pool.take(of_completion)))
    return new


def _begin(
    model: PreTrainedModel, steps: Steps, first: int, new: Sequence[Running], pool: Pool
) -> None:
    """Reads the prompts of new completions, unless that is done, and draws their first tokens."""
    if not new:
        return
    unread = {id(one.prompt): one for one in new if one.prompt.logits is None}
    pack: list[Running] = []
    for place, one in enumerate(unread.values()):
        pack.append(one)
        tokens = sum(len(each.prompt.tokens) for each in pack)
        if place == len(unread) - 1 or tokens >= _PACK:
            read = [(each.prompt.tokens, each.prompt.pages or each.table) for each in pack]
            for each, logits in zip(pack, prompt_logits(model, read, pool), strict=True):
                each.prompt.logits = logits
            pack = []
    # What of a prompt does not fill a page, each of its completions goes on from in its own copy.
    copied = [
        (one.prompt.pages[-1], one.table[one.prompt.whole_pages(pool.size)])
        for one in new
        if one.prompt.pages and len(one.prompt.tokens) % pool.size
    ]
    pool.copy([source for source, _ in copied], [target for _, target in copied])
    steps.begin(
        first,
        torch.stack([one.prompt.logits for one in new if one.prompt.logits is not None]),
        [len(one.prompt.tokens) for one in new],
        [one.prompt.limit for one in new],
        uniform_numbers([one.prompt.seeds[one.number] for one in new], steps.rows.uniform.shape[1]),
        [one.table for one in new],
    )
    for one in new:
        if one.number == len(one.prompt.seeds) - 1:
            one.prompt.logits = None


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
        pool.free += running[row].table[prompt.whole_pages(pool.size) :]
        if len(prompt.done) == len(prompt.seeds):
            pool.free += prompt.pages
            prompt.pages = []
    steps.keep([row for row, goes_on in enumerate(alive) if goes_on])
