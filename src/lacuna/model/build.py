"""The model of a run: first without memory, then made, in the order of `build_model`'s lines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import distributions
from typing import cast

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lacuna.config import Config, in_curriculum_stage, logger
from lacuna.config.machine import Float8Config, ParallelismConfig
from lacuna.config.sections import TrainingConfig
from lacuna.data import Batch
from lacuna.model import architecture
from lacuna.model.attention_choice import attention_choices
from lacuna.model.checks import (
    check_dtypes,
    check_layout,
    check_lengths,
    check_mixture,
    check_ties,
    compiled_parts,
    required_router,
)
from lacuna.model.flops import flops_of
from lacuna.model.forward import Reading, attach_forward, hidden_states, run_forward
from lacuna.model.head import Head, probe_head
from lacuna.model.inputs import Inputs, prepare_inputs
from lacuna.model.layers.adapter_files import begin_adapters
from lacuna.model.layers.casting import compute_in
from lacuna.model.layers.lora import trained_names
from lacuna.model.layers.replacement import replace_layers
from lacuna.model.probe import rows_of
from lacuna.model.probe_shares import tried_attention
from lacuna.model.rotation import fix_rotations
from lacuna.model.specimen import found_once, specimen
from lacuna.model.vocabulary import (
    embeddings_on_cpu,
    freeze_rows,
    look_up_on_cpu,
    require_gradients_of_embedded,
)
from lacuna.model.weights import fill_model
from lacuna.parallel.fsdp import is_alone
from lacuna.parallel.mesh import Layout, Mesh
from lacuna.parallel.parallelize import parallelize
from lacuna.parallel.pipeline import Pipeline
from lacuna.parallel.precision import (
    casts_by_itself,
    compute_dtype,
    frozen_training,
    stored_dtype,
)
from lacuna.parallel.stages import Stage
from lacuna.parallel.tensor import check_split


@dataclass(frozen=True)
class BuiltModel:
    """A model that is ready to train, and what the loop needs to know of it.

    Attributes:
        model: has all parameters of which this rank has a share, under their names.
        stages: the parts of the model that this rank runs: the model itself, or its stages of a
            pipeline.
        pipeline: runs the stages, where the model is cut into several.
        parameters: the number of all parameters of the whole model.
        flops: gives the FLOPs of a number of tokens in documents of these lengths, over all ranks
            that share the work (see `step_flops`).
        after_update: must be called after each change of the weights.
        training, parallelism: the settings that it was built with.
    """

    model: PreTrainedModel
    stages: Sequence[Stage]
    pipeline: Pipeline | None
    mesh: Mesh
    device: torch.device
    head: Head
    parameters: int
    flops: Callable[[int, Tensor], float]
    after_update: Callable[[], None]
    training: TrainingConfig
    parallelism: ParallelismConfig

    def inputs(self, batch: Batch) -> Inputs:
        """This rank's share of `batch`, on the device."""
        attention = self.model.config._attn_implementation
        how = self.parallelism.disable_loss_parallel, self.head.router is not None
        return prepare_inputs(batch, attention, self.device, self.mesh, *how)

    def read(self, batch: Batch, reading: Reading) -> Tensor | None:
        """What `reading` makes of a forward pass of `batch`; None without the last stage."""
        inputs = self.inputs(batch)
        if self.pipeline is not None:
            return self.pipeline.evaluate(inputs, reading)
        if self.head.router is not None:
            self.head.router.enter(inputs)
        return run_forward(self.model, reading, self.head, inputs)

    @property
    def has_head(self) -> bool:
        """Whether this rank runs the head, and so has the result of a forward pass."""
        return self.pipeline is None or self.stages[-1].is_last


def build_meta_model(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    layout: Layout,
    device_type: str,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Builds the run's whole model without memory: its shapes, adapters and quantised layers.

    Where there is a `device`, a small model tries on it which attention is exact, and that one is
    noted in the configuration; else it is the first that the run may have. Raises `UserError` for a
    model that the settings or the layout do not suit.
    """
    model_config = architecture.load_model_config(config.model, tokenizer)
    is_packed = bool(getattr(model_config, "quantization_config", None))
    unquantised: list[str] = []
    if is_packed:
        from lacuna.model.layers.quantized_files import take_off_quantization

        unquantised = take_off_quantization(model_config, config.quantization.base)
    for number, stage in enumerate(config.curriculum_stages()):
        with in_curriculum_stage(number):
            check_lengths(stage.training, model_config, layout)
    recomputed = config.activation_checkpoint
    check_layout(
        config.parallelism, config.compile, recomputed, config.validation, model_config, layout
    )
    dtype = compute_dtype(config.training, device_type)
    names = attention_choices(
        config.model.attention, config.data.document_mask, model_config, device_type, dtype, layout
    )
    attention = names[0]
    if device is not None:
        tried = names, model_config, rows_of(config.row_form), config.longest_piece
        attention = tried_attention(*tried, dtype, layout, device)
    if config.gives_scores:
        from lacuna.model.scores import make_scoring  # an extension

        make_scoring(model_config)
    model = architecture.meta_model(
        model_config, attention, stored_dtype(config.training, config.lora, device_type)
    )
    if layout.tp > 1:
        check_split(architecture.decoder_layers(model), model_config)
    check_mixture(model, config.parallelism, config.model, config.metrics, layout)
    replace_layers(model, config, is_packed, unquantised, layout, device)
    if not is_alone(config.training, layout):
        check_dtypes(model, config.training)
        check_ties(model)
    return model


def build_model(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    mesh: Mesh,
    device: torch.device,
    fill: bool = True,
) -> BuiltModel:
    """Builds the run's model, spreads it over the mesh, and with `fill` loads or draws its weights.

    Raises `UserError` for whatever the configuration gets wrong.
    """
    training = config.training
    parallelism = config.parallelism
    recomputed = config.activation_checkpoint
    model = build_meta_model(config, tokenizer, mesh.layout, device.type, device)
    logger.info("attention: %s", install_fastest_kernels(model.config, mesh.layout, device.type))
    dtype = compute_dtype(training, device.type)
    router = required_router(config.job.task, config.model, model.config, device)
    pieces = 1 if router is None else recomputed.mlp_chunks
    compiled = compiled_parts(config.compile, parallelism, dtype, model.config, pieces, device.type)
    is_compiled = compiled != "nothing"
    head = replace(_known_head(model.config, device), compiled=is_compiled, router=router)
    parameters = model.num_parameters()
    flops = flops_of(model)
    trained = trained_names(model)
    if config.quantization.base != "none":
        from lacuna.model.layers.quantized import pack_layers

        pack_layers(model)
    layers = architecture.decoder_layers(model)
    stages = parallelize(
        model, layers, mesh, parallelism, recomputed, compiled, training, config.quantization
    )
    _fill(model, trained, config, mesh.layout, device, fill)
    if config.lora.rank and is_compiled and mesh.layout.pp == 1:
        require_gradients_of_embedded(model)
    for stage in stages:
        attach_forward(stage.module)
        if router is not None:
            router.watch(stage.module, stage.layers)
    if config.model.train_new_tokens_only:
        new_ids = tokenizer.convert_tokens_to_ids([*config.model.new_tokens])
        freeze_rows(model, cast(list[int], new_ids))
    pipeline = None
    if mesh.layout.pp > 1:
        pipeline = Pipeline(parallelism, mesh, device, dtype, stages, partial(_run_stage, head))
    after = _after_update(model, config.float8, mesh)
    return BuiltModel(
        model, stages, pipeline, mesh, device, head, parameters, flops, after, training, parallelism
    )


def _known_head(model_config: PretrainedConfig, device: torch.device) -> Head:
    """How a model makes logits, which a small one is asked once."""
    return found_once(
        model_config,
        (probe_head, device),
        lambda: probe_head(specimen(model_config, device=device), compiled=False),
    )


def _fill(
    model: PreTrainedModel,
    trained: set[str],
    config: Config,
    layout: Layout,
    device: torch.device,
    fill: bool,
) -> None:
    """Gives a model memory and, in place, all that it begins with: weights, rotations, adapters.

    Without `fill` weights and adapters remain unknown. Where sharding does not cast the weights, it
    casts them itself, and an embedding that is to stay in CPU memory is looked up there.
    """
    training = config.training
    alone = is_alone(training, layout)
    on_cpu = embeddings_on_cpu(model, config.quantization.base, alone, device.type)
    fill_model(model, trained, config.model, config.lora, training, device, fill, on_cpu)
    for description in fix_rotations(model, config.longest_piece):
        logger.info("rotations of %s", description)
    if fill and config.lora.rank:
        source = config.model.name_or_path
        begin_adapters(model, trained, config.lora, source, training.seed, device)
    if alone or casts_by_itself(model, training, config.quantization, device.type):
        compute_in(model, compute_dtype(training, device.type))
    for path in on_cpu:
        look_up_on_cpu(model.get_submodule(path))


def install_fastest_kernels(
    model_config: PretrainedConfig, layout: Layout, device_type: str
) -> str:
    """Has the fastest kernels that are installed compute attention; says what computes it."""
    # By its own name, since FlashAttention 2's package has a module of the same name.
    if device_type != "cuda" or not any(distributions(name="flash-attn-4")):
        return str(model_config._attn_implementation)
    from lacuna.model.flash import install_flash_attention_4  # an extension

    return install_flash_attention_4(model_config, layout)


def _after_update(model: PreTrainedModel, settings: Float8Config, mesh: Mesh) -> Callable[[], None]:
    """What must be called after each change of a filled model's weights."""
    if not settings.enable_float8_linear:
        return lambda: None
    from lacuna.model.layers.float8 import gather_filled

    return gather_filled(model, settings, mesh)


def build_frozen(
    config: Config, tokenizer: PreTrainedTokenizerBase, mesh: Mesh, device: torch.device
) -> BuiltModel:
    """Builds a model that is not trained (a reference or a teacher), spread like one that is.

    Its weights have the dtype that they are computed with. Raises `UserError` as `build_model`
    does.
    """
    frozen = {"training": frozen_training(config.training, device.type)}
    built = build_model(config.model_copy(update=frozen), tokenizer, mesh, device)
    built.model.requires_grad_(False)
    return built


def _run_stage(head: Head, stage: Stage, inputs: Inputs, reading: Reading) -> Tensor:
    """What a stage of a pipeline makes: hidden states, and the last stage what `reading` makes."""
    if head.router is not None:
        head.router.enter(inputs, stage.index)
    module = stage.module
    made = reading(module, head, inputs) if stage.is_last else hidden_states(module, inputs)
    if head.router is not None:
        made = head.router.leave(made)
    # A copy where it is a view, since zero-bubble schedules detach it in place.
    return made.clone() if made._is_view() else made
