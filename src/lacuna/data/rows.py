"""The spans of each row: end to end or fitted from a table of tokens, or from lanes."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np

from lacuna.config import UserError
from lacuna.data.document import BEGINNING, Document, PlacedRecord, Snapshot, Span
from lacuna.data.faults import readable
from lacuna.data.filling import fill_rows, refuse_long_pairs
from lacuna.data.mixture import shuffled
from lacuna.data.plan import RowPlan
from lacuna.data.tokenize import add_broken, document_of

_WINDOW = 8192
_DRAWN_AT_ONCE = 16384
_DRAWN_AHEAD = 64
# How many records without a text may follow each other; and how many broken ones may be met again,
# since then nothing else is in the source.
_MOST_EMPTY = 100_000
_MOST_AGAIN = 1000
# The share of the buffer that is filled: to fit a full one would take one more, nearly empty row.
_FILL = 0.98

# For each source, how many documents have been passed and, of a stream, where to read on.
Place = list[tuple[int, Snapshot]]
# A document that a lane has drawn: its source, itself, and the lane's place after it.
Drawn = tuple[int, Document, Place]
# How much was used from a place on (tokens of a document, or rows of examples that were fitted
# together), and that place.
LaneState = tuple[int, Place]


def open_rows(
    plan: RowPlan, states: dict[int, LaneState | None], broken: list[str]
) -> Callable[[int], list[Span]]:
    """A function from the number of a row to its spans, which fill it.

    Rows are asked for in order, but not all of them. At the end of the documents rows are not full,
    then empty.

    Args:
        states: where each of the lanes that are read goes on (None: at the beginning); updated in
            place.
        broken: gains the places of unreadable records that were met.
    """
    if plan.table is None:
        return _LaneRows(plan, states, broken).row
    table = plan.table
    nothing = np.zeros((3, 0), dtype=np.int64)
    rows = enumerate(itertools.chain(_pieces_of_table(plan), itertools.repeat(nothing)))

    def row(wanted: int) -> list[Span]:
        pieces = next(pieces for number, pieces in rows if number == wanted)
        return [
            Span(*table.document(index), start, stop) for index, start, stop in pieces.T.tolist()
        ]

    return row


def rows_from_the_start(plan: RowPlan, count: int) -> Iterator[list[list[Span]]]:
    """The rows of a plan, `count` at a time, until all documents are used up.

    Raises UserError when more records are unreadable than `data.max_broken_records`.
    """
    broken: list[str] = []
    known: dict[str, None] = {}
    row = open_rows(plan, dict.fromkeys(range(plan.mixture.lanes)), broken)
    for first in itertools.count(0, count):
        rows = [row(number) for number in range(first, first + count)]
        add_broken(known, broken, plan.data.max_broken_records)
        if not any(rows):
            return
        yield rows


def documents_begun(plan: RowPlan, rows: int) -> np.ndarray:
    """How often the first `rows` rows begin each document, int64 [documents]."""
    begun = np.zeros(len(plan.tokens.lengths), dtype=np.int64)
    for documents, starts, _ in itertools.islice(_pieces_of_table(plan), rows):
        np.add.at(begun, documents[starts == 0], 1)
    return begun


def _pieces_of_table(plan: RowPlan) -> Iterator[np.ndarray]:
    """The pieces, int64 [3, n], of each row: documents, where these begin, where they end."""
    return _pieces_fitted(plan) if plan.fits else _pieces_end_to_end(plan)


def _pieces_end_to_end(plan: RowPlan) -> Iterator[np.ndarray]:
    """The pieces of rows that are cut out of all drawn documents, laid end to end.

    The rows are shuffled within windows: in one step together, the parts of a long document would
    teach hardly more than one of them. A pass over the documents is cut into even windows. If
    passes are whole, no row holds tokens of two.
    """
    length = plan.form.length
    lengths = plan.tokens.lengths
    in_pass = plan.rows_per_pass or _WINDOW
    in_window = math.ceil(in_pass / math.ceil(in_pass / _WINDOW))
    draws = _drawn_documents(plan)
    # The documents drawn so far, and where each ends in the text of all.
    drawn = np.zeros((2, 1), dtype=np.int64)
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
            drawn = np.concatenate(kept, axis=1)
            documents, ends = drawn
            edges = np.union1d(cuts, ends.clip(cuts[0], cuts[-1]))
            found = np.searchsorted(ends, edges[:-1], side="right")
            starts = edges[:-1] - (ends - lengths[documents])[found]
            pieces = np.stack([documents[found], starts, starts + np.diff(edges)])
            bounds = np.searchsorted(edges, cuts).tolist()
            for place in shuffled(size, plan.mixture.pools[0].key, epoch, window).tolist():
                yield pieces[:, bounds[place] : bounds[place + 1]]


def _pieces_fitted(plan: RowPlan) -> Iterator[np.ndarray]:
    """The pieces of rows of whole examples, which are shuffled anew for each pass.

    The examples of a pass are fitted together. Sources mixed by weight have no pass: the documents
    that are drawn next are fitted together.
    """
    draws = _drawn_documents(plan)
    for number in itertools.count(1) if plan.endless else [1]:
        bins = plan.bins_of(next(draws)) if plan.rows_per_pass is None else plan.bins
        for place in shuffled(len(bins), plan.mixture.pools[0].key, number).tolist():
            yield bins[place]


def _drawn_documents(plan: RowPlan) -> Iterator[np.ndarray]:
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

    def __init__(
        self, plan: RowPlan, states: dict[int, LaneState | None], broken: list[str]
    ) -> None:
        self._plan = plan
        self._states = states
        self._broken = broken
        pools = plan.mixture.pools
        beginning: LaneState = (0, [(0, BEGINNING)] * len(pools))
        starts = {lane: state or beginning for lane, state in states.items()}
        self._readers = []
        if plan.data.streaming:
            self._readers = [self._reader(source, starts) for source in range(len(pools))]
        rows = self._fitted_rows if plan.fits else self._rows_end_to_end
        self._rows = {lane: rows(lane, *start) for lane, start in starts.items()}

    def _reader(self, source: int, starts: dict[int, LaneState]) -> Callable[[int], PlacedRecord]:
        """A function from a lane to its next record from a source that is a stream."""
        from lacuna.data.stream import Stream  # an extension

        plan = self._plan
        pool = self._plan.mixture.pools[source]
        retries = plan.data.retries
        stream = Stream(pool.size, pool.key, plan.sources[source], retries, plan.endless)
        positions = {lane: place[source] for lane, (_, place) in starts.items()}
        return stream.reader(plan.mixture.lanes, positions)

    def row(self, number: int) -> list[Span]:
        """The spans of a row; those of a lane are asked for in order. There are none at the end."""
        lane = number % self._plan.mixture.lanes
        nothing: tuple[list[Span], LaneState | None] = ([], None)
        spans, self._states[lane] = next(self._rows[lane], nothing)
        return spans

    def _rows_end_to_end(
        self, lane: int, offset: int, place: Place
    ) -> Iterator[tuple[list[Span], LaneState]]:
        """The rows of a lane from a state on, each with the state after it."""
        spans: list[Span] = []
        space = self._plan.form.length
        for source, document, after in self._draw_documents(lane, place):
            while offset < len(document.tokens):
                start = offset
                offset = min(offset + space, len(document.tokens))
                spans.append(Span(document, source, start, offset))
                space -= offset - start
                if not space:
                    yield spans, (offset, place)
                    spans = []
                    space = self._plan.form.length
            offset = 0
            place = after
        yield spans, (0, place)

    def _fitted_rows(
        self, lane: int, used: int, place: Place
    ) -> Iterator[tuple[list[Span], LaneState]]:
        """The same with whole examples, as many of which are fitted together as fill the buffer."""
        drawn = self._draw_documents(lane, place)
        while examples := self._fill_buffer(drawn):
            bins = self._fit_into_rows([document for _, document, _ in examples])
            passed = sum(count for count, _ in place)
            order = shuffled(len(bins), self._plan.mixture.pools[0].key, lane, passed)
            after = examples[-1][2]
            for row in range(used, len(bins)):
                spans = []
                for number, start, stop in bins[order[row]].T.tolist():
                    source, document, _ = examples[number]
                    spans.append(Span(document, source, start, stop))
                is_last = row + 1 == len(bins)
                yield spans, (0, after) if is_last else (row + 1, place)
            used = 0
            place = after

    def _fill_buffer(self, drawn: Iterator[Drawn]) -> list[Drawn]:
        """The next examples, as many as fill the buffer; none at the end."""
        most = self._plan.form.length
        enough = _FILL * self._plan.form.packing.buffer * most
        examples = []
        tokens = 0
        for example in drawn:
            examples.append(example)
            tokens += min(len(example[1].tokens), most)
            if tokens >= enough:
                break
        return examples

    def _fit_into_rows(self, documents: list[Document]) -> list[np.ndarray]:
        """The pieces of rows that these documents are fitted into."""
        form = self._plan.form
        lengths = np.array([len(document.tokens) for document in documents])
        if form.trains_on == "preferences":
            refuse_long_pairs(lengths, [form])
        return fill_rows(lengths, documents.__getitem__, form.length, form.packing)

    def _draw_documents(self, lane: int, place: Place) -> Iterator[Drawn]:
        """The documents that a lane draws.

        Raises UserError when too many in a row are empty or broken: nothing else may be left.
        """
        most_broken = self._plan.data.max_broken_records
        in_vain, met = 0, Counter[str]()
        with suppress(StopIteration):  # where a stream ends
            while (
                in_vain < _MOST_EMPTY
                and len(met) <= most_broken
                and met.total() < len(met) + _MOST_AGAIN
            ):
                passed = [count for count, _ in place]
                drawn = self._plan.mixture.draw(lane, passed, _DRAWN_AHEAD)
                for source, index in np.transpose(drawn).tolist():
                    document, snapshot = self._read_document(lane, source, index, place[source][1])
                    if len(document.tokens):
                        in_vain, met = 0, Counter[str]()
                    else:
                        in_vain += 1
                    if document.broken:
                        self._broken.append(document.broken)
                        met[document.broken] += 1
                    moved = (place[source][0] + 1, snapshot)
                    place = [*place[:source], moved, *place[source + 1 :]]
                    yield source, document, place
            add_broken({}, self._broken, most_broken)
            name = self._plan.sources[source].name
            raise UserError(
                f"{name}: {in_vain} records in a row hold no text; check data.text_column"
            )

    def _read_document(
        self, lane: int, source: int, index: int, snapshot: Snapshot
    ) -> tuple[Document, Snapshot]:
        """The document that a lane has drawn, and where the lane is in the source after it.

        From a stream the lane takes the next document in its turn, whichever was drawn.
        """
        documents = self._plan.sources[source]
        number: int | str = index
        with readable(documents.name):
            if self._readers:
                record, number, snapshot = self._readers[source](lane)
            else:
                record = documents.dataset[index]
        return document_of(record, number, documents, self._plan.tokenizer), snapshot
