"""Which rows there are: from the configuration to spans of documents, by one of two ways."""

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from transformers import PreTrainedTokenizerBase

from lacuna.config import Config, UserError
from lacuna.config.documents import Source
from lacuna.data.bins import fill_rows, packing_mode
from lacuna.data.mixture import Mixture, Pool, random_key, shuffled
from lacuna.data.packing import Batch, Document, Span, pack
from lacuna.data.sources import Documents, open_source
from lacuna.data.stream import BEGINNING, Snapshot, Stream, number_of_parts
from lacuna.data.tokenize import TokenTable, add_broken, document_of, token_table

_LOG = logging.getLogger(__name__)
_CACHED_BELOW = 256 * 2**20
_WINDOW = 8192
_DRAWN_AT_ONCE = 16384
_DRAWN_AHEAD = 64
_MOST_EMPTY = 100_000
_FILL = 0.98  # of the buffer: examples that filled it whole would take a row more, nearly empty

LaneState = tuple[int, list[int], list[Snapshot]]
"""Documents passed of each source, where to read each stream from, and before these what was used since then: tokens
of the current document, or rows of the examples that were fitted together."""


@dataclass(frozen=True)
class Plan:
    """Everything that decides the rows.

    With a `table` of all tokens the mixture has one lane; without, documents are tokenised while training, and row R
    is the next row of lane R mod lanes. Rows end with the last document unless `endless`.
    """

    config: Config
    tokenizer: PreTrainedTokenizerBase
    mixture: Mixture
    sources: tuple[Documents, ...]
    table: TokenTable | None
    endless: bool = True

    @property
    def rows_per_pass(self) -> int | None:
        """Rows that all documents fill; None when unknown, or when sources are mixed by weight: no common pass."""
        if self.table is None or len(self.mixture.pools) > 1:
            return None
        return len(self.bins) if self.fits else math.ceil(self.table.lengths.sum() / self.config.training.seq_len)

    @property
    def fits(self) -> bool:
        """Whether rows are made of whole examples."""
        return packing_mode(self.config) != "concatenate"

    @cached_property
    def bins(self) -> list[np.ndarray]:
        """The pieces of documents in each row of a pass over all of them."""
        return self.bins_of(np.arange(len(self.table.lengths)))

    def bins_of(self, documents: np.ndarray) -> list[np.ndarray]:
        """The pieces in each row that these documents fill."""

        bins = fill_rows(
            self.table.lengths[documents], lambda number: self.table.document(documents[number])[0], self.config
        )
        return [np.stack([documents[numbers], starts, stops]) for numbers, starts, stops in bins]

    def batch(self, rows: Sequence[Sequence[Span]]) -> Batch:
        """Lay out rows as the configuration wants them."""
        return pack(rows, self.config, len(self.sources), self.tokenizer.eos_token_id or 0)

    def signature(self, global_batch: int) -> dict[str, object]:
        """What must be the same for a saved position to mean the same samples, by the settings that decide it."""
        return {
            "data.tokenization": "cache" if self.table else "online",
            "data.shuffle": any(pool.key is not None for pool in self.mixture.pools),
            "data.data_probs": [share / sum(self.mixture.shares) for share in self.mixture.shares],
            "documents in data.dataset": [pool.size for pool in self.mixture.pools],
            "packing": [packing_mode(self.config), self.config.packing.long_examples, self.config.packing.buffer],
            "training.seq_len": self.config.training.seq_len,
            "training.seed": self.mixture.seed,
            "training.global_batch_size": global_batch,
        }


def make_plan(
    config: Config, tokenizer: PreTrainedTokenizerBase, settings: Sequence[Source], lanes: int, endless: bool = True
) -> Plan:
    """Open the sources and decide the order of everything; tokenise them when they are to be cached.

    What is not endless comes in the sources' own order.
    """
    data, seed, table = config.data, config.training.seed, None
    sources = tuple(open_source(setting, data) for setting in settings)
    keys = [random_key(seed, 0, number) if data.shuffle and endless else None for number in range(len(sources))]
    pools: list[Pool]
    if data.streaming:
        pools = [
            Stream(number_of_parts(source.shard_sizes, lanes), key, source, data.retries, endless)
            for source, key in zip(sources, keys, strict=True)
        ]
    else:
        pools = [Pool(len(source.dataset), key) for source, key in zip(sources, keys, strict=True)]
        if settings[0].weight is None:
            pools = [Pool(sum(pool.size for pool in pools), keys[0])]
    if _is_cached(config, sources, endless):
        lanes, table = 1, token_table(sources, tokenizer, data.max_broken_records)
    shares = tuple(setting.weight or 1.0 for setting in settings[: len(pools)])
    return Plan(config, tokenizer, Mixture(seed, tuple(pools), shares, lanes), sources, table, endless)


def _is_cached(config: Config, sources: Sequence[Documents], endless: bool) -> bool:
    """Whether to tokenise ahead or while training, by the configuration and the data alone."""
    wanted = config.data.tokenization
    if config.data.streaming:
        return False
    if not endless or config.training.epochs:
        return True  # only the cache knows how long an epoch or the validation data is
    if wanted == "auto":
        size = sum(source.dataset.data.nbytes for source in sources)
        wanted = "cache" if size < _CACHED_BELOW else "online"
        _LOG.info("%.0f MiB of data: data.tokenization is %s", size / 2**20, wanted)
    return wanted == "cache"


def open_rows(plan: Plan, states: dict[int, LaneState | None], broken: list[str]) -> Callable[[int], list[Span]]:
    """A function from the number of a row to its spans, which fill it but at the end of the documents.

    Args:
        states: of the lanes that are read, where each goes on (None: the beginning); kept up to date in place.
        broken: gains the places of unreadable records that were met.
    """
    if plan.table is None:
        return LaneRows(plan, states, broken).row
    return FittedRows(plan).row if plan.fits else IndexedRows(plan).row


class IndexedRows:
    """The tokens [P * seq_len, (P + 1) * seq_len) of all drawn documents laid end to end are place P.

    Rows are the places, shuffled within windows: side by side in one step, the parts of a long document teach hardly
    more than one of them. A pass over the documents is cut into even windows.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._end = math.inf if plan.endless else int(plan.table.lengths.sum())
        self._pass = plan.rows_per_pass or _WINDOW
        self._window = math.ceil(self._pass / math.ceil(self._pass / _WINDOW))
        self._pool_starts = np.cumsum([0, *(pool.size for pool in plan.mixture.pools)])
        self._cursors = np.zeros(len(plan.mixture.pools), dtype=np.int64)
        self._drawn = np.zeros((2, 1), dtype=np.int64)

    def row(self, number: int) -> list[Span]:
        """The spans of a row; rows are asked for in order."""
        epoch, within = divmod(number, self._pass)
        window, offset = divmod(within, self._window)
        size = min(self._window, self._pass - within + offset)
        order = shuffled(size, self._plan.mixture.pools[0].key, epoch, window)
        length, first = self._plan.config.training.seq_len, number - offset
        position = (first + int(order[offset])) * length
        stop = min(position + length, self._end)
        if self._drawn[1, -1] < stop:
            self._draw(first * length, stop)
        spans = []
        while position < stop:
            index, end = self._drawn[:, np.searchsorted(self._drawn[1], position, side="right")].tolist()
            document, source = self._plan.table.document(index)
            start = len(document.tokens) - (end - position)
            spans.append(document.span(start, start + stop - position, source))
            position += len(spans[-1].tokens)
        return spans

    def _draw(self, start: int, stop: int) -> None:
        """Draw documents until they reach the token `stop`, and forget those that end before the token `start`.

        Of each draw there is the document, and where it ends in the endless run of tokens.
        """
        kept = [self._drawn[:, self._drawn[1] > start]]
        end = int(self._drawn[1, -1])
        while end < stop:
            choices, index = self._plan.mixture.draw(0, self._cursors, _DRAWN_AT_ONCE)
            documents = self._pool_starts[choices] + index
            drawn = np.stack([documents, end + np.cumsum(self._plan.table.lengths[documents])])
            kept.append(drawn[:, drawn[1] > start])
            end = int(drawn[1, -1])
            self._cursors += np.bincount(choices, minlength=len(self._cursors))
        self._drawn = np.concatenate(kept, axis=1)


class FittedRows:
    """Rows of whole examples, fitted together in one pass over all of them, and shuffled anew for each.

    Sources mixed by weight have no pass: there the next of their draws are fitted together.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._pool_starts = np.cumsum([0, *(pool.size for pool in plan.mixture.pools)])
        self._cursors = np.zeros(len(plan.mixture.pools), dtype=np.int64)
        self._bins: list[np.ndarray] = []
        self._first = self._passes = 0

    def row(self, number: int) -> list[Span]:
        """The spans of a row; rows are asked for in order."""
        while number >= self._first + len(self._bins):
            if self._passes and not self._plan.endless:
                return []
            self._go_on()
        order = shuffled(len(self._bins), self._plan.mixture.pools[0].key, self._passes)
        spans = []
        for index, start, stop in self._bins[order[number - self._first]].T.tolist():
            document, source = self._plan.table.document(index)
            spans.append(document.span(start, stop, source))
        return spans

    def _go_on(self) -> None:
        self._first += len(self._bins)
        self._passes += 1
        if self._plan.rows_per_pass is not None:
            self._bins = self._plan.bins
            return
        choices, index = self._plan.mixture.draw(0, self._cursors, _DRAWN_AT_ONCE)
        self._bins = self._plan.bins_of(self._pool_starts[choices] + index)
        self._cursors += np.bincount(choices, minlength=len(self._cursors))


class LaneRows:
    """Rows of documents that are tokenised as they come; row R is the next of lane R mod lanes."""

    def __init__(self, plan: Plan, states: dict[int, LaneState | None], broken: list[str]) -> None:
        self._plan, self._states, self._broken = plan, states, broken
        pools = plan.mixture.pools
        starts = {lane: state or (0, [0] * len(pools), [BEGINNING] * len(pools)) for lane, state in states.items()}
        rows = self._fitted if plan.fits else self._rows_from
        self._rows = {lane: rows(lane, start) for lane, start in starts.items()}
        self._readers = {}
        for source, stream in enumerate(pools):
            if isinstance(stream, Stream):
                positions = {lane: (cursors[source], snaps[source]) for lane, (_, cursors, snaps) in starts.items()}
                self._readers[source] = stream.reader(plan.mixture.lanes, positions)

    def row(self, number: int) -> list[Span]:
        """The spans of a row; those of a lane are asked for in order."""
        lane = number % self._plan.mixture.lanes
        spans, self._states[lane] = next(self._rows[lane])
        return spans

    def _rows_from(self, lane: int, state: LaneState) -> Iterator[tuple[list[Span], LaneState]]:
        """The rows of a lane from a state on, each with the state after it."""
        offset, cursors, snapshots = copy.deepcopy(state)
        spans, space = [], self._plan.config.training.seq_len
        for source, document in self._documents(lane, cursors, snapshots):
            while offset < len(document.tokens):
                spans.append(document.span(offset, offset + space, source))
                offset += len(spans[-1].tokens)
                space -= len(spans[-1].tokens)
                if not space:
                    yield spans, (offset, list(cursors), list(snapshots))
                    spans, space = [], self._plan.config.training.seq_len
            cursors[source] += 1
            offset = 0
        while True:  # after the last document there are empty rows
            yield spans, (offset, cursors, snapshots)
            spans = []

    def _fitted(self, lane: int, state: LaneState) -> Iterator[tuple[list[Span], LaneState]]:
        """The same with whole examples, as many of which are fitted together as fill the buffer."""
        used, cursors, snapshots = copy.deepcopy(state)
        config, ended = self._plan.config, False
        drawn = self._documents(lane, cursors, snapshots)
        while not ended:
            before, examples, tokens = (list(cursors), list(snapshots)), [], 0
            while tokens < _FILL * config.packing.buffer * config.training.seq_len:
                if ended := (example := next(drawn, None)) is None:
                    break
                cursors[example[0]] += 1
                examples.append(example)
                tokens += min(len(example[1].tokens), config.training.seq_len)
            documents = [document for _, document in examples]
            bins = fill_rows(np.array([len(document.tokens) for document in documents]), documents.__getitem__, config)
            order = shuffled(len(bins), self._plan.mixture.pools[0].key, lane, sum(before[0]))
            for row in range(used, len(bins)):
                after = (row + 1, *before) if row + 1 < len(bins) else (0, list(cursors), list(snapshots))
                pieces = bins[order[row]].T.tolist()
                yield [documents[number].span(*part, examples[number][0]) for number, *part in pieces], after
            used = 0
        while True:  # after the last document there are empty rows
            yield [], (0, cursors, snapshots)

    def _documents(self, lane: int, cursors: list[int], snapshots: list[Snapshot]) -> Iterator[tuple[int, Document]]:
        """The documents that a lane draws, each with its source; the caller counts them in `cursors`."""
        in_vain = 0
        with suppress(StopIteration):  # where a stream ends
            while in_vain < _MOST_EMPTY:
                drawn = self._plan.mixture.draw(lane, cursors, _DRAWN_AHEAD)
                for source, index in np.transpose(drawn).tolist():
                    documents = self._plan.sources[source]
                    if source in self._readers:
                        record, place, snapshots[source] = self._readers[source](lane, index)
                    else:
                        record, place = documents.dataset[index], index
                    document = document_of(record, place, documents, self._plan.tokenizer)
                    if document.broken:
                        self._broken.append(document.broken)
                    in_vain = 0 if len(document.tokens) else in_vain + 1
                    yield source, document
            add_broken({}, self._broken, self._plan.config.data.max_broken_records)
            raise UserError(f"{documents.name}: {in_vain} records in a row hold no text; check data.text_column")
