"""Tensor and sequence parallelism of decoder layers, by the plan that transformers has for the architecture.

Only the layers are split. Embedding, last norm and head work on each rank's own slice of the
sequence: the logits are then sharded by token, tied weights need no care, and a vocabulary need not
divide.
"""

import logging
from collections.abc import Sequence
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

from lacuna.config import UserError, refuse
from lacuna.parallel.backbone import backbone

SETTING = "parallelism.tensor_parallel_degree"
_NORM = "replicated_with_grad_allreduce"
_PLANS = {  # of one layer, for architectures that transformers has none for
    "gpt2": {
        "attn.c_attn": "colwise_gather_output",  # queries, keys and values in one
        "attn.c_proj": "rowwise_split_input",
        "mlp.c_fc": "colwise",
        "mlp.c_proj": "rowwise",
    }
}
_STYLES = {  # torch's, by transformers' names
    "colwise": parallel.ColwiseParallel(),
    "colwise_gather_output": parallel.ColwiseParallel(output_layouts=Replicate()),
    "rowwise": parallel.RowwiseParallel(output_layouts=Shard(1)),
    "rowwise_split_input": parallel.RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(1)
    ),
    # norms of heads [B, T, heads, head_dim]
    _NORM: parallel.SequenceParallel(sequence_dim=2, use_local_output=True),
}


def tensor_plan(model_config: PretrainedConfig) -> dict[str, str]:
    """transformers' plan for one decoder layer: name of a module in it -> style.

    Raises `UserError` when there is none, or it has a style without a counterpart.
    """
    text_config = model_config.get_text_config()
    plan = getattr(text_config, "base_model_tp_plan", None) or {}
    plan = {name.split(".*.", 1)[1]: style for name, style in plan.items() if ".*." in name}
    plan = plan or _PLANS.get(text_config.model_type, {})
    unknown = sorted({*plan.values()} - _STYLES.keys())
    setting = f"{SETTING}: use data, context or pipeline parallelism for {text_config.model_type!r} models"
    refuse(
        {
            f"{setting}, for which transformers has no tensor-parallel plan (base_model_tp_plan)": not plan,
            f"{setting}, whose plan splits {', '.join(unknown)}, which is not available yet": bool(
                unknown
            ),
        }
    )
    return plan


def check_tensor_parallel(model_config: PretrainedConfig, degree: int) -> None:
    """Raises `UserError` for a model whose heads or matrices `degree` ranks cannot share evenly."""
    plan, text_config = tensor_plan(model_config), model_config.get_text_config()
    fields = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "n_inner")
    sizes = {field: getattr(text_config, field, None) for field in fields}
    uneven = f"{SETTING}: {degree} ranks cannot share the model's %s = %s evenly: choose a degree that divides it"
    refuse(
        {
            uneven % (field, size): size % degree > 0
            for field, size in sizes.items()
            if isinstance(size, int)
        }
    )
    dropout = f"{SETTING}: every rank computes all heads, and would drop out others: set the model's %s to 0"
    for name in ("attention_dropout", "attn_pdrop"):
        refuse(
            {
                dropout % name: "colwise_gather_output" in plan.values()
                and getattr(text_config, name, 0) > 0
            }
        )


def check_split(layers: Sequence[nn.Module], model_config: PretrainedConfig) -> None:
    """Raises `UserError` where the plan does not say of every part of a layer how to split it."""
    plan = tensor_plan(model_config)
    kind = f"{SETTING}: the plan of {model_config.model_type!r} models"
    for layer in layers:
        absent = plan.keys() - {name for name, _ in layer.named_modules()}
        if absent:
            raise UserError(f"{kind} splits {min(absent)}, which not all layers have.")
        parts = [*plan, *_between_whole_outputs(layer, plan)]
        parts += [name for name, child in layer.named_children() if _goes_by_token(child)]
        for name, _ in layer.named_parameters():
            if not any(name.startswith(f"{part}.") for part in parts):
                raise UserError(f"{kind} leaves out {name}.")


def split_layers(
    layers: Sequence[nn.Module], model_config: PretrainedConfig, mesh: DeviceMesh
) -> None:
    """Splits each layer's matrices over `mesh` in place; activations in between are split along the sequence."""
    # It advises, at every new shape, to flatten meshes that FSDP and its layers want apart.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    plan = tensor_plan(model_config)
    gathered = {
        name.rpartition(".")[0] for name, style in plan.items() if style.startswith("colwise")
    }
    for layer in layers:
        for name in gathered:
            layer.get_submodule(name).register_forward_pre_hook(
                partial(_gather_input, mesh), with_kwargs=True
            )
        for name, child in layer.named_children():
            if name not in gathered and any(True for _ in child.parameters()):
                parallel.parallelize_module(
                    child, mesh, parallel.SequenceParallel(use_local_output=True)
                )
        for name, style in plan.items():
            split = parallel.parallelize_module if style == _NORM else _split
            split(layer.get_submodule(name), mesh, _STYLES[style])
        for name in _between_whole_outputs(layer, plan):
            distribute_module(layer.get_submodule(name), mesh, None, _replicated, _own)


def _goes_by_token(module: nn.Module) -> bool:
    """Whether a module works on each token by itself, so that it can have a share of them."""
    has_parts = any(True for _ in module.children())
    return not has_parts and (isinstance(module, nn.Linear) or "Norm" in type(module).__name__)


def _between_whole_outputs(layer: nn.Module, plan: dict[str, str]) -> list[str]:
    """The modules that work on outputs which the plan gathers, such as norms over all heads.

    Every rank has these whole, and computes the same with them.
    """
    styles: dict[str, set[str]] = {}
    for name, style in plan.items():
        if style.startswith("colwise"):
            styles.setdefault(name.rpartition(".")[0], set()).add(style)
    whole = [place for place, used in styles.items() if used == {"colwise_gather_output"}]
    children = [
        f"{place}.{name}"
        for place in whole
        for name, _ in layer.get_submodule(place).named_children()
    ]
    return [
        name
        for name in children
        if name not in plan and any(True for _ in layer.get_submodule(name).parameters())
    ]


def _replicated(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[DTensor, ...]:
    return tuple(DTensor.from_local(one, mesh, [Replicate()], run_check=False) for one in inputs)


def _own(_: nn.Module, output: DTensor, __: DeviceMesh) -> Tensor:
    return output.to_local()


def _split(module: nn.Module, mesh: DeviceMesh, style: parallel.ParallelStyle) -> None:
    """Splits in place, by column or row, a linear layer (GPT-2's weights are [in, out]) and the adapter beside it."""
    rowwise, inward = (
        isinstance(style, parallel.RowwiseParallel),
        0 if isinstance(module, Conv1D) else 1,
    )
    # What is beside the inputs is split where these are, and all else where the outputs are.
    places = {
        "weight": Shard(inward if rowwise else 1 - inward),
        "lora_A": Shard(1) if rowwise else Replicate(),
    }
    for name, whole in [*module.named_parameters(recurse=False)]:
        place = places.get(name, Replicate() if rowwise else Shard(0))
        setattr(module, name, nn.Parameter(distribute_tensor(whole, mesh, [place])))
    inputs = partial(
        style._prepare_input_fn, style.input_layouts, (Shard(-1) if rowwise else Replicate(),)
    )
    outputs = partial(style._prepare_output_fn, style.output_layouts, style.use_local_output)
    distribute_module(module, mesh, None, inputs, outputs)


def _gathered(hidden: Tensor, mesh: DeviceMesh) -> DTensor:
    """`hidden` [B, T, width] of all ranks along the sequence."""
    return DTensor.from_local(hidden, mesh, [Shard(1)], run_check=False).redistribute(
        placements=[Replicate()]
    )


def _gather_input(
    mesh: DeviceMesh, _: nn.Module, arguments: Any, named: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """A module's arguments with gathered hidden states, however they are passed.

    Left a DTensor, so that the gradients of all projections are added before they are reduced.
    """
    if "hidden_states" in named:
        return arguments, named | {"hidden_states": _gathered(named["hidden_states"], mesh)}
    return (_gathered(arguments[0], mesh), *arguments[1:]), named


def slice_positions(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Makes learned positions, in place, those of a rank's own slice of the sequence, like the embedded tokens."""

    def own_slice(_: nn.Module, arguments: tuple[Tensor]) -> Tensor:
        return arguments[0].chunk(mesh.size(), -1)[mesh.get_local_rank()]

    for module in backbone(model).children():
        if isinstance(module, nn.Embedding) and module is not model.get_input_embeddings():
            module.register_forward_pre_hook(own_slice)


def overlap_communication(mesh: DeviceMesh) -> None:
    """Lets the compiler take collectives apart and run them beside the matrix products (async tensor parallelism)."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    torch._inductor.config._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)


def gather_sequence_slices(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    """`hidden` [B, T, width] of all ranks along the sequence, for work that every rank then does alike.

    Gradients are summed over the ranks: each must contribute its share only.
    """
    return _gathered(hidden, mesh).to_local(grad_placements=[Partial()])
