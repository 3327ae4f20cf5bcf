"""Adapters in peft's files: what their tensors are called there, and how they are read."""

import os
from collections.abc import Set
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from lacuna.config import UserError, explained
from lacuna.config.adapters import ADAPTER_WEIGHTS, LoraConfig
from lacuna.model.layers.lora import PARTS, initialize_adapters, scale_of
from lacuna.model.weights import stored_slices
from lacuna.parallel.fsdp import local, own_part


def file_name(name: str) -> str:
    """The name that a trained tensor has in peft's file."""
    end = ".weight" if name.endswith(PARTS[:2]) else ""
    return f"base_model.model.{name}{end}"


@torch.no_grad()
def load_adapters(model: PreTrainedModel, trained: Set[str], settings: LoraConfig) -> None:
    """Loads, in place, a rank's share of the parameters `trained` from files.

    The parameters become the sum of the adapters that `settings` names. Raises `UserError` when
    those do not fit: they have another rank, or are for other layers or for another model.
    """
    found: dict[str, list[Tensor]] = {}
    for folder in settings.adapter:
        ratio = 1.0
        if len(settings.adapter) > 1:
            ratio = scale_of(LoraConfig(adapter=(folder,))) / scale_of(settings)
        for key, tensor in _read_tensors(folder).items():
            found.setdefault(key, []).append(ratio * tensor if "lora_B" in key else tensor)
    _drop_twins(found, model.all_tied_weights_keys)
    wrong = (
        f"lora.adapter: {', '.join(settings.adapter)} is of another model, or of other settings "
        "than lora.*"
    )
    needless = min(found.keys() - {file_name(name) for name in trained}, default=None)
    if needless is not None:
        raise UserError(f"{wrong}: nothing here takes {needless}.")
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        key = file_name(name)
        parts = found.get(key, [])
        if len(parts) > 1 and (settings.parameters or not name.endswith(PARTS[:2])):
            raise UserError(
                f"lora.adapter: {key} has no sum over several adapters, as only layers' have: give "
                "one."
            )
        whole = torch.cat(parts, dim=int(name.endswith("lora_B"))) if parts else None
        if whole is None or whole.shape != parameter.shape:
            shape = "missing" if whole is None else [*whole.shape]
            raise UserError(f"{wrong}: {key} is {shape}, and {[*parameter.shape]} here.")
        local(parameter).copy_(own_part(whole, parameter))


def _read_tensors(folder: str) -> dict[str, Tensor]:
    """Reads the tensors of the adapter in a folder: by their names there, in float32."""
    path = os.path.join(folder, ADAPTER_WEIGHTS)
    problem = f"lora.adapter: cannot read {path}"
    mend = "save the adapter again, as safetensors"
    with (
        explained(problem, OSError, SafetensorError, mend=mend),
        safe_open(path, framework="pt") as file,
    ):
        return {key: file.get_tensor(key).float() for key in file.keys()}  # noqa: SIM118


def _drop_twins(found: dict[str, list[Tensor]], tied: dict[str, Any]) -> None:
    """Removes from `found` one of each two tensors that are one weight in the model.

    Raises `UserError` where the two differ.
    """
    for end, home in tied.items():
        name = file_name(end)
        twin = file_name(home)
        removed = found.pop(name, [])
        kept = found.get(twin, [])
        if len(removed) != len(kept) or not all(map(torch.equal, removed, kept)):
            raise UserError(
                f"lora.adapter: {twin} and {name} are one weight in the model, and not the same "
                "there."
            )


def begin_adapters(
    model: PreTrainedModel,
    trained: set[str],
    settings: LoraConfig,
    base: str | None,
    seed: int,
    device: torch.device,
) -> None:
    """Gives the adapters of a filled model, in place, the values that they begin with."""
    initialize_adapters(model, seed)
    if settings.init == "loftq":
        from lacuna.model.layers.loftq import initialize_from_quantization_error

        slices = stored_slices(str(base))
        initialize_from_quantization_error(model, slices, device)
    if settings.adapter:
        load_adapters(model, trained, settings)
