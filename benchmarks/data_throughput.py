r"""How fast batches come: tokens per second, and how long a trainer of a given speed would wait.

python benchmarks/data_throughput.py \
    [--data-files a.jsonl b.jsonl] [--tokenizer NAME] [--consumer 500000]
"""

import argparse
import time
from itertools import islice

from lacuna.config import Config
from lacuna.config.documents import DataConfig, Source
from lacuna.config.sections import TrainingConfig
from lacuna.data import BatchSizes, Loader, build_loader
from lacuna.data.tokenizer import load_tokenizer

_WARM_UP = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-files", nargs="*", default=[], help="JSON lines; default: python-stdlib"
    )
    parser.add_argument("--tokenizer", default="python-stdlib")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument(
        "--consumer", type=float, default=500_000, help="tokens per second of the simulated trainer"
    )
    parser.add_argument("--seconds", type=float, default=10, help="time per measurement")
    given = parser.parse_args()
    waits = f"waits at {given.consumer:,.0f} tokens/s"
    print(f"{'way':10} {'workers':>7} {'tokens/s':>12} {waits:>28} {'first batch':>12}")
    for way, workers in (("cache", 0), ("cache", 1), ("online", 0), ("online", 1), ("online", 2)):
        loader = loader_of(given, way, workers)
        began = time.perf_counter()
        for _ in islice(loader, _WARM_UP):
            pass
        first = (time.perf_counter() - began) / _WARM_UP
        speed, _ = consume(loader, given.seconds / 2, consumer=None)
        _, waiting = consume(loader, given.seconds / 2, consumer=given.consumer)
        loader.close()
        print(f"{way:10} {workers:7} {speed:12,.0f} {waiting:28.2%} {first:10.2f} s")


def loader_of(given: argparse.Namespace, way: str, workers: int) -> Loader:
    source = (
        Source(dataset="json", files=tuple(given.data_files))
        if given.data_files
        else Source(dataset="python-stdlib")
    )
    config = Config(
        data=DataConfig(sources=(source,), tokenization=way, num_workers=workers),
        training=TrainingConfig(seq_len=given.seq_len),
    )
    return build_loader(
        config,
        load_tokenizer(given.tokenizer),
        BatchSizes(given.batch_size, 1, given.batch_size),
        0,
    )


def consume(loader: Loader, seconds: float, consumer: float | None) -> tuple[float, float]:
    """Tokens per second, and the share of time spent waiting.

    Each batch is worked on at `consumer` tokens/s.
    """
    tokens = waited = 0.0
    began = time.perf_counter()
    while (now := time.perf_counter()) - began < seconds:
        batch = next(loader)
        waited += time.perf_counter() - now
        tokens += batch.tokens
        time.sleep(batch.tokens / consumer if consumer else 0)
    elapsed = time.perf_counter() - began
    return tokens / elapsed, waited / elapsed


if __name__ == "__main__":
    main()
