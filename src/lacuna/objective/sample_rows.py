"""Samples laid out in rows, as they are read and trained."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lacuna.config.documents import DataConfig
from lacuna.config.row_form import RowForm
from lacuna.config.sections import TrainingConfig
from lacuna.data import Batch
from lacuna.data.document import Document, Span
from lacuna.data.filling import best_fit
from lacuna.data.packing import IGNORED, pack
from lacuna.rollout.groups import Sample


@dataclass(frozen=True)
class Targets:
    """What a loss takes of a sample.

    Attributes:
        of: gives the columns of samples' own tokens, float32 [own tokens of all of them] each.
        is_trained: whether a sample is trained at all.
    """

    of: Callable[[Sequence[Sample]], dict[str, Tensor]]
    is_trained: Callable[[Sample], bool]

    def only_read(self) -> "Targets":
        """The same samples for a model that only reads them: without columns."""
        return Targets(lambda samples: {}, self.is_trained)


@dataclass(frozen=True)
class LaidOut:
    """Samples in batches.

    Attributes:
        batches: the batches.
        places: where the label of each of the samples' own tokens is, int64 [own tokens of all],
            if all batches lie one after the other, flattened.
    """

    batches: list[Batch]
    places: np.ndarray

    def with_columns(self, columns: Mapping[str, Tensor]) -> "LaidOut":
        """The same with these columns of own tokens in the batches, [own tokens of all] each.

        They are float32, and 0 where nothing is trained.
        """
        labels = [batch.columns["labels"] for batch in self.batches]
        sizes = [own.numel() for own in labels]
        ignored = torch.cat([own.flatten() for own in labels]) == IGNORED
        found: list[dict[str, Tensor]] = [{} for _ in labels]
        for name, values in columns.items():
            whole = torch.zeros(len(ignored))
            whole[torch.from_numpy(self.places)] = values
            whole[ignored] = 0
            for added, own, part in zip(found, labels, whole.split(sizes), strict=True):
                added[name] = part.view(own.shape)
        pairs = zip(self.batches, found, strict=True)
        batches = [replace(batch, columns=batch.columns | added) for batch, added in pairs]
        return LaidOut(batches, self.places)


def lay_out(
    samples: Sequence[Sample],
    training: TrainingConfig,
    form: RowForm,
    data: DataConfig,
    padding: int,
    targets: Targets,
) -> LaidOut:
    """Packs samples into micro-batches, as many on this rank as on all others.

    Each has `training.batch_size` rows in the form of the data; the last ones may be padding.
    """
    size = training.batch_size
    documents, is_own = _documents(samples, targets.is_trained)
    lengths = np.array([len(one.tokens) for one in documents], dtype=np.int64)
    bins = [[number] for number in range(len(samples))]
    if form.packing.mode != "none":
        bins = best_fit(lengths, form.length)
    count = torch.tensor(-(-len(bins) // size))
    if dist.get_backend() == "nccl":
        count = count.cuda()
    dist.all_reduce(count, dist.ReduceOp.MAX)
    batches: list[Batch] = []
    begins = [0] * len(samples)  # the place of each sample's first token
    first = 0
    sources = max(len(data.resolved_sources()), 1)
    spans = [
        Span(document, sample.source, 0, len(document.tokens))
        for document, sample in zip(documents, samples, strict=True)
    ]
    for number in range(int(count)):
        rows = bins[number * size : (number + 1) * size]
        rows += [[]] * (size - len(rows))
        batch = pack([[spans[index] for index in row] for row in rows], form, sources, padding)
        counts = batch.counts | {"sequences": float(sum(map(len, rows)))}
        batches.append(replace(batch, counts=counts))
        for row in rows:
            start = first
            for index in row:
                begins[index] = start
                start += len(documents[index].tokens)
            first += batch.shape[1]
    shift = np.array(begins, dtype=np.int64) - (np.cumsum(lengths) - lengths)
    places = np.flatnonzero(is_own) + np.repeat(shift, lengths)[is_own] - 1
    return LaidOut(batches, places).with_columns(targets.of(samples))


def _documents(
    samples: Sequence[Sample], is_trained: Callable[[Sample], bool]
) -> tuple[list[Document], np.ndarray]:
    """The prompt of each and what follows it, as a document; and which tokens are the model's own.

    What the model was given between its turns is read, and not trained. The second is bool [tokens
    of all documents].
    """
    parts = [part for one in samples for part in (one.prompt, one.after)]
    sizes = [len(part) for part in parts]
    tokens = np.fromiter(chain.from_iterable(parts), np.int64, sum(sizes))
    is_own = np.repeat(np.arange(len(parts)) % 2 == 1, sizes)
    bounds = np.cumsum([0, *sizes]).tolist()
    trained = is_own.copy()
    documents = []
    for number, sample in enumerate(samples):
        begin, follows, end = bounds[2 * number : 2 * number + 3]
        if sample.given:
            is_own[follows:end] = trained[follows:end] = sample.is_own
        if not is_trained(sample):
            trained[begin:end] = False
        own = Document(tokens[begin:end], float("nan"), trained=trained[begin:end])
        documents.append(own)
    return documents, is_own
