"""Optimizer state in CPU memory changes no step, is away with activations, and back for updates."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from every_model import NO_SPECIMEN, configuration_class, model_types, small_config
from lacuna.config import Config, UserError
from lacuna.config.optimizers import OptimizerConfig
from lacuna.model.architecture import decoder_layers
from lacuna.parallel.around_layers import leave_uncompiled
from lacuna.parallel.recompute import recompute
from lacuna.plan.memory import peak_memory
from lacuna.train.optimizer import build_optimizer
from runs import curve, make_world, refused, stop_after, together, train, weights, write_model
from tiny import random_model, tiny_config

LAYERS = 4
HALF = OptimizerConfig(lr=1e-2, state_offload_share=0.5)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]
Watch = Callable[[torch.optim.Optimizer, str], None]


def deep_model(device: str = "cpu", backend: str = "") -> PreTrainedModel:
    torch._dynamo.reset()
    model = random_model(tiny_config("llama", num_hidden_layers=LAYERS)).to(device).train()
    if backend:
        for layer in decoder_layers(model):
            layer.compile(fullgraph=True, backend=backend)
    return model


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's state."""
    return [one for tensors in optimizer.state.values() for one in tensors.values()]


def bytes_there(optimizer: torch.optim.Optimizer) -> int:
    """The memory that an optimizer's state has."""
    storages = {one.untyped_storage()._cdata: one for one in state_of(optimizer)}
    return sum(one.untyped_storage().nbytes() for one in storages.values())


def check_share(settings: OptimizerConfig) -> Watch:
    """Something to watch training with: the share is away between passes, and else all is there."""

    def watch(optimizer: torch.optim.Optimizer, when: str) -> None:
        whole = sum(one.nbytes for one in state_of(optimizer))
        there = bytes_there(optimizer)
        if when != "forward":
            assert there >= whole
        elif any("exp_avg" in state for state in optimizer.state.values()):  # after an update
            stays = 1 - settings.state_offload_share
            assert (stays - 0.05) * whole < there < (stays + 0.1) * whole

    return watch


def trained(
    model: PreTrainedModel,
    settings: OptimizerConfig,
    micro_batches: int = 1,
    watch: Watch | None = None,
) -> list[Tensor]:
    """Weights and optimizer state after three steps; `watch` sees what goes on between passes."""
    watch = watch or check_share(settings)
    device = next(model.parameters()).device
    optimizer = build_optimizer(model, settings)
    for step in range(3):
        for number in range(micro_batches):
            tokens = (torch.arange(64, device=device)[None] * (step + number + 1)) % 40
            output: Any = model(input_ids=tokens, use_cache=False)
            watch(optimizer, "forward")
            output.logits.float().square().mean().backward()
            watch(optimizer, "backward")
        optimizer.step()
        optimizer.zero_grad()
        watch(optimizer, "update")
    return [*(one.detach().clone() for one in model.parameters()), *state_of(optimizer)]


def check_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_steps_are_the_same_to_the_bit(
    share: float, compiled: bool, micro_batches: int, device: str
) -> None:
    backend = ("inductor" if device == "cuda" else "aot_eager") if compiled else ""
    settings = HALF.model_copy(update={"state_offload_share": share})
    plain = settings.model_copy(update={"state_offload_share": 0.0})
    ours = trained(deep_model(device, backend), settings, micro_batches)
    check_equal(ours, trained(deep_model(device, backend), plain, micro_batches))


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "Muon"},
        {"name": "Muon", "neuron_beta2": 0.95},
        {"implementation": "foreach"},
        pytest.param({"state_dtype": "bfloat16"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_steps_of_other_optimizers_are_the_same_to_the_bit(changes: dict[str, Any]) -> None:
    settings = OptimizerConfig(lr=1e-2, **changes)
    moved = settings.model_copy(update={"state_offload_share": 1.0})
    check_equal(trained(deep_model(), moved), trained(deep_model(), settings))


def test_state_is_copied_out_once_an_update_and_back_in_each_micro_batch() -> None:
    model = deep_model()
    optimizer = build_optimizer(model, HALF)
    copies = CopiesOfBytes()
    found = []
    for micro_batches in (1, 3, 1):
        copies.number = 0
        for _ in range(micro_batches):
            with copies:
                output: Any = model(input_ids=torch.arange(32)[None], use_cache=False)
                output.logits.square().mean().backward()
        found.append(copies.number)
        optimizer.step()
        optimizer.zero_grad()
    nothing, three, one = found
    assert nothing == 0 and one > 2
    assert three == one // 2 * (1 + 3)


class CopiesOfBytes(TorchDispatchMode):
    """Counts the copies of plain bytes, as which state is moved."""

    number = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        is_copy = operator.name().partition(".")[0] == "aten::copy_"
        self.number += is_copy and arguments[0].dtype == torch.uint8
        return operator(*arguments, **(named or {}))


def test_state_that_is_made_late_is_moved_as_well() -> None:
    model = deep_model()
    settings = HALF.model_copy(update={"state_offload_share": 1.0})
    optimizer = build_optimizer(model, settings)
    for step in range(3):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(step > 0 or "mlp" not in name)
        output: Any = model(input_ids=torch.arange(32)[None], use_cache=False)
        if step == 2:
            check_share(settings)(optimizer, "forward")
        output.logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["none", "full"])
def test_state_leaves_and_comes_back_layer_by_layer(mode: str) -> None:
    model = deep_model()
    recompute(
        decoder_layers(model), Config(activation_checkpoint={"mode": mode}).activation_checkpoint
    )
    optimizer = build_optimizer(model, HALF.model_copy(update={"state_offload_share": 1.0}))
    there: dict[str, list[int]] = {"forward": [], "backward": []}

    def note(way: str) -> None:
        there[way].append(bytes_there(optimizer))

    for number, layer in enumerate(decoder_layers(model)):
        layer.mlp.register_forward_hook(lambda *_: note("forward"))
        if number:
            layer.register_full_backward_hook(lambda *_: note("backward"))
    for _ in range(2):
        for list_of_way in there.values():
            list_of_way.clear()
        output: Any = model(input_ids=torch.arange(32)[None], use_cache=False)
        note("forward")
        output.logits.square().mean().backward()
        optimizer.step()
    forward, backward = there["forward"][: LAYERS + 1], there["backward"]
    assert forward == sorted(forward, reverse=True) and forward[0] > forward[-1]
    assert forward[-2] > forward[-1], "copies have the time of the last layer, too"
    assert backward == sorted(backward) and backward[0] < backward[-1]


def test_state_is_moved_beside_layers_that_are_left_uncompiled() -> None:
    model = deep_model(backend="eager")
    optimizer = build_optimizer(model, HALF)
    for layer in decoder_layers(model):
        leave_uncompiled(layer)
    watch = check_share(HALF)
    for _ in range(2):
        output: Any = model(input_ids=torch.arange(32)[None], use_cache=False)
        watch(optimizer, "forward")
        output.logits.square().mean().backward()
        watch(optimizer, "backward")
        optimizer.step()
        optimizer.zero_grad()


def test_passes_that_learn_nothing_move_nothing() -> None:
    model = deep_model()
    optimizer = build_optimizer(model, HALF)
    output: Any = model(input_ids=torch.arange(32)[None], use_cache=False)
    output.logits.square().mean().backward()
    optimizer.step()
    whole = bytes_there(optimizer)
    with torch.no_grad():
        model(input_ids=torch.arange(32)[None], use_cache=False)
    model.eval()(input_ids=torch.arange(32)[None], use_cache=False)
    assert bytes_there(optimizer) == whole


def test_state_is_there_for_an_update_without_a_backward_pass() -> None:
    def stepped(share: float) -> list[Tensor]:
        model = deep_model()
        optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2, state_offload_share=share))
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            model(input_ids=torch.arange(32)[None], use_cache=False)
            check_share(OptimizerConfig(state_offload_share=share))(optimizer, "forward")
            optimizer.step()
        return [*(one.detach() for one in model.parameters()), *state_of(optimizer)]

    check_equal(stepped(1.0), stepped(0.0))


@pytest.mark.parametrize("frozen", ["embed", "embed layers.0", "layers"])
def test_models_of_which_parts_are_frozen_have_their_state_back(frozen: str) -> None:
    def partly_trained(share: float) -> list[Tensor]:
        model = deep_model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen.split()))
        return trained(model, OptimizerConfig(lr=1e-2, state_offload_share=share))

    check_equal(partly_trained(1.0), partly_trained(0.0))


def test_after_a_failed_backward_pass_state_comes_back_as_ever() -> None:
    def interrupted(share: float) -> list[Tensor]:
        model = deep_model()
        settings = OptimizerConfig(lr=1e-2, state_offload_share=share)
        optimizer = build_optimizer(model, settings)
        for step in range(3):
            for fails in (step == 1, False):
                output: Any = model(input_ids=torch.arange(32)[None], use_cache=False)
                loss = output.logits.square().mean()
                if fails:
                    decoder_layers(model)[1].self_attn.q_proj.weight.register_hook(fail_once())
                    with pytest.raises(ZeroDivisionError):
                        loss.backward()
                    optimizer.zero_grad()
            loss.backward()
            check_share(settings)(optimizer, "backward")
            optimizer.step()
            optimizer.zero_grad()
        return [*(one.detach() for one in model.parameters()), *state_of(optimizer)]

    check_equal(interrupted(1.0), interrupted(0.0))


def fail_once() -> Callable[[Tensor], None]:
    left = [1]

    def fail(_: Tensor) -> None:
        if left:
            left.pop()
            raise ZeroDivisionError

    return fail


def test_a_model_of_one_layer_is_refused() -> None:
    model = random_model(tiny_config("llama", num_hidden_layers=1))
    with pytest.raises(UserError, match="optimizer.state_offload_share: state leaves between"):
        build_optimizer(model, HALF)


def test_a_model_whose_layers_learn_nothing_is_refused_at_its_first_pass() -> None:
    model = deep_model()
    model.model.requires_grad_(False)
    with pytest.raises(UserError, match="optimizer.state_offload_share: between the layers"):
        trained(model, HALF)


@pytest.mark.slow
def test_every_architecture_trains_the_same() -> None:
    differing = {}
    tried = 0
    for kind in sorted({*model_types()} - NO_SPECIMEN - {"reformer"}):  # which runs refuse
        found = []
        away: list[bool] = []

        def watch(optimizer: torch.optim.Optimizer, when: str, away: list[bool] = away) -> None:
            if when == "forward" and optimizer.state:
                whole = sum(one.nbytes for one in state_of(optimizer))
                away.append(bytes_there(optimizer) < 0.2 * whole)

        for share in (0.0, 1.0):
            model_config = small_config(configuration_class(kind))
            model_config.use_cache = False
            # Some draw at random in training.
            torch.manual_seed(0)
            model = random_model(model_config, attention="eager").train()
            settings = OptimizerConfig(lr=1e-3, state_offload_share=share)
            try:
                found.append(trained(model, settings, watch=watch))
            except Exception as fault:
                found.append(repr(fault))
        plain, moved = found
        if isinstance(plain, str):  # transformers' own code does not train it here
            continue
        tried += 1
        if isinstance(moved, str):
            differing[kind] = moved
        elif not all(torch.equal(one, other) for one, other in zip(plain, moved, strict=True)):
            differing[kind] = "other steps"
        elif not all(away[len(away) // 2 :]):
            differing[kind] = "state stayed"
    assert differing == {} and tried > 50


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


WAYS = {
    "one process": (),
    "sharded": ("--cpus", 2),
    "copies": ("--cpus", 2, "--parallelism.data_parallel_replicate_degree", 2),
    "tensor": ("--cpus", 2, "--parallelism.tensor_parallel_degree", 2),
    "context": ("--cpus", 2, "--parallelism.context_parallel_degree", 2),
    "adapters": ("--lora.rank", 4),
    "activations": ("--activation_checkpoint.mode", "full", "--activation_checkpoint.offload"),
    "8 bits": ("--optimizer.state_dtype", "int8", "--training.dtype", "bfloat16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_run_in_any_layout_is_the_same_to_the_bit_and_resumed_to_the_bit(
    way: str, world: Path, tmp_path: Path
) -> None:
    if way == "8 bits":
        world = make_world(tmp_path)
        write_model(world / "model", hidden_size=256, intermediate_size=256)
    flags = (*WAYS[way], "--training.gradient_accumulation_steps", 2)
    moved = (*flags, "--optimizer.state_offload_share", 0.7)
    plain, straight, resumed = (tmp_path / name for name in ("plain", "straight", "resumed"))
    together(
        lambda: train(world, plain, *flags),
        lambda: train(world, straight, *moved),
        lambda: stop_after(3, world, resumed, *moved),
    )
    said = train(world, resumed, *moved)
    assert "of state are in CPU memory while gradients are computed" in said
    assert curve(straight) == curve(plain) == curve(resumed)
    assert weights(straight) == weights(plain) == weights(resumed)


REFUSED = {
    "early steps": (
        ("--optimizer.early_step_in_backward", "--training.max_norm", 0),
        "early steps need what is away",
    ),
    "offload": (("--training.enable_cpu_offload",), "the second moves all of the state"),
    "a pipeline": (("--parallelism.pipeline_parallel_degree", 2), "take turns"),
    "recorded steps": (("--compile.cuda_graphs",), "cannot be recorded"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_go_with_is_refused(name: str, world: Path) -> None:
    flags, wrong = REFUSED[name]
    said = refused("train", world / "run.toml", "--optimizer.state_offload_share", 0.5, *flags)
    assert "optimizer.state_offload_share" in said and wrong in said


def test_the_plan_counts_moved_state_with_gradients_or_with_activations() -> None:
    parts = {"weights": 1.0, "gradients": 2.0, "optimizer": 4.0, "activations": 5.0, "loss": 1.0}
    assert peak_memory(parts, 1, moved=0.0) == 11.0
    assert peak_memory(parts, 1, moved=0.5) == 9.0
    assert peak_memory(parts, 1, moved=1.0) == 7.0
    assert peak_memory(parts, 2, moved=0.0) == 13.0
    assert peak_memory(parts, 2, moved=1.0) == 9.0
    assert peak_memory(parts | {"activations": 0.5, "loss": 0.0}, 1, moved=1.0) == 7.0
