"""What a run replaces in the layers of its model, in the order in which it is done."""

import torch
from transformers import PreTrainedModel

from lacuna.config import Config, UserError
from lacuna.config.adapters import LoraConfig, described_adapter
from lacuna.config.sections import ModelConfig
from lacuna.model.architecture import vocabulary_weights
from lacuna.model.layers.lora import add_adapters
from lacuna.model.weights import check_base
from lacuna.parallel.mesh import Layout
from lacuna.parallel.precision import named_dtype


def replace_layers(
    model: PreTrainedModel,
    config: Config,
    is_packed: bool,
    unquantised: list[str],
    layout: Layout,
    device: torch.device | None,
) -> None:
    """Quantises layers, has them compute in float8 or in pieces and have adapters, as a run asks.

    That is done in place. Experts that transformers would compute by its grouped products are
    computed by lacuna's own. `is_packed` says that the model's files are quantised, all but the
    layers `unquantised`. The `device` that is to compute them must be able to, if it is known.
    Raises `UserError` for what cannot be replaced so.
    """
    if getattr(model.config.get_text_config(), "_experts_implementation", None) == "grouped_mm":
        from lacuna.parallel.grouped_experts import install_grouped_experts  # an extension

        install_grouped_experts(model)
    if config.quantization.base != "none":
        from lacuna.model.layers.quantized import quantize_layers

        learning = config.parallelism if config.lora.rank else None
        quantize_layers(model, config.quantization.base, unquantised, learning)
    if config.float8.enable_float8_linear:
        from lacuna.model.layers.float8 import (
            compute_in_float8,
            has_uneven_products,
            tokens_of_experts,
        )

        stages = [stage.training for stage in config.curriculum_stages()]
        pieces = config.activation_checkpoint.mlp_chunks
        pads = has_uneven_products(stages, config.row_form, pieces, layout.cp)
        tokens = tokens_of_experts(stages, config.parallelism, pieces, layout)
        compute_in_float8(model, config.float8, config.training, pads, tokens, device)
    if config.lora.rank:
        _add_adapters(
            model, config.lora, config.model, named_dtype(config.training.dtype), is_packed
        )
    if config.activation_checkpoint.mlp_chunks > 1:
        from lacuna.model.pieces import compute_in_pieces

        compute_in_pieces(model, config.activation_checkpoint.mlp_chunks, layout.tp)


def _add_adapters(
    model: PreTrainedModel,
    settings: LoraConfig,
    base: ModelConfig,
    dtype: torch.dtype,
    is_packed: bool,
) -> None:
    """Gives a model, in place, the adapters of this dtype that its run trains beside its `base`.

    `is_packed` says that the model's files are quantised. Raises `UserError` where something that
    is to be trained cannot learn.
    """
    if base.name_or_path:
        for folder in settings.adapter:
            stated = described_adapter(folder).get("base_model_name_or_path")
            check_base("lora.adapter", base.name_or_path, stated)
    quantised = []
    if is_packed:
        from lacuna.model.layers.quantized import quantized_modules

        quantised = [*quantized_modules(model).items()]
    add_adapters(model, settings, dtype)
    lost = [name for name, layer in quantised if layer.weight.requires_grad]
    if lost:
        raise UserError(
            f"lora.modules: {lost[:1]} is quantised in the model's files, where only adapters "
            "learn."
        )
    if is_packed and settings.init == "loftq":
        raise UserError(
            "lora.init = loftq: the model's files are quantised, and no longer have what that "
            "took; leave it out."
        )
    vocabulary = vocabulary_weights(model).values()
    learns = any(weight.requires_grad for weight in vocabulary)
    if base.train_new_tokens_only and not learns:
        raise UserError(
            "model.train_new_tokens_only, lora.modules: adapters leave the vocabulary frozen: name "
            "its embedding in lora.modules."
        )
