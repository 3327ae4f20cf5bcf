"""Fresh weights, and buffers, as transformers' own code makes them, for a model that is sharded."""

from collections.abc import Iterator, Set

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from lacuna.model.layers.wrapping import Wrapper
from lacuna.parallel.fsdp import local, own_part
from lacuna.parallel.precision import keep_in_float32


def constructed(
    model_config: PretrainedConfig,
    attention: str | None,
    dtype: torch.dtype,
    real: Set[str] = frozenset(),
) -> PreTrainedModel:
    """A model as transformers' own code makes it on the CPU.

    Buffers are there; of the parameters only those named `real`, all others take no memory.
    """
    settings = {"dtype": dtype, "attn_implementation": attention}
    registered: list[nn.Parameter] = []
    kept: set[int] = set()

    def without_memory(_: nn.Module, __: str, made: nn.Parameter) -> nn.Parameter:
        if len(registered) not in kept and not made.is_meta:
            made = nn.Parameter(made.to("meta"), made.requires_grad)
            # Which spares transformers' drawing what nobody will see.
            made._is_hf_initialized = True
        registered.append(made)
        return made

    with register_module_parameter_registration_hook(without_memory):
        model = AutoModelForCausalLM.from_config(model_config, **settings)
        if real:  # now that it is known which is which in the order of their making
            names = {id(one): name for name, one in model.named_parameters()}
            kept = {place for place, one in enumerate(registered) if names.get(id(one)) in real}
            registered.clear()
            model = AutoModelForCausalLM.from_config(model_config, **settings)
    keep_in_float32(model, dtype)
    return model


def place_buffers(
    model: PreTrainedModel, shadow: PreTrainedModel, names: Set[str], device: torch.device
) -> None:
    """Gives `model` those of its buffers that are in `names`, as transformers makes them."""
    buffers = dict(model.named_buffers())
    for name, made in constructed(shadow.config, "eager", shadow.dtype).named_buffers():
        if name in names and name in buffers:
            place, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(place), own_name, made.to(device))


@torch.no_grad()
def draw_weights(
    model: PreTrainedModel,
    shadow: PreTrainedModel,
    names: Set[str],
    device: torch.device,
    seed: int,
) -> None:
    """Gives the sharded `model` its parameters in `names` as transformers would draw them.

    `shadow` is the same model, unsharded, on the meta device. A part of it at a time, no larger
    than a layer, is made real on `device`, initialised, copied slice by slice and dropped, so that
    every rank draws the same numbers and none holds more than its shards and one part. (DTensor's
    own random numbers are the same on every rank of a CPU mesh, and transformers' zeroing of the
    padding row does not reach a DTensor.) What initialisation leaves alone is as the constructor
    made it.
    """
    torch.manual_seed(seed)
    named = model.named_parameters(remove_duplicate=False)
    weights = {name: weight for name, weight in named if name in names}

    def place(name: str, drawn: Tensor) -> None:
        if name not in weights:  # what another pipeline stage holds is drawn all the same
            return
        path, _, own_name = name.rpartition(".")
        module = model.get_submodule(path)
        if isinstance(module, Wrapper):
            drawn = module.stored_weight(own_name, drawn)
        local(weights[name]).copy_(own_part(drawn, weights[name]))

    left_alone = set()
    with guard_torch_init_functions():
        for path, part, is_whole in _parts(shadow):
            part.to_empty(device=device, recurse=is_whole)
            for parameter in part.parameters(is_whole):
                parameter.fill_(torch.nan)
            _initialize(shadow, path, part, is_whole)
            for name, drawn in part.named_parameters(path, is_whole):
                if drawn.isnan().any():
                    left_alone.add(name)
                else:
                    place(name, drawn)
            part.to_empty(device="meta", recurse=is_whole)
    if left_alone:
        torch.manual_seed(seed)
        made = constructed(shadow.config, "eager", shadow.dtype, left_alone)
        for name in sorted(left_alone):
            place(name, made.get_parameter(name))


def _parts(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module, bool]]:
    """Cuts a model: path and module of each part, and whether it is with all that is in it.

    The elements of lists, which layers are, are parts; so is what has no list in it, and what is
    directly in the modules around these.
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
            yield from _parts(child, below)


def _initialize(shadow: PreTrainedModel, path: str, part: nn.Module, is_whole: bool) -> None:
    """Runs the initialisation that a part of `shadow` gets by transformers' rules, in place.

    Inner modules come before outer ones, which may draw anew what is in them (GPT-2's c_proj); so
    those around the part come last. Each goes by the rules of the innermost model that it is in.
    """
    around = [shadow]
    for name in filter(None, path.split(".")):
        around.append(getattr(around[-1], name))
    rules: dict[nn.Module, PreTrainedModel] = {}
    for module in (*around, *part.modules()):
        for inner in module.modules() if isinstance(module, PreTrainedModel) else ():
            rules[inner] = module
    from_within: list[nn.Module] = []
    part.apply(from_within.append)
    for module in (*(from_within if is_whole else [part]), *reversed(around[:-1])):
        rules[module]._init_weights(module)
