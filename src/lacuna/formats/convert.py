"""A trained model is written in another form, its adapters merged or alone."""

import os
import shutil
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from lacuna.config import Config, UserError
from lacuna.data.remote_code import open_with
from lacuna.formats.adapter import export_adapter
from lacuna.formats.checkpoint import model_tensors
from lacuna.formats.huggingface import export_model, save_model_description
from lacuna.formats.opening import Opened, find_form, open_model
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
    """Writes the model at `source` to `target` as `form`, with weights of the type `dtype`.

    That is by default its own. A form is `hf`, `gguf`, which has types of its own, or `dcp`, a
    checkpoint of weights to start from. Adapters are merged, to `hf` one tensor at a time, into
    what they were trained beside, or into the model `base`; with `adapter_only` they are written
    alone. Returns what there is to say of it.
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
    return "" if run is None else _about_merging(opened.model, run, target)


def _write_start(model: PreTrainedModel, opened: Opened, target: str) -> None:
    """Writes a checkpoint that holds the weights alone, for runs to start from."""
    describe = partial(save_model_description, model.config, opened.tokenizer, opened.description)
    state = {"loop": {"step": 0}}
    write_checkpoint(os.path.abspath(target), model_tensors(model), state, describe, Process())


def _about_merging(model: PreTrainedModel, run: Config, target: str) -> str:
    """Into what a model's adapters were merged, and how near to it the model at `target` is."""
    before = probe_logits(model)
    merged = open_with(AutoModelForCausalLM, target, run.model.trust_remote_code, dtype="auto")
    after = probe_logits(merged.eval())
    form = run.quantization.base
    if form == "none":
        stored = "as its files have them"
    else:
        stored = f"dequantised from {form}, as they were in training"
    return (
        f"Merged into the weights of {run.model.name_or_path or 'the run'}, {stored}. Highest "
        f"logits of four probe tokens before: {_highest(before)}, after: {_highest(after)}; the "
        f"largest difference of any of 16 is {(before - after).abs().max():.2g}.\n"
    )


def _highest(logits: torch.Tensor) -> str:
    """The highest logits of the first four tokens."""
    return " ".join(f"{value:.3f}" for value in logits.amax(1)[:4].tolist())
