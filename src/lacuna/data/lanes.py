"""The spans of rows of documents that are tokenised as they come, lane by lane."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np

from lacuna.config import UserError
from lacuna.data.document import BEGINNING, Document, PlacedRecord, Snapshot, Span
from lacuna.data.faults import readable
from lacuna.data.filling import (
    fill_rows,
    refuse_long_examples,
    refuse_long_pairs,
    tokens_kept,
)
from lacuna.data.mixture import shuffled
from lacuna.data.plan import RowPlan
from lacuna.data.rows import LaneState, Place
from lacuna.data.tokenize import add_broken, document_of

_DRAWN_AHEAD = 64
# How many records without a text may follow each other, and how many examples of which rows have
# nothing; and how many broken ones may be met again. Then nothing else is in the source.
_MOST_EMPTY = 100_000
_MOST_LONG = 10_000
_MOST_AGAIN = 1000
# The share of the buffer that is filled: to fit a full one would take one more, nearly empty row.
_FILL = 0.98

# A document that a lane has drawn: its source, itself, and the lane's place after it.
Drawn = tuple[int, Document, Place]


class LaneRows:
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
        form = self._plan.form
        drawn = self._draw_documents(lane, place)
        while found := self._fill_buffer(drawn):
            examples, after = found
            documents = [document for _, document in examples]
            lengths = np.array([len(document.tokens) for document in documents])
            bins = fill_rows(lengths, documents.__getitem__, form.length, form.packing)
            passed = sum(count for count, _ in place)
            order = shuffled(len(bins), self._plan.mixture.pools[0].key, lane, passed)
            for row in range(used, len(bins)):
                spans = []
                for number, start, stop in bins[order[row]].T.tolist():
                    source, document = examples[number]
                    spans.append(Span(document, source, start, stop))
                is_last = row + 1 == len(bins)
                yield spans, (0, after) if is_last else (row + 1, place)
            used = 0
            place = after

    def _fill_buffer(
        self, drawn: Iterator[Drawn]
    ) -> tuple[list[tuple[int, Document]], Place] | None:
        """The next examples of which rows have something, as many as fill the buffer.

        With them comes the place after all that were drawn. There are none at the end. Raises
        UserError when too many in a row do not fit: nothing else may be left.
        """
        form = self._plan.form
        enough = _FILL * form.packing.buffer * form.length
        examples = []
        tokens = in_vain = 0
        place: Place = []
        for source, document, after in drawn:
            place = after
            if form.trains_on == "preferences":
                refuse_long_pairs(np.array([len(document.tokens)]), [form])
            kept = tokens_kept(document, form.length, form.packing)
            in_vain = 0 if kept else in_vain + 1
            if in_vain == _MOST_LONG:
                refuse_long_examples(in_vain, form.length)
            if kept:
                examples.append((source, document))
                tokens += min(kept, form.length)
            if tokens >= enough:
                break
        return (examples, place) if examples else None

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
