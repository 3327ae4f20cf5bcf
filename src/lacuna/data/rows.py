"""The spans of each row: from a table of all tokens, laid end to end or fitted, or from documents as they come."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np

from lacuna.config import UserError
from lacuna.data.document import Document, Span
from lacuna.data.faults import readable
from lacuna.data.filling import fill_rows, refuse_long_pairs
from lacuna.data.mixture import shuffled
from lacuna.data.plan import Plan
from lacuna.data.stream import BEGINNING, Snapshot, Stream
from lacuna.data.tokenize import add_broken, document_of

_WINDOW = 8192
_DRAWN_AT_ONCE = 16384
_DRAWN_AHEAD = 64
_MOST_EMPTY = 100_000  # records in a row without a text
_MOST_AGAIN = (
    1000  # of them, such as were met and broken before: of the whole source nothing else comes
)
_FILL = 0.98  # of the buffer: examples that filled it whole would take a row more, nearly empty

# Of each source how many documents have been passed, and where to read it from if it is a stream.
Place = list[tuple[int, Snapshot]]
# What was used from a place on: tokens of a document, or rows of examples that were fitted
# together; and the place.
LaneState = tuple[int, Place]


def open_rows(
    plan: Plan, states: dict[int, LaneState | None], broken: list[str]
) -> Callable[[int], list[Span]]:
    """A function from the number of a row to its spans, which fill it but at the end of the documents.

    Rows are asked for in order, but not all of them.

    Args:
        states: of the lanes that are read, where each goes on (None: the beginning); kept up to
            date in place.
        broken: gains the places of unreadable records that were met.
    """
    if plan.table is None:
        return _LaneRows(plan, states, broken).row
    rows = enumerate(
        itertools.chain(_made_of_table(plan), itertools.repeat(()))
    )  # empty after the last document

    def row(wanted: int) -> list[Span]:
        pieces = next(pieces for number, pieces in rows if number == wanted)
        return [
            Span(*plan.table.document(index), *part)
            for index, *part in np.transpose(pieces).tolist()
        ]

    return row


def rows_from_the_start(plan: Plan, count: int) -> Iterator[list[list[Span]]]:
    """The rows of a plan as `open_rows` gives them, `count` at a time, until all documents are used up.

    Raises UserError when more records are unreadable than `data.max_broken_records`.
    """
    broken: list[str] = []
    known: dict[str, None] = {}
    row = open_rows(plan, dict.fromkeys(range(plan.mixture.lanes)), broken)
    for first in itertools.count(0, count):
        rows = [row(number) for number in range(first, first + count)]
        add_broken(known, broken, plan.config.data.max_broken_records)
        if not any(rows):
            return
        yield rows


def documents_begun(plan: Plan, rows: int) -> np.ndarray:
    """How often the first `rows` rows begin each document, int64 [documents]."""
    begun = np.zeros(len(plan.table.lengths), dtype=np.int64)
    for documents, starts, _ in itertools.islice(_made_of_table(plan), rows):
        np.add.at(begun, documents[starts == 0], 1)
    return begun


def _made_of_table(plan: Plan) -> Iterator[np.ndarray]:
    """The pieces, int64 [3, n], of each row: documents, where these begin, where they end."""
    return _fitted(plan) if plan.fits else _laid_end_to_end(plan)


def _laid_end_to_end(plan: Plan) -> Iterator[np.ndarray]:
    """The pieces of rows that are cut out of all drawn documents, laid end to end.

    The rows are shuffled within windows: side by side in one step, the parts of a long document
    teach hardly more than one of them. A pass over the documents is cut into even windows. Rows of
    whole passes hold tokens of one each.
    """
    length, lengths = plan.config.training.seq_len, plan.table.lengths
    in_pass = plan.rows_per_pass or _WINDOW
    in_window = math.ceil(in_pass / math.ceil(in_pass / _WINDOW))
    drawn, draws = np.zeros((2, 1), dtype=np.int64), _draws(plan)  # documents, and where each ends
    pass_tokens = lengths.sum() if plan.whole_passes else in_pass * length
    for epoch in itertools.count() if plan.endless else [0]:
        for window, within in enumerate(range(0, in_pass, in_window)):
            size = min(in_window, in_pass - within)
            cuts = epoch * pass_tokens + np.minimum(
                (within + np.arange(size + 1)) * length, pass_tokens
            )
            kept = [drawn[:, drawn[1] >= cuts[0]]]
            while kept[-1][1, -1] < cuts[-1]:
                more = next(draws)
                kept.append(np.stack([more, kept[-1][1, -1] + np.cumsum(lengths[more])]))
            documents, ends = drawn = np.concatenate(kept, axis=1)
            edges = np.union1d(cuts, ends.clip(cuts[0], cuts[-1]))
            found = np.searchsorted(ends, edges[:-1], side="right")
            starts = edges[:-1] - (ends - lengths[documents])[found]
            pieces = np.stack([documents[found], starts, starts + np.diff(edges)])
            bounds = np.searchsorted(edges, cuts).tolist()
            for place in shuffled(size, plan.mixture.pools[0].key, epoch, window).tolist():
                yield pieces[:, bounds[place] : bounds[place + 1]]


def _fitted(plan: Plan) -> Iterator[np.ndarray]:
    """The pieces of rows of whole examples, fitted together in one pass over all of them, and shuffled anew for each.

    Sources mixed by weight have no pass: there the next of their draws are fitted together.
    """
    draws = _draws(plan)
    for number in itertools.count(1) if plan.endless else [1]:
        bins = plan.bins_of(next(draws)) if plan.rows_per_pass is None else plan.bins
        for place in shuffled(len(bins), plan.mixture.pools[0].key, number).tolist():
            yield bins[place]


def _draws(plan: Plan) -> Iterator[np.ndarray]:
    """The documents in the table, int64 [n] at a time, in the order in which they are drawn."""
    pool_starts = np.cumsum([0, *(pool.size for pool in plan.mixture.pools)])
    cursors = np.zeros(len(plan.mixture.pools), dtype=np.int64)
    while True:
        choices, index = plan.mixture.draw(0, cursors, _DRAWN_AT_ONCE)
        documents = pool_starts[choices] + index
        yield documents if plan.order is None else plan.order[documents]
        cursors += np.bincount(choices, minlength=len(cursors))


class _LaneRows:
    """Rows of documents that are tokenised as they come; row R is the next of lane R mod lanes."""

    def __init__(self, plan: Plan, states: dict[int, LaneState | None], broken: list[str]) -> None:
        self._plan, self._states, self._broken = plan, states, broken
        pools, data = plan.mixture.pools, plan.config.data
        starts = {
            lane: state or (0, [(0, BEGINNING)] * len(pools)) for lane, state in states.items()
        }
        self._readers = []
        for source, pool in enumerate(pools if data.streaming else ()):
            stream = Stream(pool.size, pool.key, plan.sources[source], data.retries, plan.endless)
            positions = {lane: place[source] for lane, (_, place) in starts.items()}
            self._readers.append(stream.reader(plan.mixture.lanes, positions))
        rows = self._fitted if plan.fits else self._laid_end_to_end
        self._rows = {lane: rows(lane, *start) for lane, start in starts.items()}

    def row(self, number: int) -> list[Span]:
        """The spans of a row, none after the last document; those of a lane are asked for in order."""
        lane = number % self._plan.mixture.lanes
        spans, self._states[lane] = next(self._rows[lane], ([], None))
        return spans

    def _laid_end_to_end(
        self, lane: int, offset: int, place: Place
    ) -> Iterator[tuple[list[Span], LaneState]]:
        """The rows of a lane from a state on, each with the state after it."""
        spans, space = [], self._plan.config.training.seq_len
        for source, document, after in self._documents(lane, place):
            while offset < len(document.tokens):
                start, offset = offset, min(offset + space, len(document.tokens))
                spans.append(Span(document, source, start, offset))
                space -= offset - start
                if not space:
                    yield spans, (offset, place)
                    spans, space = [], self._plan.config.training.seq_len
            offset, place = 0, after
        yield spans, (0, place)

    def _fitted(self, lane: int, used: int, place: Place) -> Iterator[tuple[list[Span], LaneState]]:
        """The same with whole examples, as many of which are fitted together as fill the buffer."""
        config = self._plan.config
        drawn = self._documents(lane, place)
        while True:
            examples, tokens = [], 0
            for example in drawn:
                examples.append(example)
                tokens += min(len(example[1].tokens), config.training.seq_len)
                if tokens >= _FILL * config.packing.buffer * config.training.seq_len:
                    break
            if not examples:
                return
            sources, documents, places = zip(*examples, strict=True)
            lengths = np.array([len(document.tokens) for document in documents])
            if config.trains_on == "preferences":
                refuse_long_pairs(lengths, config.training.seq_len, config.packing.long_examples)
            bins = fill_rows(
                lengths, documents.__getitem__, config.training.seq_len, config.packing
            )
            order = shuffled(
                len(bins), self._plan.mixture.pools[0].key, lane, sum(passed for passed, _ in place)
            )
            for row in range(used, len(bins)):
                pieces = bins[order[row]].T.tolist()
                spans = [
                    Span(documents[number], sources[number], *part) for number, *part in pieces
                ]
                yield spans, (row + 1, place) if row + 1 < len(bins) else (0, places[-1])
            used, place = 0, places[-1]

    def _documents(self, lane: int, place: Place) -> Iterator[tuple[int, Document, Place]]:
        """The documents that a lane draws, each with its source and the place after it."""
        in_vain, met, most = 0, Counter(), self._plan.config.data.max_broken_records
        with suppress(StopIteration):  # where a stream ends
            while (
                in_vain < _MOST_EMPTY and len(met) <= most and met.total() < len(met) + _MOST_AGAIN
            ):
                drawn = self._plan.mixture.draw(lane, [passed for passed, _ in place], _DRAWN_AHEAD)
                for source, index in np.transpose(drawn).tolist():
                    documents, (passed, snapshot) = self._plan.sources[source], place[source]
                    with readable(documents.name):
                        if (
                            self._readers
                        ):  # a lane takes its turn in a stream, whichever document was drawn
                            record, number, snapshot = self._readers[source](lane)
                        else:
                            record, number = documents.dataset[index], index
                    document = document_of(record, number, documents, self._plan.tokenizer)
                    in_vain, met = (0, Counter()) if len(document.tokens) else (in_vain + 1, met)
                    if document.broken:
                        self._broken.append(document.broken)
                        met[document.broken] += 1
                    place = [*place[:source], (passed + 1, snapshot), *place[source + 1 :]]
                    yield source, document, place
            add_broken({}, self._broken, most)
            raise UserError(
                f"{documents.name}: {in_vain} records in a row hold no text; check data.text_column"
            )
