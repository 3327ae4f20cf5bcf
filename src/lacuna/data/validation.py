"""The validation set as batches: every token of it once, and equally many batches on every rank."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from transformers import PreTrainedTokenizerBase

from lacuna.config import Config, UserError
from lacuna.data.cache import tokenised
from lacuna.data.files import BROKEN
from lacuna.data.indexed import IndexedPlan, IndexedRows
from lacuna.data.mixture import Mixture, Pool
from lacuna.data.packing import IGNORED, Batch, Packing, Span
from lacuna.data.plan import packing_of
from lacuna.data.sources import Documents, open_source
from lacuna.data.stream import read_pass
from lacuna.data.tokenize import BrokenRecords, document_of

Rows = Callable[[], Iterator[list[Span]]]


@dataclass(frozen=True)
class Validation:
    """Can be iterated any number of times; yields the same batches each time.

    Documents come in the source's order, packed like the training data; where rows are missing at the end there
    are rows of padding, whose labels are all -100.
    """

    rows: Rows
    packing: Packing
    dp_rank: int
    dp_world: int
    micro_batch: int
    most_batches: int | None

    def __iter__(self) -> Iterator[Batch]:
        rows = self.rows()
        first = self.dp_rank * self.micro_batch
        for _ in range(self.most_batches) if self.most_batches is not None else iter(int, 1):
            group = list(islice(rows, self.dp_world * self.micro_batch))
            if not group:
                return
            own = group[first : first + self.micro_batch]
            yield self.packing.batch(own + [[]] * (self.micro_batch - len(own)))


def build_validation(
    config: Config, tokenizer: PreTrainedTokenizerBase, *, dp_rank: int, dp_world: int, micro_batch: int
) -> Validation:
    """The validation batches of one rank, at most validation.steps of them.

    Raises UserError when the data cannot be opened or holds no text.
    """
    setting = config.validation.resolved_source()
    assert setting is not None, "built only where the configuration has a validation source"
    source = open_source(setting, config.data, config.data.streaming)
    broken = BrokenRecords(config.data.max_broken_records)
    length = config.training.seq_len
    if source.streaming:
        rows = _streamed_rows(source, tokenizer, length, config.data.retries, broken)
    else:
        rows = _cached_rows(source, tokenizer, length, broken)
    packing = packing_of(config, tokenizer, sources=1)
    steps = config.validation.steps if config.validation.steps >= 0 else None
    return Validation(rows, packing, dp_rank, dp_world, micro_batch, steps)


def _cached_rows(source: Documents, tokenizer: PreTrainedTokenizerBase, length: int, broken: BrokenRecords) -> Rows:
    table = tokenised(source, tokenizer, broken)
    broken.report()
    pool = Pool(first_source=0, sizes=(len(source.dataset),), key=None)
    plan = IndexedPlan(Mixture(0, (1.0,), lanes=1), (pool,), (table,), length)
    tokens = plan.tokens_per_pass
    if not tokens:
        raise UserError(f"{source.name}: no record holds any text; check data.text_column")

    def rows() -> Iterator[list[Span]]:
        indexed = IndexedRows(plan)
        return (indexed.spans(start, min(start + length, tokens)) for start in range(0, tokens, length))

    return rows


def _streamed_rows(
    source: Documents, tokenizer: PreTrainedTokenizerBase, length: int, retries: int, broken: BrokenRecords
) -> Rows:
    start = source.dataset.state_dict()

    def documents() -> Iterator[tuple[object, str]]:
        count = 0
        for block, _ in read_pass(source.dataset, start, retries, source.name):
            values = block[source.column]
            for value, reason in zip(values, block.get(BROKEN, [None] * len(values)), strict=True):
                yield value, reason or f"{source.name}, document {count}"
                count += 1

    def rows() -> Iterator[list[Span]]:
        row: list[Span] = []
        space = length
        for value, place in documents():
            document = document_of(value, place, source.pretokenised, tokenizer, broken)
            offset, size = 0, len(document.tokens) if document else 0
            while offset < size:
                stop = min(offset + space, size)
                following = int(document.tokens[stop]) if stop < size else IGNORED
                share = document.text_bytes * (stop - offset) / size
                row.append(Span(document.tokens[offset:stop], following, 0, share))
                space, offset = space - (stop - offset), stop
                if not space:
                    yield row
                    row, space = [], length
        if row:
            yield row
        broken.report()

    return rows
