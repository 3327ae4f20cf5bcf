"""What a run leaves of its model as it is: the model itself, and its adapter beside it."""

import os
from collections.abc import Callable
from functools import partial

import torch

from lacuna.formats.huggingface import export_model
from lacuna.train.setup import Run


def exports_of(run: Run, folder: str) -> list[Callable[[], None]]:
    """Functions that write a run's model as it is to `folder`, then its adapter to a folder in it.

    All ranks must call each of them.
    """
    config = run.config
    parts = (run.built.model, run.tokenizer)
    name = config.model.name_or_path
    dtype = getattr(torch, config.checkpoint.export_dtype)
    writers: list[Callable[[], None]] = [partial(export_model, *parts, folder, dtype, name)]
    if config.lora.rank:
        from lacuna.formats.adapter import export_adapter  # an extension

        inside = os.path.join(folder, "adapter")
        writers.append(partial(export_adapter, *parts, config.lora, name, inside))
    return [partial(_write_whole, run, write) for write in writers]


def _write_whole(run: Run, write: Callable[[], None]) -> None:
    with run.halves.joined():
        write()
