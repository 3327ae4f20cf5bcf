"""Checks that a model suits the run before it is made: layouts, lengths, dtypes, ties."""

from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig, PreTrainedModel

from lacuna.config import UserError, logger
from lacuna.config.documents import ValidationConfig
from lacuna.config.machine import (
    ActivationCheckpointConfig,
    CompileConfig,
    MetricsConfig,
    ParallelismConfig,
)
from lacuna.config.sections import ModelConfig, TrainingConfig
from lacuna.model.architecture import asks_for_router_loss, decoder_layers, is_from_fla
from lacuna.model.layers.lora import trained_names
from lacuna.model.over_tokens import has_recurrences
from lacuna.parallel.mesh import Layout
from lacuna.parallel.parallelize import Compiled, compile_enabled
from lacuna.parallel.precision import kept_in_float32, named_dtype
from lacuna.parallel.stages import check_pipeline
from lacuna.parallel.tensor import check_tensor_parallel

if TYPE_CHECKING:
    from lacuna.model.router import Router


def check_lengths(training: TrainingConfig, model_config: PretrainedConfig, layout: Layout) -> None:
    """Raises `UserError` for sequences that the model or the layout cannot take.

    They may be too long for the model, or not divide into the pieces of the layout.
    """
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None) or 0
    if 0 < positions < training.context_len:  # XLNet says -1 for no limit
        setting = "context_len" if training.varlen else "seq_len"
        raise UserError(
            f"training.{setting}: {training.context_len} is more than the {positions} positions of "
            "the model: lower it, or raise max_position_embeddings in the model's configuration."
        )
    length = training.seq_len
    pieces = layout.tp
    if layout.cp > 1:
        pieces *= 2 * layout.cp
    if length % pieces > 0:
        raise UserError(
            f"training.seq_len: {length} is no multiple of tensor_parallel_degree × 2 × "
            f"context_parallel_degree = {layout.tp} × 2 × {layout.cp}, the pieces of a sequence: "
            f"the nearest above is {-(-length // pieces) * pieces}."
        )


def check_layout(
    parallelism: ParallelismConfig,
    compiled: CompileConfig,
    recomputed: ActivationCheckpointConfig,
    validation: ValidationConfig,
    model_config: PretrainedConfig,
    layout: Layout,
) -> None:
    """Raises `UserError` for a layout that the model cannot have, or that cannot sample text."""
    if layout.pp > 1 and validation.prompts:
        raise UserError(
            "validation.prompts: no text is sampled with pipeline parallelism; use lacuna generate "
            "on the run's folder."
        )
    check_layers_stay(model_config, layout)
    if layout.tp > 1:
        check_tensor_parallel(model_config, layout.tp)
    if layout.pp > 1:
        check_pipeline(parallelism, compiled, recomputed, model_config)


def check_mixture(
    model: PreTrainedModel,
    parallelism: ParallelismConfig,
    settings: ModelConfig,
    reported: MetricsConfig,
    layout: Layout,
) -> None:
    """Raises `UserError` where a model's experts cannot be spread, or their load not be counted.

    Nothing is checked of what is not asked for.
    """
    if layout.ep > 1:
        from lacuna.parallel.experts import check_experts  # an extension

        check_experts(decoder_layers(model), model.config.model_type, layout, parallelism)
    if settings.router_bias_update_rate or reported.router:
        from lacuna.model.router_kinds import check_routers  # an extension

        check_routers(model, settings.router_bias_update_rate, reported.router)


def check_dtypes(model: PreTrainedModel, training: TrainingConfig) -> None:
    """Raises `UserError` where weights of several dtypes would be trained and sharded together."""
    kept = kept_in_float32(model, named_dtype(training.dtype)) & trained_names(model)
    if kept:
        raise UserError(
            f"training.dtype: transformers keeps {min(kept)} in float32, and what is trained "
            f"cannot be sharded beside it in {training.dtype}: set training.dtype = float32."
        )


def check_layers_stay(model_config: PretrainedConfig, layout: Layout) -> None:
    """Raises `UserError` where layers are left out at random: each rank would leave out others."""
    settings = vars(model_config.get_text_config())
    if layout.data_parallel * layout.sharing > 1 and (
        settings.get("layerdrop") or settings.get("decoder_layerdrop")
    ):
        raise UserError(
            "model: its configuration leaves out layers at random (layerdrop, decoder_layerdrop), "
            "and every rank would leave out others: set that to 0 in it, or use one process."
        )


def check_ties(model: PreTrainedModel) -> None:
    """Raises `UserError` where layers share weights, since layers are sharded one by one."""
    layers = decoder_layers(model)
    layer_of = {module: place for place, layer in enumerate(layers) for module in layer.modules()}
    for pair in model.all_tied_weights_keys.items():
        ends = {layer_of.get(model.get_submodule(name.rpartition(".")[0])) for name in pair}
        if len(ends) == 2 and None not in ends:
            raise UserError(
                f"model: {' and '.join(pair)} are one weight, but layers are sharded one by one: "
                "use one process."
            )


def reason_not_to_compile(
    model_config: PretrainedConfig, counted_pieces: int, dtype: torch.dtype, device_type: str
) -> str | None:
    """Why layers that compute in `dtype` cannot be compiled, or None where they can.

    Where they count what routers choose, they do so in `counted_pieces` of the sequence.
    """
    if has_recurrences(model_config):
        return "recurrences over tokens have kernels that break the graph of a layer"
    if counted_pieces > 1:
        return "what routers choose in pieces of a sequence is counted in Python"
    experts = getattr(model_config.get_text_config(), "_experts_implementation", None)
    # transformers computes these another way then, on whose gradients torch 2.11's compiler fails.
    # On CPUs 2.13 compiles them right; 2.11 fails too, or leaves out gradients in float8.
    if (
        str(experts).endswith("grouped_mm")
        and (device_type == "cuda" or torch.__version__ < "2.13")  # compares as versions do
        and dtype != torch.bfloat16
    ):
        return "grouped products of experts are compiled in bfloat16 only"
    return None


def required_router(
    task: str,
    settings: ModelConfig,
    model_config: PretrainedConfig,
    device: torch.device,
) -> "Router | None":
    """What a run must know of its model's load-balancing loss, or None where none is asked for.

    Raises `UserError` where that loss cannot be computed exactly, and where the model's own code
    adds another one to the loss of next tokens.
    """
    router = None
    if asks_for_router_loss(model_config):
        from lacuna.model.router_settings import find_router  # an extension

        router = find_router(model_config, settings, device)
    if router is None and task in ("pretrain", "sft"):
        from lacuna.model.added_losses import require_no_added_loss  # an extension

        require_no_added_loss(model_config, device)
    return router


def compiled_parts(
    settings: CompileConfig,
    parallelism: ParallelismConfig,
    dtype: torch.dtype,
    model_config: PretrainedConfig,
    counted_pieces: int,
    device_type: str,
) -> Compiled:
    """What of layers, which compute in `dtype`, is compiled: where it is wanted and can be."""
    if not compile_enabled(settings, parallelism, device_type):
        return "nothing"
    if is_from_fla(model_config):
        logger.info("of fla's layers the feed-forward blocks are compiled: its kernels are already")
        return "feed_forward"
    against = reason_not_to_compile(model_config, counted_pieces, dtype, device_type)
    if against is None:
        return "layers"
    logger.info("layers are not compiled: %s", against)
    return "nothing"
