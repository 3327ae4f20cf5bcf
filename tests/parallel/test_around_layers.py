"""What is called around layers is called once a pass, however the layers themselves are called."""

import pytest
import torch
from torch import Tensor, nn

from lacuna.parallel.around_layers import call_after, call_before, leave_uncompiled


class Layer(nn.Module):
    """A layer of somebody's own: torch's own are not compiled by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.product(hidden)


@pytest.mark.parametrize("way", ["plain", "compiled", "left uncompiled"])
def test_calls_are_made_before_and_after_a_layer(way: str) -> None:
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    layer = Layer()
    if way != "plain":
        layer.compile(fullgraph=True, backend="eager")
    calls: list[str] = []

    def note_first(hidden: Tensor) -> None:
        assert hidden.shape == (2, 4)
        calls.append("first")

    call_before(layer, note_first)
    call_before(layer, lambda _: calls.append("second"))
    call_after(layer, lambda: calls.append("after"))
    if way == "left uncompiled":
        leave_uncompiled(layer)
    hidden = torch.randn(2, 4)
    for given, named in (((hidden,), {}), ((), {"hidden": hidden})):
        assert torch.equal(layer(*given, **named), layer.product(hidden))
    assert calls == ["first", "second", "after"] * 2
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert (graphs > 0) == (way == "compiled")


def test_a_layer_with_nothing_around_it_is_left_uncompiled() -> None:
    layer = Layer()
    layer.compile(fullgraph=True, backend="eager")
    leave_uncompiled(layer)
    assert layer._compiled_call_impl is None
