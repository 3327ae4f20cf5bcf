"""Tensor and sequence parallelism of decoder layers, by the plan that transformers has for the architecture.

Only the layers are split. Embedding, last norm and head work on each rank's own slice of the sequence: the logits are
then sharded by token, tied weights need no care, and a vocabulary need not divide.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lacuna.config import UserError, refuse

SETTING = "parallelism.tensor_parallel_degree"
_PLANS = {  # of one layer, for architectures that transformers has none for
    "gpt2": {
        "attn.c_attn": "colwise_gather_output",  # queries, keys and values in one
        "attn.c_proj": "rowwise_split_input",
        "mlp.c_fc": "colwise",
        "mlp.c_proj": "rowwise",
    }
}


class _GatherInput(ParallelStyle):
    """Gathers a module's hidden states along the sequence before it runs, however they are passed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
            if "hidden_states" in named:
                return arguments, named | {"hidden_states": whole(named["hidden_states"])}
            return (whole(arguments[0]), *arguments[1:]), named

        def whole(hidden: Tensor) -> DTensor:
            # Left a DTensor, so that the gradients of all projections are added before they are reduced.
            return DTensor.from_local(hidden, device_mesh, [Shard(1)], run_check=False).redistribute(
                placements=[Replicate()]
            )

        module.register_forward_pre_hook(gather, with_kwargs=True)
        return module


class _Transposed(ParallelStyle):
    """A column- or row-wise style for GPT-2's linear layer, whose weight is [in, out]."""

    def __init__(self, style: ColwiseParallel | RowwiseParallel) -> None:
        super().__init__()
        self.style = style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rowwise = isinstance(self.style, RowwiseParallel)
        for name, placement in {"weight": Shard(1 - rowwise), "bias": Replicate() if rowwise else Shard(0)}.items():
            whole = getattr(module, name)
            setattr(module, name, nn.Parameter(distribute_tensor(whole, device_mesh, [placement])))
        style = PrepareModuleInputOutput(
            input_layouts=self.style.input_layouts,
            desired_input_layouts=Shard(-1) if rowwise else Replicate(),
            output_layouts=Partial() if rowwise else Shard(-1),
            desired_output_layouts=self.style.output_layouts,
        )
        return style._apply(module, device_mesh)


def _style(name: str) -> ParallelStyle | None:
    """torch's style for transformers' word, or None where there is none."""
    match name:
        case "colwise":
            return ColwiseParallel()
        case "colwise_gather_output":
            return ColwiseParallel(output_layouts=Replicate())
        case "rowwise":
            return RowwiseParallel(output_layouts=Shard(1))
        case "rowwise_split_input":
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        case "replicated_with_grad_allreduce":  # norms of heads [B, T, heads, head_dim]
            return SequenceParallel(sequence_dim=2, use_local_output=True)
    return None


def tensor_plan(model_config: PretrainedConfig) -> dict[str, str]:
    """transformers' plan for one decoder layer: name of a module in it -> style.

    Raises `UserError` when there is none, or it has a style without a counterpart.
    """
    text_config = model_config.get_text_config()
    plan = getattr(text_config, "base_model_tp_plan", None) or {}
    plan = {name.split(".*.", 1)[1]: style for name, style in plan.items() if ".*." in name}
    plan = plan or _PLANS.get(text_config.model_type, {})
    unknown = sorted({style for style in plan.values() if _style(style) is None})
    setting = f"{SETTING}: use data, context or pipeline parallelism for {text_config.model_type!r} models"
    refuse({
        f"{setting}, for which transformers has no tensor-parallel plan (base_model_tp_plan)": not plan,
        f"{setting}, whose plan splits {', '.join(unknown)}, which is not available yet": bool(unknown),
    })  # fmt: skip
    return plan


def check_tensor_parallel(model_config: PretrainedConfig, degree: int) -> None:
    """Raises `UserError` for a model whose heads or matrices `degree` ranks cannot share evenly."""
    plan, text_config = tensor_plan(model_config), model_config.get_text_config()
    fields = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "n_inner")
    sizes = {field: getattr(text_config, field, None) for field in fields}
    uneven = f"{SETTING}: {degree} ranks cannot share the model's %s = %s evenly: choose a degree that divides it"
    refuse({uneven % (field, size): size % degree > 0 for field, size in sizes.items() if isinstance(size, int)})
    dropout = f"{SETTING}: every rank computes all heads, and would drop out others: set the model's %s to 0"
    for name in ("attention_dropout", "attn_pdrop"):
        refuse({dropout % name: "colwise_gather_output" in plan.values() and getattr(text_config, name, 0) > 0})


def split_layers(layers: Sequence[nn.Module], model_config: PretrainedConfig, mesh: DeviceMesh) -> None:
    """Splits each layer's matrices over `mesh` in place; activations in between are split along the sequence.

    Raises `UserError` when a layer has parameters that the plan knows nothing of.
    """
    # It advises, at every new shape, to flatten meshes that FSDP and its layers want apart.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    plan = tensor_plan(model_config)
    for layer in layers:
        styles = {name: _style(style) for name, style in plan.items()}
        for name, style in styles.items():
            if isinstance(layer.get_submodule(name), Conv1D):
                styles[name] = _Transposed(style)
        gathered = {name.rpartition(".")[0] for name, style in plan.items() if style.startswith("colwise")}
        styles |= {name: _GatherInput() for name in gathered}
        for name, child in layer.named_children():
            if name not in gathered and any(True for _ in child.parameters()):
                styles[name] = SequenceParallel(use_local_output=True)
        parallelize_module(layer, mesh, styles)
        whole = [name for name, parameter in layer.named_parameters() if not isinstance(parameter, DTensor)]
        if whole:
            raise UserError(f"{SETTING}: the plan of {model_config.model_type!r} models leaves out {whole[0]}.")


def slice_positions(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Makes learned positions, in place, those of a rank's own slice of the sequence, like the embedded tokens."""

    def own_slice(_: nn.Module, arguments: tuple[Tensor]) -> Tensor:
        return arguments[0].chunk(mesh.size(), -1)[mesh.get_local_rank()]

    for module in model.base_model.children():
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
    sharded = DTensor.from_local(hidden, mesh, [Shard(1)], run_check=False)
    return sharded.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
