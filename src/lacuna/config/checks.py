"""Rules between settings that need no knowledge of the machine; a message names all its settings."""

import os
from collections.abc import Iterator
from glob import has_magic
from pathlib import Path

from lacuna.config.aliases import UNAVAILABLE, refusal
from lacuna.config.documents import Source
from lacuna.config.errors import UserError, nearby
from lacuna.config.fields import shown
from lacuna.config.sections import Config

READERS = ("json", "text", "parquet", "csv", "arrow")
"""Datasets that are readers of local files; the files are data_files."""

_ENDINGS = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst", ".xz", ".bz2")


def problems_of(config: Config) -> list[str]:
    """Everything about the configuration that is known to be wrong before the machine is looked at."""
    checks = (_unavailable, _model, _length, _batch, _data, _validation, _switches)
    return [problem for check in checks for problem in check(config)]


def _unavailable(config: Config) -> Iterator[str]:
    for (section, table), (_, defaults) in zip(config, Config(), strict=True):
        for name, value in table:
            reason = refusal(UNAVAILABLE, f"{section}.{name} = {shown(value)}")
            if reason and value != getattr(defaults, name):
                yield f"{section}.{name}: {reason} (got {shown(value)}; leave it out)"


def _model(config: Config) -> Iterator[str]:
    model = config.model
    if model.name_or_path and model.config:
        yield "model.name_or_path, model.config: both are given; keep one (--model.config none takes the file's away)"
    if not model.name_or_path and not model.config:
        yield "model.name_or_path, model.config: give the first to start from its weights, or the second from scratch"
    for field in ("name_or_path", "config", "tokenizer_path"):
        yield from _missing(f"model.{field}", getattr(model, field))
    if config.checkpoint.initial_load_path:
        yield from _missing("checkpoint.initial_load_path", os.path.abspath(config.checkpoint.initial_load_path))


def _length(config: Config) -> Iterator[str]:
    training, data = config.training, config.data
    if training.epochs and training.steps:
        yield "training.steps, training.epochs: both are given; keep one (--training.steps none takes the file's away)"
    if training.epochs and data.streaming:
        yield "training.epochs, data.streaming: a stream has no known length; give training.steps instead"
    if training.epochs and data.tokenization == "online":
        yield "training.epochs, data.tokenization: only the cache knows how long an epoch is; drop data.tokenization"
    if training.epochs and (data.data_probs or any(source.weight for source in data.sources)):
        yield (
            "training.epochs, data.data_probs: shares and whole passes contradict each other; give "
            "training.steps with shares, or training.epochs without data.data_probs and weights"
        )


def _batch(config: Config) -> Iterator[str]:
    training = config.training
    size, accumulation = training.batch_size, training.gradient_accumulation_steps or 1
    context, length = training.context_len, training.seq_len
    if training.varlen and size != 1:
        yield f"training.batch_size, training.varlen: the first must be 1 (got {size}); raise training.seq_len instead"
    if training.varlen and not config.data.document_mask:
        yield "training.varlen, data.document_mask: varlen masks documents; drop varlen, or keep the mask"
    if context > length:
        yield f"training.context_len, training.seq_len: {context} is more than {length}; leave out training.context_len"
    if context < length and not training.varlen:
        yield f"training.context_len, training.varlen: {context} is not seq_len ({length}); leave it out, or set varlen"
    if training.global_batch_size and training.global_batch_size % (size * accumulation):
        yield (
            "training.global_batch_size, training.batch_size, training.gradient_accumulation_steps: "
            f"{training.global_batch_size} is no multiple of {size} x {accumulation}; change one of them"
        )


def _data(config: Config) -> Iterator[str]:
    data = config.data
    if data.dataset and data.sources:
        yield "data.dataset, data.sources: two spellings of the same; keep one"
    if data.streaming and data.tokenization == "cache":
        yield "data.streaming, data.tokenization: a stream cannot be cached; keep one of them"
    needed = not (config.memory_estimation.enabled or config.checkpoint.create_seed_checkpoint)
    if not data.dataset and not data.sources and data.data_files:
        yield f"data.data_files, data.dataset: set the second to the files' reader: {', '.join(READERS)}"
    elif not data.dataset and not data.sources and needed:
        yield "data.dataset: no data is given; set data.dataset, or write [[data.sources]] tables"
    try:
        sources = data.resolved_sources()
    except UserError as error:
        yield str(error)
        return
    if len(sources) > 1 and sources[0].weight is None and config.training.epochs is None:
        yield (
            "data.dataset, data.data_probs: several datasets need their shares; set data.data_probs (or a "
            "weight in every [[data.sources]]), or train whole passes with training.epochs"
        )
    for source in sources:
        yield from _missing_files("data.sources" if data.sources else "data.data_files", source)


def _validation(config: Config) -> Iterator[str]:
    validation, source = config.validation, config.validation.resolved_source()
    needing = {"checkpoint.keep_best": config.checkpoint.keep_best, "validation.patience": validation.patience}
    for setting, value in needing.items():
        if value and source is None:
            yield f"{setting}, validation.dataset: needs the validation loss; set validation.dataset"
    for field in ("enable", "dataset_name", "data_dir", "data_files"):
        if getattr(validation, field) and validation.dataset is None:
            yield f"validation.{field}, validation.dataset: the second is not given; set it, or drop both"
    if source is not None:
        yield from _missing_files("validation.data_files", source)


def _switches(config: Config) -> Iterator[str]:
    checkpoint, stage = config.checkpoint, config.parallelism.zero_stage
    reshard = config.parallelism.fsdp_reshard_after_forward
    for field in ("keep_best", "create_seed_checkpoint"):
        if getattr(checkpoint, field) and not checkpoint.enable_checkpoint:
            yield f"checkpoint.{field}, checkpoint.enable_checkpoint: nothing is saved; drop one of them"
    if config.optimizer.early_step_in_backward and config.training.max_norm > 0:
        yield "optimizer.early_step_in_backward, training.max_norm: early steps leave nothing to clip; set max_norm = 0"
    if config.activation_checkpoint.mode == "memory_budget" and not config.compile.enable:
        yield "activation_checkpoint.mode, compile.enable: memory_budget is torch.compile's; set compile.enable = true"
    if (stage, reshard) in ((2, "always"), (3, "never")):
        yield f"parallelism.zero_stage, parallelism.fsdp_reshard_after_forward: {stage} contradicts {reshard}; keep one"


def _missing_files(setting: str, source: Source) -> Iterator[str]:
    """Local files of a source that do not exist; what a Hub dataset holds is not known here."""
    yield from _missing(setting.replace("data_files", "dataset"), source.dataset)
    folder = "" if source.dataset in READERS else source.dataset
    for file in source.files:
        if "://" not in file and os.path.isdir(folder or "."):
            yield from _missing(setting, os.path.abspath(os.path.join(folder, source.dir or "", file)))


def _missing(setting: str, path: str | None) -> Iterator[str]:
    """A problem when a path can only be local (not the Hub's, no address, no pattern) and is not there."""
    only_local = path and (path.startswith(("/", "./", "../", "~")) or path.endswith(_ENDINGS))
    if only_local and "://" not in path and not has_magic(path) and not os.path.exists(path):
        yield f"{setting}: {path} does not exist{nearby(Path(path))}"
