"""lacuna's grouped products of experts are transformers' own, in outputs and gradients."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from every_model import NO_SPECIMEN, configuration_class, model_types, small_config
from lacuna.model.layers.quantized_stacks import quantize_stacks
from lacuna.model.layers.stacks import add_stack_adapters
from lacuna.parallel.expert_stacks import stacks_of
from lacuna.parallel.grouped_experts import GROUPED, PLAIN, install_grouped_experts
from tiny import relative_error

EXACT = 1e-6
FEW = ("qwen3_moe", "gpt_oss", "nemotron_h")  # gated; transposed, with biases; not gated


def first_stack(kind: str) -> nn.Module | None:
    """The experts of a small model's first mixture, with random weights, if it has any."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(configuration_class(kind)))
    stacks = stacks_of([model.float()])
    if not stacks:
        return None
    stack: Any = stacks[0]
    for weight in stack.parameters():
        nn.init.normal_(weight, std=0.2)
    stack.width = stack.down_proj.shape[2 if stack.is_transposed else 1]
    return stack  # type: ignore[no-any-return]


def with_gradients(
    stack: nn.Module, tokens: int = 19, backend: str = ""
) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs, and the gradients of weights, of tokens and of how their experts are weighted."""
    generator = torch.Generator().manual_seed(1)
    width = int(stack.width)  # type: ignore[arg-type]
    hidden = torch.randn(tokens, width, generator=generator, requires_grad=True)
    scores = torch.rand(tokens, int(stack.num_experts), generator=generator)  # type: ignore[arg-type]
    # No token has the last expert.
    weights, chosen = scores[:, :-1].topk(2)
    weights.requires_grad_()
    stack.zero_grad()
    run = torch.compile(stack, fullgraph=True, dynamic=True, backend=backend) if backend else stack
    outputs = run(hidden, chosen, weights)
    outputs.backward(torch.randn(outputs.shape, generator=generator))
    found = {name: one.grad for name, one in stack.named_parameters() if one.grad is not None}
    assert hidden.grad is not None and weights.grad is not None
    return outputs.detach(), {**found, "hidden": hidden.grad, "weights": weights.grad}


def check(theirs: nn.Module, ours: nn.Module, backend: str = "") -> None:
    for tokens in (19, 5) if backend else (19,):
        expected, gradients = with_gradients(theirs, tokens)
        outputs, found = with_gradients(ours, tokens, backend)
        assert relative_error({"": outputs}, {"": expected}) < EXACT
        assert found.keys() == gradients.keys()
        assert relative_error(found, gradients) < EXACT


def pair(kind: str) -> tuple[nn.Module, nn.Module]:
    theirs = first_stack(kind)
    assert theirs is not None
    assert theirs.config._experts_implementation == PLAIN  # type: ignore[union-attr]
    ours = copy.deepcopy(theirs)
    install_grouped_experts(ours)
    assert ours.config._experts_implementation == GROUPED  # type: ignore[union-attr]
    assert theirs.config._experts_implementation == PLAIN  # type: ignore[union-attr]
    return theirs, ours


@pytest.mark.parametrize("backend", ["", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", FEW)
def test_experts_are_transformers_own(kind: str, backend: str) -> None:
    torch._dynamo.reset()
    check(*pair(kind), backend)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [one for one in model_types() if one not in NO_SPECIMEN])
def test_experts_of_every_kind_are_transformers_own(kind: str) -> None:
    if first_stack(kind) is None:
        pytest.skip("has no stacks of experts")
    check(*pair(kind))


@pytest.mark.parametrize("kind", FEW)
def test_a_model_s_own_loop_is_left_as_it_is(kind: str) -> None:
    stack = first_stack(kind)
    assert stack is not None
    stack.config._experts_implementation = "eager"  # type: ignore[union-attr]
    install_grouped_experts(stack)
    assert stack.config._experts_implementation == "eager"  # type: ignore[union-attr]


@pytest.mark.parametrize("backend", ["", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", FEW[:2])
@pytest.mark.parametrize("change", ["adapters", "nf4"])
def test_changed_stacks_compute_as_with_transformers_own(
    change: str, kind: str, backend: str
) -> None:
    torch._dynamo.reset()
    both = pair(kind)
    for stack in both:
        torch.manual_seed(3)
        if change == "nf4":
            quantize_stacks(stack, "nf4")
        else:
            names = [".gate_up_proj", ".down_proj"]
            add_stack_adapters(stack, names, 2, 1.0, torch.float32)
            for name, weight in stack.named_parameters():
                if "lora" in name:
                    nn.init.normal_(weight, std=0.2)
    check(*both, backend)
