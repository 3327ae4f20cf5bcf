"""Documents to batches: the samples of step t are a function of the configuration and t alone.

A document goes through these modules:

1. `sources` opens what the configuration names. `files` reads local JSON and texts; `corpus` is the
   one source that needs no download.
2. `mixture` decides the order of documents from the seed and their positions.
3. `tokenize` turns documents into tokens: conversations by means of `messages`, `chat` and
   `template`, preferences by means of `judged` and `preferences`.
4. `filling` decides which documents share a row, and `packing` makes batches of rows.
5. `micro_batches` deals rows to ranks and workers. `loader` hands batches out and saves its
   position.

`rows` makes rows of documents in one of three ways, which `plan` chooses:

- Laid end to end: the sources are tokenised once, into a cache. Rows of seq_len tokens are cut out
  of all documents in their order. So any process can make any row, and the position in the data is
  the step alone.
- Fitted: the documents come from the same cache, and row R holds the whole examples that `filling`
  fits together.
- In lanes: documents are dealt to 8 lanes per sequence of the global batch. Each lane packs its own
  documents, and row R is the next row of lane R mod lanes. The worker that owns a lane tokenises
  its documents. Local sources are read where they are, streams through `stream`. The position in
  the data is a few integers per lane and, for each stream, the place to go on reading from.

Row R belongs to step R // global_batch. None of the three ways depends on how many ranks or workers
there are.
"""

from lacuna.data.loader import HeldOut, Loader, build_loader, build_validation, merge_states
from lacuna.data.micro_batches import BatchSizes
from lacuna.data.packing import Batch
from lacuna.data.tokenizer import run_tokenizer
from lacuna.data.workers import is_worker_end, worker_ends_explained

__all__ = [
    "Batch",
    "BatchSizes",
    "HeldOut",
    "Loader",
    "build_loader",
    "build_validation",
    "merge_states",
    "is_worker_end",
    "run_tokenizer",
    "worker_ends_explained",
]
