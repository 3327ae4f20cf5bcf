"""Settings that not every kind of device can do."""

from importlib.util import find_spec

from lacuna.config.errors import UserError
from lacuna.config.sections import Config


def check_device(config: Config, kind: str) -> None:
    """Raises `UserError` for settings that this kind of device does not have.

    They need a GPU where there is none, or a package that is not installed on a GPU.
    """
    base = config.quantization.base
    if kind == "cuda":
        if base == "nf4" and not find_spec("bitsandbytes"):
            raise UserError(
                f"quantization.base: {base} on a GPU needs bitsandbytes, which is not installed: "
                "pip install -e '.[qlora]' -c constraints.txt."
            )
        return
    uncompiled = config.activation_checkpoint.mode == "memory_budget" and not config.compile.enable
    pinned = config.checkpoint.async_mode == "async_with_pinned_mem"
    needing_a_gpu = {
        'checkpoint.async_mode = "async_with_pinned_mem"': pinned,
        "profiling.enable_memory_snapshot": config.profiling.enable_memory_snapshot,
        "parallelism.enable_async_tensor_parallel": config.parallelism.enable_async_tensor_parallel,
        'activation_checkpoint.mode = "memory_budget" without compile.enable = true': uncompiled,
    }
    for setting, wanted in needing_a_gpu.items():
        if wanted:
            raise UserError(f"{setting} needs a GPU, and this run is on the CPU: leave it out.")
