"""Documents to batches: the samples of step t are a function of the configuration and t alone.

The way of a document: `sources` opens what the configuration names (`files` reads local JSON and
texts, `corpus` is the one that needs no download); `mixture` decides the order of documents from
the seed and their positions; `tokenize` makes tokens of them, of conversations with `messages`,
`chat` and `template`, of preferences with `judged` and `preferences`; `filling` decides which share
a row, and `packing` makes batches of rows; `micro_batches` deals rows to ranks and workers, and
`loader` hands batches out and saves its position. `rows` makes the rows of documents in one of
three ways, as `plan` decides:

- Laid end to end: the sources are tokenised once into a cache; rows are cut every seq_len tokens
  out of all documents in their order, so that any process can make any row and the position is the
  step alone.
- Fitted: from the same cache, row R holds the whole examples that `filling` fits together.
- In lanes: documents are dealt to 8 lanes per sequence of the global batch, each of which packs its
  own; row R is the next row of lane R mod lanes. Documents are tokenised by the worker that owns
  the lane, and local sources stay where they are; streams are read through `stream`. The position
  is a few integers per lane and, for each stream, the place to read it on from.

Row R belongs to step R // global_batch. No way knows how many ranks or workers there are.
"""

from lacuna.data.loader import Loader, build_loader, build_validation, merge_states
from lacuna.data.micro_batches import BatchPlan
from lacuna.data.packing import Batch
from lacuna.data.plan import run_tokenizer
from lacuna.data.workers import of_a_worker, workers_told

__all__ = [
    "Batch",
    "BatchPlan",
    "Loader",
    "build_loader",
    "build_validation",
    "merge_states",
    "of_a_worker",
    "run_tokenizer",
    "workers_told",
]
