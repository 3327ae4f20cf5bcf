"""The forms a trained model has on disk (Hugging Face folder, adapter, checkpoint, run folder): open and convert."""

import os
import shutil
import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError

import torch
from huggingface_hub import model_info, try_to_load_from_cache
from huggingface_hub.errors import HTTPError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights
from transformers.utils import CHAT_TEMPLATE_FILE, CONFIG_NAME

from lacuna.config import Config, explained, refuse
from lacuna.config.adapters import ADAPTER_FILE, QuantizationConfig, described_adapter
from lacuna.config.errors import nearby
from lacuna.data.gguf import hf_folder
from lacuna.data.remote_code import open_with
from lacuna.export.gguf import export_gguf
from lacuna.export.huggingface import export_adapter, export_model, save_model_description
from lacuna.model.architecture import load_model_config
from lacuna.model.build import plan_model
from lacuna.model.lora import load_adapters, merge_adapters, trained_names
from lacuna.model.quantization import pack_layers
from lacuna.model.weights import check_base, fill_model
from lacuna.parallel.mesh import Layout
from lacuna.parallel.precision import compute_dtype, compute_in, keep_in_float32, store_in
from lacuna.parallel.processes import Process
from lacuna.train import checkpoint
from lacuna.train.reader import only_data


def find_form(source: str) -> tuple[str, bool]:
    """The folder or Hub id to load for `source`, and whether it is a checkpoint (else Hugging Face's form).

    A run folder stands for its final model, or while that is not there, for its newest complete
    checkpoint. Raises `UserError` when there is nothing to load.
    """
    if os.path.exists(os.path.join(source, checkpoint.MANIFEST)):
        return checkpoint.require_complete(source, "MODEL", Process()), True
    for folder in (source, os.path.join(source, "hf")):
        if any(
            os.path.exists(os.path.join(folder, file)) for file in ("config.json", ADAPTER_FILE)
        ):
            return folder, False
    for folder in (os.path.join(source, "checkpoint"), source):
        if newest := checkpoint.newest_complete(folder, Process()):
            return newest, True
    wrong = f"{source}: neither a Hugging Face folder (no config.json), nor a checkpoint (no {checkpoint.MANIFEST})"
    refuse(
        {
            f"{wrong}, nor a run folder (no hf/ and no complete checkpoint/step-N)": os.path.isdir(
                source
            )
        }
    )
    if not source.endswith(".gguf"):
        _require_on_hub(source)
    return hf_folder(source), False


def _require_on_hub(name: str) -> None:
    """Raises `UserError` unless a name is that of a model that was had from the Hub before, or is there.

    It is asked once, where transformers would try for a minute to have several files of what may be
    a misspelt folder.
    """
    problem = f"{name}: there is no such folder here, and no such model on the Hub, or it cannot be reached"
    with explained(problem, OSError, ValueError, HTTPError, mend=nearby(Path(name))):
        if try_to_load_from_cache(name, CONFIG_NAME) is None:
            model_info(name, timeout=10)


@dataclass(frozen=True)
class Opened:
    """A model on the CPU, its tokenizer, and what describes it.

    Attributes:
        description: folder or Hub id of its description.
        dtype: of its weights as they are to be, whatever those in memory have; None: as they are.
        run: of a model with adapters, the settings that these were trained with; its base is as it
            is in files.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    description: str
    dtype: torch.dtype | None
    run: Config | None = None


def open_model(source: str, base: str | None = None, trust_remote_code: bool = False) -> Opened:
    """The model at `source`, in any form; adapters are beside their base, or beside the model `base`.

    Raises `UserError` when it cannot be opened.
    """
    path, is_checkpoint = find_form(source)
    description = os.path.join(path, checkpoint.DESCRIPTION) if is_checkpoint else path
    run = _run_of(path, description, base, trust_remote_code)
    refuse(
        {f"convert: --base: {source} has no adapters to merge": base is not None and run is None}
    )
    if run is not None and base is not None:
        check_base("convert: --base", base, run.model.name_or_path)
        model = run.model.model_copy(update={"name_or_path": base, "config": None})
        run = run.model_copy(update={"model": model, "quantization": QuantizationConfig()})
    description = (
        description if is_checkpoint or run is None else hf_folder(str(run.model.name_or_path))
    )
    problem = f"{source}: no folder or Hub model that transformers can open"
    kinds = (OSError, ValueError, SafetensorError)
    with explained(
        problem, *kinds, mend="check the files, the name, and whether the Hub can be reached"
    ):
        model_config = open_with(AutoConfig, description, trust_remote_code)
        tokenizer = open_with(AutoTokenizer, description, trust_remote_code)
        if run is None and not is_checkpoint:
            wrong = f"{source}: its weights are quantised: give the model that they were made from"
            refuse({wrong: getattr(model_config, "quantization_config", None) is not None})
            with only_data(
                f"{source}: its file of weights", (UnpicklingError, EOFError, RuntimeError)
            ):
                model = open_with(AutoModelForCausalLM, path, trust_remote_code, dtype="auto")
            return Opened(model, tokenizer, description, None)
    if run is not None and not is_checkpoint:
        packed = getattr(model_config, "quantization_config", None) or {}
        form = "int8" if packed.get("load_in_8bit") else "nf4" if packed else "none"
        run = run.model_copy(update={"quantization": QuantizationConfig(base=form)})
    if run is not None:
        template = Path(path, CHAT_TEMPLATE_FILE)
        tokenizer.chat_template = (
            template.read_text() if template.exists() else tokenizer.chat_template
        )
        model = _beside_base(run, tokenizer)
    else:
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(model_config)
        keep_in_float32(model, model.dtype)
        model.tie_weights()
    if is_checkpoint:
        checkpoint.read_tensors(path, checkpoint.model_tensors(model), Process())
    elif run is not None:
        load_adapters(model, trained_names(model), run.lora)
    return Opened(model, tokenizer, description, model_config.dtype or torch.float32, run)


def _run_of(
    path: str, description: str, base: str | None, trust_remote_code: bool
) -> Config | None:
    """The settings that the adapters in `path` were trained with, on `base` if they do not say, or None."""
    run, adapter = Path(description, checkpoint.RUN), Path(path, ADAPTER_FILE)
    if run.exists():
        settings = tomllib.loads(run.read_text())
        settings["lora"] |= {
            "adapter": ()
        }  # what it began as may be gone, and its tensors are here
        settings["model"] |= {"trust_remote_code": trust_remote_code}  # for who opens it to say
        del settings["job"][
            "task"
        ]  # maybe a module of the user's, which opening the model need not have
        return Config.model_validate(settings)
    if not adapter.exists():
        return None
    base = described_adapter(path).get("base_model_name_or_path") or base
    refuse(
        {
            f"{adapter}: does not say of which model it is: add base_model_name_or_path, or give --base": not base
        }
    )
    fits = {"seq_len": 1}  # any model
    model = {"name_or_path": base, "trust_remote_code": trust_remote_code}
    return Config.model_validate({"model": model, "training": fits, "lora": {"adapter": path}})


def _beside_base(run: Config, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The model of a run that trains adapters, whole on the CPU, with empty adapters.

    Weights have the dtype of their files, of which they are a view then; such as the run has
    quantised are, each time that they are used. Only where the files have them quantised they are
    packed.
    """
    base = load_model_config(run, tokenizer)
    if run.model.name_or_path:
        dtype = "bfloat16" if base.dtype == torch.bfloat16 else "float32"
        run = run.model_copy(
            update={"training": run.training.model_copy(update={"mixed_precision_param": dtype})}
        )
    model = plan_model(run, tokenizer, Layout(), "cpu")
    if getattr(base, "quantization_config", None):
        pack_layers(model)
    fill_model(model, trained_names(model), run, torch.device("cpu"), fill=True)
    compute_in(model, compute_dtype(run, "cpu"))  # not what is trained whole has
    return model.eval()


def _merge(opened: Opened, dtype: torch.dtype | None) -> PreTrainedModel:
    """The model that was opened, its adapters merged into it in place, with weights of this dtype, if one is given."""
    merge_adapters(opened.model)
    if dtype is not None:
        store_in(opened.model, dtype)
    return opened.model


def load_any_model(
    source: str, device: str, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model on `device`, ready to generate, adapters merged, and its tokenizer; `source` may have any form.

    Raises `UserError` when it cannot be opened.
    """
    opened = open_model(source, trust_remote_code=trust_remote_code)
    return _merge(opened, opened.dtype).to(device).eval(), opened.tokenizer


@torch.no_grad()
def probe_logits(model: PreTrainedModel) -> torch.Tensor:
    """What the model makes of a row of 16 tokens from all over its vocabulary: float32 [16, vocabulary]."""
    ids = torch.arange(16) * len(model.get_input_embeddings().weight) // 16
    return model(input_ids=ids[None]).logits[0].float()


def convert(
    source: str,
    target: str,
    form: str,
    dtype: str | None = None,
    base: str | None = None,
    adapter_only: bool = False,
    trust_remote_code: bool = False,
) -> str:
    """Writes the model at `source` to `target` as `form`, with weights of the type `dtype`, by default its own.

    A form is `hf`, `gguf`, which has types of its own, or `dcp`, a checkpoint of weights to start
    from. Adapters are merged, to `hf` one tensor at a time, into what they were trained beside, or
    into the model `base`; with `adapter_only` they are written alone. Returns what there is to say
    of it.
    """
    adapter = os.path.join(find_form(source)[0], "adapter")
    has_adapter = os.path.isdir(adapter)
    if adapter_only and has_adapter and base is None:
        shutil.copytree(adapter, target)
        return ""
    opened = open_model(
        adapter if has_adapter and base is not None else source, base, trust_remote_code
    )
    model, run = opened.model, opened.run
    refuse({f"convert: --adapter-only: {source} has no adapters": adapter_only and run is None})
    kind = opened.dtype if dtype is None or form == "gguf" else getattr(torch, dtype)
    if adapter_only:
        export_adapter(model, opened.tokenizer, run.lora, run.model.name_or_path, target)
    elif form == "hf":
        export_model(model, opened.tokenizer, target, kind or model.dtype, opened.description)
    elif form == "gguf":
        export_gguf(_merge(opened, kind), opened.tokenizer, target, str(dtype))
    else:
        tensors = checkpoint.model_tensors(_merge(opened, kind))
        describe = partial(
            save_model_description, model.config, opened.tokenizer, opened.description
        )
        checkpoint.write_checkpoint(
            os.path.abspath(target), tensors, {"step": 0}, describe, Process()
        )
    return "" if run is None or adapter_only or form != "hf" else _said_of_merging(opened, target)


def _said_of_merging(opened: Opened, target: str) -> str:
    """Into what the adapters of a model were merged, and how near the model at `target` is to it with them beside."""
    before, trust = probe_logits(opened.model), opened.run.model.trust_remote_code
    after = probe_logits(open_with(AutoModelForCausalLM, target, trust, dtype="auto").eval())
    form = opened.run.quantization.base
    stored = (
        "as its files have them"
        if form == "none"
        else f"dequantised from {form}, as they were in training"
    )
    shown = [
        " ".join(f"{value:.3f}" for value in logits.amax(1)[:4].tolist())
        for logits in (before, after)
    ]
    return (
        f"Merged into the weights of {opened.run.model.name_or_path or 'the run'}, {stored}. Highest logits of four "
        f"probe tokens before: {shown[0]}, after: {shown[1]}; the largest difference of any of 16 is "
        f"{(before - after).abs().max():.2g}.\n"
    )
