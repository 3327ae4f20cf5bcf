"""Rules between settings that need no knowledge of the machine; a message names all its settings."""

import os
import sys
from collections.abc import Iterator
from glob import has_magic
from pathlib import Path

from lacuna.config.contradictions import contradictions_of
from lacuna.config.documents import READERS, Source, Stage
from lacuna.config.errors import UserError, nearby
from lacuna.config.fields import shown
from lacuna.config.sections import Config, JobConfig

_ENDINGS = (
    ".json",
    ".jsonl",
    ".csv",
    ".tsv",
    ".parquet",
    ".arrow",
    ".txt",
    ".gz",
    ".zst",
    ".xz",
    ".bz2",
    ".gguf",
)


def problems_of(config: Config) -> list[str]:
    """Everything about the configuration that is known to be wrong before the machine is looked at."""
    sources: tuple[Source, ...] = ()
    problems = [*_name(config.job), *contradictions_of(config), *_batch(config), *_stages(config)]
    problems += long_warmup(
        config, config.training.steps or sys.maxsize
    )  # of epochs it is known with the data
    try:
        sources = config.data.resolved_sources()
    except UserError as error:
        problems.append(str(error))
    return [*problems, *_data(config, sources), *_missing(config, sources)]


def _batch(config: Config) -> Iterator[str]:
    training = config.training
    context, length, together = training.context_len, training.seq_len, training.global_batch_size
    size, accumulation = training.batch_size, training.gradient_accumulation_steps or 1
    if context > length or (context < length and not training.varlen):
        names = "training.context_len, training.seq_len, training.varlen"
        yield f"{names}: {context} is not {length}, or less with varlen; leave out training.context_len"
    if together and together % (size * accumulation):
        names = (
            "training.global_batch_size, training.batch_size, training.gradient_accumulation_steps"
        )
        yield f"{names}: {together} is no multiple of {size} x {accumulation}; change one of them"


def _name(job: JobConfig) -> Iterator[str]:
    """What is wrong with a name that makes the run's folder."""
    folder = f"outputs/{job.name}"
    inside = os.path.normpath(folder).startswith("outputs/") and "\0" not in folder
    if job.dump_folder == folder and not inside:
        yield f"job.name: {shown(job.name)} is no folder in outputs; choose another, or give job.dump_folder"


def long_warmup(config: Config, steps: int) -> Iterator[str]:
    """What is wrong with a warmup that was given and is longer than the run."""
    warmup = config.lr_scheduler.warmup_steps or 0
    if warmup > steps:
        wrong = f"lr_scheduler.warmup_steps: {warmup} is more than the {steps} steps of the run"
        yield f"{wrong}, which would never reach its learning rate; give fewer, or leave it out"


def _data(config: Config, sources: tuple[Source, ...]) -> Iterator[str]:
    data, epochs = config.data, config.training.epochs
    needless = config.memory_estimation.enabled or config.checkpoint.create_seed_checkpoint
    if not (data.dataset or data.sources or data.data_files or needless):
        yield "data.dataset: no data is given; set data.dataset, or write [[data.sources]] tables"
    if epochs and any(source.weight for source in sources):
        yield "training.epochs, data.data_probs, data.sources: whole passes and shares contradict each other; keep one"
    if len(sources) > 1 and sources[0].weight is None and not epochs:
        ways = "the second, a weight in every [[data.sources]], or training.epochs for whole passes"
        yield f"data.dataset, data.data_probs: several datasets need their shares; set {ways}"


def _stages(config: Config) -> Iterator[str]:
    steps, count = 0, len(config.data.sources or config.data.dataset)
    for number, stage in enumerate(config.curriculum.stages, start=1):
        where, shares = f"curriculum.stages, table {number}:", stage.data_probs
        if stage.from_step is None and stage.from_loss is None:
            yield f"{where} does not say when it begins; give from_step or from_loss"
        if stage.model_copy(update={"from_step": None, "from_loss": None}) == Stage():
            yield f"{where} changes nothing; give data_probs, seq_len, batch_size or global_batch_size, or drop it"
        if stage.from_step is not None and stage.from_step <= steps:
            yield f"{where} from_step = {stage.from_step} is not after the {steps} of the stage before; raise it"
        if stage.from_loss is not None and config.validation.resolved_source() is None:
            yield f"{where} from_loss needs the validation loss; set validation.dataset"
        if shares and (len(shares) != count or not any(shares)):
            yield f"{where} data_probs needs a share for each of the {count} sources, and not all 0"
        steps = stage.from_step or steps


def _missing(config: Config, sources: tuple[Source, ...]) -> Iterator[str]:
    """Paths that can only be local (not the Hub's, no address, no pattern) and are not there."""
    for setting, path in _paths(config, sources):
        only_local = path.startswith(("/", "./", "../", "~")) or path.endswith(_ENDINGS)
        if only_local and "://" not in path and not has_magic(path) and not os.path.exists(path):
            yield f"{setting}: {path} does not exist; {nearby(Path(path))}"


def _paths(config: Config, sources: tuple[Source, ...]) -> Iterator[tuple[str, str]]:
    """The settings that name what a run reads, and what they name; files within a dataset of the Hub are left out."""
    for field in ("name_or_path", "config", "tokenizer_path"):
        yield f"model.{field}", getattr(config.model, field) or ""
    yield "checkpoint.initial_load_path", os.path.abspath(config.checkpoint.initial_load_path or "")
    named = [
        ("data.sources" if config.data.sources else "data.data_files", source) for source in sources
    ]
    if validation := config.validation.resolved_source():
        named.append(("validation.data_files", validation))
    for setting, source in named:
        yield setting.replace("data_files", "dataset"), source.dataset
        folder = "." if source.dataset in READERS else source.dataset
        here = [file for file in source.files if "://" not in file and os.path.isdir(folder)]
        yield from (
            (setting, os.path.abspath(os.path.join(folder, source.dir or "", file)))
            for file in here
        )
