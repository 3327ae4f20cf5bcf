"""The forms a trained model has on disk (Hugging Face folder, checkpoint step, run folder): open and convert them."""

import os
import tomllib
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from lacuna.config import Config, explained, refuse
from lacuna.export.huggingface import export_model, save_model_description
from lacuna.model.build import plan_model
from lacuna.model.lora import merge_adapters, trained_names
from lacuna.model.weights import fill_model
from lacuna.parallel.mesh import Layout
from lacuna.parallel.processes import Process
from lacuna.train import checkpoint


def find_form(source: str) -> tuple[str, bool]:
    """The folder or Hub id to load for `source`, and whether it is a checkpoint (else Hugging Face's form).

    A run folder stands for its final model, or while that is not there, for its newest complete checkpoint. Raises
    `UserError` when there is nothing to load.
    """
    if os.path.exists(os.path.join(source, checkpoint.MANIFEST)):
        return checkpoint.require_complete(source, "MODEL", Process()), True
    for folder in (source, os.path.join(source, "hf")):
        if os.path.exists(os.path.join(folder, "config.json")):
            return folder, False
    for folder in (os.path.join(source, "checkpoint"), source):
        if newest := checkpoint.newest_complete(folder, Process()):
            return newest, True
    wrong = f"{source}: neither a Hugging Face folder (no config.json), nor a checkpoint (no {checkpoint.MANIFEST})"
    refuse({f"{wrong}, nor a run folder (no hf/ and no complete checkpoint/step-N)": os.path.isdir(source)})
    return source, False


def load_any_model(source: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """A model on `device`, ready to generate, its tokenizer, and the folder or Hub id of its description.

    `source` may have any form. Raises `UserError` when it cannot be opened.
    """
    path, is_checkpoint = find_form(source)
    description = os.path.join(path, checkpoint.DESCRIPTION) if is_checkpoint else path
    problem = f"{source}: no folder or Hub model that transformers can open"
    with explained(problem, OSError, ValueError, mend="check the name, and whether the Hub can be reached"):
        tokenizer = AutoTokenizer.from_pretrained(description)
        if not is_checkpoint:
            return AutoModelForCausalLM.from_pretrained(path, dtype="auto").to(device).eval(), tokenizer, description
        model_config = AutoConfig.from_pretrained(description)
    run = Path(description, checkpoint.RUN)
    if run.exists():
        model = _frozen_model(Config.model_validate(tomllib.loads(run.read_text())), tokenizer)
    else:
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(model_config)
        model.tie_weights()
    checkpoint.read_tensors(path, checkpoint.model_tensors(model), Process())
    merge_adapters(model)
    for parameter in model.parameters():  # modules trained whole; buffers of rotations are float32 in any model
        parameter.data = parameter.to(model_config.dtype)
    return model.to(device).eval(), tokenizer, description


def _frozen_model(config: Config, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The model of a run that trains adapters, whole on the CPU: frozen weights as in the run, and empty adapters."""
    model = plan_model(config, tokenizer, Layout(), "cpu")
    fill_model(model, trained_names(model), config, torch.device("cpu"), fill=True)
    return model


def convert(source: str, target: str, form: str, dtype: str | None) -> None:
    """Writes the model at `source` to `target` as `form`: `hf`, or `dcp`, a checkpoint of weights to start from."""
    model, tokenizer, description = load_any_model(source, "cpu")
    if dtype is not None:
        model = model.to(getattr(torch, dtype))
    if form == "hf":
        export_model(model, tokenizer, target, model.dtype, description)
    else:
        describe = partial(save_model_description, model.config, tokenizer, description)
        tensors = checkpoint.model_tensors(model)
        checkpoint.write_checkpoint(os.path.abspath(target), tensors, {"step": 0}, describe, Process())
