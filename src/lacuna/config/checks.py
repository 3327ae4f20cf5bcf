"""Finds everything that is wrong with a configuration, whatever machine it is for."""

import os
import sys
from collections.abc import Iterator
from glob import has_magic
from pathlib import Path

from lacuna.config.contradictions import contradictions_of
from lacuna.config.documents import (
    READERS,
    CurriculumConfig,
    CurriculumStage,
    Source,
    ValidationConfig,
)
from lacuna.config.errors import UserError, nearby
from lacuna.config.fields import shown
from lacuna.config.optimizers import LRSchedulerConfig
from lacuna.config.sections import Config, JobConfig, TrainingConfig

# Endings of names that can only be those of files: texts, packed ones, models.
_TEXTS = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
_ENDINGS = (*_TEXTS, ".gz", ".zst", ".xz", ".bz2", ".gguf")


def problems_of(config: Config) -> list[str]:
    """A message for each thing that is wrong; each begins with the names of its settings."""
    training = config.training
    problems = [
        *_folder_problems(config.job),
        *contradictions_of(config),
        *_batch_problems(training),
    ]
    source_count = len(config.data.sources or config.data.dataset)
    problems += _curriculum_problems(config.curriculum, config.validation, source_count)
    # How many steps training.epochs takes is only known with the data.
    problems += long_warmup(config.lr_scheduler, training.steps or sys.maxsize)
    sources: tuple[Source, ...] = ()
    try:
        sources = config.data.resolved_sources()
    except UserError as error:
        problems.append(str(error))
    return [*problems, *_data_problems(config, sources), *_missing_paths(config, sources)]


def _folder_problems(job: JobConfig) -> Iterator[str]:
    """What is wrong with a name that makes the run's folder."""
    folder = f"outputs/{job.name}"
    is_inside = os.path.normpath(folder).startswith("outputs/") and "\0" not in folder
    if job.dump_folder == folder and not is_inside:
        yield (
            f"job.name: {shown(job.name)} is no folder in outputs; choose another, or give "
            "job.dump_folder"
        )


def _batch_problems(training: TrainingConfig) -> Iterator[str]:
    """What does not fit together among the numbers that make a batch."""
    is_shorter = training.context_len < training.seq_len
    if training.context_len > training.seq_len or (is_shorter and not training.varlen):
        yield (
            f"training.context_len, training.seq_len, training.varlen: {training.context_len} is "
            f"not {training.seq_len}, or less with varlen; leave out training.context_len"
        )
    accumulation = training.gradient_accumulation_steps or 1
    together = training.global_batch_size
    if together and together % (training.batch_size * accumulation):
        yield (
            "training.global_batch_size, training.batch_size, "
            f"training.gradient_accumulation_steps: {together} is no multiple of "
            f"{training.batch_size} x {accumulation}; change one of them"
        )


def long_warmup(lr_scheduler: LRSchedulerConfig, steps: int) -> Iterator[str]:
    """What is wrong with a warmup that was given and is longer than the run."""
    warmup = lr_scheduler.warmup_steps or 0
    if warmup > steps:
        yield (
            f"lr_scheduler.warmup_steps: {warmup} is more than the {steps} steps of the run, which "
            "would never reach its learning rate; give fewer, or leave it out"
        )


def _data_problems(config: Config, sources: tuple[Source, ...]) -> Iterator[str]:
    """What is wrong with the choice of data, and with the shares of several sources."""
    data = config.data
    epochs = config.training.epochs
    needs_none = config.memory_estimation.enabled or config.checkpoint.create_seed_checkpoint
    if not (data.dataset or data.sources or data.data_files or needs_none):
        yield "data.dataset: no data is given; set data.dataset, or write [[data.sources]] tables"
    if epochs and any(source.weight for source in sources):
        yield (
            "training.epochs, data.data_probs, data.sources: whole passes and shares contradict "
            "each other; keep one"
        )
    if len(sources) > 1 and sources[0].weight is None and not epochs:
        yield (
            "data.dataset, data.data_probs: several datasets need their shares; set the second, a "
            "weight in every [[data.sources]], or training.epochs for whole passes"
        )


def _curriculum_problems(
    curriculum: CurriculumConfig, validation: ValidationConfig, source_count: int
) -> Iterator[str]:
    """What is wrong with the tables of the curriculum."""
    steps = 0
    for number, stage in enumerate(curriculum.stages, start=1):
        where = f"curriculum.stages, table {number}:"
        if stage.from_step is None and stage.from_loss is None:
            yield f"{where} does not say when it begins; give from_step or from_loss"
        if stage.model_copy(update={"from_step": None, "from_loss": None}) == CurriculumStage():
            yield (
                f"{where} changes nothing; give data_probs, seq_len, batch_size or "
                "global_batch_size, or drop it"
            )
        if stage.from_step is not None and stage.from_step <= steps:
            yield (
                f"{where} from_step = {stage.from_step} is not after the {steps} of the stage "
                "before; raise it"
            )
        if stage.from_loss is not None and validation.resolved_source() is None:
            yield f"{where} from_loss needs the validation loss; set validation.dataset"
        shares = stage.data_probs
        if shares and (len(shares) != source_count or not any(shares)):
            yield (
                f"{where} data_probs needs a share for each of the {source_count} sources, and not "
                "all 0"
            )
        steps = stage.from_step or steps


def _missing_paths(config: Config, sources: tuple[Source, ...]) -> Iterator[str]:
    """Paths that can only be local (not the Hub's, no address, no pattern) and are not there."""
    for setting, path in _named_paths(config, sources):
        is_local = (
            path.startswith(("/", "./", "../", "~"))
            or path.endswith(_ENDINGS)
            or path.rstrip("/").count("/") > 1  # a Hub id has one
        )
        if is_local and "://" not in path and not has_magic(path) and not os.path.exists(path):
            yield f"{setting}: {path} does not exist; {nearby(Path(path))}"


def _named_paths(config: Config, sources: tuple[Source, ...]) -> Iterator[tuple[str, str]]:
    """Each setting that names a file or folder which the run reads, with the name that it gives.

    Data files are among them only where the dataset is local, and not where it is on the Hub.
    """
    models = [
        ("model.name_or_path", config.model.name_or_path),
        ("model.config", config.model.config),
        ("model.tokenizer_path", config.model.tokenizer_path),
        ("ppo.critic", config.ppo.critic),
        ("distillation.teacher", config.distillation.teacher),
        *(("rewards.functions", name) for name in config.rewards.functions),
    ]
    yield from ((setting, path or "") for setting, path in models)
    yield "checkpoint.initial_load_path", os.path.abspath(config.checkpoint.initial_load_path or "")
    setting = "data.sources" if config.data.sources else "data.data_files"
    named = [(setting, source) for source in sources]
    validation = config.validation.resolved_source()
    if validation is not None:
        named.append(("validation.data_files", validation))
    for setting, source in named:
        yield setting.replace("data_files", "dataset"), source.dataset
        folder = "." if source.dataset in READERS else source.dataset
        if not os.path.isdir(folder):
            continue
        for file in source.files:
            if "://" not in file:
                yield setting, os.path.abspath(os.path.join(folder, source.dir or "", file))
