"""Tensor and sequence parallelism of decoder layers, by transformers' plan for the architecture.

Only the layers are split. The embedding, the last norm and the head work on each rank's own slice
of the sequence. So logits are sharded by token, tied weights need no care, and the vocabulary need
not divide by the number of ranks. A mixture of experts works on that slice too, and is sharded as
they are, or spread over ranks by its experts.
"""

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    parallel,
)
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lacuna.config import UserError
from lacuna.parallel.backbone import backbone

SETTING = "parallelism.tensor_parallel_degree"
_NORM = "replicated_with_grad_allreduce"
EXPERTS = "moe_tp_experts"
_STYLES_OF = {  # for architectures that transformers has no plan for
    "gpt2": {
        "attn.c_attn": "colwise_gather_output",  # queries, keys and values in one
        "attn.c_proj": "rowwise_split_input",
        "mlp.c_fc": "colwise",
        "mlp.c_proj": "rowwise",
    }
}
# torch's styles by transformers' names: those of matrices, and that of the norms of heads, which
# are [B, T, heads, head_dim].
_MATRIX_STYLES: dict[str, parallel.ColwiseParallel | parallel.RowwiseParallel] = {
    "colwise": parallel.ColwiseParallel(),
    "colwise_gather_output": parallel.ColwiseParallel(output_layouts=Replicate()),
    "rowwise": parallel.RowwiseParallel(output_layouts=Shard(1)),
    "rowwise_split_input": parallel.RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(1)
    ),
}
_NORM_STYLE = parallel.SequenceParallel(sequence_dim=2, use_local_output=True)


def plan_of(model_config: PretrainedConfig) -> dict[str, str]:
    """How transformers' plan splits the modules of one decoder layer: the style of each name."""
    text_config = model_config.get_text_config()
    plan = getattr(text_config, "base_model_tp_plan", None) or {}
    styles = {name.split(".*.", 1)[1]: style for name, style in plan.items() if ".*." in name}
    return styles or _STYLES_OF.get(text_config.model_type, {})


def layer_styles(model_config: PretrainedConfig) -> dict[str, str]:
    """How matrices of one decoder layer are split: the style of each name, but within experts.

    Raises `UserError` when there is no plan, or when it has a style that is not available.
    """
    text_config = model_config.get_text_config()
    plan = plan_of(model_config)
    stacks = tuple(name for name, style in plan.items() if style == EXPERTS)
    styles = {name: style for name, style in plan.items() if not name.startswith(stacks)}
    unknown = sorted({*styles.values()} - {_NORM, *_MATRIX_STYLES})
    setting = (
        f"{SETTING}: use data, context or pipeline parallelism for {text_config.model_type!r} "
        "models"
    )
    if not styles:
        raise UserError(
            f"{setting}, for which transformers has no tensor-parallel plan (base_model_tp_plan)."
        )
    if unknown:
        raise UserError(
            f"{setting}, whose plan splits {', '.join(unknown)}, which is not available yet."
        )
    return styles


def _split_and_whole(
    layer: nn.Module, model_config: PretrainedConfig
) -> tuple[dict[str, str], dict[str, nn.Module]]:
    """The same of one layer, and its mixtures of experts, in which nothing is split."""
    if EXPERTS not in plan_of(model_config).values():
        return layer_styles(model_config), {}
    from lacuna.parallel.mixtures import mixtures_in, styles_beside  # an extension

    mixtures = mixtures_in(layer, model_config)
    return styles_beside(mixtures, layer, model_config), mixtures


def gathered_blocks(styles: dict[str, str]) -> set[str]:
    """The blocks of a layer that take whole sequences, and make this rank's slice of them."""
    return {
        name.rpartition(".")[0] for name, style in styles.items() if style.startswith("colwise")
    }


def check_tensor_parallel(model_config: PretrainedConfig, degree: int) -> None:
    """Raises `UserError` for a model whose heads or matrices `degree` ranks cannot share evenly."""
    styles = layer_styles(model_config)
    text_config = model_config.get_text_config()
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "n_inner"):
        size = getattr(text_config, field, None)
        if isinstance(size, int) and size % degree > 0:
            raise UserError(
                f"{SETTING}: {degree} ranks cannot share the model's {field} = {size} evenly: "
                "choose a degree that divides it."
            )
    for name in ("attention_dropout", "attn_pdrop"):
        if "colwise_gather_output" in styles.values() and getattr(text_config, name, 0) > 0:
            raise UserError(
                f"{SETTING}: every rank computes all heads, and would drop out others: set the "
                f"model's {name} to 0."
            )


def check_split(layers: Iterable[nn.Module], model_config: PretrainedConfig) -> None:
    """Raises `UserError` where the plan does not say how to split every part of the layers."""
    kind = f"{SETTING}: the plan of {model_config.model_type!r} models"
    for layer in layers:
        styles, mixtures = _split_and_whole(layer, model_config)
        absent = styles.keys() - {name for name, _ in layer.named_modules()}
        if absent:
            raise UserError(f"{kind} splits {min(absent)}, which not all layers have.")
        parts = [*styles, *_between_whole_outputs(layer, styles), *mixtures]
        parts += [name for name, child in layer.named_children() if _goes_by_token(child)]
        for name, _ in layer.named_parameters():
            if not any(name.startswith(f"{part}.") for part in parts):
                raise UserError(f"{kind} leaves out {name}.")


def split_layers(
    layers: Iterable[nn.Module], model_config: PretrainedConfig, mesh: DeviceMesh
) -> None:
    """Splits each layer's matrices over `mesh` in place.

    Activations in between are split along the sequence.
    """
    # At every new shape this logger advises to flatten meshes that FSDP needs apart.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    by_token = parallel.SequenceParallel(use_local_output=True)
    gather = partial(_gather_input, mesh)
    for layer in layers:
        styles, mixtures = _split_and_whole(layer, model_config)
        gathering = gathered_blocks(styles)
        for block in mixtures.values():
            block.is_sharded_by_all = True  # type: ignore[assignment]
        for name in gathering:
            layer.get_submodule(name).register_forward_pre_hook(gather, with_kwargs=True)
        for name, child in layer.named_children():
            if name not in gathering and name not in mixtures and _has_parameters(child):
                parallel.parallelize_module(child, mesh, by_token)
        for name, style in styles.items():
            part = layer.get_submodule(name)
            if style == _NORM:
                parallel.parallelize_module(part, mesh, _NORM_STYLE)
            else:
                _split_layer(part, mesh, _MATRIX_STYLES[style])
        for name in _between_whole_outputs(layer, styles):
            part = layer.get_submodule(name)
            # torch's types forget that what these return is what the module is then given.
            distribute_module(part, mesh, None, _as_replicated, _as_local)  # type: ignore[arg-type]


def _goes_by_token(module: nn.Module) -> bool:
    """Whether a module works on each token by itself, so that a share of them is enough for it."""
    has_parts = any(True for _ in module.children())
    return not has_parts and (isinstance(module, nn.Linear) or "Norm" in type(module).__name__)


def _between_whole_outputs(layer: nn.Module, styles: dict[str, str]) -> list[str]:
    """The names of the modules that work on gathered outputs, such as norms over all heads.

    Every rank has them whole, and computes the same with them.
    """
    used: dict[str, set[str]] = {}
    for name, style in styles.items():
        if style.startswith("colwise"):
            used.setdefault(name.rpartition(".")[0], set()).add(style)
    found = []
    for place, kinds in used.items():
        if kinds == {"colwise_gather_output"}:
            for name, child in layer.get_submodule(place).named_children():
                if f"{place}.{name}" not in styles and _has_parameters(child):
                    found.append(f"{place}.{name}")
    return found


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _as_replicated(
    _: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh
) -> tuple[DTensor, ...]:
    return tuple(DTensor.from_local(one, mesh, [Replicate()], run_check=False) for one in inputs)


def _as_local(_: nn.Module, output: DTensor, __: DeviceMesh) -> Tensor:
    return output.to_local()


def _split_layer(
    module: nn.Module,
    mesh: DeviceMesh,
    style: parallel.ColwiseParallel | parallel.RowwiseParallel,
) -> None:
    """Splits a linear layer and the adapter beside it by column or row, in place."""
    rowwise = isinstance(style, parallel.RowwiseParallel)
    inward = 0 if isinstance(module, Conv1D) else 1  # GPT-2's weights are [in, out]
    # Parameters with a dimension of inputs are split where inputs are, others where outputs are.
    places = {
        "weight": Shard(inward if rowwise else 1 - inward),
        "lora_A": Shard(1) if rowwise else Replicate(),
    }
    for name, whole in [*module.named_parameters(recurse=False)]:
        place = places.get(name, Replicate() if rowwise else Shard(0))
        setattr(module, name, nn.Parameter(distribute_tensor(whole, mesh, [place])))
    wanted = (Shard(-1) if rowwise else Replicate(),)
    inputs = partial(style._prepare_input_fn, style.input_layouts, wanted)
    outputs = partial(style._prepare_output_fn, style.output_layouts, style.use_local_output)
    distribute_module(module, mesh, None, inputs, outputs)


def _gather_sequence(hidden: Tensor, mesh: DeviceMesh) -> DTensor:
    """Gathers `hidden` [B, T, width] of all ranks along the sequence."""
    sharded = DTensor.from_local(hidden, mesh, [Shard(1)], run_check=False)
    return sharded.redistribute(placements=[Replicate()])


def _gather_input(
    mesh: DeviceMesh, _: nn.Module, arguments: Any, named: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Gathers the hidden states among a module's arguments, by position or by name.

    They are left a DTensor, so that the gradients of all projections are added before they are
    reduced.
    """
    if "hidden_states" in named:
        return arguments, named | {"hidden_states": _gather_sequence(named["hidden_states"], mesh)}
    return (_gather_sequence(arguments[0], mesh), *arguments[1:]), named


def slice_positions(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Has learned positions be embedded only for a rank's own slice of the sequence, in place.

    The embedded tokens are those of this slice, too.
    """

    def own_slice(_: nn.Module, arguments: tuple[Tensor]) -> Tensor:
        return arguments[0].chunk(mesh.size(), -1)[mesh.get_local_rank()]

    for module in backbone(model).children():
        if isinstance(module, nn.Embedding) and module is not model.get_input_embeddings():
            module.register_forward_pre_hook(own_slice)


def overlap_communication(mesh: DeviceMesh) -> None:
    """Has the compiler overlap collectives with matrix products (async tensor parallelism)."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    torch._inductor.config._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)


def gather_sequence_slices(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    """Gathers `hidden` [B, T, width] of all ranks along the sequence, for work done by every rank.

    Gradients are summed over the ranks, so each must contribute its share only.
    """
    return _gather_sequence(hidden, mesh).to_local(grad_placements=[Partial()])
