"""torchtitan, which knows no CPU, imported so that it trains on one: for tests of its driver.

To be imported before any part of torchtitan. On a GPU it changes nothing.
"""

import importlib
import platform
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from lacuna.parallel.processes import device_type

# What torchtitan asks of torch.cuda, answered for a CPU. Peaks of memory are not known there.
_CPU = SimpleNamespace(
    set_device=torch.cpu.set_device,
    current_device=lambda: 0,
    synchronize=torch.cpu.synchronize,
    empty_cache=lambda: None,
    get_device_name=lambda _: platform.machine(),
    get_device_properties=lambda _: SimpleNamespace(total_memory=2**30),
    memory_stats=lambda _: {},
    reset_peak_memory_stats=lambda: None,
)


def _import_for(kind: str, device: Any) -> None:
    # It asks torch for the kind of device, and for the module of it, as it is imported.
    asked = {"_get_available_device_type": lambda: kind, "_get_device_module": lambda _: device}
    with mock.patch.multiple(torch._utils, **asked):
        importlib.import_module("torchtitan.tools.utils")


_histogram = torch.histc


def _histogram_of_integers(values: torch.Tensor, *bounds: Any, **named: Any) -> torch.Tensor:
    """CPUs count numbers with a point only, which routers' choices are not."""
    return _histogram(values.float(), *bounds, **named).to(values.dtype)


def _mend_mixtures() -> None:
    """Has mixtures of experts count and sort tokens by what CPUs have."""
    torch.histc = _histogram_of_integers  # type: ignore[assignment]
    sorting = importlib.import_module("torchtitan.models.moe.utils")
    sorting.generate_permute_indices = partial(sorting.generate_permute_indices, use_cpu=True)


if device_type() == "cpu":
    _import_for("cpu", _CPU)
    _mend_mixtures()
