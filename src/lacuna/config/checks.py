"""Rules between settings that need no knowledge of the machine; a message names all its settings."""

import os
from collections.abc import Iterator
from glob import has_magic
from pathlib import Path

from lacuna.config.aliases import NOT_YET, REFUSED_VALUES
from lacuna.config.documents import Source
from lacuna.config.errors import UserError, nearby
from lacuna.config.sections import Config
from lacuna.config.values import to_toml_value

READERS = ("json", "text", "parquet", "csv", "arrow")
"""Datasets that are readers of local files; the files are data_files."""

_ENDINGS = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst", ".xz", ".bz2")
_DEFAULTS = Config()


def problems_of(config: Config) -> list[str]:
    """Everything about the configuration that is known to be wrong before the machine is looked at."""
    checks = (_refused, _model, _length, _batch, _data, _validation, _switches)
    return [problem for check in checks for problem in check(config)]


def _value(config: Config, setting: str) -> object:
    section, field = setting.split(".")
    return getattr(getattr(config, section), field)


def _refused(config: Config) -> Iterator[str]:
    for setting, (refused, reason) in REFUSED_VALUES.items():
        value = _value(config, setting)
        if value == refused and type(value) is type(refused):
            yield f"{setting}: {to_toml_value(value)} is not accepted: {reason}"
    for setting, feature in NOT_YET.items():
        value = _value(config, setting)
        if value != _value(_DEFAULTS, setting):
            yield f"{setting}: {feature} is not available yet (got {to_toml_value(value)}; leave it out)"


def _model(config: Config) -> Iterator[str]:
    model = config.model
    if bool(model.name_or_path) == bool(model.config):
        yield (
            f"model.name_or_path, model.config: {'both' if model.config else 'none'} given; keep the "
            "first to start from its weights, or the second to start from scratch (a flag takes a setting of "
            "the file away with the word none: --model.config none)"
        )
    for setting in ("model.name_or_path", "model.config", "model.tokenizer_path"):
        yield from _missing(setting, str(_value(config, setting) or ""))
    if config.checkpoint.initial_load_path is not None:
        yield from _missing("checkpoint.initial_load_path", os.path.abspath(config.checkpoint.initial_load_path))


def _length(config: Config) -> Iterator[str]:
    training, data = config.training, config.data
    if training.epochs is None:
        return
    if training.steps is not None:
        yield (
            f"training.steps, training.epochs: both are given ({training.steps} and {training.epochs}); "
            "keep one (--training.steps none takes the file's away)"
        )
    if data.streaming:
        yield "training.epochs, data.streaming: a stream has no known length; give training.steps instead"
    if data.data_probs or any(source.weight is not None for source in data.sources):
        yield (
            "training.epochs, data.data_probs: shares and whole passes contradict each other; give "
            "training.steps with shares, or training.epochs without data.data_probs and weights"
        )


def _batch(config: Config) -> Iterator[str]:
    training = config.training
    size, accumulation = training.batch_size, training.gradient_accumulation_steps or 1
    if training.varlen and size != 1:
        yield f"training.batch_size, training.varlen: the first must be 1 (got {size}); raise training.seq_len instead"
    if training.varlen and not config.data.document_mask:
        yield "training.varlen, data.document_mask: varlen masks documents; drop varlen, or keep the mask"
    longer = training.context_len - training.seq_len
    if longer > 0 or (longer and not training.varlen):
        yield (
            f"training.context_len, training.seq_len: {training.context_len} and {training.seq_len} must be "
            "equal (with training.varlen, the first may be smaller); leave out training.context_len"
        )
    if training.global_batch_size and training.global_batch_size % (size * accumulation):
        yield (
            "training.global_batch_size, training.batch_size, training.gradient_accumulation_steps: "
            f"{training.global_batch_size} is no multiple of {size} x {accumulation}; change one of them"
        )


def _data(config: Config) -> Iterator[str]:
    data = config.data
    if data.dataset and data.sources:
        yield "data.dataset, data.sources: two spellings of the same; keep one"
    if not data.dataset and not data.sources:
        if data.data_files:
            yield f"data.data_files, data.dataset: set the second to the files' reader: {', '.join(READERS)}"
        elif not config.memory_estimation.enabled and not config.checkpoint.create_seed_checkpoint:
            yield "data.dataset: no data is given; set data.dataset, or write [[data.sources]] tables"
        return
    if data.streaming and data.tokenization == "cache":
        yield "data.streaming, data.tokenization: a stream cannot be cached; keep one of them"
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
    for setting in ("checkpoint.keep_best", "validation.patience"):
        if _value(config, setting) and config.validation.resolved_source() is None:
            yield f"{setting}, validation.dataset: needs the validation loss; set validation.dataset"
    for field in ("enable", "dataset_name", "data_dir", "data_files"):
        if getattr(config.validation, field) and config.validation.dataset is None:
            yield f"validation.{field}, validation.dataset: the second is not given; set it, or drop both"
    source = config.validation.resolved_source()
    if source is not None:
        yield from _missing_files("validation.data_files", source)


def _switches(config: Config) -> Iterator[str]:
    checkpoint, layout = config.checkpoint, config.parallelism
    for field in ("keep_best", "create_seed_checkpoint"):
        if getattr(checkpoint, field) and not checkpoint.enable_checkpoint:
            yield f"checkpoint.{field}, checkpoint.enable_checkpoint: nothing is saved; drop one of them"
    if config.optimizer.early_step_in_backward and config.training.max_norm > 0:
        yield (
            "optimizer.early_step_in_backward, training.max_norm: an early step leaves no gradients to clip; "
            "set training.max_norm to 0, or drop the early step"
        )
    if (layout.zero_stage, layout.fsdp_reshard_after_forward) in ((2, "always"), (3, "never")):
        yield (
            f"parallelism.zero_stage, parallelism.fsdp_reshard_after_forward: stage {layout.zero_stage} "
            f"contradicts {layout.fsdp_reshard_after_forward}; keep one of them"
        )


def _missing_files(setting: str, source: Source) -> Iterator[str]:
    """Local files of a source that do not exist; what a Hub dataset holds is not known here."""
    yield from _missing(setting.replace("data_files", "dataset"), source.dataset)
    folder = "" if source.dataset in READERS else source.dataset
    for file in source.files:
        if "://" not in file and os.path.isdir(folder or "."):
            yield from _missing(setting, os.path.abspath(os.path.join(folder, source.dir or "", file)))


def _missing(setting: str, path: str) -> Iterator[str]:
    """A problem when a path can only be local (not the Hub's, no address, no pattern) and is not there."""
    only_local = path.startswith(("/", "./", "../", "~")) or path.endswith(_ENDINGS)
    if only_local and "://" not in path and not has_magic(path) and not os.path.exists(path):
        yield f"{setting}: {path} does not exist{nearby(Path(path))}"
