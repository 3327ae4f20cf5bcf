"""Calls before and after layers, outside of what is compiled of them."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn


class _Surrounded:
    """What a compiled layer is called by, with calls `before` it and `after` it."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self.compiled = compiled
        self.before: list[Callable[[Tensor], None]] = []
        self.after: list[Callable[[], None]] = []

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        hidden = first_tensor([*arguments, *named.values()])
        for before in self.before:
            before(hidden)
        made = self.compiled(*arguments, **named)
        for after in self.after:
            after()
        return made


def call_before(layer: nn.Module, function: Callable[[Tensor], None]) -> None:
    """Has a function be called before a layer, in place, with the hidden states it is given."""

    def hook(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        function(first_tensor([*arguments, *named.values()]))

    if layer._compiled_call_impl is None:
        layer.register_forward_pre_hook(hook, with_kwargs=True)
    else:
        _surrounded(layer).before.append(function)


def call_after(layer: nn.Module, function: Callable[[], None]) -> None:
    """Has a function be called after a layer, in place."""
    if layer._compiled_call_impl is None:
        layer.register_forward_hook(lambda *_: function())
    else:
        _surrounded(layer).after.append(function)


def leave_uncompiled(layer: nn.Module) -> None:
    """Has a layer not be compiled after all, in place; what is called around it is called still."""
    compiled: Any = layer._compiled_call_impl
    layer._compiled_call_impl = None
    if isinstance(compiled, _Surrounded):
        for before in compiled.before:
            call_before(layer, before)
        for after in compiled.after:
            call_after(layer, after)


def first_tensor(arguments: Sequence[Any]) -> Tensor:
    """What a module is given to work on: numbers of tokens, or hidden states [B, T, width]."""
    return next(one for one in arguments if isinstance(one, Tensor))


def _surrounded(layer: nn.Module) -> _Surrounded:
    """How a compiled layer is called, so that more can be called around it, in place."""
    compiled: Any = layer._compiled_call_impl
    if isinstance(compiled, _Surrounded):
        return compiled
    surrounded = _Surrounded(compiled)
    layer._compiled_call_impl = surrounded
    return surrounded
