"""What can be done with a run that has ended: commands that work as they are printed."""

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from datasets import Dataset

from lacuna.config import Config, UserError
from lacuna.data.files import RECORD
from lacuna.data.sources import Documents, open_source
from lacuna.parallel.processes import Process

_WORDS = 8
_LOOKED_AT = 100
# What training on other data needs to know of this run, where it is not the default.
_KEPT = ("training.seq_len", "training.batch_size", "optimizer.lr", "quantization.base")


def closing_hints(config: Config, sources: Sequence[Documents], process: Process) -> str:
    """What lies in the folder of a run over, a line each: the model, the curves, and commands to go on with."""
    folder, training = str(config.job.dump_folder), config.training
    model = os.path.join(folder, "hf")
    adapter = (
        os.path.join(model, "adapter") if config.lora.rank and config.model.name_or_path else None
    )
    longer = (
        ("--training.steps", 2 * training.steps)
        if training.steps
        else ("--training.epochs", 2 * training.epochs)
    )
    if process.world_size > 1 and process.device.type == "cpu":
        longer = (*longer, "--cpus", process.world_size)
    columns, first = next(_beginnings(sources[0]), (("messages",), []))
    given = ("--prompt", _prompt(config, first))
    answers = config.conversations is not None and (
        columns == ("messages",) or not isinstance(first, str)
    )
    how = ("--chat", *given) if answers else (*given, "--temperature", 0.8)
    other = _command("train", *_on_other_data(config, model, adapter))
    lines = {
        "model": f"{model}, which transformers' AutoModelForCausalLM.from_pretrained opens",
        "adapter": adapter
        and f"{adapter}, which peft's PeftModel.from_pretrained opens; the model has it merged",
        "curves": f"{folder}/metrics.jsonl; tensorboard --logdir {shlex.quote(folder)}",
        "try it": _command("generate", adapter or folder, *how),
        "merge": adapter
        and _command("convert", adapter, os.path.join(folder, "merged"), "--to", "hf"),
        "train on": _command("train", os.path.join(folder, "config.toml"), *longer),
        "your data": f"{other} (rows with {' and '.join(columns) if config.conversations else 'a text column'})",
    }
    return "\n".join(f"  {name:<10} {line}" for name, line in lines.items() if line)


def _on_other_data(config: Config, model: str, adapter: str | None) -> Iterator[object]:
    """The flags that train what came of this run on other data, for a pass over it."""
    base = config.model.name_or_path
    if adapter and base and not config.model.new_tokens:
        yield from (
            "--model.name_or_path",
            base,
            "--model.tokenizer_path",
            adapter,
            "--lora.adapter",
            adapter,
        )
    else:
        yield from ("--model.name_or_path", model)
        yield from ("--lora.rank", config.lora.rank) if adapter else ()
    yield from ("--job.task", config.job.task) if config.job.task != Config().job.task else ()
    yield from ("--data.dataset", "my.jsonl", "--training.epochs", 1)
    kept, task = list(_KEPT), config.job.task
    if task in Config.model_fields:  # it has settings of its own
        kept += [f"{task}.{name}" for name in type(getattr(config, task)).model_fields]
    for setting in kept:
        section, name = setting.split(".")
        value = getattr(getattr(config, section), name)
        if value != getattr(getattr(Config(), section), name):
            yield from (f"--{setting}", value)
    yield from ("--job.name", "mine")


def _command(*words: object) -> str:
    return shlex.join(map(str, ("lacuna", *words)))


def _prompt(config: Config, value: Any) -> str:
    """The run's own prompt, or the first words of its validation data, or else those of a `value` it trained on."""
    if config.validation.prompts:
        return config.validation.prompts[0]
    if source := config.validation.resolved_source():
        at_once = config.model_copy(update={"data": config.data.model_copy(update={"retries": 0})})
        with suppress(UserError):  # it was there at the start, and may be gone by now
            value = next(_beginnings(open_source(source, at_once)), ((), value))[1]
    if isinstance(value, list):
        messages = [one for one in value if isinstance(one, dict)]
        question = next(
            (one for one in messages if {"user", "human"} & {one.get("role"), one.get("from")}), {}
        )
        value = question.get("content") or question.get("value")
    return " ".join(value.split()[:_WORDS]) or "The" if isinstance(value, str) else "The"


def _beginnings(documents: Documents) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Of the first readable rows: the columns that are trained, in our names, and what the first of them holds.

    There are none of a stream, which would have to be opened anew.
    """
    if not isinstance(documents.dataset, Dataset):
        return
    for record in islice(documents.dataset, _LOOKED_AT):
        with suppress(UserError, ValueError):  # broken rows are in the dataset, too
            row = json.loads(record[RECORD] or "{}") if documents.column == RECORD else record
            columns, names = documents.columns_of(row)
            value = row[names[columns[0]]]
            if value:
                yield (
                    columns,
                    json.loads(value)
                    if columns == ("messages",) and isinstance(value, str)
                    else value,
                )
