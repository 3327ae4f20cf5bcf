"""From the configuration to a plan of rows: which sources, in which order, by which of the two ways."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from lacuna.config import Config
from lacuna.config.documents import Source
from lacuna.data.mixture import Mixture, Pool, random_key
from lacuna.data.packing import Batch, Span, pack
from lacuna.data.sources import Documents, open_source
from lacuna.data.stream import Stream, number_of_parts
from lacuna.data.tokenize import BrokenRecords, TokenTable, tokenised

_LOG = logging.getLogger(__name__)
_CACHED_BELOW = 256 * 2**20


@dataclass(frozen=True)
class Plan:
    """Everything that decides the rows.

    With `tables`, the tokens of each source, the mixture has one lane; without, documents are tokenised while
    training, and row R is the next row of lane R mod lanes. Rows end with the last document unless `endless`.
    """

    config: Config
    tokenizer: PreTrainedTokenizerBase
    mixture: Mixture
    sources: tuple[Documents, ...]
    tables: tuple[TokenTable, ...]
    endless: bool = True

    @property
    def tokens_per_pass(self) -> int | None:
        """Tokens of all documents together; None when unknown, or when sources are mixed by weight: no common pass."""
        known = self.tables and len(self.mixture.pools) == 1
        return sum(int(table.lengths.sum()) for table in self.tables) if known else None

    def batch(self, rows: Sequence[Sequence[Span]]) -> Batch:
        """Lay out rows as the configuration wants them."""
        return pack(rows, self.config, len(self.sources), self.tokenizer.eos_token_id or 0)

    def signature(self, global_batch: int) -> dict[str, object]:
        """What must be the same for a saved position to mean the same samples, by the settings that decide it."""
        return {
            "data.tokenization": "cache" if self.tables else "online",
            "data.shuffle": any(pool.key is not None for pool in self.mixture.pools),
            "data.data_probs": [share / sum(self.mixture.shares) for share in self.mixture.shares],
            "documents in data.dataset": [list(pool.sizes) for pool in self.mixture.pools],
            "training.seq_len": self.config.training.seq_len,
            "training.seed": self.mixture.seed,
            "training.global_batch_size": global_batch,
        }


def make_plan(
    config: Config, tokenizer: PreTrainedTokenizerBase, settings: Sequence[Source], lanes: int, endless: bool = True
) -> Plan:
    """Open the sources and decide the order of everything; tokenise them when they are to be cached.

    What is not endless comes in the sources' own order.
    """
    data, seed = config.data, config.training.seed
    sources = tuple(open_source(setting, data, data.streaming) for setting in settings)
    keys = [random_key(seed, 0, number) if data.shuffle and endless else None for number in range(len(sources))]
    shares = tuple(float(setting.weight) for setting in settings if setting.weight)
    pools: tuple[Pool, ...]
    if data.streaming:
        assert len(shares) == len(sources), "the configuration refuses streams without weights"
        pools = tuple(
            Stream(number, (number_of_parts(source.shard_sizes, lanes),), keys[number], source, data.retries, endless)
            for number, source in enumerate(sources)
        )
    elif shares:
        pools = tuple(Pool(number, (len(source.dataset),), keys[number]) for number, source in enumerate(sources))
    else:  # without weights they are one pool
        pools, shares = (Pool(0, tuple(len(source.dataset) for source in sources), keys[0]),), (1.0,)
    tables: tuple[TokenTable, ...] = ()
    if _is_cached(config, sources, endless):
        lanes, broken = 1, BrokenRecords(data.max_broken_records)
        tables = tuple(tokenised(source, tokenizer, broken) for source in sources)
    return Plan(config, tokenizer, Mixture(seed, pools, shares, lanes), sources, tables, endless)


def _is_cached(config: Config, sources: Sequence[Documents], endless: bool) -> bool:
    """Whether to tokenise ahead or while training, by the configuration and the data alone."""
    wanted = config.data.tokenization
    if config.data.streaming:
        return False
    if wanted == "auto" and endless and config.training.epochs is None:
        size = sum(source.dataset.data.nbytes for source in sources)
        wanted = "cache" if size < _CACHED_BELOW else "online"
        _LOG.info("%.0f MiB of data: data.tokenization is %s", size / 2**20, wanted)
    return wanted != "online" or not endless  # only the cache knows how long an epoch or the validation data is
