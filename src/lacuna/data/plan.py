"""From the configuration to a plan of rows: which sources, in which order, by which of the two ways."""

import logging

from transformers import PreTrainedTokenizerBase

from lacuna.config import Config, UserError
from lacuna.data.cache import tokenised
from lacuna.data.indexed import IndexedPlan
from lacuna.data.lanes import LanePlan
from lacuna.data.mixture import Mixture, Pool, random_key
from lacuna.data.packing import Packing
from lacuna.data.sources import Documents, open_source
from lacuna.data.stream import Substream, number_of_parts
from lacuna.data.tokenize import BrokenRecords

_LOG = logging.getLogger(__name__)
_CACHED_BELOW = 256 * 2**20
STEPS_BEFORE_A_LANE_RETURNS = 8

Plan = IndexedPlan | LanePlan


def make_plan(config: Config, tokenizer: PreTrainedTokenizerBase, global_batch: int) -> Plan:
    """Open the sources and decide the order of everything; tokenise them when they are to be cached."""
    settings, data = config.data.resolved_sources(), config.data
    sources = tuple(open_source(source, data, data.streaming) for source in settings)
    weights = [source.weight for source in settings]
    way = _choose_way(config, sources)
    seed = config.training.seed
    keys = [random_key(seed, 0, number) if data.shuffle else None for number in range(len(sources))]
    if way == "cache":
        broken = BrokenRecords(data.max_broken_records)
        tables = tuple(tokenised(source, tokenizer, broken) for source in sources)
        broken.report()
        for source, table in zip(sources, tables, strict=True):
            if not table.lengths.any():
                raise UserError(f"{source.name}: no record holds any text; check data.text_column")
        pools, shares = _local_pools(sources, weights, keys)
        return IndexedPlan(Mixture(seed, shares, lanes=1), pools, tables, config.training.seq_len)
    lanes = global_batch * STEPS_BEFORE_A_LANE_RETURNS
    if data.streaming:
        pools = tuple(
            _substreams(number, source, lanes, keys[number], data.retries) for number, source in enumerate(sources)
        )
        shares = tuple(float(weight) for weight in weights if weight)
        assert len(shares) == len(pools), "the configuration refuses streams without weights"
    else:
        pools, shares = _local_pools(sources, weights, keys)
    return LanePlan(
        Mixture(seed, shares, lanes), sources, pools, config.training.seq_len, tokenizer, data.max_broken_records
    )


def _choose_way(config: Config, sources: tuple[Documents, ...]) -> str:
    """Whether to tokenise ahead or while training, by the configuration and the data alone."""
    wanted, reason = config.data.tokenization, "data.tokenization"
    if config.data.streaming:
        wanted, reason = "online", "the data is streamed"
    elif config.training.epochs is not None:
        if wanted == "online":
            raise UserError(
                "training.epochs, data.tokenization: the length of an epoch is only known from the cache; "
                "use training.steps, or drop data.tokenization"
            )
        wanted, reason = "cache", "training.epochs needs to know the length of an epoch"
    elif wanted == "auto":
        size = sum(source.dataset.data.nbytes for source in sources)
        wanted = "cache" if size < _CACHED_BELOW else "online"
        reason = f"{size / 2**20:.0f} MiB of data, and the limit is {_CACHED_BELOW / 2**20:.0f}"
    _LOG.info("tokenising %s (%s)", "once, into a cache" if wanted == "cache" else "while training", reason)
    return wanted


def _local_pools(
    sources: tuple[Documents, ...], weights: list[float | None], keys: list[int | None]
) -> tuple[tuple[Pool, ...], tuple[float, ...]]:
    """The pools of local sources and their shares; sources without weights are one pool."""
    sizes = [len(source.dataset) for source in sources]
    shares = tuple(float(weight) for weight in weights if weight is not None)
    if len(shares) < len(sources):
        return (Pool(0, tuple(sizes), keys[0]),), (1.0,)
    return tuple(Pool(number, (size,), keys[number]) for number, size in enumerate(sizes)), shares


def _substreams(number: int, source: Documents, lanes: int, key: int | None, retries: int) -> tuple[Substream, ...]:
    parts = number_of_parts(source.shard_sizes, lanes)
    return tuple(
        Substream(number, source.name, source.column, source.dataset, parts, part, key, retries)
        for part in range(parts)
    )


def packing_of(config: Config, tokenizer: PreTrainedTokenizerBase, sources: int) -> Packing:
    """How the configuration wants the rows of so many sources laid out."""
    return Packing(
        row_length=config.training.seq_len,
        piece_length=config.training.context_len if config.training.varlen else None,
        document_mask=config.data.document_mask,
        predict_across_documents=config.data.predict_across_documents,
        sources=sources,
        padding=tokenizer.eos_token_id or 0,
    )


def signature(plan: Plan, global_batch: int) -> dict[str, object]:
    """What must be the same for a saved position to mean the same samples, by the settings that decide it."""
    first = [pool if isinstance(pool, Pool) else pool[0] for pool in plan.pools]
    total = sum(plan.mixture.probabilities)
    return {
        "data.tokenization": "cache" if isinstance(plan, IndexedPlan) else "online",
        "data.shuffle": any(pool.key is not None for pool in first),
        "data.data_probs": [share / total for share in plan.mixture.probabilities],
        "documents in data.dataset": [list(pool.sizes) if isinstance(pool, Pool) else pool.parts for pool in first],
        "training.seq_len": plan.row_length,
        "training.seed": plan.mixture.seed,
        "training.global_batch_size": global_batch,
    }
