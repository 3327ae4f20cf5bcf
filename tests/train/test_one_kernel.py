"""The one kernel updates as torch's AdamW does, also what is skipped, scaled, moved or recorded."""

# ruff: noqa: E402

import importlib.util
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

ON_GPU = torch.cuda.is_available()
# The variable must be there before anything imports Triton.
if importlib.util.find_spec("triton") is None or not (
    ON_GPU or os.environ.get("TRITON_INTERPRET") == "1"
):
    pytest.skip("needs triton and a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from torch.distributed.fsdp import fully_shard

from lacuna.config.optimizers import OptimizerConfig
from lacuna.parallel.fsdp import local
from lacuna.train.one_kernel import _BLOCK, OneKernelAdamW
from lacuna.train.optimizer import LocalAdamW, build_optimizer
from tiny import random_model, run_ranks, tiny_config

DEVICE = "cuda" if ON_GPU else "cpu"
SHAPES = [(3, _BLOCK), (100, 65), (7,), (), (0, 4), (2 * _BLOCK + 1,)]
# Added to the roots of squares, so that updates depend on how large gradients are.
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 0.1, "fused": True}


def parameters(dtype: torch.dtype = torch.float32, unaligned: bool = False) -> list[nn.Parameter]:
    torch.manual_seed(0)
    drawn = [torch.randn(shape, device=DEVICE, dtype=dtype) for shape in SHAPES]
    if unaligned:
        drawn = [torch.cat([one.flatten()[:1], one.flatten()])[1:].view_as(one) for one in drawn]
    return [nn.Parameter(one) for one in drawn]


def groups(all_of: list[nn.Parameter]) -> list[dict[str, object]]:
    empty = [one for one in all_of if not one.numel()]  # a rank may have nothing of a group
    rest = [one for one in all_of if one.numel()]
    return [{"params": rest[::2], "weight_decay": 0.3}, {"params": rest[1::2]}, {"params": empty}]


def give_gradients(step: int, *models: list[nn.Parameter]) -> None:
    for model in models:
        torch.manual_seed(step)
        for parameter in model:
            parameter.grad = torch.randn_like(parameter)


def state_of(optimizer: AdamW) -> list[Tensor]:
    return [one for state in optimizer.state.values() for one in state.values()]


def steps_beside_torchs(
    dtype: torch.dtype, unaligned: bool, change: Callable[[int, AdamW], None]
) -> tuple[list[Tensor], list[Tensor]]:
    """All tensors after five steps of the kernel, and after torch's; `change` is called before."""
    ours, theirs = parameters(dtype, unaligned), parameters(dtype)
    optimizers = OneKernelAdamW(groups(ours), **SETTINGS), AdamW(groups(theirs), **SETTINGS)
    for step in range(5):
        give_gradients(step, ours, theirs)
        for optimizer in optimizers:
            change(step, optimizer)
            optimizer.step()
    assert optimizers[0].tables, "the kernel was not used"
    return tuple(
        [*(one.detach() for one in trained), *state_of(optimizer)]
        for trained, optimizer in zip((ours, theirs), optimizers, strict=True)
    )


def nothing(step: int, optimizer: AdamW) -> None:
    pass


def scales(step: int, optimizer: AdamW) -> None:
    optimizer.grad_scale = torch.tensor(1.5 + step, device=DEVICE)


def skips(step: int, optimizer: AdamW) -> None:
    optimizer.found_inf = torch.tensor(float(step in (0, 3)), device=DEVICE)


def rates(step: int, optimizer: AdamW) -> None:
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(1e-2 * (step + 1), device=DEVICE)


@pytest.mark.parametrize("unaligned", [False, True])
@pytest.mark.parametrize("change", [nothing, scales, skips, rates])
def test_steps_are_torchs(change: Callable[[int, AdamW], None], unaligned: bool) -> None:
    for ours, theirs in zip(*steps_beside_torchs(torch.float32, unaligned, change), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not ON_GPU, reason="Triton's interpreter cuts bfloat16 off")
def test_weights_in_bfloat16_are_rounded_as_torchs_on_a_gpu() -> None:
    for ours, theirs in zip(*steps_beside_torchs(torch.bfloat16, False, scales), strict=True):
        # What is rounded otherwise in one step is found in the sums of the next ones.
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-10)


def test_a_skipped_step_leaves_all_as_it_is_whatever_the_gradients() -> None:
    trained = parameters()
    optimizer = OneKernelAdamW(groups(trained), **SETTINGS)
    give_gradients(0, trained)
    optimizer.step()
    before = [one.detach().clone() for one in [*trained, *state_of(optimizer)]]
    for parameter in trained:
        parameter.grad.fill_(torch.nan)
    optimizer.found_inf = torch.ones((), device=DEVICE)
    optimizer.step()
    for one, other in zip(before, [*trained, *state_of(optimizer)], strict=True):
        assert torch.equal(one, other.detach())


def test_tensors_are_found_where_they_have_gone() -> None:
    ours, theirs = parameters(), parameters()
    optimizers = OneKernelAdamW(groups(ours), **SETTINGS), AdamW(groups(theirs), **SETTINGS)
    for step in range(4):
        give_gradients(step, ours, theirs)
        if step == 2:
            for tensor in state_of(optimizers[0]):
                tensor.set_(tensor.clone())
        if step == 3:
            ours[0].grad = theirs[0].grad = None
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def shards_beside_torchs() -> tuple[list[Tensor], list[Tensor]]:
    """All that this rank has after three steps of the kernel, and of torch's, of a sharded model.

    One of three ranks has nothing of the keys' four rows.
    """
    found = []
    for kind in (OneKernelAdamW, LocalAdamW):
        model = random_model(tiny_config("llama", hidden_size=8, intermediate_size=33))
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = kind(model.parameters(), **SETTINGS)
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = parameter.detach() * step + 0.01
            optimizer.grad_scale = torch.tensor(1.5)
            optimizer.step()
        assert kind is LocalAdamW or optimizer.tables, "the kernel was not used"
        found.append([local(one).detach() for one in [*model.parameters(), *state_of(optimizer)]])
    return found[0], found[1]


@pytest.mark.skipif(ON_GPU, reason="shards are on CPUs, which Triton's interpreter is for")
def test_shards_are_updated_as_torch_does() -> None:
    results = run_ranks(3, shards_beside_torchs)
    assert any(not one.numel() for ours, _ in results for one in ours)
    for ours, theirs in results:
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_weights_that_come_and_go_are_updated_and_asked_of_the_device_anew() -> None:
    ours, theirs = parameters(), parameters()
    optimizers = OneKernelAdamW(ours, **SETTINGS), AdamW(theirs, **SETTINGS)
    for step in range(5):
        give_gradients(step, ours, theirs)
        if step % 2:
            ours[1].grad = theirs[1].grad = None
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_gradients_stay_as_they_are() -> None:
    trained = parameters()
    optimizer = OneKernelAdamW(groups(trained), **SETTINGS)
    optimizer.grad_scale = torch.tensor(3.0, device=DEVICE)
    give_gradients(0, trained)
    before = [one.grad.clone() for one in trained]
    optimizer.step()
    assert all(torch.equal(one.grad, old) for one, old in zip(trained, before, strict=True))


def test_tensors_of_other_kinds_are_updated_by_torch() -> None:
    """Numbers that are not next to each other, and several dtypes."""
    for other in (torch.randn(6, 4).t(), torch.randn(4, dtype=torch.float64)):
        ours, theirs = ([nn.Parameter(other.clone().to(DEVICE))] for _ in range(2))
        ours += parameters()
        theirs += parameters()
        optimizer = OneKernelAdamW(ours, **SETTINGS)
        give_gradients(0, ours, theirs)
        optimizer.step()
        AdamW(theirs, **SETTINGS).step()
        assert not optimizer.tables
        for one, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, expected)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_recorded_step_on_cuda_is_torchs() -> None:
    ours, theirs = parameters(), parameters()
    optimizer, plain = OneKernelAdamW(groups(ours), **SETTINGS), AdamW(groups(theirs), **SETTINGS)
    scale = torch.tensor(2.0, device=DEVICE)
    for group in optimizer.param_groups:
        group["lr"] = torch.full((), 1e-2, device=DEVICE)
    optimizer.grad_scale = plain.grad_scale = scale
    graph = torch.cuda.CUDAGraph()
    give_gradients(0, ours, theirs)
    optimizer.step()
    plain.step()
    for group in optimizer.param_groups:
        group["capturable"] = True
    with torch.cuda.graph(graph):
        optimizer.step()
    kept = [one.grad for one in ours]
    for step in range(1, 4):
        give_gradients(step, theirs)
        if step == 2:  # an update of other tensors between replays
            give_gradients(step, ours)
            optimizer.step()
        else:
            for place, one in zip(kept, theirs, strict=True):
                place.copy_(one.grad)
            graph.replay()
        plain.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_plain_adamw_on_cuda_has_the_kernel_unless_it_steps_early() -> None:
    model = random_model(tiny_config("llama")).to(DEVICE)
    for settings, kernel in (({}, True), ({"early_step_in_backward": True}, False)):
        optimizer = build_optimizer(model, OptimizerConfig(**settings))
        assert isinstance(optimizer, OneKernelAdamW) == kernel
    assert not isinstance(
        build_optimizer(model, OptimizerConfig(implementation="foreach")), OneKernelAdamW
    )
