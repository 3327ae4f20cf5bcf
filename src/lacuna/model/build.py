"""The model of a run: what its layout asks of it, then the making, in the order of the lines of `build_model`."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lacuna.config import Config, UserError, of_stage, refuse
from lacuna.config.adapters import described_adapter
from lacuna.data import Batch
from lacuna.model import architecture
from lacuna.model.attention import attention_choices, install_fastest_kernels
from lacuna.model.forward import Reading, attach_forward, hidden_states
from lacuna.model.head import Head, probe_head
from lacuna.model.inputs import Inputs, prepare_inputs
from lacuna.model.lora import (
    add_adapters,
    initialize_adapters,
    initialize_from_quantization_error,
    load_adapters,
    trained_names,
)
from lacuna.model.probe import find_attention, runs_by_itself
from lacuna.model.probe_shares import require_shareable
from lacuna.model.quantization import (
    pack_layers,
    quantize_layers,
    quantized_modules,
    take_off_quantization,
)
from lacuna.model.rotation import fix_rotations
from lacuna.model.router import Router, asks_for_router_loss, check_router_loss, find_router
from lacuna.model.specimen import specimen
from lacuna.model.weights import check_base, fill_model, stored_slices
from lacuna.parallel.fsdp import is_alone, local, own_part
from lacuna.parallel.mesh import Layout, Mesh
from lacuna.parallel.parallelize import compile_enabled, parallelize
from lacuna.parallel.pipeline import Pipeline, Stage, check_pipeline
from lacuna.parallel.precision import (
    casts_by_itself,
    compute_dtype,
    compute_in,
    kept_in_float32,
    stored_dtype,
)
from lacuna.parallel.tensor import check_split, check_tensor_parallel

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
        attention, gather = (
            self.model.config._attn_implementation,
            self.config.parallelism.disable_loss_parallel,
        )
        routed = self.head.router is not None
        return prepare_inputs(batch, attention, self.device, self.mesh, gather, routed)

    def read(self, batch: Batch, reading: Reading) -> Tensor | None:
        """What `reading` makes of a forward pass of `batch`; None where other ranks have the last stage."""
        inputs = self.inputs(batch)
        if self.pipeline is not None:
            return self.pipeline.evaluate(inputs, reading)
        return self.model.run_forward(reading, self.head, inputs)

    @property
    def has_head(self) -> bool:
        """Whether this rank runs the head, and so learns what is wanted of a forward pass."""
        return self.pipeline is None or self.stages[-1].is_last


def check_layout(config: Config, model_config: PretrainedConfig, layout: Layout) -> None:
    """Raises `UserError` for sequences too long for the model, and a layout that it or their length does not allow."""
    training = config.training
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None) or 0
    too_long = (
        f"training.{'context_len' if training.varlen else 'seq_len'}: {training.context_len} is more than the "
        f"{positions} positions of the model: lower it, or raise max_position_embeddings in the model's configuration"
    )
    length, cuts = training.seq_len, layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
    uneven = (
        f"training.seq_len: {length} is no multiple of tensor_parallel_degree × 2 × context_parallel_degree = "
        f"{layout.tp} × 2 × {layout.cp}, the pieces of a sequence: the nearest above is {-(-length // cuts) * cuts}"
    )
    prompts = "validation.prompts: sampling needs data parallelism only; use lacuna generate on the run's folder"
    refuse(
        {
            too_long: 0 < positions < training.context_len,  # XLNet says -1 for no limit
            uneven: length % cuts > 0,
            prompts: layout.sharing > 1 and bool(config.validation.prompts),
        }
    )
    if layout.tp > 1:
        check_tensor_parallel(model_config, layout.tp)
    if layout.pp > 1:
        check_pipeline(config, model_config)


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
    model_config, base = architecture.load_model_config(config, tokenizer), config.quantization.base
    is_packed = bool(getattr(model_config, "quantization_config", None))  # which is taken off
    left = take_off_quantization(model_config, base)
    for number, stage in enumerate(config.stages()):
        with of_stage(number):
            check_layout(stage, model_config, layout)
    dtype = compute_dtype(config, device_type)
    attention, *_ = names = attention_choices(config, model_config, device_type, dtype, layout)
    if device is not None:
        attention = find_attention(names, model_config, config, device, dtype)
        require_shareable(model_config, config, layout, device)
    model = architecture.meta_model(model_config, attention, stored_dtype(config, device_type))
    if layout.tp > 1:
        check_split(architecture.decoder_layers(model), model_config)
    if base != "none":
        quantize_layers(model, base, left)
    for folder in config.lora.adapter if config.model.name_or_path else ():
        check_base(
            "lora.adapter",
            config.model.name_or_path,
            described_adapter(folder).get("base_model_name_or_path"),
        )
    if config.lora.rank:
        packed = quantized_modules(model) if is_packed else {}
        add_adapters(model, config.lora, getattr(torch, config.training.dtype))
        lost = [name for name, one in packed.items() if one.weight.requires_grad]
        refuse(
            {
                f"lora.modules: {lost[:1]} is quantised in the model's files, where only adapters learn": lost
                != []
            }
        )
        gone = "lora.init = loftq: the model's files are quantised, and no longer have what that took; leave it out"
        refuse({gone: is_packed and config.lora.init == "loftq"})
        learns = any(
            weight.requires_grad for weight in architecture.vocabulary_weights(model).values()
        )
        frozen = "model.train_new_tokens_only, lora.modules: adapters leave the vocabulary frozen: name its embedding"
        refuse({f"{frozen} in lora.modules": config.model.train_new_tokens_only and not learns})
    if not is_alone(config, layout):
        check_dtypes(model, config)
        check_ties(model)
    return model


def check_dtypes(model: PreTrainedModel, config: Config) -> None:
    """Raises `UserError` where weights of several dtypes would be trained, which cannot be sharded together."""
    kept = kept_in_float32(model, getattr(torch, config.training.dtype)) & trained_names(model)
    if kept:
        raise UserError(
            f"training.dtype: transformers keeps {min(kept)} in float32, and what is trained cannot be "
            f"sharded beside it in {config.training.dtype}: set training.dtype = float32."
        )


def check_ties(model: PreTrainedModel) -> None:
    """Raises `UserError` where layers share weights, which are sharded one layer at a time."""
    layers = architecture.decoder_layers(model)
    layer_of = {module: place for place, layer in enumerate(layers) for module in layer.modules()}
    for pair in model.all_tied_weights_keys.items():
        ends = {layer_of.get(model.get_submodule(name.rpartition(".")[0])) for name in pair}
        if len(ends) == 2 and None not in ends:
            raise UserError(
                f"model: {' and '.join(pair)} are one weight, but layers are sharded one by one: use one process."
            )


def required_router(
    config: Config, model_config: PretrainedConfig, layout: Layout, device: torch.device
) -> Router | None:
    """What the load-balancing loss of a run takes, or None where nothing asks for one.

    Raises `UserError` where it cannot be had exactly.
    """
    if not asks_for_router_loss(model_config):
        return None
    model = specimen(model_config).to(device)
    with runs_by_itself(model):
        router = find_router(model)
    if router is not None:
        check_router_loss(config, layout)
    return router


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
    head = probe_head(specimen(model.config).to(device), compile_enabled(config, device.type))
    head = replace(head, router=router)
    parameters, products = model.num_parameters(), architecture.non_embedding_parameters(model)
    flops = partial(architecture.step_flops, products, architecture.attention_widths(model.config))
    trained = trained_names(model)
    pack_layers(model)
    stages = parallelize(model, architecture.decoder_layers(model), mesh, config)
    fill_model(model, trained, config, device, fill)
    for said in fix_rotations(model, max(one.training.context_len for one in config.stages())):
        logger.info("rotations of %s", said)
    if fill:
        initialize_adapters(model, config.training.seed)
        if config.lora.init == "loftq":
            initialize_from_quantization_error(
                model, stored_slices(str(config.model.name_or_path)), device
            )
        if config.lora.adapter:
            load_adapters(model, trained, config.lora)
    if is_alone(config, mesh.layout) or casts_by_itself(model, config, device.type):
        compute_in(model, compute_dtype(config, device.type))
    if embeds_on_cpu(config, mesh.layout, model, device.type):
        look_up_on_cpu(model.get_input_embeddings())
    if config.lora.rank and compile_enabled(config, device.type) and mesh.layout.pp == 1:
        # Else the first layer, into which no gradient goes back, would be compiled anew for every
        # kind of batch.
        embedded = model.get_input_embeddings()
        embedded.register_forward_hook(
            lambda _, __, found: found.requires_grad_(torch.is_grad_enabled())
        )
    for stage in stages:
        attach_forward(stage.module)
    if config.model.train_new_tokens_only:
        freeze_rows(model, tokenizer.convert_tokens_to_ids([*config.model.new_tokens]))
    pipeline = (
        Pipeline(config, mesh, device, stages, partial(_run_stage, head))
        if mesh.layout.pp > 1
        else None
    )
    return BuiltModel(config, model, stages, pipeline, mesh, device, head, parameters, flops)


def build_frozen(
    config: Config, tokenizer: PreTrainedTokenizerBase, mesh: Mesh, device: torch.device
) -> BuiltModel:
    """A model of these settings that is only asked: spread like one that is trained.

    Its weights have the dtype that they are computed with. Raises `UserError` as `build_model` does.
    """
    dtype = str(compute_dtype(config, device.type)).removeprefix("torch.")
    training = config.training.model_copy(update={"dtype": dtype})
    built = build_model(config.model_copy(update={"training": training}), tokenizer, mesh, device)
    built.model.requires_grad_(False)
    return built


def embeds_on_cpu(config: Config, layout: Layout, model: PreTrainedModel, device_type: str) -> bool:
    """Whether the embedding stays in CPU memory: on one GPU, frozen beside quantised weights, and not also the head."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    lone = device_type == "cuda" and config.quantization.base != "none" and is_alone(config, layout)
    plain = (
        lone
        and type(embedding) is nn.Embedding
        and getattr(head, "weight", None) is not embedding.weight
    )
    return plain and not embedding.weight.requires_grad


def look_up_on_cpu(embedding: nn.Embedding) -> None:
    """Moves an embedding to CPU memory, in place: what it finds there goes to where the ids are."""
    forward = embedding.cpu().forward
    embedding.forward = lambda ids: forward(ids.cpu()).to(ids.device)


def freeze_rows(model: PreTrainedModel, trained: Sequence[int]) -> None:
    """Of the vocabulary of a sharded model, lets only the rows of the ids `trained` keep their gradients."""
    for weight in filter(
        lambda weight: weight.requires_grad, architecture.vocabulary_weights(model).values()
    ):
        frozen = torch.ones(len(weight), *[1] * (weight.ndim - 1), dtype=torch.bool)
        frozen[trained] = False
        weight.register_post_accumulate_grad_hook(
            partial(_clear, own_part(frozen, weight).to(weight.device))
        )


def _clear(rows: Tensor, weight: Tensor) -> None:
    local(weight.grad).masked_fill_(
        rows, 0
    )  # so that AdamW, without decay, leaves them as they are


def _run_stage(head: Head, stage: Stage, inputs: Inputs, reading: Reading) -> Tensor:
    """What a pipeline hands on: hidden states, and from the last stage what is wanted of the pass."""
    if stage.is_last:
        return reading(stage.module, head, inputs)
    hidden = hidden_states(stage.module, inputs)
    return (
        hidden.clone() if hidden._is_view() else hidden
    )  # zero-bubble schedules detach it in place
