"""AdamW on shards is torch's AdamW on the whole model; what is skipped leaves no trace."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from every_model import configuration_class, model_types, small_config
from lacuna.config import Config
from lacuna.config.optimizers import OptimizerConfig
from lacuna.config.sections import ModelConfig, TrainingConfig
from lacuna.model.architecture import meta_model
from lacuna.model.build import BuiltModel, build_model
from lacuna.parallel.mesh import Layout, build_mesh
from lacuna.train.optimizer import (
    build_optimizer,
    optimizer_tensors,
    update,
)
from tiny import (
    CPU,
    differing,
    random_model,
    relative_error,
    run_ranks,
    tiny_config,
    tokenizer_of_words,
    whole,
)

IMPLEMENTATIONS = ("fused", "foreach", "for-loop")
TRAINED = torch.tensor(10.0, dtype=torch.float64)
# Added to the roots of squares, so that updates depend on how large gradients are.
SENSITIVE = 1.0
# The first does not clip, and the last clips nothing.
LIMITS = (0.0, 0.5, 1000.0)


@pytest.fixture
def model_config(tmp_path: Path) -> Path:
    tiny_config("llama").save_pretrained(tmp_path)
    return tmp_path


def configuration(
    folder: Path, implementation: str, eps: float = 1e-8, **training: object
) -> Config:
    return Config(
        model=ModelConfig(config=str(folder)),
        training=TrainingConfig(seq_len=32, **training),
        optimizer=OptimizerConfig(
            implementation=implementation, lr=1e-2, weight_decay=0.3, eps=eps
        ),
    )


def build(config: Config) -> BuiltModel:
    return build_model(
        config, tokenizer_of_words(), build_mesh(Layout(1, dist.get_world_size()), "cpu"), CPU
    )


def undecayed(architecture: str) -> set[str]:
    """The names of the parameters without weight decay."""
    model = random_model(tiny_config(architecture))
    groups = build_optimizer(model, OptimizerConfig(weight_decay=0.3)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter] for parameter in groups[1]["params"]}


@pytest.mark.parametrize("architecture", ["llama", "llama_tied", "gpt2", "qwen3_moe"])
def test_embeddings_norms_and_biases_do_not_decay(architecture: str) -> None:
    model = random_model(tiny_config(architecture))
    expected = {name for name, parameter in model.named_parameters() if parameter.ndim == 1}
    embeddings = {
        "gpt2": {"transformer.wte.weight", "transformer.wpe.weight"},  # the head is tied
    }.get(architecture, {"model.embed_tokens.weight"})
    assert undecayed(architecture) == expected | embeddings
    assert "lm_head.weight" not in undecayed("llama")


NO_MATRICES = {
    "gpt_oss": (
        "experts.gate_up_proj_bias",
        "experts.down_proj_bias",
        "self_attn.sinks",
        "router.bias",
    ),
    "recurrent_gemma": (
        "rg_lru.input_gate_bias",
        "rg_lru.recurrent_gate_bias",
        "rg_lru.recurrent_param",
    ),
    "mamba": ("mixer.A_log", "mixer.D", "mixer.dt_proj.bias"),
    "zamba": ("mamba.A_log", "mamba.D", "mamba.dt_proj_bias"),
    "kimi_linear": ("forget_gate.A_log", "forget_gate.dt_bias"),
    "rwkv": ("attention.time_mix_key", "attention.time_decay", "feed_forward.time_mix_receptance"),
    "xlnet": ("rel_attn.r_w_bias", "rel_attn.seg_embed"),
    "deepseek_v4": ("compressor.position_bias",),
}
"""Parameters of several dimensions that are no matrices, by what their names end with."""

MATRICES = {
    "gpt_oss": ("experts.gate_up_proj", "experts.down_proj", "q_proj.weight", "router.weight"),
    "recurrent_gemma": (
        "rg_lru.input_gate_weight",
        "rg_lru.recurrent_gate_weight",
        "conv_1d.weight",
    ),
    "mamba": ("mixer.in_proj.weight", "mixer.conv1d.weight", "mixer.x_proj.weight"),
    "zamba": ("mamba.x_proj_weight", "mamba.dt_proj_weight"),
    "qwen2_moe": ("shared_expert_gate.weight", "experts.down_proj"),
    "dbrx": ("mlp.w1", "mlp.v1"),
}


@pytest.mark.parametrize("kind", sorted(NO_MATRICES.keys() | MATRICES.keys()))
def test_what_decays_is_a_matrix_however_many_dimensions_others_have(kind: str) -> None:
    model = meta_model(small_config(configuration_class(kind)), "eager", torch.float32)
    names = {parameter: name for name, parameter in model.named_parameters()}
    decayed, free = (
        [names[one] for one in group["params"]]
        for group in build_optimizer(model, OptimizerConfig()).param_groups
    )
    for wanted, others, ends in (
        (free, decayed, NO_MATRICES.get(kind, ())),
        (decayed, free, MATRICES.get(kind, ())),
    ):
        for end in ends:
            assert any(name.endswith(end) for name in wanted), end
            assert not any(name.endswith(end) for name in others), end


@pytest.mark.slow
def test_of_every_causal_model_no_bias_norm_or_state_decays() -> None:
    for kind in model_types():
        model = meta_model(small_config(configuration_class(kind)), "eager", torch.float32)
        names = {parameter: name for name, parameter in model.named_parameters()}
        decayed = [
            names[one]
            for one in build_optimizer(model, OptimizerConfig()).param_groups[0]["params"]
        ]
        states = re.compile(r"bias$|norm\.?(weight)?$|A_log$|\.D$|\.embed_tokens\.weight$")
        wrong = [name for name in decayed if states.search(name)]
        assert wrong == [], kind


def test_frozen_parameters_are_left_alone() -> None:
    model = random_model(tiny_config("llama"))
    model.model.requires_grad_(False)
    groups = build_optimizer(model, OptimizerConfig()).param_groups
    assert [parameter for group in groups for parameter in group["params"]] == [
        model.lm_head.weight
    ]


def give_gradients(model: nn.Module, scale: float = 0.5) -> None:
    """Gradients that do not depend on how the model is sharded."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * scale + 0.01


def snapshot(built: BuiltModel, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """Whole copies of parameters and optimizer state."""
    tensors = dict(built.model.named_parameters()) | optimizer_tensors(built.model, optimizer)
    return {name: whole(tensor.detach()).clone() for name, tensor in tensors.items()}


def three_steps(
    folder: Path, implementation: str, max_norm: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The whole sharded model after three clipped steps, and torch's own unsharded one."""
    config = configuration(folder, implementation, SENSITIVE, max_norm=max_norm)
    built = build(config)
    plain = random_model(tiny_config("llama"))
    plain.load_state_dict(
        {name: whole(tensor) for name, tensor in built.model.state_dict().items()}
    )
    matrices = [p for name, p in plain.named_parameters() if p.ndim > 1 and "embed" not in name]
    others = [p for name, p in plain.named_parameters() if p.ndim == 1 or "embed" in name]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=SENSITIVE)
    optimizer = build_optimizer(built.model, config.optimizer)
    for step in range(3):
        give_gradients(built.model, step + 0.5)
        for group in (*optimizer.param_groups, *reference.param_groups):
            group["lr"] = 1e-2 * (step + 1)
        norm, _ = update(built, optimizer, TRAINED)
        give_gradients(plain, step + 0.5)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm or torch.inf)
        assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
        reference.step()
    assert all(parameter.grad is None for parameter in built.model.parameters())
    return snapshot(built, optimizer), {name: p.detach() for name, p in plain.named_parameters()}


def three_steps_each(
    folder: Path, implementation: str
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    return [three_steps(folder, implementation, limit) for limit in LIMITS]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_three_steps_on_shards_are_torchs_steps_on_the_whole(
    model_config: Path, implementation: str
) -> None:
    for results in run_ranks(2, three_steps_each, model_config, implementation):
        for ours, expected in results:
            assert relative_error({name: ours[name] for name in expected}, expected) < 1e-6
            assert ours["optimizer.lm_head.weight.step"].item() == 3
        (free, _), (clipped, _), (within, _) = results
        assert relative_error(within, free) == 0 < 1e-4 < relative_error(clipped, free)


def poison(model: nn.Module) -> None:
    """A NaN in the last rank's shard of one gradient; the others must learn of it."""
    if dist.get_rank() == dist.get_world_size() - 1:
        model.lm_head.weight.grad.to_local()[0, 0] = torch.nan


def skipped_steps(folder: Path, implementation: str) -> None:
    """Two good steps with skipped ones between must equal the two good steps."""
    config = configuration(folder, implementation, skip_nan_inf=True)
    built, untroubled = build(config), build(config)
    optimizer, calm = (
        build_optimizer(built.model, config.optimizer),
        build_optimizer(untroubled.model, config.optimizer),
    )
    nothing_trained = torch.zeros_like(TRAINED)

    initial = snapshot(built, optimizer)
    give_gradients(built.model)
    _, skip = update(built, optimizer, nothing_trained)
    after = snapshot(built, optimizer)
    assert skip.item() == 1
    assert not any(after[name].any() for name in after if name.startswith("optimizer."))
    assert differing({name: after[name] for name in initial}, initial) == []

    for trained, broken in (
        (TRAINED, False),
        (TRAINED, True),
        (nothing_trained, False),
        (TRAINED, False),
    ):
        before = snapshot(built, optimizer)
        give_gradients(built.model)
        if broken:
            poison(built.model)
        norm, skip = update(built, optimizer, trained)
        assert norm.isnan() == broken
        assert skip.item() == (broken or trained == 0)
        if skip:
            assert differing(snapshot(built, optimizer), before) == []
        else:
            assert differing(snapshot(built, optimizer), before) != []
            give_gradients(untroubled.model)
            update(untroubled, calm, trained)
    assert differing(snapshot(built, optimizer), snapshot(untroubled, calm)) == []
    assert snapshot(built, optimizer)["optimizer.lm_head.weight.step"].item() == 2


def skipped_steps_each(folder: Path) -> None:
    for implementation in IMPLEMENTATIONS:
        skipped_steps(folder, implementation)


def test_a_skipped_step_leaves_parameters_state_and_step_count_untouched(
    model_config: Path,
) -> None:
    run_ranks(2, skipped_steps_each, model_config)


def broken_step(folder: Path) -> tuple[float, bool]:
    config = configuration(folder, "fused", skip_nan_inf=False)
    built = build(config)
    optimizer = build_optimizer(built.model, config.optimizer)
    give_gradients(built.model)
    poison(built.model)
    _, skip = update(built, optimizer, TRAINED)
    return skip.item(), bool(whole(built.model.lm_head.weight).isnan().any())


def test_without_skip_nan_inf_nothing_is_hidden(model_config: Path) -> None:
    assert run_ranks(2, broken_step, model_config) == [(0.0, True)] * 2


@pytest.mark.parametrize("scale", [torch.nan, 0.0])
def test_allocating_state_changes_no_weight_whatever_the_last_update_was(scale: float) -> None:
    model = random_model(tiny_config("llama"))
    optimizer = build_optimizer(model, OptimizerConfig())
    optimizer.grad_scale = torch.tensor(scale)  # as `update` leaves it
    optimizer.found_inf = torch.zeros(())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer_tensors(model, optimizer)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_allocated_state_is_what_a_first_step_makes(implementation: str) -> None:
    model = random_model(tiny_config("llama"))
    config = Config(optimizer=OptimizerConfig(implementation=implementation))
    allocated, stepped = (
        build_optimizer(model, config.optimizer),
        build_optimizer(model, config.optimizer),
    )
    give_gradients(model)
    stepped.step()
    stepped.zero_grad()
    ours, theirs = (optimizer_tensors(model, optimizer) for optimizer in (allocated, stepped))
    described = [
        {name: (t.shape, t.dtype, t.device) for name, t in state.items()}
        for state in (ours, theirs)
    ]
    assert described[0] == described[1]
    assert not any(tensor.any() for tensor in ours.values())


def test_an_early_step_is_taken_after_one_that_was_skipped() -> None:
    model = random_model(tiny_config("llama"))
    optimizer = build_optimizer(model, OptimizerConfig(early_step_in_backward=True))
    optimizer.found_inf = torch.ones(())  # as `update` leaves it
    before = model.lm_head.weight.detach().clone()
    model(input_ids=torch.arange(8)[None]).logits.sum().backward()
    assert not torch.equal(model.lm_head.weight, before)
