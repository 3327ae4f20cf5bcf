"""Muon in any layout is torch's Muon on whole matrices, with AdamW for all that is no matrix."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from every_model import configuration_class, model_types, small_config
from lacuna.config import UserError
from lacuna.config.optimizers import OptimizerConfig
from lacuna.config.sections import TrainingConfig
from lacuna.model.architecture import meta_model
from lacuna.model.layers.linear import is_matrix
from lacuna.model.parameter_groups import muon_matrices
from lacuna.parallel.fsdp import local
from lacuna.parallel.homes import balanced_homes
from lacuna.parallel.mesh import Layout
from lacuna.train.muon import Muon, orthogonalised
from lacuna.train.optimizer import build_optimizer, optimizer_tensors, update
from layouts import Case
from optimizer_steps import (
    FOUR_RANKS,
    TRAINED,
    TWO_RANKS,
    build,
    give_gradients,
    gradient,
    snapshot,
    three_steps,
)
from runs import curve, refused, stop_after, together, train, weights
from tiny import (
    differing,
    random_model,
    relative_error,
    run_ranks,
    tiny_config,
)

SETTINGS = OptimizerConfig(name="Muon", lr=1e-2, weight_decay=0.3)
EVENED = SETTINGS.model_copy(update={"neuron_beta2": 0.9})


@pytest.fixture
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's Muon, which would iterate in bfloat16, iterates in float32."""
    monkeypatch.setattr(Tensor, "bfloat16", lambda tensor: tensor.to(torch.float32, copy=True))


def torchs_steps(
    before: dict[str, Tensor], settings: OptimizerConfig = SETTINGS
) -> dict[str, Tensor]:
    """The parameters after three steps of torch's Muon, and of torch's AdamW beside it."""
    parameters = {name: nn.Parameter(tensor.clone()) for name, tensor in before.items()}
    matrices = [p for name, p in parameters.items() if p.ndim == 2 and ".layers." in name]
    head = [p for name, p in parameters.items() if name == "lm_head.weight"]
    others = [p for p in parameters.values() if p.ndim == 1]
    others += [p for name, p in parameters.items() if "embed_tokens" in name]
    muon = torch.optim.Muon(
        matrices,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        ns_steps=settings.ns_steps,
        adjust_lr_fn=settings.adjust_lr_fn,
    )
    groups = [
        {"params": head, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step in range(3):
        for name, parameter in parameters.items():
            parameter.grad = gradient(name, parameter.shape, step)
        for optimizer in (muon, adamw):
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * (step + 1)
            optimizer.step()
    state = {
        f"optimizer.{name}.momentum_buffer": muon.state[parameter]["momentum_buffer"]
        for name, parameter in parameters.items()
        if parameter in muon.state
    }
    return {name: parameter.detach() for name, parameter in parameters.items()} | state


def normuons_steps(before: dict[str, Tensor], settings: OptimizerConfig) -> dict[str, Tensor]:
    """The same by NorMuon's formulas (arXiv 2510.05491), on whole matrices [out, in]."""
    expected = torchs_steps(before, settings)
    beta = settings.neuron_beta2
    for name in [name for name in before if f"optimizer.{name}.momentum_buffer" in expected]:
        weight = before[name]
        momentum, squares = torch.zeros_like(weight), torch.zeros(weight.shape[0])
        for step in range(3):
            new = gradient(name, weight.shape, step)
            momentum = 0.95 * momentum + 0.05 * new
            update = orthogonalised(0.95 * momentum[None] + 0.05 * new, settings.ns_steps)[0]
            squares = beta * squares + (1 - beta) * update.square().mean(dim=1)
            evened = update / squares.sqrt()[:, None]
            evened *= update.norm() / evened.norm()
            rate = settings.lr * (step + 1)
            weight = weight * (1 - rate * settings.weight_decay)
            weight = weight - rate * 0.2 * max(weight.shape) ** 0.5 * evened
        expected[name] = weight
        expected[f"optimizer.{name}.neuron_square"] = squares
    return expected


def check_three_steps(
    folder: Path,
    cases: dict[str, Case],
    settings: OptimizerConfig = SETTINGS,
    reference: Callable[..., dict[str, Tensor]] = torchs_steps,
) -> None:
    tiny_config("llama", num_hidden_layers=4).save_pretrained(folder)
    ranks = {case.layout.data_parallel * case.layout.sharing for case in cases.values()}.pop()
    results = run_ranks(ranks, three_steps, folder, [*cases.values()], settings)
    for name, of_ranks in zip(cases, zip(*results, strict=True), strict=True):
        before: dict[str, Tensor] = {}
        after: dict[str, Tensor] = {}
        for first, last in of_ranks:
            both = after.keys() & last.keys()
            equal = {key: after[key] for key in both}, {key: last[key] for key in both}
            assert differing(*equal) == [], name
            before |= first
            after |= last
        expected = reference(before, settings)
        assert len(expected) == len(before) + (28 if reference is torchs_steps else 56)
        changed = {key: after[key] - before[key] for key in before}
        wanted = {key: expected[key] - before[key] for key in before}
        assert relative_error(changed, wanted) < 1e-5, name
        assert relative_error({key: after[key] for key in expected}, expected) < 1e-6, name


@pytest.mark.slow
def test_on_two_ranks_three_steps_are_torchs(tmp_path: Path, in_float32: None) -> None:
    check_three_steps(tmp_path, TWO_RANKS)


@pytest.mark.slow
def test_on_four_ranks_three_steps_are_torchs(tmp_path: Path, in_float32: None) -> None:
    check_three_steps(tmp_path, FOUR_RANKS)


@pytest.mark.slow
def test_on_two_ranks_three_steps_are_normuons(tmp_path: Path, in_float32: None) -> None:
    check_three_steps(tmp_path, TWO_RANKS, EVENED, normuons_steps)


@pytest.mark.slow
def test_on_four_ranks_three_steps_are_normuons(tmp_path: Path, in_float32: None) -> None:
    check_three_steps(tmp_path, FOUR_RANKS, EVENED, normuons_steps)


@pytest.mark.parametrize("architecture, inputs", [("llama", 1), ("gpt2", 0)])
def test_all_neurons_of_a_matrix_move_by_as_much_at_first(architecture: str, inputs: int) -> None:
    model = random_model(tiny_config(architecture))
    optimizer = build_optimizer(model, EVENED.model_copy(update={"weight_decay": 0.0}))
    weights = [p for p, _ in optimizer.matrices if p.shape[0] != p.shape[1]]
    before = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.grad = torch.randn(weight.shape)
    optimizer.step()
    assert weights
    for weight, old in zip(weights, before, strict=True):
        moved = (weight.detach() - old).square().mean(dim=inputs).sqrt()
        assert moved.std() < 1e-3 * moved.mean()
        assert moved.mean() == pytest.approx(0.2 * EVENED.lr, rel=0.3)  # as AdamW's updates


def test_neurons_of_stacks_are_refused() -> None:
    model = random_model(tiny_config("qwen3_moe"), "eager")
    with pytest.raises(UserError, match="optimizer.neuron_beta2: this model has stacks"):
        build_optimizer(model, EVENED)


def test_neurons_of_stacks_are_refused_before_a_run(world: Path, tmp_path: Path) -> None:
    tiny_config("qwen3_moe").save_pretrained(tmp_path)
    words = [
        "--optimizer.name",
        "Muon",
        "--optimizer.neuron_beta2",
        0.95,
        "--model.config",
        tmp_path,
    ]
    said = refused("train", world / "run.toml", *words, "--dry-run")
    assert "optimizer.neuron_beta2: this model has stacks" in said


@pytest.mark.parametrize(
    "changes",
    [{"nesterov": False}, {"adjust_lr_fn": "original", "momentum": 0.5}, {"ns_steps": 3}],
)
def test_every_setting_is_torchs(changes: dict[str, Any], in_float32: None) -> None:
    settings = SETTINGS.model_copy(update=changes)
    model = random_model(tiny_config("llama"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, settings)
    for step in range(3):
        give_gradients(model, step)
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * (step + 1)
        optimizer.step()
    expected = torchs_steps(before, settings)
    ours = snapshot(model, optimizer)
    assert relative_error({name: ours[name] for name in expected}, expected) < 1e-6


def test_in_bfloat16_the_iteration_is_torchs() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.zeros(48, 32))
    ours, theirs = parameter, nn.Parameter(parameter.detach().clone())
    group = {"params": [ours], "muon": True, "transposed": False}
    optimizer = Muon([group], SETTINGS, {}, torch.bfloat16)
    oracle = torch.optim.Muon([theirs], lr=SETTINGS.lr, adjust_lr_fn="match_rms_adamw")
    ours.grad = torch.randn(48, 32)
    theirs.grad = ours.grad.clone()
    optimizer.step()
    oracle.step()
    assert relative_error({"": ours.detach()}, {"": theirs.detach()}) < 1e-2


def test_singular_values_become_about_one() -> None:
    torch.manual_seed(0)
    for shape in ((3, 20, 50), (3, 50, 20)):
        values = torch.linalg.svdvals(orthogonalised(torch.randn(shape), 5))
        assert values.min() > 0.6 and values.max() < 1.3


MATRICES = {
    "llama": ("q_proj.weight", "down_proj.weight"),
    "gpt2": ("attn.c_attn.weight", "mlp.c_proj.weight"),
    "qwen3_moe": ("mlp.gate.weight", "experts.gate_up_proj", "experts.down_proj"),
    "mamba": ("in_proj.weight", "x_proj.weight"),
}
OTHERS = {
    "llama": ("lm_head.weight", "embed_tokens.weight", "norm.weight"),
    "gpt2": ("wte.weight", "wpe.weight", "c_attn.bias"),
    "qwen3_moe": ("lm_head.weight", "q_norm.weight"),
    "qwen2_moe": ("shared_expert_gate.weight",),
    "mamba": ("conv1d.weight", "A_log", "mixer.D"),
}


@pytest.mark.parametrize("architecture", sorted(MATRICES.keys() | OTHERS.keys()))
def test_muon_has_the_matrices_and_adamw_the_rest(architecture: str) -> None:
    model = random_model(tiny_config(architecture), "eager")
    optimizer = build_optimizer(model, SETTINGS)
    states: dict[str, set[str]] = {}
    for name in optimizer_tensors(model, optimizer):
        parameter, _, key = name.removeprefix("optimizer.").rpartition(".")
        states.setdefault(parameter, set()).add(key)
    assert states.keys() == dict(model.named_parameters()).keys()
    for ends, keys in (
        (MATRICES.get(architecture, ()), {"momentum_buffer"}),
        (OTHERS.get(architecture, ()), {"step", "exp_avg", "exp_avg_sq"}),
    ):
        for end in ends:
            found = [kinds for name, kinds in states.items() if name.endswith(end)]
            assert found and all(kinds == keys for kinds in found), end


# Modules that have matrices of products beside linear layers, experts and routers.
WITH_MATRICES = {
    "DeepseekV4HyperConnection",
    "DeepseekV4HyperHead",
    "FalconLinear",
    "Gemma3MultiModalProjector",
    "HYV4HyperConnection",
    "HYV4HyperHead",
    "MultiheadAttention",
    "NonDynamicallyQuantizableLinear",
    "RecurrentGemmaRglru",
    "ZambaMambaMixer",
}


@pytest.mark.slow
def test_in_every_architecture_muon_has_matrices_of_products_alone() -> None:
    """Other parameters may have as many dimensions: experts one below another, or positions."""
    others = set()
    for kind in model_types():
        model_config = small_config(configuration_class(kind))
        model = meta_model(model_config, "eager", torch.float32)
        matrices = muon_matrices(model)
        for module in model.modules():
            if type(module) in (nn.Linear, Conv1D):
                continue
            name = type(module).__name__
            found = {
                own: parameter
                for own, parameter in module.named_parameters(recurse=False)
                if parameter in matrices
            }
            if found and not name.endswith(("Experts", "Router")) and name not in WITH_MATRICES:
                others.add((kind, name, *found))
    assert others == set()


@pytest.mark.slow
def test_in_every_architecture_it_is_known_which_experts_are_stored_as_inputs_by_outputs() -> None:
    """Else the "original" rate of a matrix would be that of its transpose."""
    wrong, seen = set(), set()
    for kind in model_types():
        model = meta_model(small_config(configuration_class(kind)), "eager", torch.float32)
        names = {parameter: name.rpartition(".")[2] for name, parameter in model.named_parameters()}
        for parameter, is_transposed in muon_matrices(model).items():
            name = names[parameter]
            if name not in ("gate_up_proj", "up_proj", "down_proj"):
                continue
            seen.add(kind)
            outputs, inputs = parameter.shape[-2:]
            if is_transposed:
                outputs, inputs = inputs, outputs
            width = outputs if name == "down_proj" else inputs
            if width != 32:
                wrong.add((kind, name))
    assert wrong == set()
    assert {"gpt_oss", "llama4_text", "qwen3_moe", "mixtral"} <= seen


@pytest.mark.parametrize("name", ["bonus", "r_k", "lower_bounds", "mimo_x", "L"])
def test_what_scales_the_states_of_heads_is_no_matrix(name: str) -> None:
    """Such parameters of fla's layers are multiplied with states value by value."""
    assert not is_matrix(nn.Module(), name, torch.empty(4, 16))
    assert is_matrix(nn.Module(), "proj", torch.empty(4, 16))


def test_a_layer_stored_as_inputs_by_outputs_learns_like_its_transpose() -> None:
    model = random_model(tiny_config("gpt2"))
    matrices = muon_matrices(model)
    weight = model.transformer.h[0].mlp.c_fc.weight
    assert matrices[weight] and tuple(weight.shape) == (32, 128)
    settings = SETTINGS.model_copy(update={"adjust_lr_fn": "original", "weight_decay": 0.0})
    optimizer = build_optimizer(model, settings)
    before = weight.detach().clone()
    weight.grad = torch.randn(weight.shape)
    expected = orthogonalised(weight.grad[None].mT * 0.05 * 1.95, 5)[0].mT
    optimizer.step()
    moved = (before - weight.detach()) / (settings.lr * 2)  # sqrt(128 / 32)
    assert relative_error({"": moved}, {"": expected}) < 1e-3


def steps_of_experts(folder: Path) -> dict[str, Tensor]:
    [(_, after)] = three_steps(folder, [Case(Layout(dp_shard=dist.get_world_size()))], SETTINGS)
    return after


def test_each_expert_of_a_stack_is_a_matrix_of_its_own(tmp_path: Path) -> None:
    tiny_config("qwen3_moe", num_experts=3).save_pretrained(tmp_path)
    [(before, alone)] = run_ranks(1, three_steps, tmp_path, [Case()], SETTINGS)[0]
    for after in run_ranks(2, steps_of_experts, tmp_path):
        assert relative_error(after, alone) < 1e-6
    name = next(name for name in before if name.endswith("layers.0.mlp.experts.down_proj"))
    stack = nn.Parameter(before[name].clone())
    experts = [nn.Parameter(expert.clone()) for expert in before[name]]
    one, each = (
        Muon([{"params": parameters, "muon": True, "transposed": False}], SETTINGS, {})
        for parameters in ([stack], experts)
    )
    stack.grad = gradient(name, stack.shape, 0)
    for expert, its in zip(experts, gradient(name, stack.shape, 0), strict=True):
        expert.grad = its
    one.step()
    each.step()
    whole_stack = torch.stack([expert.detach() for expert in experts])
    assert relative_error({"": stack.detach()}, {"": whole_stack}) < 1e-6


def skipped_steps(folder: Path, implementation: str) -> None:
    """Skipped steps, by a NaN in one rank's shard or by nothing to learn from, leave no trace."""
    settings = EVENED.model_copy(update={"implementation": implementation})
    training = TrainingConfig(seq_len=24, skip_nan_inf=True)
    built = build(folder, Case(Layout(dp_shard=dist.get_world_size())), settings, training)
    optimizer = build_optimizer(built.model, settings)
    for divisor, broken in ((0.0, False), (1.0, False), (1.0, True), (0.0, False), (1.0, False)):
        before = snapshot(built.model, optimizer)
        give_gradients(built.model, 0)
        if broken and dist.get_rank() == dist.get_world_size() - 1:
            weight = built.model.model.layers[0].self_attn.q_proj.weight
            local(weight.grad)[0, 0] = torch.nan
        _, skip = update(built, optimizer, TRAINED * divisor)
        assert skip.item() == (broken or divisor == 0)
        assert (differing(snapshot(built.model, optimizer), before) == []) == bool(skip)


def skipped_steps_each(folder: Path) -> None:
    for implementation in ("fused", "foreach"):
        skipped_steps(folder, implementation)


def test_a_skipped_step_leaves_everything_untouched(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    for ranks in (1, 2):
        run_ranks(ranks, skipped_steps_each, tmp_path)


def test_a_matrix_without_a_gradient_is_left_alone() -> None:
    model = random_model(tiny_config("llama"))
    optimizer = build_optimizer(model, SETTINGS)
    before = snapshot(model, optimizer)
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    name = "model.layers.1.mlp.up_proj.weight"
    changed = {name, f"optimizer.{name}.momentum_buffer"}
    assert {*differing(snapshot(model, optimizer), before)} == changed


class Calls(TorchDispatchMode):
    """Counts the operators that are called within it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        self.count += 1
        return operator(*arguments, **(named or {}))


def calls_of_a_step(matrices: int, settings: OptimizerConfig, may_skip: bool) -> int:
    weights = [nn.Parameter(torch.randn(16, 8)) for _ in range(matrices)]
    optimizer = Muon([{"params": weights, "muon": True, "transposed": False}], settings, {})
    if may_skip:
        optimizer.found_inf = torch.zeros(())
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    with Calls() as calls:
        optimizer.step()
    return calls.count


@pytest.mark.parametrize("settings", [SETTINGS, EVENED], ids=["Muon", "NorMuon"])
@pytest.mark.parametrize(("may_skip", "each"), [(False, 0), (True, 1)])
def test_more_matrices_of_a_shape_cost_the_host_hardly_more(
    settings: OptimizerConfig, may_skip: bool, each: int
) -> None:
    """A small model's step takes as long as the host needs to call its operators."""
    few, many = (calls_of_a_step(matrices, settings, may_skip) for matrices in (4, 12))
    assert many - few <= 8 * each


def test_homes_share_the_work_evenly() -> None:
    shapes = [torch.Size(shape) for shape in [(64, 64)] * 7 + [(256, 64)] * 6 + [(16, 64)] * 3]
    homes_of = balanced_homes(shapes, 4)
    assert sorted(matrix for home in homes_of for matrix in home) == list(range(len(shapes)))
    costs = [sum(shapes[m].numel() * min(shapes[m]) for m in home) for home in homes_of]
    assert max(costs) < 1.3 * sum(costs) / 4


FLAGS = (
    *("--optimizer.name", "muon", "--training.steps", 12, "--checkpoint.interval", 4),
    *("--optimizer.neuron_beta2", 0.95),
)


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_bit_and_only_with_muon(world: Path, tmp_path: Path) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    flags = (*FLAGS, "--cpus", 2)
    together(lambda: train(world, straight, *flags), lambda: stop_after(5, world, stopped, *flags))
    said = train(world, stopped, *FLAGS[2:6], "--cpus", 2, status=2)
    assert "it belongs to another optimizer ([optimizer])" in said
    said = train(world, stopped, *FLAGS[:6], "--cpus", 2, status=2)
    assert "neuron_square' is not among what is trained, or what the optimizer keeps" in said
    train(world, stopped, *flags)
    assert curve(stopped, "loss", "grad_norm") == curve(straight, "loss", "grad_norm")
    assert curve(straight)[0][1] > curve(straight)[-1][1] + 0.3
    assert weights(stopped) == weights(straight)
