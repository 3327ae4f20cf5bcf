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
from lacuna.config.attentions import is_own
from lacuna.config.optimizer_rules import OF_MUON
from lacuna.config.task import SECTIONS
from lacuna.data.files import RECORD
from lacuna.data.sources import Documents, open_source
from lacuna.parallel.processes import Process

_WORDS = 8
_LOOKED_AT = 100
# What training on other data needs to know of this run, where it is not the default.
_KEPT = (
    *("training.seq_len", "training.batch_size", "optimizer.name", "optimizer.lr", *OF_MUON),
    "quantization.base",
)
# What only validation.dataset or curriculum.by_success take, which belong to the data of this run.
_OF_ITS_DATA = (
    "rollout.validation_samples",
    "rollout.validation_temperature",
    "rewards.solved_at",
)


def closing_hints(
    config: Config, sources: Sequence[Documents], process: Process, is_early: bool
) -> str:
    """What lies in the folder of a run that has ended, and commands to go on with, a line each.

    It may have ended early, for want of a better validation, which would end it again.
    """
    folder = config.job.dump_folder
    model = os.path.join(folder, "hf")
    adapter = None
    if config.lora.rank and config.model.name_or_path:
        adapter = os.path.join(model, "adapter")
    columns, first = next(_first_rows(sources[0]), (("messages",), []))
    how: tuple[object, ...] = ("--prompt", _example_prompt(config, first))
    is_conversation = columns[0] in ("messages", "instruction") or not isinstance(first, str)
    if sources[0].tools is not None:
        is_conversation = True
    if config.trains_on != "texts" and is_conversation:
        how = ("--chat", *how)
    else:
        how = (*how, "--temperature", 0.8)
    other = _shell_command("train", *_flags_for_other_data(config, model, adapter))
    wanted = " and ".join(columns) if config.conversations else "a text column"
    if config.trains_on == "prompts":
        wanted = "a prompt, or messages"
    kind = "SequenceClassification" if config.gives_scores else "CausalLM"
    opens = f"which transformers' AutoModelFor{kind}.from_pretrained opens"
    lines = {"model": f"{model}, {opens}{_condition_to_open(model)}"}
    if adapter:
        peft = "which peft's PeftModel.from_pretrained opens; the model has it merged"
        lines["adapter"] = f"{adapter}, {peft}"
    lines["curves"] = f"{folder}/metrics.jsonl"
    if config.metrics.enable_tensorboard:
        lines["curves"] += f"; tensorboard --logdir {shlex.quote(folder)}"
    # Adapters of a quantised base belong to that; as it was before it is another model.
    on_its_base = adapter is not None and config.quantization.base == "none"
    if not config.gives_scores:
        lines["try it"] = _shell_command("generate", adapter if on_its_base else folder, *how)
    if on_its_base and not config.gives_scores:
        merged = os.path.join(folder, "merged")
        lines["merge"] = _shell_command("convert", adapter, merged, "--to", "hf")
    settings = config.checkpoint
    if settings.enable_checkpoint and not settings.model_weights_only:
        longer = _flags_for_longer(config, process, is_early)
        lines["train on"] = _shell_command("train", os.path.join(folder, "config.toml"), *longer)
    lines["your data"] = f"{other} (rows with {wanted})"
    return "\n".join(f"  {name:<10} {line}" for name, line in lines.items())


def _flags_for_longer(config: Config, process: Process, is_early: bool) -> Iterator[object]:
    """The flags with which the run goes on for as long again."""
    if config.training.steps:
        yield from ("--training.steps", 2 * config.training.steps)
    else:
        yield from ("--training.epochs", 2 * (config.training.epochs or 0))
    if is_early:
        yield from ("--validation.patience", "none")
    if process.world_size > 1 and process.device.type == "cpu":
        yield from ("--cpus", process.world_size)


def _flags_for_other_data(config: Config, model: str, adapter: str | None) -> Iterator[object]:
    """The flags that train the result of this run on other data, for one pass over them."""
    base = config.model.name_or_path
    task = config.job.task
    if adapter and base and not config.model.new_tokens:
        yield from ("--model.name_or_path", base, "--model.tokenizer_path", adapter)
        yield from ("--lora.adapter", adapter)
    else:
        yield from ("--model.name_or_path", model)
        if adapter:
            yield from ("--lora.rank", config.lora.rank)
    if task != Config().job.task:
        yield from ("--job.task", task)
    yield from ("--data.dataset", "my.jsonl")
    own = SECTIONS.get(task, task)
    sections = [own] if own in Config.model_fields else []  # the task has settings of its own
    if config.trains_on == "prompts":
        sections += ["rollout", "rewards"]
    if config.trains_on == "prompts" and config.training.steps is not None:
        yield from ("--training.steps", config.training.steps)
    else:
        yield from ("--training.epochs", 1)
    kept = list(_KEPT)
    for one in sections:
        kept += [f"{one}.{name}" for name in type(getattr(config, one)).model_fields]
    for setting in kept:
        if setting in _OF_ITS_DATA:
            continue
        section, name = setting.split(".")
        value = getattr(getattr(config, section), name)
        if value != getattr(getattr(Config(), section), name):
            yield from (
                f"--{setting}",
                ",".join(map(str, value)) if isinstance(value, tuple) else value,
            )
    yield from ("--job.name", "mine")


def _shell_command(*words: object) -> str:
    """A command of lacuna's, quoted for a shell."""
    return shlex.join(map(str, ("lacuna", *words)))


def _example_prompt(config: Config, value: Any) -> str:
    """A prompt to try the model with.

    That is the first of `validation.prompts`, or else the first words of the validation data, or of
    the `value` of a row that was trained on.
    """
    if config.validation.prompts:
        return config.validation.prompts[0]
    source = config.validation.resolved_source()
    if source is not None:
        at_once = config.data.model_copy(update={"retries": 0})
        with suppress(UserError):  # the data were there at the start, and may be gone by now
            asks = config.trains_on == "prompts"
            chat = config.chat if asks else config.conversations
            opened = open_source(source, at_once, chat, config.judged_answers, whole=asks)
            value = next(_first_rows(opened), ((), value))[1]
    if isinstance(value, list):
        messages = [one for one in value if isinstance(one, dict)]
        asked = [one for one in messages if {"user", "human"} & {one.get("role"), one.get("from")}]
        question = asked[0] if asked else {}
        value = question.get("content") or question.get("value")
    words = value.split() if isinstance(value, str) else []
    return " ".join(words[:_WORDS]) or "The"


def _condition_to_open(model: str) -> str:
    """What transformers must be told before it opens a model, as words to append."""
    with open(os.path.join(model, "config.json")) as file:
        attention = json.load(file).get("attn_implementation")
    if not is_own(attention):
        return ""
    return f" after lacuna.model.own_attention.register({attention!r})"


def _first_rows(documents: Documents) -> Iterator[tuple[tuple[str, ...], Any]]:
    """For each of the first readable rows, our names of its columns, and what the first one holds.

    A stream gives none, because it would have to be opened anew.
    """
    if not isinstance(documents.dataset, Dataset):
        return
    for record in islice(documents.dataset, _LOOKED_AT):
        with suppress(UserError, ValueError, IndexError):  # broken rows are in the dataset, too
            row = json.loads(record[RECORD] or "{}") if documents.column == RECORD else record
            columns, names = _columns_of(row, documents)
            value = row[names[columns[0]]]
            if columns == ("messages",) and isinstance(value, str) and value:
                value = json.loads(value)
            if value:
                yield columns, value


def _columns_of(
    row: dict[str, Any], documents: Documents
) -> tuple[tuple[str, ...], dict[str, str]]:
    """As `Documents.columns_of`; of prompts only the column that asks, if there is one."""
    if not documents.asks or documents.chat is None:
        return documents.columns_of(row)
    from lacuna.data.messages import columns_by_our_names  # an extension

    names = columns_by_our_names(row, documents.chat)
    asking = [ours for ours in ("prompt", "messages", "instruction") if ours in names]
    return tuple(asking[:1]), names
