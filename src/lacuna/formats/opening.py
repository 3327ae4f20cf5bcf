"""Opens a trained model: an HF folder, adapter, checkpoint, run folder or GGUF file."""

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights
from transformers.utils.hub import CHAT_TEMPLATE_FILE

from lacuna.config import Config, UserError, explained
from lacuna.config.adapters import ADAPTER_FILE, QuantizationConfig, described_adapter
from lacuna.config.attentions import TRAINED, is_own
from lacuna.config.sections import ModelConfig
from lacuna.data.remote_code import open_with
from lacuna.data.unpacked import hf_folder
from lacuna.formats.checkpoint import (
    DESCRIPTION,
    RUN,
    model_tensors,
)
from lacuna.formats.finding import find_form
from lacuna.formats.reader import damage_explained, read_tensors
from lacuna.model.architecture import load_model_config
from lacuna.model.build import build_meta_model
from lacuna.model.kind import is_scoring
from lacuna.model.layers.adapter_files import load_adapters
from lacuna.model.layers.casting import compute_in
from lacuna.model.layers.lora import trained_names
from lacuna.model.layers.wrapping import merge
from lacuna.model.leftovers import check_unused, untied
from lacuna.model.weights import check_base, fill_model
from lacuna.parallel.mesh import Layout
from lacuna.parallel.precision import compute_dtype, keep_in_float32, store_in
from lacuna.parallel.processes import Process


@dataclass(frozen=True)
class Opened:
    """A model on the CPU, its tokenizer, and what describes it.

    Attributes:
        description: folder or Hub id of its description.
        dtype: what its weights are to have, whatever they have in memory; None: what they have.
        run: for a model with adapters, the settings that these were trained with; the base is
            quantised as in its files.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    description: str
    dtype: torch.dtype | None
    run: Config | None = None

    def merged(self, dtype: torch.dtype | None) -> PreTrainedModel:
        """The model, after its adapters are merged into it and its weights cast, in place."""
        merge(self.model)
        if dtype is not None:
            store_in(self.model, dtype)
        return self.model


def open_model(source: str, base: str | None = None, trust_remote_code: bool = False) -> Opened:
    """The model at `source`, in any form, with adapters beside their base or the model `base`.

    Raises `UserError` when it cannot be opened.
    """
    path, is_checkpoint = find_form(source)
    description = os.path.join(path, DESCRIPTION) if is_checkpoint else path
    run = _run_of_adapters(path, description, base, trust_remote_code)
    if run is None and base is not None:
        raise UserError(f"convert: --base: {source} has no adapters to merge.")
    if run is not None and base is not None:
        other = {"model": _other_base(run.model, base), "quantization": QuantizationConfig()}
        run = run.model_copy(update=other)
    if run is not None and not is_checkpoint:
        description = hf_folder(str(run.model.name_or_path))
    with explained(
        f"{source}: no folder or Hub model that transformers can open",
        *(OSError, ValueError, SafetensorError),
        mend="check the files, the name, and whether the Hub can be reached",
    ):
        model_config = open_with(AutoConfig, description, trust_remote_code)
        if is_scoring(model_config):
            raise UserError(
                f"{source}: is a model that scores, and makes no text: open the hf folder of its "
                "run with transformers' AutoModelForSequenceClassification."
            )
        tokenizer = open_with(AutoTokenizer, description, trust_remote_code)
        if is_own(model_config._attn_implementation):
            from lacuna.model.own_attention_choice import restore_attention  # an extension

            restore_attention(model_config, trust_remote_code)
        if run is None and not is_checkpoint:
            model = _open_whole(source, path, model_config, trust_remote_code)
            return Opened(model, tokenizer, description, None)
    if run is None:
        model = _empty_model(model_config)
    else:
        if not is_checkpoint:
            run = run.model_copy(update={"quantization": _quantization_of_files(model_config)})
        template = Path(path, CHAT_TEMPLATE_FILE)
        if template.exists():
            tokenizer.chat_template = template.read_text()
        model = _model_with_empty_adapters(run, tokenizer)
    if is_checkpoint:
        read_tensors(path, model_tensors(model), Process())
    elif run is not None:
        load_adapters(model, trained_names(model), run.lora)
    return Opened(model, tokenizer, description, model_config.dtype or torch.float32, run)


def _run_of_adapters(
    path: str, description: str, base: str | None, trust_remote_code: bool
) -> Config | None:
    """The settings that the adapters in `path` were trained with; None without adapters.

    If they do not say beside which model that was, it is `base`.
    """
    settings_file = Path(description, RUN)
    adapter = Path(path, ADAPTER_FILE)
    if settings_file.exists():
        settings = tomllib.loads(settings_file.read_text())
        # The adapters that training began from may be gone; their tensors are in the checkpoint.
        settings["lora"]["adapter"] = ()
        # Whoever opens the model decides whether its code is trusted.
        settings["model"]["trust_remote_code"] = trust_remote_code
        # Its task may be a module of the user's, which opening the model need not have.
        del settings["job"]["task"]
        # The weights are those of other products too, and these may need a GPU.
        settings.pop("float8", None)
        return Config.model_validate(settings)
    if not adapter.exists():
        return None
    base = described_adapter(path).get("base_model_name_or_path") or base
    if not base:
        raise UserError(
            f"{adapter}: does not say of which model it is: add base_model_name_or_path, or give "
            f"--base."
        )
    model = {"name_or_path": base, "trust_remote_code": trust_remote_code}
    shortest = {"seq_len": 1}  # which fits any model
    return Config.model_validate({"model": model, "training": shortest, "lora": {"adapter": path}})


def _other_base(settings: ModelConfig, base: str) -> ModelConfig:
    """The settings with another model, beside which the adapters must make sense."""
    check_base("convert: --base", base, settings.name_or_path)
    return settings.model_copy(update={"name_or_path": base, "config": None})


def _quantization_of_files(model_config: PretrainedConfig) -> QuantizationConfig:
    """How the weights of a model are quantised in its files."""
    packed = getattr(model_config, "quantization_config", None)
    if not packed:
        base = "none"
    elif packed.get("load_in_8bit"):
        base = "int8"
    else:
        base = "nf4"
    return QuantizationConfig.model_validate({"base": base})


def _open_whole(
    source: str, path: str, model_config: PretrainedConfig, trust_remote_code: bool
) -> PreTrainedModel:
    """The model in a Hugging Face folder or on the Hub.

    Raises `UserError` where weights are quantised, damaged, of other shapes, two that should be
    one, or not there at all: transformers would draw those at random.
    """
    if getattr(model_config, "quantization_config", None) is not None:
        raise UserError(
            f"{source}: its weights are quantised: give the model that they were made from."
        )
    with damage_explained(
        f"{source}: its file of weights", (UnpicklingError, EOFError, RuntimeError)
    ):
        settings: dict[str, Any] = {"dtype": "auto", "output_loading_info": True}
        if is_own(model_config._attn_implementation):
            settings["config"] = model_config  # which says so, also when it is written again
        model, info = open_with(AutoModelForCausalLM, path, trust_remote_code, **settings)
    if lacking := sorted(info["missing_keys"]):
        raise UserError(
            f"{source}: its files lack {', '.join(lacking[:3])}: give one that has all weights."
        )
    # transformers takes off those that differ.
    for pair in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if pair[0] not in model.all_tied_weights_keys:
            raise untied(source, pair)
    check_unused(info["unexpected_keys"], model, source)
    return cast(PreTrainedModel, model)


def _empty_model(model_config: PretrainedConfig) -> PreTrainedModel:
    """The model of a configuration, whose weights are to be read."""
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(model_config)
    keep_in_float32(model, model.dtype)
    model.tie_weights()
    return cast(PreTrainedModel, model)


def _model_with_empty_adapters(run: Config, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The model of a run that trains adapters, whole on the CPU, with empty adapters.

    Weights have the dtype of their files and are views of these. Those that the run has quantised
    are quantised each time that they are used; they are packed only where their files have them so.
    """
    base = load_model_config(run.model, tokenizer)
    if run.model.name_or_path:
        dtype = "bfloat16" if base.dtype == torch.bfloat16 else "float32"
        training = run.training.model_copy(update={"mixed_precision_param": dtype})
        run = run.model_copy(update={"training": training})
    model = build_meta_model(run, tokenizer, Layout(), "cpu")
    if getattr(base, "quantization_config", None):
        from lacuna.model.layers.quantized import pack_layers  # an extension

        pack_layers(model)
    cpu = torch.device("cpu")
    fill_model(model, trained_names(model), run.model, run.lora, run.training, cpu, fill=True)
    compute_in(model, compute_dtype(run.training, "cpu"))  # not the dtype of what is trained whole
    attention = str(model.config._attn_implementation)
    if attention.startswith(TRAINED):  # which would have to be told of documents
        model.set_attn_implementation(attention.removeprefix(TRAINED))
    model.eval()
    return model


def load_any_model(
    source: str, device: str, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model on `device`, ready to generate, adapters merged, and its tokenizer.

    `source` may have any form. Raises `UserError` when it cannot be opened.
    """
    opened = open_model(source, trust_remote_code=trust_remote_code)
    model = opened.merged(opened.dtype)
    model.to(device)  # type: ignore[arg-type]  # transformers wraps torch's method
    model.eval()
    return model, opened.tokenizer
