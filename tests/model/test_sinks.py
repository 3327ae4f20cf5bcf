"""Attention with sinks is an operator that the compiler can reason about."""

import pytest
import torch

from lacuna.model import sinks  # noqa: F401, which defines the operator


@pytest.mark.parametrize("window", [None, 3])
def test_the_compiler_is_told_what_the_operator_returns(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    heads = {"query": 4, "key": 2, "value": 2}
    tensors = [torch.randn(1, 12, count, 8, generator=generator) for count in heads.values()]
    tensors.append(torch.randn(4, generator=generator))
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    inputs = [each.requires_grad_() for each in tensors]
    torch.library.opcheck(
        torch.ops.lacuna.sink_attention.default, (*inputs, bounds, bounds, 7, 12, 0.3, window)
    )
