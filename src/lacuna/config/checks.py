"""Rules between settings that need no knowledge of the machine; a message names all its settings."""

import fnmatch
import os
import sys
from collections.abc import Iterator
from glob import has_magic
from itertools import product
from pathlib import Path
from typing import Any

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

# Conditions that do not go together, or cannot be had at all -> why, and what to do. A condition is
# a setting (or pattern of settings) that is on (not false, 0, empty or left out), or whose value
# fits a pattern; `no` negates it. Of several that are parted by `|` each counts.
CONTRADICTIONS: dict[str, str] = {
    "model.name_or_path & model.config": "both are given; keep one (--model.config none takes the file's away)",
    "no model.name_or_path & no model.config": "give the first to start from its weights, or the second from scratch",
    "training.steps & training.epochs": "both are given; keep one (--training.steps none takes the file's away)",
    "training.epochs | curriculum.[dr]* & data.streaming | data.tokenization = online": "needs the cache; drop either",
    "no training.batch_size = 1 & training.varlen": "the first must be 1; raise training.seq_len instead",
    "training.varlen & no data.document_mask": "varlen masks documents; drop varlen, or keep the mask",
    "data.dataset & data.sources": "two spellings of the same; keep one",
    "data.data_files & no data.dataset & no data.sources": f"set the second to the files' reader: {', '.join(READERS)}",
    "data.streaming & data.tokenization = cache": "a stream cannot be cached; keep one of them",
    "checkpoint.keep_best | validation.patience & no validation.dataset": "needs the validation loss; set the second",
    "checkpoint.keep_best | validation.patience & validation.enable = False": "needs the validation; drop the second",
    "validation.enable | validation.*_name | validation.data_* & no validation.dataset": "set the second, or drop it",
    "curriculum.stages & training.epochs | curriculum.rank_every": "stages draw their data anew; drop either",
    "curriculum.difficulty_column & curriculum.rank_every": "two orders of the same; keep one",
    "checkpoint.keep_best | checkpoint.create_seed_checkpoint & no checkpoint.enable_checkpoint": "needs the second",
    "model.train_new_tokens_only & no model.new_tokens": "the second names the rows that the first trains; set it",
    "model.train_new_tokens_only & optimizer.early_step_in_backward": "early steps train all rows; drop one",
    "lora.[dmp]* | lora.rslora & no lora.rank": "without the second there is no adapter; set it",
    "no lora.alpha = 16.0 | no lora.targets = ('all-linear',) & no lora.rank": "without it there is no adapter; set it",
    "lora.parameters & lora.d*": "what dropout and DoRA do to layers cannot be done to stacks; drop one of them",
    "no quantization.base = none & no lora.rank": "quantised weights only learn through adapters; set the second",
    "no quantization.base = none & lora.dora": "DoRA measures weights, which are packed; drop one of them",
    "no quantization.base = none & no parallelism.tensor_p*_degree = 1": "packed weights do not split; keep one",
    "lora.init = loftq & quantization.base = none": "needs what quantising took from weights; set the second",
    "lora.init = loftq & no model.name_or_path | lora.adapter": "only for new adapters on a loaded model; drop it",
    "optimizer.early_step_in_backward & training.max_norm": "early steps leave nothing to clip; set max_norm = 0",
    "optimizer.early_step_in_backward & training.skip_nan_inf": "an early step cannot be skipped; drop one",
    "activation_checkpoint.mode = memory_budget & compile.enable = False": "needs torch.compile; drop the second",
    "activation_checkpoint.offload & no activation_checkpoint.mode = full": "full leaves what is moved; set that mode",
    "parallelism.zero_stage = [12] & parallelism.fsdp_reshard_after_forward = always": "they are opposites; keep one",
    "parallelism.zero_stage = 3 & parallelism.fsdp_reshard_after_forward = never": "they are opposites; keep one",
    "no parallelism.expert_parallel_degree = 1": "expert parallelism is not available yet; leave it out",
    "parallelism.enable_compiled_autograd": "torch's compiled autograd gives wrong gradients under FSDP2; leave it out",
    "no parallelism.data_parallel_shard_degree": "must be a number of ranks, or -1 for all that remain",
    "checkpoint.keep_latest_k = 1": "the only complete checkpoint would be deleted during a save; use 2 or more",
    "checkpoint.hf_upload_enabled & no checkpoint.hf_repo_base_name": "the second says where to, as organisation/name",
    "checkpoint.hf_repo_base_name & no checkpoint.hf_upload_enabled": "nothing would be sent there; set the second",
    "no validation.steps": "must be a number of batches, or -1 for all",
    "memory_estimation.disable_fake_mode": "the estimate is computed from shapes, nothing is faked; leave it out",
    "float8.scaling_type_* = delayed": "torchao removed delayed scaling; use dynamic",
    "float8.[!s]*": "float8 is not available yet; leave it out",
}


def problems_of(config: Config) -> list[str]:
    """Everything about the configuration that is known to be wrong before the machine is looked at."""
    sources: tuple[Source, ...] = ()
    problems = [*_name(config.job), *_contradictions(config), *_batch(config), *_stages(config)]
    problems += long_warmup(
        config, config.training.steps or sys.maxsize
    )  # of epochs it is known with the data
    try:
        sources = config.data.resolved_sources()
    except UserError as error:
        problems.append(str(error))
    return [*problems, *_data(config, sources), *_missing(config, sources)]


def _contradictions(config: Config) -> Iterator[str]:
    values = {f"{section}.{name}": value for section, table in config for name, value in table}
    for rule, reason in CONTRADICTIONS.items():
        for settings in product(*(_where(place, values) for place in rule.split(" & "))):
            yield f"{', '.join(settings)}: {reason}"


def _where(place: str, values: dict[str, Any]) -> Iterator[str]:
    """The settings of which one of the conditions holds that are parted by `|`."""
    for condition in place.split(" | "):
        pattern, _, fit = condition.removeprefix("no ").partition(" = ")
        for name in fnmatch.filter(values, pattern):
            holds = fnmatch.fnmatchcase(str(values[name]), fit) if fit else bool(values[name])
            if holds != condition.startswith("no "):
                yield name


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
