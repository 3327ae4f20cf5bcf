"""Labels, positions and bounds of packed rows, worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lacuna.config import Config
from lacuna.config.documents import PackingConfig
from lacuna.config.machine import ParallelismConfig
from lacuna.config.row_form import RowForm
from lacuna.config.sections import TrainingConfig
from lacuna.data.document import Document, Span
from lacuna.data.packing import IGNORED, Batch, pack

NO = IGNORED


def span(
    tokens: list[int],
    following: int | None = None,
    source: int = 0,
    text_bytes: float = 0.0,
    untrained: tuple[int, ...] = (),
) -> Span:
    """A document from its beginning, up to the token that follows if it goes on."""
    whole = np.array(tokens if following is None else [*tokens, following], dtype=np.int32)
    trained = ~np.isin(whole, untrained) if untrained else None
    document = Document(whole, text_bytes * len(whole) / len(tokens), trained=trained)
    return Span(document, source, 0, len(tokens))


ROWS = [
    [
        span([1, 2, 9], text_bytes=2),
        span([3, 9], source=1, text_bytes=1),
        span([4, 5, 6], following=7, text_bytes=3),
    ],
    [span([7, 8, 9], text_bytes=2.5), span([5, 6, 7, 8, 9], source=1, text_bytes=4)],
]
"""Two rows of 8; a document of 4 5 6 | 7 8 9 is cut by the end of the first."""

FORM = RowForm(
    length=8,
    longest_piece=8,
    trains_on="texts",
    judged_by="sigmoid",
    packing=PackingConfig(mode="concatenate"),
    document_mask=True,
    predict_across_documents=False,
    is_shared=False,
)


def packed(
    rows: list[list[Span]] = ROWS, padding: int = 0, pieces: int | None = None, **data: bool
) -> Batch:
    form = replace(FORM, longest_piece=pieces or 8, **data)
    return pack(rows, form, sources=2, padding=padding)


def test_documents_are_apart() -> None:
    batch = packed()
    assert batch.columns["input_ids"].tolist() == [
        [1, 2, 9, 3, 9, 4, 5, 6],
        [7, 8, 9, 5, 6, 7, 8, 9],
    ]
    assert batch.columns["labels"].tolist() == [
        [2, 9, NO, 9, NO, 5, 6, 7],
        [8, 9, NO, 6, 7, 8, 9, NO],
    ]
    assert batch.columns["position_ids"].tolist() == [
        [0, 1, 2, 0, 1, 0, 1, 2],
        [0, 1, 2, 0, 1, 2, 3, 4],
    ]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 8, 11, 16]
    assert (batch.max_seqlen, batch.counts["tokens"], batch.counts["trained_tokens"]) == (5, 16, 12)
    assert (batch.counts["source_0"], batch.counts["source_1"]) == (9, 7)
    assert batch.counts["text_bytes"] == pytest.approx(12.5)


def test_varlen_cuts_documents_and_trains_across_the_cut() -> None:
    batch = packed(pieces=2)
    assert batch.columns["labels"].tolist() == packed().columns["labels"].tolist()
    assert batch.columns["position_ids"].tolist() == [
        [0, 1, 0, 0, 1, 0, 1, 0],
        [0, 1, 0, 0, 1, 0, 1, 0],
    ]
    assert batch.cu_seqlens.tolist() == [0, 2, 3, 5, 7, 8, 10, 11, 13, 15, 16]
    assert batch.max_seqlen == 2


def test_predicting_across_documents_stops_at_the_end_of_a_row() -> None:
    labels = packed(predict_across_documents=True).columns["labels"]
    assert labels.tolist() == [[2, 9, 3, 9, 4, 5, 6, 7], [8, 9, 5, 6, 7, 8, 9, NO]]


def test_without_a_document_mask_only_rows_are_apart() -> None:
    batch = packed(document_mask=False)
    assert batch.columns["position_ids"].tolist() == [list(range(8))] * 2
    assert batch.cu_seqlens.tolist() == [0, 8, 16]
    assert batch.columns["labels"].tolist() == packed().columns["labels"].tolist()


def test_a_short_row_is_padded_and_padding_is_not_trained() -> None:
    batch = packed([[span([1, 2, 9])], []], padding=9)
    assert batch.columns["input_ids"].tolist() == [[1, 2, 9, 9, 9, 9, 9, 9], [9] * 8]
    assert batch.columns["labels"].tolist() == [[2, 9, NO, NO, NO, NO, NO, NO], [NO] * 8]
    assert batch.cu_seqlens.tolist() == [0, 3, 8, 16]
    assert (batch.counts["tokens"], batch.counts["trained_tokens"]) == (3, 2)


def test_what_is_not_trained_is_read_but_not_predicted() -> None:
    batch = packed(
        [[span([1, 2, 3, 9], untrained=(1, 2)), span([3, 4, 5, 6], 7, untrained=(3, 4, 7))]]
    )
    assert batch.columns["input_ids"].tolist() == [[1, 2, 3, 9, 3, 4, 5, 6]]
    assert batch.columns["labels"].tolist() == [[NO, 3, 9, NO, NO, 5, 6, NO]]
    assert batch.counts["trained_tokens"] == 4


@pytest.mark.parametrize(("tensor_parallel", "length"), [(1, 128), (2, 256)])
def test_rows_of_single_examples_end_with_the_longest_unless_ranks_share_them(
    tensor_parallel: int, length: int
) -> None:
    form = Config(
        packing=PackingConfig(mode="none"),
        training=TrainingConfig(seq_len=256),
        parallelism=ParallelismConfig(tensor_parallel_degree=tensor_parallel),
    ).row_form
    batch = pack([[span([9] * 100)], [span([9] * 3)]], form, sources=1, padding=9)
    assert batch.columns["input_ids"].shape == (2, length)
    assert (
        batch.counts["tokens"] == 103 and batch.counts["trained_tokens"] == 101
    )  # what pads is the end of text as well, but not trained
    assert batch.cu_seqlens.tolist() == [0, 100, length, length + 3, 2 * length]


def test_what_is_known_of_a_token_lies_beside_the_label_that_it_is() -> None:
    tokens = np.array([1, 2, 3, 9, 4, 5], dtype=np.int32)
    trained = np.array([False, True, False, True, True, True])
    known = {
        "weight": np.arange(6, dtype=np.float32),
        "likely": np.arange(12, dtype=np.int16).reshape(6, 2),
    }
    document = Document(tokens, 0.0, trained=trained, columns=known)
    kinds = {name: values[:0] for name, values in known.items()}
    form = replace(FORM, length=4, longest_piece=4)
    rows = [[Span(document, 0, 0, 4)], [Span(document, 0, 4, 6), span([7, 8])], []]
    batch = pack(rows, form, sources=1, padding=0, kinds=kinds)
    assert batch.columns["labels"].tolist() == [[2, NO, 9, 4], [5, NO, 8, NO], [NO] * 4]
    weights, likely = batch.columns["weight"], batch.columns["likely"]
    assert weights.dtype == torch.float32 and likely.dtype == torch.int16
    assert weights.tolist() == [[1, 0, 3, 4], [5, 0, 0, 0], [0] * 4]
    assert likely.shape == (3, 4, 2)
    assert likely[..., 0].tolist() == [[2, 0, 6, 8], [10, 0, 0, 0], [0] * 4]
    assert likely[..., 1].tolist() == [[3, 0, 7, 9], [11, 0, 0, 0], [0] * 4]


def test_texts_and_conversations_have_nothing_of_sequences() -> None:
    batch = packed()
    assert batch.columns.keys() == {"input_ids", "labels", "position_ids", "real"}
    assert batch.counts.keys().isdisjoint({"pairs", "sequences"}) and not batch.sequence_columns
