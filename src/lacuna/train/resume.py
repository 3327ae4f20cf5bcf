"""What a run was started with, and what happens when it is resumed with something else."""

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from datasets.fingerprint import Hasher
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lacuna.config import Config, UserError, explained, logger
from lacuna.config.fields import shown
from lacuna.data.cache import fingerprint
from lacuna.data.sources import Documents
from lacuna.data.tokenizer import tokenizer_fingerprint
from lacuna.model.weights import weight_files
from lacuna.objective.find import Objective

_SCHEDULE = "the learning rate goes on where the new schedule has it"
# Pattern of settings that the steps so far depended on -> what another value means for the steps to
# come.
_CONSEQUENCES = {
    "training.steps": _SCHEDULE,
    "training.epochs": _SCHEDULE,
    "lr_scheduler.*": _SCHEDULE,
    "optimizer.lr": _SCHEDULE,
    "optimizer.*": "the moments of the steps so far are kept",
    "training.batch_size": "a step takes as many sequences as before",
    "training.gradient_accumulation_steps": "a step takes as many sequences as before",
    "curriculum.*": "what was trained stays as it was, and what is due from here on goes by the "
    "new ones",
    "model.tokenizer_path": "it must be the same tokenizer",
    "lora.*": "the adapters so far count by it, too",
    "model.*": "the weights that are trained come from the checkpoint",
    "quantization.*": "the adapters so far were trained beside other weights",
    "training.skip_nan_inf": "",
    "training.gc_freq": "",
    "training.max_skipped_steps": "",
    "training.*": "the steps so far were trained the old way",
    "validation.*": "the best loss so far was measured before",
    "*parallelism.*": "the same samples, equal but for rounding",
}
# Settings with which a run that is finished is the same run: the length is looked at elsewhere.
_SAME_RUN = (
    *("job.name", "job.dump_folder", "job.description", "job.print_args"),
    *("training.steps", "training.epochs", "training.gc_freq", "compile.*"),
    *("checkpoint.*", "metrics.*", "profiling.*", "comm.*", "memory_estimation.*"),
    *("*parallelism.*", "activation_checkpoint.*"),
)
# Those that a run gives a value where they are not set.
_FOUND_OUT = ("training.gradient_accumulation_steps", "training.global_batch_size")
# How the names of models begin that a run reads and does not train.
_FROZEN = "the weights of "
# What templates are given; runs that began before it was noted do not have it.
_SPECIAL = "the special tokens"
# Logged elsewhere, or without effect on what the model computes.
_UNSAID = {"transformers_version", "architectures", "dtype", "torch_dtype"}


def shown_settings(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Every setting as it is shown, of all the tables of a configuration."""
    return {
        f"{section}.{name}": shown(value)
        for section, table in tables.items()
        for name, value in table.items()
    }


def changes_of(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """What every setting that both tables have was and is, where that is not the same."""
    return {
        name: f"{name}: {before[name]} → {value}"
        for name, value in now.items()
        if before.get(name, value) != value
    }


def inputs_of(
    config: Config,
    objective: Objective,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[Documents],
) -> dict[str, str]:
    """A fingerprint of each content that a run is trained with, by what users call it."""
    found = {
        f"the files of {source.name}": fingerprint(source.files)
        for source in sources
        if source.files
    }
    if tokenizer.is_fast:
        found["the tokenizer"] = Hasher.hash(tokenizer_fingerprint(tokenizer))
    else:
        found["the tokenizer"] = Hasher.hash(sorted(tokenizer.get_vocab().items()))
    if config.conversations is not None and tokenizer.chat_template is not None:
        found["the chat template"] = Hasher.hash(tokenizer.chat_template)
        found[_SPECIAL] = Hasher.hash(sorted(tokenizer.special_tokens_map.items()))
    base = config.model.name_or_path
    if config.lora.rank and base:
        found["the weights in model.name_or_path"] = fingerprint(weight_files(base))
    frozen = files_of_frozen(objective, config)
    return found | {f"{_FROZEN}{name}": fingerprint(files) for name, files in frozen.items()}


def files_of_frozen(objective: Objective, config: Config) -> dict[str, list[Path]]:
    """The files of models that are read again where a run goes on, by what asks for each.

    Those are the frozen ones of an objective, and folders among the functions of rewards. A frozen
    copy of the model as it began goes by the name of the setting that names the model: with another
    one it would be another reference.
    """
    found = {}
    for setting, one in objective.frozen_models(config).items():
        source = one.config.model.name_or_path
        if source is None or one.is_trained:  # which a checkpoint has
            continue
        with explained(setting, UserError, mend="choose another model"):
            files = weight_files(source)
        for adapter in one.config.lora.adapter:
            files += sorted(Path(adapter).glob("*.safetensors"))
        is_own = source == config.model.name_or_path
        found[f"{setting} ({'model.name_or_path' if is_own else source})"] = files
    for source in filter(os.path.isdir, config.rewards.functions):
        found[f"rewards.functions ({source})"] = sorted(Path(source).glob("*.safetensors"))
    return found


def shown_configuration(model_config: PretrainedConfig) -> dict[str, str]:
    """Every value of a model's configuration that matters, as it is shown."""
    return {
        name: json.dumps(value, default=str, sort_keys=True)
        for name, value in model_config.to_dict().items()
        if name not in _UNSAID and not name.startswith("_")
    }


def way_to_start_anew(
    config: Config, objective: Objective, tokenizer: PreTrainedTokenizerBase, path: str
) -> str:
    """How a new run begins with the weights in `path`: in a way that its objective takes."""
    loads = config.checkpoint.model_copy(update={"initial_load_path": path})
    try:
        objective.check(config.model_copy(update={"checkpoint": loads}), tokenizer)
    except UserError:
        written = shlex.join(("lacuna", "convert", path, "begin", "--to", "hf"))
        return f"of the model that `{written}` makes of it (--model.name_or_path begin)"
    return f"with checkpoint.initial_load_path = {path!r}"


def require_same_inputs(
    saved: dict[str, str], own: dict[str, str], way_to_start: Callable[[], str]
) -> None:
    """Raises `UserError` when contents are not those that the run was started with.

    Both tables are as `inputs_of` makes them. Settings that ask for other frozen models are logged
    as all that change. `way_to_start` tells how a new run begins with the weights of this one.
    """
    changed = [name for name in saved if saved[name] != own.get(name, saved[name])]
    for name in sorted(saved.keys() ^ own):
        if not name.startswith((_FROZEN, _SPECIAL)):
            whose = "not needed by these settings" if name in saved else "needed by these alone"
            changed.append(f"{name} ({whose})")
    if changed:
        raise UserError(
            f"not what it was when the run was started: {'; '.join(changed)}. The run would "
            f"not be the one promised: put back the old content, or the setting that "
            f"named it, or start a new run "
            f"{way_to_start()}."
        )


def require_same_run(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises `UserError` where a run that is finished is asked for with settings of another."""
    left_open = [name for name in _FOUND_OUT if "none" in (before.get(name), now.get(name))]
    other = [
        line
        for name, line in changes_of(before, now).items()
        if not any(fnmatchcase(name, same) for same in (*_SAME_RUN, *left_open))
    ]
    if other:
        raise UserError(
            f"job.dump_folder: the run there is finished, and was trained with other settings (was "
            f"→ is): {'; '.join(other)}. Choose another folder, or leave these as they were."
        )


def log_changes(saved: dict[str, Any], own: dict[str, Any], step: int, rate: float) -> None:
    """Logs what differs from what the run was trained with so far, and what comes of that.

    `rate` is the learning rate of the next step.
    """
    lines = []
    for name, line in changes_of(saved["settings"], own["settings"]).items():
        consequence = _consequence_of(name)
        if consequence == _SCHEDULE:
            consequence += f": {saved['rate']:.3g} in step {step}, {rate:.3g} in step {step + 1}"
        lines.append(f"{line} ({consequence})" if consequence else line)
    before, after = saved["model"], own["model"]
    for name in before | after:
        if before.get(name) != after.get(name):
            change = f"{before.get(name, 'none')} → {after.get(name, 'none')}"
            lines.append(
                f"{name} of the model's configuration: {change} (the weights so far were trained "
                "by the old)"
            )
    if lines:
        logger.warning("other than in the steps so far (was → is):\n  %s", "\n  ".join(lines))


def _consequence_of(setting: str) -> str:
    """What comes of another value of a setting; empty where nothing does."""
    for pattern, text in _CONSEQUENCES.items():
        if fnmatchcase(setting, pattern):
            return text
    return ""
