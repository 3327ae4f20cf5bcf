"""The model of a run: first without memory, then made, in the order of `build_model`'s lines."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lacuna.config import Config, UserError, of_stage
from lacuna.config.sections import described_adapter
from lacuna.data import Batch
from lacuna.model import architecture
from lacuna.model.attention_choice import attention_choices
from lacuna.model.checks import check_dtypes, check_layout, check_ties, required_router
from lacuna.model.flash import install_fastest_kernels
from lacuna.model.head import Head, TokenLoss, attach_loss, hidden_states, loss_sums, probe_head
from lacuna.model.inputs import Inputs, prepare_inputs
from lacuna.model.layers.adapter_files import load_adapters
from lacuna.model.layers.casting import compute_in
from lacuna.model.layers.lora import add_adapters, initialize_adapters, trained_names
from lacuna.model.probe import find_attention, longest_position, rows_of
from lacuna.model.probe_shares import require_shareable
from lacuna.model.rotation import fix_rotations
from lacuna.model.specimen import specimen
from lacuna.model.vocabulary import (
    embeds_on_cpu,
    freeze_rows,
    look_up_on_cpu,
    require_gradients_of_embedded,
)
from lacuna.model.weights import check_base, fill_model, stored_slices
from lacuna.parallel.fsdp import is_alone
from lacuna.parallel.mesh import Layout, Mesh
from lacuna.parallel.parallelize import compile_enabled, parallelize
from lacuna.parallel.pipeline import Pipeline
from lacuna.parallel.precision import casts_by_itself, compute_dtype, stored_dtype
from lacuna.parallel.stages import Stage
from lacuna.parallel.tensor import check_split

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuiltModel:
    """A model ready to train, and what the loop needs to know of it.

    Attributes:
        model: all parameters that this rank has a share of, under their names.
        stages: the parts of it that this rank runs: the model itself, or its stages of a pipeline.
        pipeline: runs the stages, when there are several over all ranks.
        flops: of a number of tokens in documents of these lengths, in all that shares the work, as
            `step_flops` says.
    """

    config: Config
    model: PreTrainedModel
    stages: Sequence[Stage]
    pipeline: Pipeline | None
    mesh: Mesh
    device: torch.device
    head: Head
    parameters: int
    flops: Callable[[int, Tensor], float]

    def inputs(self, batch: Batch) -> Inputs:
        """This rank's share of `batch`, on the device."""
        attention = self.model.config._attn_implementation
        gather = self.config.parallelism.disable_loss_parallel
        routed = self.head.router is not None
        return prepare_inputs(batch, attention, self.device, self.mesh, gather, routed)


def plan_model(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    layout: Layout,
    device_type: str,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """The run's model without memory, with the attention that it will have if that is tried out.

    It is where there is a `device` to try it on. Raises `UserError` for a model that cannot be had
    like that.
    """
    model_config = architecture.load_model_config(config.model, tokenizer)
    base = config.quantization.base
    is_packed = bool(getattr(model_config, "quantization_config", None))
    left: list[str] = []
    if is_packed:
        from lacuna.model.layers.quantized_files import take_off_quantization

        left = take_off_quantization(model_config, base)
    for number, curriculum_stage in enumerate(config.stages()):
        with of_stage(number):
            check_layout(curriculum_stage, model_config, layout)
    dtype = compute_dtype(config.training, device_type)
    attention, *_ = names = attention_choices(
        config.model.attention, config.data.document_mask, model_config, device_type, dtype, layout
    )
    if device is not None:
        rows = rows_of(config)
        longest = longest_position(config)
        attention = find_attention(names, model_config, rows, longest, device, dtype)
        require_shareable(model_config, layout, rows, longest, device)
    stored = stored_dtype(config.training, config.lora, device_type)
    model = architecture.meta_model(model_config, attention, stored)
    if layout.tp > 1:
        check_split(architecture.decoder_layers(model), model_config)
    if base != "none":
        from lacuna.model.layers.quantized import quantize_layers

        quantize_layers(model, base, left)
    if config.lora.rank:
        _add_adapters(model, config, is_packed)
    if not is_alone(config.training, layout):
        check_dtypes(model, config.training)
        check_ties(model)
    return model


def _add_adapters(model: PreTrainedModel, config: Config, is_packed: bool) -> None:
    """Gives a model the adapters that its run trains, in place.

    Raises `UserError` for what cannot learn; `is_packed` says that the model's files are quantised.
    """
    settings = config.lora
    if config.model.name_or_path:
        for folder in settings.adapter:
            stated = described_adapter(folder).get("base_model_name_or_path")
            check_base("lora.adapter", config.model.name_or_path, stated)
    quantised = []
    if is_packed:
        from lacuna.model.layers.quantized import quantized_modules

        quantised = [*quantized_modules(model).items()]
    add_adapters(model, settings, getattr(torch, config.training.dtype))
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
    vocabulary = architecture.vocabulary_weights(model).values()
    learns = any(weight.requires_grad for weight in vocabulary)
    if config.model.train_new_tokens_only and not learns:
        raise UserError(
            "model.train_new_tokens_only, lora.modules: adapters leave the vocabulary frozen: name "
            "its embedding in lora.modules."
        )


def build_model(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    mesh: Mesh,
    device: torch.device,
    fill: bool = True,
) -> BuiltModel:
    """Builds and spreads the model, and unless its weights will come from a checkpoint, fills it.

    Raises `UserError` for whatever the configuration gets wrong.
    """
    model = plan_model(config, tokenizer, mesh.layout, device.type, device)
    logger.info("attention: %s", install_fastest_kernels(model.config, mesh.layout))
    router = required_router(config, model.config, mesh.layout, device)
    if router is not None:
        logger.info("load-balancing loss: times %g; layers are not compiled", router.coefficient)
        uncompiled = config.compile.model_copy(update={"enable": False})
        config = config.model_copy(update={"compile": uncompiled})
    compiled = compile_enabled(config.compile, config.parallelism, device.type)
    head = probe_head(specimen(model.config).to(device), compiled)
    head = replace(head, router=router)
    parameters = model.num_parameters()
    products = architecture.non_embedding_parameters(model)
    flops = partial(architecture.step_flops, products, architecture.attention_widths(model.config))
    trained = trained_names(model)
    if config.quantization.base != "none":
        from lacuna.model.layers.quantized import pack_layers

        pack_layers(model)
    stages = parallelize(model, architecture.decoder_layers(model), mesh, config)
    fill_model(model, trained, config, device, fill)
    for said in fix_rotations(model, longest_position(config)):
        logger.info("rotations of %s", said)
    if fill and config.lora.rank:
        _begin_adapters(model, trained, config, device)
    alone = is_alone(config.training, mesh.layout)
    if alone or casts_by_itself(model, config.training, config.quantization, device.type):
        compute_in(model, compute_dtype(config.training, device.type))
    if embeds_on_cpu(model, config.quantization.base, alone, device.type):
        look_up_on_cpu(model.get_input_embeddings())
    if config.lora.rank and compiled and mesh.layout.pp == 1:
        require_gradients_of_embedded(model)
    for stage in stages:
        attach_loss(stage.module)
    if config.model.train_new_tokens_only:
        freeze_rows(model, tokenizer.convert_tokens_to_ids([*config.model.new_tokens]))
    pipeline = None
    if mesh.layout.pp > 1:
        dtype = compute_dtype(config.training, device.type)
        run = partial(_run_stage, head)
        pipeline = Pipeline(config.parallelism, mesh, device, dtype, stages, run)
    return BuiltModel(config, model, stages, pipeline, mesh, device, head, parameters, flops)


def _begin_adapters(
    model: PreTrainedModel, trained: set[str], config: Config, device: torch.device
) -> None:
    """Gives the adapters of a filled model what they begin as, in place."""
    initialize_adapters(model, config.training.seed)
    if config.lora.init == "loftq":
        from lacuna.model.layers.loftq import initialize_from_quantization_error

        slices = stored_slices(str(config.model.name_or_path))
        initialize_from_quantization_error(model, slices, device)
    if config.lora.adapter:
        load_adapters(model, trained, config.lora)


def _run_stage(head: Head, stage: Stage, inputs: Inputs, loss: TokenLoss) -> Tensor:
    """What a pipeline hands on: hidden states, and from the last stage the sums of `loss`."""
    if stage.is_last:
        return loss_sums(stage.module, head, loss, inputs)
    hidden = hidden_states(stage.module, inputs)
    # A copy where it is a view, since zero-bubble schedules detach it in place.
    return hidden.clone() if hidden._is_view() else hidden
