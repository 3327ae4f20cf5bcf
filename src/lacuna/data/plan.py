"""What decides which rows there are: the opened sources, the order of their documents, their tokens if cached."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from lacuna.config import Config, UserError, explained, logger
from lacuna.config.documents import Source
from lacuna.data.cache import made_once, require_writable_cache
from lacuna.data.chat import use_template
from lacuna.data.document import Span
from lacuna.data.filling import fill_rows, packing_mode, refuse_long_pairs
from lacuna.data.mixture import Mixture, Pool, random_key
from lacuna.data.packing import Batch, pack
from lacuna.data.sources import Documents, open_source
from lacuna.data.stream import number_of_parts
from lacuna.data.tokenize import TokenTable, token_table
from lacuna.data.tokenizer import grown_tokenizer

_PACKING_VERSION = 2
_CACHED_BELOW = 256 * 2**20
# What decides which samples a step trains on, and must stay in a run that goes on
# (train_new_tokens_only because AdamW goes on moving what it has moved).
_DECIDING = {
    "job": {"task"},
    "model": {"new_tokens", "train_new_tokens_only"},
    "data": True,
    "chat": True,
    "packing": True,
    "training": {"seq_len", "context_len", "varlen", "seed"},
    "curriculum": {"difficulty_column", "rank_every"},
}
_NOT_DECIDING = {"data": {"num_workers", "prefetch_factor", "max_broken_records", "retries"}}


def run_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """The tokenizer of a run, with its new tokens and the chat template that it trains on.

    Raises UserError for whatever the configuration gets wrong of them.
    """
    tokenizer = grown_tokenizer(config.model)
    if config.conversations is not None:
        use_template(tokenizer, config.conversations)
    return tokenizer


@dataclass(frozen=True)
class Plan:
    """Everything that decides the rows.

    With a `table` of all tokens the mixture has one lane; without, documents are tokenised while
    training, and row R is the next row of lane R mod lanes. With an `order`, int64 [documents],
    those of the table come in that. Rows end with the last document unless `endless`. Of each column
    that documents may have of their tokens there is an empty array in `kinds`.
    """

    config: Config
    tokenizer: PreTrainedTokenizerBase
    mixture: Mixture
    sources: tuple[Documents, ...]
    table: TokenTable | None
    endless: bool = True
    order: np.ndarray | None = None
    kinds: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def rows_per_pass(self) -> int | None:
        """Rows that all documents fill; None when unknown, or when sources are mixed by weight: no common pass."""
        if self.table is None or len(self.mixture.pools) > 1:
            return None
        return (
            len(self.bins)
            if self.fits
            else math.ceil(self.table.lengths.sum() / self.config.training.seq_len)
        )

    @property
    def fits(self) -> bool:
        """Whether rows are made of whole examples."""
        return self.packing_mode != "concatenate"

    @property
    def packing_mode(self) -> str:
        """How rows are filled."""
        return packing_mode(self.config.packing, self.config.trains_on)

    @cached_property
    def bins(self) -> list[np.ndarray]:
        """The pieces of documents in each row of a pass over all of them; only neighbours share rows if in order.

        They are fitted once and kept, but for those in an order, which is of this run.
        """
        most, lengths, way = (
            self.config.training.seq_len,
            self.table.lengths,
            self.config.packing.long_examples,
        )
        if long := int((lengths > most).sum()):
            logger.info(
                "%d of %d examples are longer than a row of %d tokens: %s",
                long,
                len(lengths),
                most,
                way,
            )
        if self.order is not None:
            return self.bins_of(self.order)

        def write(file: str) -> None:
            rows = self.bins_of(np.arange(len(lengths)))
            np.savez(
                file,
                pieces=np.concatenate(rows, axis=1),
                ends=np.cumsum([row.shape[1] for row in rows]),
            )

        made_of = [_PACKING_VERSION, self.table.key, self.packing_mode, way, most]
        with np.load(made_once(f"{Hasher.hash(made_of)}.npz", write)) as stored:
            return np.split(stored["pieces"], stored["ends"][:-1], axis=1)

    def bins_of(self, documents: np.ndarray) -> list[np.ndarray]:
        """The pieces in each row that these documents fill."""
        table, ordered = self.table, self.order is not None
        bins = fill_rows(
            table.lengths[documents],
            lambda n: table.document(documents[n])[0],
            self.config.training.seq_len,
            self.config.packing,
            ordered,
        )
        return [np.stack([documents[numbers], starts, stops]) for numbers, starts, stops in bins]

    @property
    def whole_passes(self) -> bool:
        """Whether a pass ends with its last document, whose row may be cut short: else the next one goes on in it."""
        return not self.endless or self.config.training.epochs is not None

    def batch(self, rows: Sequence[Sequence[Span]]) -> Batch:
        """Lay out rows as the configuration wants them."""
        padding = self.tokenizer.eos_token_id or 0
        return pack(rows, self.config, len(self.sources), padding, self.kinds)

    def signature(self, global_batch: int) -> dict[str, object]:
        """What must be the same for a saved position to mean the same samples, by the settings that decide it."""
        tables = self.config.model_dump(include=_DECIDING, exclude=_NOT_DECIDING)
        given = {
            f"{section}.{name}": repr(value)
            for section, table in tables.items()
            for name, value in table.items()
        }
        passes = {"training.epochs": "whole passes"} if self.whole_passes and not self.fits else {}
        own = {
            "data.tokenization": "cache" if self.table else "online",
            "documents in data.dataset": [pool.size for pool in self.mixture.pools],
            "packing.mode": self.packing_mode,
            "training.global_batch_size": global_batch,
        }
        return given | passes | own


def make_plan(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    settings: Sequence[Source],
    lanes: int,
    endless: bool = True,
    order: np.ndarray | None = None,
) -> Plan:
    """Open the sources and decide the order of everything; tokenise them when they are to be cached.

    What is not endless comes in the sources' own order; with an `order`, int64 [documents],
    documents come in that.
    """
    data, seed, table = config.data, config.training.seed, None
    if config.trains_on == "preferences":
        _require_whole_pairs(config)
    if not data.streaming:
        require_writable_cache()
    difficulty = config.curriculum.difficulty_column if endless else None
    sources = tuple(
        open_source(setting, config, [difficulty] if difficulty else []) for setting in settings
    )
    if difficulty:
        with explained(
            f"curriculum.difficulty_column, {difficulty}",
            ValueError,
            mend="name a column of numbers",
        ):
            values = [np.array(source.dataset[difficulty], dtype=np.float64) for source in sources]
        order = np.argsort(np.concatenate(values), kind="stable")
    shuffled = data.shuffle and endless and order is None
    sizes = [
        number_of_parts(s.shard_sizes, lanes) if data.streaming else len(s.dataset) for s in sources
    ]
    if settings[0].weight is None:
        sizes = [sum(sizes)]
    pools = tuple(
        Pool(size, random_key(seed, 0, n) if shuffled else None) for n, size in enumerate(sizes)
    )
    if _is_cached(config, sources, endless):
        lanes, table = 1, token_table(sources, tokenizer, data.max_broken_records)
        if config.trains_on == "preferences":
            long_examples = config.packing.long_examples
            refuse_long_pairs(table.lengths, config.training.seq_len, long_examples)
    if (difficulty or config.curriculum.rank_every) and endless and len(pools) > 1:
        raise UserError(
            "curriculum: sources mixed by weight have no common order; drop their weights, or the order"
        )
    shares = tuple(
        1.0 if setting.weight is None else setting.weight for setting in settings[: len(pools)]
    )
    return Plan(
        config, tokenizer, Mixture(seed, pools, shares, lanes), sources, table, endless, order
    )


def _require_whole_pairs(config: Config) -> None:
    """Raises UserError for settings of the data with which answers could not be compared."""
    data, kto = config.data, config.preference.loss == "kto"
    if packing_mode(config.packing, config.trains_on) == "concatenate":
        raise UserError("packing.mode: pairs are not cut; set best_fit or none.")
    if not data.document_mask:
        raise UserError(
            "data.document_mask: the two answers of a pair must not see each other; leave it on."
        )
    if data.predict_across_documents:
        raise UserError(
            "data.predict_across_documents: pairs do not go on in others; leave it off."
        )
    if kto and data.streaming:
        raise UserError(
            'data.streaming, preference.loss: "kto" sets answers beside those of the next row, for '
            "which it needs the cache; set data.streaming = false."
        )
    if kto and data.tokenization == "online":
        raise UserError(
            'data.tokenization, preference.loss: "kto" sets answers beside those of the next row, '
            "for which it needs the cache; leave out data.tokenization."
        )


def _is_cached(config: Config, sources: Sequence[Documents], endless: bool) -> bool:
    """Whether to tokenise ahead or while training, by the configuration and the data alone."""
    wanted = config.data.tokenization
    if config.data.streaming:
        return False
    if (
        not endless
        or config.training.epochs
        or config.curriculum.difficulty_column
        or config.curriculum.rank_every
        or (config.trains_on == "preferences" and config.preference.loss == "kto")
    ):
        return True  # only the cache knows how long an epoch or the validation data is, and what comes next
    if wanted == "auto":
        size = sum(source.dataset.data.nbytes for source in sources)
        wanted = "cache" if size < _CACHED_BELOW else "online"
        logger.info("%.0f MiB of data: data.tokenization is %s", size / 2**20, wanted)
    return wanted == "cache"
