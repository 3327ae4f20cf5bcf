"""Which parameters of a model an optimizer treats alike: as matrices for Muon, with which decay."""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel

from lacuna.config import UserError
from lacuna.config.optimizers import OptimizerConfig, OptimizerGroup
from lacuna.model.architecture import vocabulary_weights
from lacuna.model.layers.linear import is_matrix, is_transposed
from lacuna.model.layers.targets import names_matching

# Modules whose parameters have the dimensions of matrices that they do not multiply with: they are
# several such one below another, one along three dimensions, a convolution, positions or queries.
_WITHOUT_MATRICES = {
    "DbrxExpertGLU",
    "DeepseekV4GroupedLinear",
    "Inkling2BlockAttentionResidual",
    "Inkling2DynamicShortConvolution",
    "Inkling2RelativeLogits",
    "InklingRelativeLogits",
    "XLNetRelativeAttention",
}

# Modules that store matrices as [in, out] and do not say so.
_STORED_BY_INPUTS = {"Gemma3MultiModalProjector", "Llama4TextExperts"}


def muon_matrices(model: PreTrainedModel) -> dict[Tensor, bool]:
    """The parameters that Muon can update, and whether each is stored as [in, out].

    They are matrices and stacks of matrices, such as those of experts. The embedding, the head,
    kernels of convolutions and matrices with a single row are none, nor is what a module keeps in
    another form than it multiplies with.
    """
    left_out = {*vocabulary_weights(model).values()}
    found: dict[Tensor, bool] = {}
    for module in model.modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}  # FSDP and adapters add some
        if isinstance(module, _ConvNd) or kinds & _WITHOUT_MATRICES:
            continue
        by_inputs = is_transposed(module) or bool(kinds & _STORED_BY_INPUTS)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in left_out or not is_matrix(module, name, parameter):
                continue
            if min(parameter.shape[-2:]) > 1:
                added = getattr(module, "added_names", ())  # adapters are as those of all layers
                found[parameter] = by_inputs and name not in added
    return found


def parameter_groups(
    model: PreTrainedModel, settings: OptimizerConfig, groups: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The `groups` of parameters by weight decay, each divided by what else is done to them.

    Each says whether it is for `muon`, whether its matrices are `transposed`, and its `lr_ratio`.
    The first has the settings of the section. All ranks must call it, for their stages of a
    pipeline. Raises `UserError` for a pattern of `optimizer.groups` that is for nothing, and for
    stacks of matrices, such as those of experts, with `optimizer.neuron_beta2`.
    """
    matrices = muon_matrices(model)
    chosen = _chosen_groups(model, settings)
    _require_use(settings, chosen, matrices)
    divided: dict[Any, dict[str, Any]] = {}
    for place, group in enumerate(groups):
        # Without parameters of its own too, so that it is the first.
        kinds: list[tuple[int | None, bool, bool]] = [(None, False, False)]
        kinds += [_kind(one, settings, chosen, matrices) for one in group["params"]]
        for kind, parameter in zip(kinds, [None, *group["params"]], strict=True):
            index, muon, transposed = kind
            if (place, kind) not in divided:
                made = group | {"params": [], "muon": muon, "transposed": transposed}
                divided[place, kind] = made | _changes(settings, index)
            if parameter is not None:
                divided[place, kind]["params"].append(parameter)
    made_groups = [*divided.values()]
    of_muon = [one for group in made_groups if group["muon"] for one in group["params"]]
    if settings.neuron_beta2 is not None and any(matrix.ndim > 2 for matrix in of_muon):
        raise UserError(
            "optimizer.neuron_beta2: this model has stacks of matrices, as of experts, of whose "
            "neurons no means are kept: leave it out."
        )
    return made_groups


def _kind(
    parameter: Tensor,
    settings: OptimizerConfig,
    chosen: dict[Tensor, int],
    matrices: dict[Tensor, bool],
) -> tuple[int | None, bool, bool]:
    """A parameter's group of the settings, whether Muon has it, and whether it is transposed."""
    index = chosen.get(parameter)
    name = None if index is None else settings.groups[index].name
    muon = parameter in matrices and (name or settings.name) == "Muon"
    return index, muon, muon and matrices[parameter]


def _changes(settings: OptimizerConfig, index: int | None) -> dict[str, Any]:
    """What the group of this index in the settings changes for its parameters."""
    if index is None:
        return {"lr_ratio": 1.0}
    group = settings.groups[index]
    rates = {"lr_ratio": group.lr_ratio, "lr": settings.lr * group.lr_ratio}
    return rates if group.weight_decay is None else rates | {"weight_decay": group.weight_decay}


def _chosen_groups(model: PreTrainedModel, settings: OptimizerConfig) -> dict[Tensor, int]:
    """The first group of the settings that is for each trained parameter, by any of its names."""
    chosen: dict[Tensor, int] = {}
    named = dict(model.named_parameters(remove_duplicate=False))
    for names in model.all_tied_weights_keys.items():
        # A stage of a pipeline may have but one of the modules that share a weight.
        for held in named.keys() & {*names}:
            named |= dict.fromkeys({*names} - named.keys(), named[held])
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    for index, group in enumerate(settings.groups):
        for name in names_matching(trained, group.pattern):
            chosen.setdefault(trained[name], index)
    return chosen


def used_groups(model: PreTrainedModel, settings: OptimizerConfig) -> tuple[OptimizerGroup, ...]:
    """The groups of the settings that have a parameter of the model, on whatever rank.

    All ranks must call it, for their stages of a pipeline.
    """
    chosen = _chosen_groups(model, settings)
    used = _used_groups(settings, chosen, muon_matrices(model))
    return tuple(group for index, group in enumerate(settings.groups) if index in used)


def _used_groups(
    settings: OptimizerConfig, chosen: dict[Tensor, int], matrices: dict[Tensor, bool]
) -> set[int]:
    """The indices of the groups of the settings that have a parameter on some rank."""
    if not settings.groups:
        return set()
    used = {
        index
        for parameter, index in chosen.items()
        if settings.groups[index].name != "Muon" or parameter in matrices
    }
    return {*itertools.chain(*_of_all_ranks(used))}


def _require_use(
    settings: OptimizerConfig, chosen: dict[Tensor, int], matrices: dict[Tensor, bool]
) -> None:
    """Raises `UserError` for a group of the settings that has no parameter on any rank."""
    used = _used_groups(settings, chosen, matrices)
    for index, group in enumerate(settings.groups):
        if index not in used:
            kind = "matrix of a layer" if group.name == "Muon" else "parameter"
            raise UserError(
                f"optimizer.groups, table {index + 1}: {group.pattern!r} matches no trained {kind} "
                "that no table before has: give a name such as self_attn.q_proj.weight, or a "
                "pattern such as *_proj.weight."
            )


def block_length(shape: torch.Size) -> int | None:
    """How many neighbours of a parameter share a scale in an 8-bit state; None: it has none.

    Blocks lie within rows, and an eighth of a row has whole ones, so that shards of any layout do
    too. Vectors and narrow matrices keep their dtype.
    """
    eighth, rest = divmod(shape[-1] if len(shape) > 1 else 0, 8)
    if rest:
        return None
    fitting = [length for length in range(32, 257) if eighth and eighth % length == 0]
    return max(fitting, default=None)


def weights_in_8_bits(model: PreTrainedModel) -> tuple[int, int]:
    """How many trained weights can have an 8-bit state, and how many are trained, on all ranks.

    All ranks must call it, for their stages of a pipeline. Raises `UserError` where none can.
    """
    own = {
        name: (parameter.numel(), block_length(parameter.shape) is not None)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    every = {name: size for held in _of_all_ranks(own) for name, size in held.items()}
    small = sum(count for count, has_blocks in every.values() if has_blocks)
    if not small:
        raise UserError(
            'optimizer.state_dtype: no trained matrix of this model has rows that "int8" could '
            'divide into blocks, of at least 256 values and a multiple of 8: choose "bfloat16", '
            "or leave it out."
        )
    return small, sum(count for count, _ in every.values())


def _of_all_ranks(value: Any) -> list[Any]:
    """What every rank gives, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def state_bytes(model: PreTrainedModel, settings: OptimizerConfig, stored: int) -> float:
    """How many bytes an optimizer keeps for each trained weight of a model, on average.

    The weights take `stored` bytes. AdamW has two values for each, Muon has one. Raises `UserError`
    where a state in 8 bits is asked for and no weight can have it.
    """
    if settings.state_dtype == "int8":
        weights_in_8_bits(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = parameter_groups(model, settings, [{"params": trained}])
    kept: float = sum(
        parameter.numel() * _bytes_of_weight(parameter, group["muon"], settings, stored)
        for group in groups
        for parameter in group["params"]
    )
    return kept / max(sum(parameter.numel() for parameter in trained), 1)


def _bytes_of_weight(
    parameter: Tensor, muon: bool, settings: OptimizerConfig, stored: int
) -> float:
    block = block_length(parameter.shape) if settings.state_dtype == "int8" else None
    if muon:
        return stored
    if block is not None:
        return 2 * (1 + 4 / block)
    return 4 if settings.state_dtype == "bfloat16" else 2 * stored
