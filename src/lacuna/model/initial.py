"""Fresh weights and buffers for a sharded model, as transformers' own code makes them."""

from collections.abc import Callable, Iterator, Set

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from lacuna.model.kind import new_model, without_first_values
from lacuna.model.layers.wrapping import Wrapper
from lacuna.parallel.fsdp import local, own_part
from lacuna.parallel.precision import keep_in_float32


def construct_model(
    model_config: PretrainedConfig,
    attention: str | None,
    dtype: torch.dtype,
    real: Set[str] = frozenset(),
    draw_matrices: bool = True,
) -> PreTrainedModel:
    """Makes a model by transformers' own code on the CPU.

    It has its buffers, but of its parameters only those named `real`: all others take no memory.
    Without `draw_matrices` what has more than one dimension may have any values.
    """
    registered: list[nn.Parameter] = []
    kept: set[int] = set()

    def without_memory(_: nn.Module, __: str, made: nn.Parameter) -> nn.Parameter:
        if len(registered) not in kept and not made.is_meta:
            made = nn.Parameter(made.to("meta"), made.requires_grad)
            # This keeps transformers from drawing numbers that nobody will see.
            made._is_hf_initialized = True  # type: ignore[attr-defined]
        elif made.ndim > 1 and not draw_matrices:
            made._is_hf_initialized = True  # type: ignore[attr-defined]
        registered.append(made)
        return made

    # torch's types forget that what the hook returns is registered.
    with register_module_parameter_registration_hook(without_memory):  # type: ignore[arg-type]
        with without_first_values():
            model = new_model(model_config, dtype, attention)
        if real:  # now it is known as which of all each of them is made
            names = {id(one): name for name, one in model.named_parameters()}
            kept = {place for place, one in enumerate(registered) if names.get(id(one)) in real}
            registered.clear()
            model = new_model(model_config, dtype, attention)
    keep_in_float32(model, dtype)
    return model


def place_buffers(
    model: PreTrainedModel, shadow: PreTrainedModel, names: Set[str], device: torch.device
) -> None:
    """Gives `model`, in place, those of its buffers that are in `names`, as transformers does."""
    buffers = dict(model.named_buffers())
    for name, made in construct_model(shadow.config, "eager", shadow.dtype).named_buffers():
        if name in names and name in buffers:
            path, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(path), own_name, made.to(device))


@torch.no_grad()
def draw_weights(
    model: PreTrainedModel,
    shadow: PreTrainedModel,
    names: Set[str],
    device: torch.device,
    seed: int,
) -> None:
    """Draws the parameters of the sharded `model` that are in `names` as transformers would.

    `shadow` is the same model, unsharded, on the meta device. One part of it at a time, no larger
    than a layer, is made real on `device`, initialised, copied into the shards and dropped. So
    every rank draws the same numbers, and none holds more than its shards and one part. (DTensors
    cannot be drawn directly: on a CPU mesh every rank would draw the same numbers for its shard,
    and transformers' zeroing of the padding row does not reach them.) What initialisation leaves
    alone is as the constructor made it.
    """
    torch.manual_seed(seed)
    named = model.named_parameters(remove_duplicate=False)
    weights = {name: weight for name, weight in named if name in names}

    def place(name: str, drawn: Tensor) -> None:
        if name not in weights:  # another pipeline stage has it, but it is drawn all the same
            return
        path, _, own_name = name.rpartition(".")
        module = model.get_submodule(path)
        if isinstance(module, Wrapper):
            drawn = module.stored_weight(own_name, drawn)
        local(weights[name]).copy_(own_part(drawn, weights[name]))

    left_alone: set[str] = set()
    _mark_drawn_by_constructors(shadow)
    with guard_torch_init_functions():
        for path, part, is_whole in _cut_into_parts(shadow):
            left_alone |= _draw_part(shadow, path, part, is_whole, device, place)
    if left_alone:
        torch.manual_seed(seed)
        made = construct_model(shadow.config, "eager", shadow.dtype, left_alone)
        for name in sorted(left_alone):
            place(name, made.get_parameter(name))


def _draw_part(
    shadow: PreTrainedModel,
    path: str,
    part: nn.Module,
    is_whole: bool,
    device: torch.device,
    place: Callable[[str, Tensor], None],
) -> set[str]:
    """Draws and places the parameters of a part of `shadow`, and drops them.

    It is a function of its own so that nothing still has one of them when the next part is drawn.
    Returns the names of those that initialisation leaves alone.
    """
    left_alone = set()
    part.to_empty(device=device, recurse=is_whole)
    for parameter in part.parameters(is_whole):
        parameter.fill_(torch.nan)
    _initialize_part(shadow, path, part, is_whole)
    for name, drawn in part.named_parameters(path, is_whole):
        # The least value takes no memory, as a mask would.
        if drawn.numel() > 0 and drawn.amin().isnan():
            left_alone.add(name)
        else:
            place(name, drawn)
    part.to_empty(device="meta", recurse=is_whole)
    return left_alone


def _mark_drawn_by_constructors(shadow: PreTrainedModel) -> None:
    """Marks, in place, modules that their constructors give values, where they were hindered.

    Those of fla have a method for it, of a name of transformers' own.
    """
    for module in shadow.modules():
        if hasattr(module, "_initialize_weights") and not isinstance(module, PreTrainedModel):
            for inner in module.modules():
                inner._is_hf_initialized = True  # type: ignore[assignment]


def _cut_into_parts(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module, bool]]:
    """Cuts a model into parts: for each its path, its module, and whether that is whole.

    A part that is not whole has only the parameters directly in its module. The elements of lists,
    as layers are, are whole parts, and so are modules without any list in them. What is directly in
    the modules around these makes parts that are not whole.
    """
    lists = [isinstance(inner, nn.ModuleList) for inner in model.modules()]
    if not any(lists):
        yield path, model, True
        return
    if any(True for _ in model.parameters(recurse=False)):
        yield path, model, False
    for name, child in model.named_children():
        below = f"{path}.{name}".lstrip(".")
        if lists[0]:
            yield below, child, True
        else:
            yield from _cut_into_parts(child, below)


def _initialize_part(shadow: PreTrainedModel, path: str, part: nn.Module, is_whole: bool) -> None:
    """Initialises a part of `shadow`, in place, by transformers' rules.

    Inner modules come before outer ones, which may draw anew what is in them (as GPT-2 does its
    c_proj). So the modules around the part come last. Each module goes by the rules of the
    innermost model that it is in, unless its constructor has drawn what it has.
    """
    around = [shadow]
    for name in filter(None, path.split(".")):
        around.append(getattr(around[-1], name))
    rules: dict[nn.Module, PreTrainedModel] = {}
    for module in (*around, *part.modules()):
        if isinstance(module, PreTrainedModel):
            for inner in module.modules():
                rules[inner] = module
    within: list[nn.Module] = [part]
    if is_whole:
        within = []
        part.apply(within.append)  # inner modules first
    for module in (*within, *reversed(around[:-1])):
        is_drawn = getattr(module, "_is_hf_initialized", False)
        rules[module]._initialize_weights(module, shadow.is_custom_code())
        module._is_hf_initialized = is_drawn  # type: ignore[assignment]
