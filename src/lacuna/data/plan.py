"""What decides which rows there are: the sources, the order of documents, their cached tokens."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from lacuna.config import Config, UserError, logger
from lacuna.config.documents import CurriculumConfig, DataConfig, PackingConfig, Source
from lacuna.config.reinforcement import RolloutConfig
from lacuna.config.row_form import RowForm
from lacuna.config.samples import deciding_settings, needs_all_documents
from lacuna.data.cache import made_once, require_writable_cache
from lacuna.data.document import Span
from lacuna.data.filling import fill_rows, refuse_long_pairs
from lacuna.data.mixture import Mixture, Pool, from_low_to_high, random_key
from lacuna.data.packing import Batch, pack
from lacuna.data.sources import Documents, open_source
from lacuna.data.tokenize import TokenTable, token_table

_PACKING_VERSION = 2
_CACHED_BELOW = 256 * 2**20


@dataclass(frozen=True)
class RowPlan:
    """Everything that decides the rows.

    Attributes:
        mixture: the order of documents; it has a single lane where there is a table.
        sources: where the documents come from.
        table: the tokens of all documents. Without it they are tokenised while training, and row R
            is the next row of lane R mod lanes.
        endless: whether documents come again and again; else rows end with the last document.
        order: int64 [documents], the order of the table's documents, if they are to keep one.
        kinds: by name, an empty array with the dtype and shape of a column that documents may have.
        decided_by: the settings that decide the samples of a step, as they are shown, by name.
        epochs: passes over the documents after which the run ends, if it ends so.
    """

    form: RowForm
    data: DataConfig
    tokenizer: PreTrainedTokenizerBase
    mixture: Mixture
    sources: tuple[Documents, ...]
    table: TokenTable | None
    endless: bool = True
    order: np.ndarray | None = None
    kinds: Mapping[str, np.ndarray] = field(default_factory=dict)
    epochs: int | None = None
    decided_by: Mapping[str, str] = field(default_factory=dict)

    @property
    def tokens(self) -> TokenTable:
        """The table, for what is only done where there is one."""
        assert self.table is not None, "documents are tokenised while training"
        return self.table

    @property
    def rows_per_pass(self) -> int | None:
        """Rows that all documents fill.

        None when that is unknown, or when sources are mixed by weight, which have no common pass.
        """
        if self.table is None or len(self.mixture.pools) > 1:
            return None
        if self.fits:
            return len(self.bins)
        return math.ceil(int(self.table.lengths.sum()) / self.form.length)

    @property
    def fits(self) -> bool:
        """Whether rows are made of whole examples."""
        return self.form.packing.mode != "concatenate"

    @property
    def whole_passes(self) -> bool:
        """Whether the row that ends a pass may be short; else the next pass goes on in it."""
        return not self.endless or self.epochs is not None

    @cached_property
    def bins(self) -> list[np.ndarray]:
        """The pieces of documents in each row of a pass over all of them.

        They are fitted once and cached, unless documents come in an order: that belongs to this
        run, and only neighbours in it share rows.
        """
        if self.order is not None:
            return self.bins_of(self.order)
        most = self.form.length
        way = self.form.packing.long_examples

        def write(file: str) -> None:
            rows = self.bins_of(np.arange(len(self.tokens.lengths)))
            ends = np.cumsum([row.shape[1] for row in rows])
            np.savez(file, pieces=np.concatenate(rows, axis=1), ends=ends)

        made_of = [_PACKING_VERSION, self.tokens.key, self.form.packing.mode, way, most]
        with np.load(made_once(f"{Hasher.hash(made_of)}.npz", write)) as stored:
            return np.split(stored["pieces"], stored["ends"][:-1], axis=1)

    @property
    def left_out(self) -> int:
        """Of how many documents no row has anything, though they have tokens."""
        kept = np.unique(np.concatenate(self.bins, axis=1)[0])
        return int(np.count_nonzero(self.tokens.lengths)) - len(kept)

    def tell_of_long(self) -> None:
        """Logs how many examples are longer than a row, and what becomes of them."""
        form = self.form
        way = form.packing.long_examples
        if not self.fits or form.trains_on == "prompts":
            return
        if self.rows_per_pass is None:
            said = "examples longer than a row of %d tokens, which are not counted here: %s"
            logger.info(said, form.length, way)
        elif long := int((self.tokens.lengths > form.length).sum()):
            logger.info(
                "%d of %d examples are longer than a row of %d tokens: %s; %d are left out",
                *(long, len(self.tokens.lengths), form.length, way, self.left_out),
            )

    def bins_of(self, documents: np.ndarray) -> list[np.ndarray]:
        """The pieces in each row that these documents fill."""
        bins = fill_rows(
            self.tokens.lengths[documents],
            lambda number: self.tokens.document(documents[number])[0],
            self.form.length,
            self.form.packing,
            ordered=self.order is not None,
        )
        return [np.stack([documents[numbers], starts, stops]) for numbers, starts, stops in bins]

    def batch(self, rows: Sequence[Sequence[Span]]) -> Batch:
        """Lays out rows in the form of the plan."""
        return pack(
            rows, self.form, len(self.sources), self.tokenizer.eos_token_id or 0, self.kinds
        )

    def signature(self, global_batch: int) -> dict[str, object]:
        """What must be the same for a saved position to mean the same samples, by setting."""
        deciding: dict[str, object] = {**self.decided_by}
        if self.whole_passes and not self.fits:
            deciding["training.epochs"] = "whole passes"
        return deciding | {
            "data.tokenization": "cache" if self.table else "online",
            "documents in data.dataset": [pool.size for pool in self.mixture.pools],
            "packing.mode": self.form.packing.mode,
            "training.global_batch_size": global_batch,
        }


def make_row_plan(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    settings: Sequence[Source],
    lanes: int,
    endless: bool = True,
    order: np.ndarray | None = None,
) -> RowPlan:
    """Opens the sources, tokenises them if they are to be cached, and decides the order of all.

    Documents come in the given `order`, int64 [documents]. Without one they are shuffled as the
    settings say if the plan is `endless`, and else keep the sources' own order.
    """
    data = config.data
    judged = config.judged_answers
    chat = config.conversations
    asks = config.trains_on == "prompts"
    if asks:
        chat = config.chat
        # Completions share rows, but a step has as many prompts as rows.
        config = config.model_copy(update={"packing": PackingConfig(mode="none")})
    form = config.row_form
    if judged is not None:
        from lacuna.data.pairs import require_whole_pairs  # an extension, which few runs need

        require_whole_pairs(data, form.packing, judged.loss)
    if not data.streaming:
        require_writable_cache()
    difficulty = config.curriculum.difficulty_column if endless else None
    numbers = (difficulty,) if difficulty else ()
    opened = [open_source(one, data, chat, judged, numbers, asks) for one in settings]
    sources = _told_of_tools(opened, config.rollout)
    if difficulty:
        order = from_low_to_high([source.dataset[difficulty] for source in sources], difficulty)
    table = None
    if _is_cached(data, sources, not endless or needs_all_documents(config)):
        lanes = 1
        table = token_table(sources, tokenizer, data.max_broken_records)
        if judged is not None:
            stages = config.curriculum_stages() if endless else [config]
            refuse_long_pairs(table.lengths, [stage.row_form for stage in stages])
    mixture = _mix(sources, settings, data, lanes, config.training.seed, endless and order is None)
    if endless:
        _require_common_order(mixture, config.curriculum)
    kinds: Mapping[str, np.ndarray] = {}
    if table is not None and (endless or asks):
        said = config.distillation.teacher_logprobs
        table, kinds = _annotated(table, sources, tokenizer, form, said, config.rollout)
    plan = RowPlan(form, data, tokenizer, mixture, sources, table, endless, order, kinds)
    return replace(plan, epochs=config.training.epochs, decided_by=deciding_settings(config))


def _told_of_tools(opened: Sequence[Documents], rollout: RolloutConfig) -> tuple[Documents, ...]:
    """The sources, whose prompts begin conversations about tools where something replies."""
    if not rollout.takes_turns:
        return tuple(opened)
    from lacuna.data.tools import with_tools  # an extension, which few runs need

    return with_tools(opened, rollout.tools)


def _require_common_order(mixture: Mixture, curriculum: CurriculumConfig) -> None:
    """Raises UserError where documents are to come in an order that sources have not in common."""
    is_ordered = curriculum.difficulty_column or curriculum.rank_every or curriculum.by_success
    if is_ordered and len(mixture.pools) > 1:
        raise UserError(
            "curriculum: sources mixed by weight have no common order; drop their weights, or the "
            "order"
        )


def _annotated(
    table: TokenTable,
    sources: Sequence[Documents],
    tokenizer: PreTrainedTokenizerBase,
    form: RowForm,
    said: str | None,
    rollout: RolloutConfig,
) -> tuple[TokenTable, Mapping[str, np.ndarray]]:
    """The table with the columns that only some tasks need, and the kinds of these columns.

    `said` is the folder of what a teacher said of the documents, if one did.
    """
    if said is not None:
        from lacuna.data.teacher import with_teacher  # an extension, which few runs need

        return with_teacher(table, sources, said, tokenizer)
    if form.trains_on == "prompts":
        from lacuna.data.prompts import with_numbers  # an extension

        return with_numbers(table, form.length, rollout.max_tokens)
    return table, {}


def _mix(
    sources: Sequence[Documents],
    settings: Sequence[Source],
    data: DataConfig,
    lanes: int,
    seed: int,
    may_shuffle: bool,
) -> Mixture:
    """The order in which documents of all sources come: shuffled, unless they have one already."""
    sizes = _pool_sizes(sources, data.streaming, lanes, is_one=settings[0].weight is None)
    is_shuffled = data.shuffle and may_shuffle
    pools = tuple(
        Pool(size, random_key(seed, 0, number) if is_shuffled else None)
        for number, size in enumerate(sizes)
    )
    shares = tuple(1.0 if one.weight is None else one.weight for one in settings[: len(pools)])
    return Mixture(seed, pools, shares, lanes)


def _pool_sizes(
    sources: Sequence[Documents], streaming: bool, lanes: int, is_one: bool
) -> list[int]:
    """How many documents, or parts of a stream, each source has; or all of them, if `is_one`."""
    if streaming:
        from lacuna.data.stream import number_of_parts  # an extension

        sizes = [number_of_parts(source.shard_sizes, lanes) for source in sources]
    else:
        sizes = [len(source.dataset) for source in sources]
    return [sum(sizes)] if is_one else sizes


def _is_cached(data: DataConfig, sources: Sequence[Documents], needs_cache: bool) -> bool:
    """Whether to tokenise before training, by the settings and the data alone.

    Only the cache knows how long an epoch or the validation data is, and what all documents are.
    """
    wanted = data.tokenization
    if data.streaming:
        return False
    if needs_cache:
        return True
    if wanted == "auto":
        size = sum(source.dataset.data.nbytes for source in sources)
        wanted = "cache" if size < _CACHED_BELOW else "online"
        logger.info("%.0f MiB of data: data.tokenization is %s", size / 2**20, wanted)
    return wanted == "cache"
