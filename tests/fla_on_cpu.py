"""Mends Triton's interpreter, which TRITON_INTERPRET=1 asks for, where it fails on a CPU alone."""

import builtins
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.autotuner as autotuner
import triton.runtime.interpreter as interpreter

_patch_tensor = interpreter._patch_lang_tensor
_patch_language = interpreter._patch_lang
_convert = interpreter._convert_float


def _first_configuration(*_: Any, **__: Any) -> list[float]:
    """Times that are all alike: without a GPU there is nothing to choose by."""
    return [0.0, 0.0, 0.0]


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """numpy 2.4 makes no integer of an array with one element."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda each: int(each.handle.data.item()))


def _range(*bounds: Any) -> Iterable[Any]:
    """A range up to a tensor counts in tensors, as compiled kernels do."""
    if not any(isinstance(bound, tl.tensor) for bound in bounds):
        return builtins.range(*bounds)
    return map(interpreter._implicit_cvt, builtins.range(*map(int, bounds)))


def _patch_lang(kernel: Any) -> Any:
    kernel.__globals__.setdefault("range", _range)
    return _patch_language(kernel)


def _convert_float(data: Any, given: Any, wanted: Any, rounding: Any) -> Any:
    """Rounding up to a power of 2 loses its carry, and not a number becomes one, in float8."""
    if (given, wanted) == (tl.float32, tl.float8e4nv):
        numbers = torch.from_numpy(np.ascontiguousarray(data))
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    if (given, wanted) == (tl.float8e4nv, tl.float32):
        codes = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8))
        return codes.view(torch.float8_e4m3fn).float().numpy()
    return _convert(data, given, wanted, rounding)


def interpret() -> None:
    """Mends the interpreter of this process. It must be called before fla is imported."""
    autotuner.Autotuner._bench = _first_configuration
    autotuner.Autotuner.check_disk_cache = lambda *given: given[-1]()
    interpreter._patch_lang_tensor = _patch_lang_tensor
    interpreter._patch_lang = _patch_lang
    interpreter._convert_float = _convert_float
