"""The forms a trained model has on disk (Hugging Face folder, checkpoint step, run folder): open and convert them."""

import os

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lacuna.config import UserError
from lacuna.export.huggingface import export_model, save_model_description
from lacuna.model.build import meta_model
from lacuna.model.initialize import compute_buffers
from lacuna.parallel.processes import alone
from lacuna.train.checkpoint import (
    DESCRIPTION,
    MANIFEST,
    newest_complete,
    read_tensors,
    require_complete,
    write_checkpoint,
)
from lacuna.train.resume import model_tensors


def find_form(source: str) -> tuple[str, bool]:
    """The folder or Hub id to load for `source`, and whether it is a checkpoint (else Hugging Face's form).

    A run folder stands for its final model, or while that is not there, for its newest complete checkpoint. Raises
    `UserError` when there is nothing to load.
    """
    if os.path.exists(os.path.join(source, MANIFEST)):
        return require_complete(source, "MODEL", alone()), True
    if os.path.exists(os.path.join(source, "config.json")):
        return source, False
    if os.path.exists(os.path.join(source, "hf", "config.json")):
        return os.path.join(source, "hf"), False
    for folder in (os.path.join(source, "checkpoint"), source):
        if newest := newest_complete(folder, alone()):
            return newest, True
    if os.path.isdir(source):
        raise UserError(
            f"{source}: neither a Hugging Face folder (no config.json), nor a run folder (no hf/ and no complete "
            f"checkpoint/step-N), nor a checkpoint (no {MANIFEST})."
        )
    return source, False


def load_any_model(source: str, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model on `device`, ready to generate, and its tokenizer, from any form. Raises `UserError` when it cannot."""
    path, is_checkpoint = find_form(source)
    try:
        if not is_checkpoint:
            model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
            return model.to(device).eval(), AutoTokenizer.from_pretrained(path)
        description = os.path.join(path, DESCRIPTION)
        model_config = AutoConfig.from_pretrained(description)
        tokenizer = AutoTokenizer.from_pretrained(description)
    except (OSError, ValueError) as error:
        raise UserError(f"{source}: no folder or Hub model that transformers can open: {error}") from error
    model = meta_model(model_config, "sdpa", model_config.dtype or torch.float32)
    shadow = meta_model(model_config, "sdpa", torch.float32)
    model.to_empty(device=device)
    model.tie_weights()
    compute_buffers(model, shadow, device)
    read_tensors(path, model_tensors(model), alone())
    return model.eval(), tokenizer


def convert(source: str, target: str, form: str, dtype: str | None) -> None:
    """Writes the model at `source` to `target` as `form`: `hf`, or `dcp`, a checkpoint of weights to start from."""
    model, tokenizer = load_any_model(source, torch.device("cpu"))
    if dtype is not None:
        model = model.to(getattr(torch, dtype))
    path, is_checkpoint = find_form(source)
    generation_source = os.path.join(path, DESCRIPTION) if is_checkpoint else path
    if form == "hf":
        os.makedirs(os.path.dirname(os.path.abspath(target)), exist_ok=True)
        export_model(model, tokenizer, target, model.dtype, True, generation_source)
        return
    state = {"step": 0, "counters": {}, "global_batch": 0, "settings": {}, "ranks": []}
    write_checkpoint(
        os.path.abspath(target), model_tensors(model), state,
        lambda folder: save_model_description(folder, model.config, tokenizer, generation_source), alone(),
    )  # fmt: skip
