"""Writes a trained model in another form, with its adapters merged or alone."""

import os
import shutil
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from lacuna.config import UserError
from lacuna.config.sections import ModelConfig
from lacuna.data.remote_code import open_with
from lacuna.formats.adapter import export_adapter
from lacuna.formats.checkpoint import model_tensors
from lacuna.formats.finding import find_form
from lacuna.formats.huggingface import export_model, save_model_description
from lacuna.formats.opening import Opened, open_model
from lacuna.formats.writer import write_checkpoint
from lacuna.parallel.processes import Process


@torch.no_grad()
def probe_logits(model: PreTrainedModel) -> torch.Tensor:
    """The logits after 16 tokens from all over the vocabulary: float32 [16, vocabulary]."""
    embedding: Any = model.get_input_embeddings()
    ids = torch.arange(16) * len(embedding.weight) // 16
    logits: torch.Tensor = model(input_ids=ids[None]).logits
    return logits[0].float()


def convert(
    source: str,
    target: str,
    form: str,
    dtype: str | None = None,
    base: str | None = None,
    adapter_only: bool = False,
    trust_remote_code: bool = False,
) -> str:
    """Writes the model at `source` to `target` in another form. Returns a message about it.

    The `form` is `hf`, `gguf` or `dcp`, which is a checkpoint of weights to start from. Weights get
    the type `dtype`, by default the one that they have (GGUF has types of its own). Adapters are
    merged into the model that they were trained beside, or into `base`; with `adapter_only` they
    are written alone.
    """
    adapter = os.path.join(find_form(source)[0], "adapter")
    has_adapter = os.path.isdir(adapter)
    if adapter_only and has_adapter and base is None:
        shutil.copytree(adapter, target)
        return ""
    opened = open_model(
        adapter if has_adapter and base is not None else source, base, trust_remote_code
    )
    run = opened.run
    if adapter_only:
        if run is None:
            raise UserError(f"convert: --adapter-only: {source} has no adapters.")
        name = run.model.name_or_path
        export_adapter(opened.model, opened.tokenizer, run.lora, name, target)
        return ""
    if form == "gguf":
        from lacuna.formats.gguf import export_gguf  # an extension

        export_gguf(opened.merged(opened.dtype), opened.tokenizer, target, str(dtype))
        return ""
    wanted = opened.dtype if dtype is None else getattr(torch, dtype)
    if form == "dcp":
        _write_start(opened.merged(wanted), opened, target)
        return ""
    kept = wanted or opened.model.dtype
    export_model(opened.model, opened.tokenizer, target, kept, opened.description)
    return (
        ""
        if run is None
        else _about_merging(opened.model, run.model, run.quantization.base, target)
    )


def _write_start(model: PreTrainedModel, opened: Opened, target: str) -> None:
    """Writes a checkpoint that holds the weights alone, for runs to start from."""
    describe = partial(save_model_description, model.config, opened.tokenizer, opened.description)
    state = {"loop": {"step": 0}}
    write_checkpoint(os.path.abspath(target), model_tensors(model), state, describe, Process())


def _about_merging(model: PreTrainedModel, source: ModelConfig, form: str, target: str) -> str:
    """The message about merged adapters: what they were merged into, and how exactly."""
    before = probe_logits(model)
    merged = open_with(AutoModelForCausalLM, target, source.trust_remote_code, dtype="auto")
    after = probe_logits(merged.eval())
    if form == "none":
        stored = "as its files have them"
    else:
        stored = f"dequantised from {form}, as they were in training"
    return (
        f"Merged into the weights of {source.name_or_path or 'the run'}, {stored}. Highest "
        f"logits of four probe tokens before: {_highest_logits(before)}, "
        f"after: {_highest_logits(after)}; the largest difference "
        f"of any of 16 is {(before - after).abs().max():.2g}.\n"
    )


def _highest_logits(logits: torch.Tensor) -> str:
    """The highest logits of the first four tokens."""
    return " ".join(f"{value:.3f}" for value in logits.amax(1)[:4].tolist())
