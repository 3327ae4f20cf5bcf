"""Which linear layers and experts compute in 8-bit floats, and what such a run needs."""

import fnmatch
import math
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec

import torch
from torch import nn
from transformers import PreTrainedModel

from lacuna.config import UserError, logger
from lacuna.config.machine import Float8Config, ParallelismConfig
from lacuna.config.row_form import RowForm
from lacuna.config.sections import TrainingConfig
from lacuna.model.architecture import experts_of
from lacuna.model.layers.linear import PlainLinear, is_transposed, plain_linears
from lacuna.parallel.batch import pipeline_microbatches
from lacuna.parallel.expert_stacks import stacks_of
from lacuna.parallel.grouped_experts import GROUPED
from lacuna.parallel.mesh import Layout, Mesh
from lacuna.parallel.precision import compute_dtype

SETTING = "float8.enable_float8_linear"
_TORCHTITANS_HEAD = "output"  # the name in its examples of float8.filter_fqns
_MULTIPLE = 16  # of which the hardware wants both dimensions of a weight
_ROW_STEP = 64  # rows of one example each may be shorter than asked for, by multiples of this
_CAPABILITY = (8, 9)  # of the first GPUs that multiply in float8: Ada and Hopper
_GROUPED_MAJORS = (9, 10)  # capabilities for which torch has grouped products in float8
_STACKS = ("gate_up_proj", "up_proj", "down_proj")


def has_float8(device: torch.device) -> bool:
    """Whether a GPU converts to float8 and multiplies in it."""
    return torch.cuda.get_device_capability(device) >= _CAPABILITY


def check_float8(settings: Float8Config, training: TrainingConfig, device: torch.device) -> None:
    """Raises `UserError` for a device that cannot multiply in float8, or not in the run's dtype."""
    if settings.emulate:
        return
    if device.type != "cuda":
        raise UserError(
            f"{SETTING}: float8 needs a GPU, and this run is on the CPU: leave it out, or set "
            "float8.emulate = true to try what it does to the loss."
        )
    if not has_float8(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise UserError(
            f"{SETTING}: this GPU has compute capability {major}.{minor}, and float8 products need "
            "8.9 or higher (Ada, Hopper and newer): leave it out."
        )
    if compute_dtype(training, "cuda") != torch.bfloat16:
        raise UserError(
            f"{SETTING}, training.mixed_precision_param: float8 products give bfloat16; leave the "
            "second out."
        )


def compute_in_float8(
    model: PreTrainedModel,
    settings: Float8Config,
    training: TrainingConfig,
    pads: bool,
    tokens: int,
    device: torch.device | None,
) -> None:
    """Has the linear layers and experts that gain by it compute in float8, in place.

    The model is whole, and has no adapters yet. `pads` says that numbers of tokens need not be
    multiples of 16; a layer's experts get so many `tokens` at once, each of which several compute.
    Raises `UserError` where torchao is not installed, for a `device` that cannot compute so, where
    nothing suits, and for names that match none.
    """
    if not find_spec("torchao"):
        raise UserError(
            f"{SETTING} needs torchao, which is not installed: "
            "pip install -e '.[float8]' -c constraints.txt."
        )
    if device is not None:
        check_float8(settings, training, device)
    chosen = chosen_layers(model, settings)
    stacks = chosen_stacks(model, settings, tokens, device)
    if not chosen and not stacks:
        raise UserError(
            f"{SETTING}: no linear layer of the model would gain by float8, and no experts: all "
            "are too small (or experts get too few tokens at once), or not multiples of 16, or "
            "left out by float8.filter_fqns. Leave it out, or set float8.filter_small = false."
        )
    recipe = settings.recipe_name or "tensorwise"
    if chosen:
        from lacuna.model.layers.float8_product import wrap_layers

        wrap_layers([*chosen.values()], recipe, settings.emulate, pads)
    if stacks:
        from lacuna.model.layers.float8_stacks import wrap_stacks

        for experts, names in stacks.items():
            wrap_stacks(experts, names, recipe, settings.emulate)
    counts = len(chosen), sum(map(len, stacks.values()))
    logger.info("float8: %s, in %d linear layers and %d stacks of experts", recipe, *counts)


def has_uneven_products(
    stages: Iterable[TrainingConfig], form: RowForm, pieces: int, cp: int
) -> bool:
    """Whether any product of a run may be of a number of tokens that is no multiple of 16.

    Rows have the lengths of the `stages` of its curriculum; `cp` ranks have a part of each, and
    layers compute so many `pieces` of it one after another.
    """
    every = {training.seq_len for training in stages}
    if form.packing.mode == "none" and not form.is_shared:
        every |= {*range(_ROW_STEP, max(every), _ROW_STEP)}
    for length in every:
        own, rest = divmod(length, cp)
        piece = math.ceil(own / pieces)
        if rest or own % _MULTIPLE or piece % _MULTIPLE:
            return True
    return False


def tokens_of_experts(
    stages: Iterable[TrainingConfig], settings: ParallelismConfig, pieces: int, layout: Layout
) -> int:
    """The tokens that reach the experts of a layer together, in any of a run's stages at the least.

    They are those of a micro-batch, or of one of so many `pieces` of it, of all ranks that share
    the experts. (A resumed run whose batch no longer divides may have fewer.)
    """
    together = []
    for training in stages:
        rows = training.batch_size
        if layout.pp > 1:  # which cuts all rows of a step anew
            accumulation = training.gradient_accumulation_steps or 1
            total = training.global_batch_size or rows * accumulation * layout.data_parallel
            own = total // layout.data_parallel
            rows = own // pipeline_microbatches(settings, max(own // rows, 1))
        together.append(rows * training.seq_len)
    return min(together) * layout.ep // (layout.cp * pieces)


def chosen_layers(model: PreTrainedModel, settings: Float8Config) -> dict[str, PlainLinear]:
    """The linear layers of a model that compute in float8, by their names.

    The head is none of them. Raises `UserError` for a pattern of names that matches no layer and no
    stack of experts at all; those of layers that are left out anyway change nothing.
    """
    head = model.get_output_embeddings()
    layers = {name: one for name, one in plain_linears(model).items() if one is not head}
    every = [_TORCHTITANS_HEAD, *(name for name, _ in model.named_modules())]
    every += _stacks(model)
    for pattern in settings.filter_fqns:
        if not fnmatch.filter(every, f"*{pattern}*"):
            raise UserError(
                f"float8.filter_fqns: {pattern!r} matches no layer: give a part of a name, "
                f"such as {next(iter(layers), 'q_proj')}; what is too small is left out anyway."
            )
    chosen = {}
    for name, layer in layers.items():
        out, into = layer.weight.shape
        if is_transposed(layer):
            out, into = into, out
        fits = out % _MULTIPLE == 0 and into % _MULTIPLE == 0
        small = settings.filter_small and loses(out, into, settings.recipe_name or "tensorwise")
        if fits and not small and not _is_left_out(name, settings):
            chosen[name] = layer
    return chosen


def chosen_stacks(
    model: PreTrainedModel, settings: Float8Config, tokens: int, device: torch.device | None
) -> dict[nn.Module, list[str]]:
    """The modules that have experts of a layer, and the names of their stacks that take float8.

    A layer's experts get so many `tokens` at once. Stacks are left out where they are not computed
    by grouped products, and on a `device` for which torch has none in float8.
    """
    if device is not None and not settings.emulate and not _multiplies_groups(device):
        return {}
    _, each = experts_of(model.config)
    chosen: dict[nn.Module, list[str]] = {}
    for name, (experts, stack) in _stacks(model).items():
        count, rows, columns = stack.shape
        fits = rows % _MULTIPLE == 0 and columns % _MULTIPLE == 0
        small = settings.filter_small and groups_lose(rows, columns, tokens * each / count)
        grouped = getattr(experts.config, "_experts_implementation", None) == GROUPED
        if grouped and fits and not small and not _is_left_out(name, settings):
            chosen.setdefault(experts, []).append(name.rpartition(".")[2])
    return chosen


def loses(out: int, into: int, recipe: str) -> bool:
    """Whether a product with a weight [out, into] is slower in float8 than in bfloat16.

    The sizes are those that torchao found on H100s (`_auto_filter_for_recipe`, and the tables of
    torchao/float8/README.md), where casts took longer than the product saved.
    """
    if recipe == "tensorwise":
        return out <= 1024 and into <= 4096
    return out <= 2048 or into <= 1024 or (out <= 4096 and into <= 2048)


def groups_lose(rows: int, columns: int, tokens: float) -> bool:
    """Whether experts' matrices [rows, columns] are slower in float8 when each has so many tokens.

    Measured on an H100 (docs/log.md, 2026-11-27): Mixtral's gain a fifth to a quarter with 4,096
    tokens and lose with 1,024; narrower ones lose, since the casts take longer than products save.
    """
    return min(rows, columns) < 4096 or tokens < 4096


def _multiplies_groups(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] in _GROUPED_MAJORS


def _stacks(model: PreTrainedModel) -> dict[str, tuple[nn.Module, nn.Parameter]]:
    """The stacks of experts of a model, each with its module."""
    names = {module: name for name, module in model.named_modules()}
    return {
        f"{names[experts]}.{name}": (experts, stack)
        for experts in stacks_of([model])
        for name, stack in experts.named_parameters(recurse=False)
        if name in _STACKS
    }


def _is_left_out(name: str, settings: Float8Config) -> bool:
    return any(fnmatch.fnmatch(name, f"*{pattern}*") for pattern in settings.filter_fqns)


def gather_filled(model: PreTrainedModel, settings: Float8Config, mesh: Mesh) -> Callable[[], None]:
    """Has FSDP gather the weights of a filled model in float8 where that is asked for, in place.

    Returns what must be called after each change of the weights.
    """
    if not settings.enable_fsdp_float8_all_gather:
        return lambda: None
    from lacuna.model.layers.float8_product import compute_scales, gather_in_float8

    casters = gather_in_float8(model)
    logger.info("float8: %d weights are gathered in float8", len(casters))
    if not casters or not settings.precompute_float8_dynamic_scale_for_fsdp:
        return lambda: None
    return partial(compute_scales, casters, mesh.layers.get_group(-1))
