"""What a run was started with, and what a resume makes of a difference."""

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from datasets.fingerprint import Hasher
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lacuna.config import Config, UserError, logger
from lacuna.config.fields import shown
from lacuna.data.cache import fingerprint
from lacuna.data.sources import Documents
from lacuna.data.tokenizer import tokenizer_fingerprint
from lacuna.model.weights import weight_files

_SCHEDULE = "the learning rate goes on where the new schedule has it"
# What comes of another value for the steps to come, by the settings that had a part in those that
# are done.
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
    "parallelism.*": "the same samples, equal but for rounding",
}
# Said by others, or of no consequence for what the model computes.
_UNSAID = {"transformers_version", "architectures", "dtype", "torch_dtype"}


def settings_of(config: Config) -> dict[str, str]:
    """Every setting as it is shown."""
    tables = config.model_dump().items()
    return {
        f"{section}.{name}": shown(value)
        for section, table in tables
        for name, value in table.items()
    }


def inputs_of(
    config: Config, tokenizer: PreTrainedTokenizerBase, sources: Sequence[Documents]
) -> dict[str, str]:
    """What tells apart the contents that samples, or weights beside adapters, come from."""
    found = {
        f"the files of {source.name}": fingerprint(source.files)
        for source in sources
        if source.files
    }
    told = (
        tokenizer_fingerprint(tokenizer)
        if tokenizer.is_fast
        else sorted(tokenizer.get_vocab().items())
    )
    found["the tokenizer"] = Hasher.hash(told)
    if config.conversations is not None:
        found["the chat template"] = Hasher.hash(tokenizer.chat_template)
    if config.lora.rank and config.model.name_or_path:
        found["the weights in model.name_or_path"] = fingerprint(
            weight_files(config.model.name_or_path)
        )
    return found


def described(model_config: PretrainedConfig) -> dict[str, str]:
    """A model's configuration, as it is shown."""
    values = model_config.to_dict().items()
    return {
        name: json.dumps(value, default=str, sort_keys=True)
        for name, value in values
        if name not in _UNSAID and not name.startswith("_")
    }


def refuse_other_inputs(saved: dict[str, str], own: dict[str, str], path: str) -> None:
    """Raises `UserError` when contents are not those that the run at `path` was started with."""
    changed = [name for name in saved | own if saved.get(name) != own.get(name)]
    if changed:
        raise UserError(
            f"not what it was when the run was started: {'; '.join(changed)}. The samples would "
            f"not be those promised: put the old content back, or start a new run with "
            f"checkpoint.initial_load_path = {path!r}."
        )


def say_changes(saved: dict[str, Any], own: dict[str, Any], step: int, rate: float) -> None:
    """Lists what a run goes on with that was otherwise, and what comes of it.

    `rate` is the learning rate of the next step.
    """
    before, after = saved["settings"], own["settings"]
    lines = []
    for name in [name for name in after if before.get(name, after[name]) != after[name]]:
        said = next(
            (text for pattern, text in _CONSEQUENCES.items() if fnmatchcase(name, pattern)), ""
        )
        if said == _SCHEDULE:
            said = f"{_SCHEDULE}: {saved['rate']:.3g} in step {step}, {rate:.3g} in step {step + 1}"
        lines.append(f"{name}: {before[name]} → {after[name]}" + (f" ({said})" if said else ""))
    before, after = saved["model"], own["model"]
    for name in [name for name in before | after if before.get(name) != after.get(name)]:
        was, now = before.get(name, "none"), after.get(name, "none")
        lines.append(
            f"{name} of the model's configuration: {was} → {now} (the weights so far were trained "
            f"by the old)"
        )
    if lines:
        logger.warning("other than in the steps so far (was → is):\n  %s", "\n  ".join(lines))
