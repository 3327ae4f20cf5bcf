"""Groups of parameters with settings of their own learn as torch's groups do, in any layout."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lacuna.config import Config, UserError
from lacuna.config.optimizers import OptimizerConfig, OptimizerGroup
from lacuna.config.sections import ModelConfig, TrainingConfig
from lacuna.model.build import build_model
from lacuna.parallel.mesh import Layout
from lacuna.train.optimizer import build_optimizer, optimizer_tensors
from layouts import Case, pipelined
from optimizer_steps import build
from runs import curve, lacuna, refused, stop_after, together, train, weights
from tiny import (
    CPU,
    mesh_of,
    random_model,
    relative_error,
    run_ranks,
    tiny_config,
    tokenizer_of_words,
    whole,
)

SETTINGS = OptimizerConfig(
    lr=1e-2,
    weight_decay=0.3,
    groups=(
        OptimizerGroup(pattern="layers.0.self_attn.*", lr_ratio=0.5, weight_decay=0.0),
        OptimizerGroup(pattern="*_proj.weight", lr_ratio=2.0),
        OptimizerGroup(pattern="embed_tokens.weight", weight_decay=0.7),
        OptimizerGroup(pattern="norm.weight", lr_ratio=0.0),
    ),
)
CASES = {
    "dp_shard 2": Case(Layout(dp_shard=2)),
    "tp 2": Case(Layout(tp=2), parallelism={"tensor_parallel_degree": 2}),
    "pp 2": pipelined(Layout(pp=2), 4),
}
TABLES = """
[[optimizer.groups]]
pattern = "embed_tokens.weight"
lr_ratio = 0.25
weight_decay = 0.2

[[optimizer.groups]]
pattern = "down_proj.weight"
name = "muon"
"""


def expected_group(name: str) -> tuple[float, float]:
    """The learning rate and the weight decay that SETTINGS give a parameter."""
    if "layers.0.self_attn" in name:
        return 0.5e-2, 0.0
    if name.endswith("_proj.weight"):
        return 2e-2, 0.3
    if name.endswith("embed_tokens.weight"):
        return 1e-2, 0.7
    if name.endswith(".norm.weight"):
        return 0.0, 0.0
    return 1e-2, 0.3 if name == "lm_head.weight" else 0.0


def gradient(name: str, shape: torch.Size) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator)


def one_step(folder: Path, cases: list[Case]) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """The whole parameters before and after a step."""
    results = []
    for case in cases:
        config = Config(
            model=ModelConfig(config=str(folder)),
            training=TrainingConfig(seq_len=24),
            optimizer=SETTINGS,
            parallelism={"pipeline_parallel_degree": case.layout.pp} | case.parallelism,
        )
        built = build_model(config, tokenizer_of_words(), mesh_of(case.layout), CPU)
        named = dict(built.model.named_parameters())
        before = {name: whole(one.detach()).clone() for name, one in named.items()}
        optimizer = build_optimizer(built.model, SETTINGS)
        for name, one in named.items():
            loss = (whole(one) * gradient(name, one.shape)).sum()
            one.grad = torch.autograd.grad(loss, one)[0]
        optimizer.step()
        results.append({name: (before[name], whole(one.detach())) for name, one in named.items()})
    return results


@pytest.mark.slow
def test_a_step_in_every_layout_is_torchs_with_such_groups(tmp_path: Path) -> None:
    tiny_config("llama", num_hidden_layers=4).save_pretrained(tmp_path)
    for of_ranks in zip(*run_ranks(2, one_step, tmp_path, [*CASES.values()]), strict=True):
        steps = of_ranks[0] | of_ranks[1]
        assert len(steps) == 39
        expected = {}
        for name, (before, _) in steps.items():
            parameter = nn.Parameter(before.clone())
            parameter.grad = gradient(name, before.shape)
            rate, decay = expected_group(name)
            torch.optim.AdamW([parameter], rate, (0.9, 0.95), 1e-8, decay).step()
            expected[name] = parameter.detach() - before
        ours = {name: after - before for name, (before, after) in steps.items()}
        assert relative_error(ours, expected) < 1e-5
        assert not ours["model.norm.weight"].any()


def group_of_embedding(folder: Path, case: Case, settings: OptimizerConfig) -> tuple[float, float]:
    """The learning rate and the weight decay of this rank's embedding."""
    built = build(folder, case, settings)
    optimizer = build_optimizer(built.model, settings)
    embedding = built.model.get_input_embeddings().weight
    [group] = [one for one in optimizer.param_groups if {*one["params"]} & {embedding}]
    return group["lr"], group["weight_decay"]


@pytest.mark.parametrize("name", ["lm_head.weight", "embed_tokens.weight"])
def test_a_tied_weight_is_known_by_each_of_its_names_on_every_stage(
    name: str, tmp_path: Path
) -> None:
    """Else its copies, of which the first stage's has no head, would drift apart."""
    tiny_config("llama_tied", num_hidden_layers=4).save_pretrained(tmp_path)
    group = OptimizerGroup(pattern=name, lr_ratio=0.25, weight_decay=0.2)
    settings = OptimizerConfig(lr=1e-2, groups=(group,))
    case = pipelined(Layout(pp=2), 4)
    assert run_ranks(2, group_of_embedding, tmp_path, case, settings) == [(0.25e-2, 0.2)] * 2


def test_a_group_may_have_muon(tmp_path: Path) -> None:
    model = random_model(tiny_config("llama"))
    group = OptimizerGroup(pattern="down_proj.weight", name="Muon")
    tensors = optimizer_tensors(model, build_optimizer(model, OptimizerConfig(groups=(group,))))
    with_momentum = {name for name in tensors if name.endswith("momentum_buffer")}
    assert with_momentum == {
        f"optimizer.{name}.momentum_buffer"
        for name, _ in model.named_parameters()
        if name.endswith("down_proj.weight")
    }


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (OptimizerGroup(pattern="nothing"), "'nothing' matches no trained parameter"),
        (
            OptimizerGroup(pattern="norm.weight", name="Muon"),
            "'norm.weight' matches no trained matrix of a layer",
        ),
    ],
)
def test_a_group_of_nothing_is_refused(group: OptimizerGroup, reason: str) -> None:
    model = random_model(tiny_config("llama"))
    with pytest.raises(UserError, match=rf"optimizer\.groups, table 1: {reason}"):
        build_optimizer(model, OptimizerConfig(groups=(group,)))


@pytest.mark.slow
def test_a_stopped_run_with_groups_goes_on_to_the_bit(world: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text((world / "run.toml").read_text() + TABLES)
    straight, stopped, copied = (tmp_path / name for name in ("straight", "stopped", "copied"))
    flags = ("--training.steps", 12)
    together(
        lambda: train(tmp_path, straight, *flags),
        lambda: stop_after(5, tmp_path, stopped, *flags),
    )
    train(tmp_path, stopped, *flags)
    # The run's own record of its settings makes the same run.
    lacuna("train", straight / "config.toml", "--job.dump_folder", copied)
    for folder in (stopped, copied):
        assert curve(folder) == curve(straight)
        assert weights(folder) == weights(straight)


def test_a_misspelt_table_is_refused(world: Path, tmp_path: Path) -> None:
    settings = tmp_path / "run.toml"
    settings.write_text((world / "run.toml").read_text() + TABLES.replace("lr_ratio", "lr_ration"))
    assert "did you mean lr_ratio" in refused("train", settings)


def test_a_table_with_a_rate_of_its_own_or_without_a_pattern_is_answered_by_words(
    world: Path, tmp_path: Path
) -> None:
    settings = tmp_path / "run.toml"
    plain = (world / "run.toml").read_text()
    settings.write_text(plain + TABLES.replace("lr_ratio = 0.25", "lr = 1e-3"))
    said = refused("train", settings)
    assert "optimizer.groups[0].lr: there is no such setting" in said
    assert "did you mean lr_ratio" in said
    settings.write_text(plain + "[[optimizer.groups]]\nlr_ratio = 0.5\n")
    assert "optimizer.groups[0].pattern: it must be given" in refused("train", settings)
