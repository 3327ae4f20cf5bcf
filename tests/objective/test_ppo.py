"""Runs of PPO: alike in every layout, resumed to the bit with their critic, refused by name."""

import math
import shutil
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig

from lacuna.config import Config
from lacuna.config.contradictions import contradictions_of
from lacuna.config.reinforcement import PpoConfig
from lacuna.data.tokenizer import load_tokenizer
from lacuna.objective.critic import build_critic, critic_config, values_of_samples
from lacuna.objective.ppo import Ppo, _columns_of
from lacuna.objective.sample_rows import lay_out
from lacuna.parallel.mesh import Layout
from lacuna.rollout.groups import Sample
from policies import one_rank
from rewarded import (
    DEEP,
    SHARED_LAYOUTS,
    InLayout,
    completions,
    flags,
    made_once,
    rewards_until,
    shallow_model,
    write_prompts,
)
from runs import (
    as_stopped,
    checkpoint,
    curve,
    ended,
    lacuna,
    refused,
    rows,
    start,
    steps,
    train,
    wait_until,
    weights,
    write_model,
)
from tiny import CPU, mesh_of, run_ranks, tiny_config

KEYS = (
    *("loss", "critic_loss", "grad_norm", "critic_grad_norm", "reward", "entropy", "clipped"),
    *("moved", "critic_clipped", "mismatch_mean", "tokens"),
)
"""What two runs that are the same have in common in their log."""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="module")
def judge(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that scores, with the tokens of the world's model."""
    folder = write_model(tmp_path_factory.mktemp("judge"), num_labels=1)
    torch.manual_seed(5)
    model_config = LlamaConfig.from_pretrained(folder)
    AutoModelForSequenceClassification.from_config(model_config).save_pretrained(folder)
    return folder


def ppo(prompts: Path, *more: object) -> list[object]:
    return flags(prompts, "--job.task", "ppo", "--ppo.updates", 2, *more)


CASES: dict[str, tuple[object, ...]] = {
    "plain": ("--ppo.beta", 0),
    "adaptive": ("--ppo.kl_target", 0.01, "--ppo.updates", 3, "--ppo.unended_penalty", 0.5),
    "adapters": ("--lora.rank", 4, "--ppo.beta", 0.2, "--rollout.samples", 1),
    "temperature": (
        "--rollout.temperature",
        0.7,
        "--ppo.reward_clip",
        0.5,
        "--ppo.critic_lr",
        0.01,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [*CASES, "adaptive, cp 2, ring", "adaptive, tp 2"],
)
def test_a_stopped_run_goes_on_to_the_bit(
    case: str, world: Path, prompts: Path, tmp_path: Path
) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    name, _, layout = case.partition(", ")
    own = ppo(prompts, *CASES[name], *SHARED_LAYOUTS.get(layout, ()), "--checkpoint.interval", 2)
    keys = KEYS if case == "plain" else (*KEYS, "divergence", "beta")
    train(world, straight, *own, "--training.steps", 7)
    if case == "adaptive":  # of runs that have ended one is enough: it has updates left
        train(world, resumed, *own, "--training.steps", 4)
    else:
        as_stopped(straight, resumed, 4)
    train(world, resumed, *own, "--training.steps", 7)
    assert curve(straight, *keys) == curve(resumed, *keys)
    assert completions(straight) == completions(resumed)
    assert weights(straight) == weights(resumed)
    files = ["critic.model.score.weight", "critic.optimizer.score.weight.exp_avg"]
    saved = torch.distributed.checkpoint.FileSystemReader(checkpoint(straight, 6)).read_metadata()
    assert {*files} <= saved.state_dict_metadata.keys()
    if case == "adaptive":
        assert len({row["beta"] for row in rows(straight)}) == 3


@pytest.mark.slow
def test_optimizer_state_of_both_models_in_cpu_memory_changes_nothing(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    plain, moved = tmp_path / "plain", tmp_path / "moved"
    train(world, plain, *ppo(prompts))
    said = train(world, moved, *ppo(prompts, "--optimizer.state_offload_share", 1))
    assert said.count("of state are in CPU memory while gradients are computed") == 2
    assert curve(plain, *KEYS) == curve(moved, *KEYS)
    assert completions(plain) == completions(moved)
    assert weights(plain) == weights(moved)


LAYOUTS = {
    "shards": ("--cpus", 2, "--training.batch_size", 2),
    "replicas": (
        *("--cpus", 2, "--training.batch_size", 2),
        *("--parallelism.data_parallel_replicate_degree", 2),
        *("--parallelism.data_parallel_shard_degree", 1),
    ),
    "zero 1": (
        *("--cpus", 2, "--training.batch_size", 2, "--parallelism.zero_stage", 1),
        *("--packing.mode", "none"),
    ),
    "accumulated": ("--training.batch_size", 2, "--training.gradient_accumulation_steps", 2),
    **SHARED_LAYOUTS,
}


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    return shallow_model(tmp_path_factory.mktemp("shallow"))


@pytest.fixture(scope="module")
def in_layout(
    world: Path,
    prompts: Path,
    shallow: tuple[object, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> InLayout:
    def flags_of(case: str, layout: str) -> list[object]:
        model = DEEP if case == "temperature" else shallow
        return ppo(prompts, *CASES[case], *model, *EVERY_LAYOUT[layout])

    return made_once(world, tmp_path_factory.mktemp("layouts"), flags_of)


def check_layouts(case: str, layouts: list[str], in_layout: InLayout) -> None:
    """Runs a case in each layout, and compares what is logged with one process's."""
    keys = KEYS if case == "plain" else (*KEYS, "divergence", "beta")
    alone = in_layout(case, "alone")
    wanted = curve(alone, *keys)
    for name in layouts:
        found = in_layout(case, name)
        for row, other in zip(curve(found, *keys), wanted, strict=True):
            assert row == pytest.approx(other, rel=2e-4, abs=1e-5), name
        said, other_said = (
            [row["completion"] for row in completions(one)] for one in (found, alone)
        )
        assert said == other_said, name


def test_a_layout_trains_as_one_process_does(in_layout: InLayout) -> None:
    check_layouts("adaptive", ["tp 2"], in_layout)


OF_OTHERS = (*[*SHARED_LAYOUTS][1::2], "tp 2", "cp 2 × tp 2")
"""The layouts that GRPO has, and of the rest those that other cases and other tests of PPO have."""
SOME_LAYOUTS = {
    "plain": ["shards"],
    "adaptive": [name for name in LAYOUTS if name not in OF_OTHERS],
    "adapters": ["shards", "cp 2 × tp 2"],
    "temperature": ["cp 2 × tp 2"],
}
"""The layouts of each case."""


def test_a_sampler_that_differs_is_corrected_where_that_is_set() -> None:
    values = {"advantages": [1.0, 1.0], "values": [0.0, 0.0], "returns": [1.0, 1.0]}
    sample = Sample([1], [2, 3], [-1.0, -2.0], True, old=[-1.5, -1.9], **values)
    settings = PpoConfig(importance="token", importance_bound=1.05)
    found = _columns_of([sample], settings)["corrections"]
    assert found.tolist() == pytest.approx([math.exp(-0.5), 1.05])
    assert _columns_of([sample], PpoConfig())["corrections"].tolist() == [1.0, 1.0]
    said = contradictions_of(Config(job={"task": "ppo"}, ppo={"importance_bound": 3.0}))
    assert any("ppo.importance_bound, ppo.importance: none has no bound" in one for one in said)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_layout_trains_as_one_process_does(case: str, in_layout: InLayout) -> None:
    check_layouts(case, SOME_LAYOUTS[case], in_layout)


def test_a_mixture_trains_with_its_load_balancing_loss_and_its_critic_without(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    mixture = tiny_config("qwen3_moe", vocab_size=257, eos_token_id=256)
    mixture.save_pretrained(tmp_path / "mixture")
    own = ppo(prompts, "--training.steps", 2, "--optimizer.lr", 1e-3)
    own += ["--model.config", tmp_path / "mixture", "--model.tokenizer_path", world / "model"]
    losses = []
    for asked in ("false", "true"):
        said = train(world, tmp_path / asked, *own, "--model.output_router_logits", asked)
        losses.append(curve(tmp_path / asked, "loss"))
        assert "the critic is spread as the model is" in said
        assert ("load-balancing loss: times" in said) == (asked == "true")
    assert losses[0] != losses[1]


@pytest.mark.slow
def test_ratios_are_1_where_nothing_has_changed(world: Path, prompts: Path, tmp_path: Path) -> None:
    """Of compiled layers passes without gradients round otherwise: 4e-7 at so short lengths."""
    own = ppo(prompts, "--ppo.updates", 1, "--lora.rank", 4, "--training.steps", 3)
    compiled = ("--compile.enable", "true", "--training.mixed_precision_param", "bfloat16")
    train(world, tmp_path, *own, *compiled)
    assert [row[-1] for row in curve(tmp_path, "moved")] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "compiled", [(), pytest.param(("--compile.enable", "true"), marks=pytest.mark.slow)]
)
def test_values_are_the_same_in_training_where_nothing_has_changed(
    compiled: tuple[object, ...], world: Path, prompts: Path, tmp_path: Path
) -> None:
    own = ppo(prompts, "--ppo.updates", 1, "--ppo.value_epsilon", 1e-5, "--training.steps", 3)
    train(world, tmp_path, *own, *compiled, "--training.mixed_precision_param", "bfloat16")
    assert [row[-1] for row in curve(tmp_path, "critic_clipped")] == [0.0, 0.0, 0.0]


def test_tokens_that_are_only_read_are_not_counted_among_the_experts(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    mixture = tiny_config("qwen3_moe", vocab_size=257, eos_token_id=256)
    mixture.save_pretrained(tmp_path / "mixture")
    own = ppo(prompts, "--training.steps", 4, "--metrics.router", "true")
    own += ["--model.config", tmp_path / "mixture", "--model.tokenizer_path", world / "model"]
    train(world, tmp_path / "run", *own, "--optimizer.lr", 1e-30)
    first, second, *_ = rows(tmp_path / "run")  # on the same completions
    for name, share in first.items():
        if name.startswith("router"):
            assert second[name] == pytest.approx(share), name


def critic_by(**degrees: object) -> tuple[object, ...]:
    """Flags of a critic that is spread by settings of its own."""
    flags = ((f"--critic_parallelism.{name}", value) for name, value in degrees.items())
    return tuple(word for pair in flags for word in pair)


CRITIC_LAYOUTS: dict[str, tuple[object, ...]] = {
    "shards, the critic tp 2": (*LAYOUTS["shards"], *critic_by(tensor_parallel_degree=2)),
    "shards, the critic replicas": (
        *LAYOUTS["shards"],
        *critic_by(data_parallel_replicate_degree=2, data_parallel_shard_degree=1),
    ),
    "shards, the critic cp 2": (*LAYOUTS["shards"], *critic_by(context_parallel_degree=2)),
    "tp 2, the critic zero 1": (
        *SHARED_LAYOUTS["tp 2"],
        *critic_by(data_parallel_shard_degree=2, zero_stage=1),
    ),
    "cp 2 × tp 2, the critic shards": (
        *SHARED_LAYOUTS["cp 2 × tp 2"],
        *critic_by(data_parallel_shard_degree=4),
    ),
    "shards × tp 2, the critic replicas × cp 2": (
        *SHARED_LAYOUTS["dp_shard 2 × tp 2"],
        *critic_by(data_parallel_replicate_degree=2, context_parallel_degree=2),
    ),
    "4 shards, the critic shards × tp 2": (
        *("--cpus", 4, "--training.batch_size", 1),
        *critic_by(data_parallel_shard_degree=2, tensor_parallel_degree=2),
    ),
}
"""The layouts of the model and of its critic, where these differ."""


EVERY_LAYOUT = {"alone": (), **LAYOUTS, **CRITIC_LAYOUTS}


@pytest.fixture(scope="module")
def alone(
    world: Path,
    prompts: Path,
    shallow: tuple[object, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A run of 7 steps in one process, without a stop; to be read only."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    own = ppo(prompts, *CASES["adaptive"], *shallow)
    train(world, folder, *own, "--training.steps", 7)
    return folder


GONE_ON_WITH = ("tp 2, the critic zero 1", "shards × tp 2, the critic replicas × cp 2")
"""The layouts of critics in which a run is stopped as well; others are those that runs move to."""


def go_on(found: Path, layout: str, folder: Path, world: Path, own: list[object]) -> Path:
    """Lets a copy of a run of four steps go on in a layout, where it begins on new completions."""
    shutil.copytree(found, folder)
    train(world, folder, *own, *EVERY_LAYOUT[layout], "--training.steps", 7)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CRITIC_LAYOUTS])
def test_a_critic_in_a_layout_of_its_own_learns_as_in_one_process(
    name: str,
    world: Path,
    prompts: Path,
    shallow: tuple[object, ...],
    in_layout: InLayout,
    alone: Path,
    tmp_path: Path,
) -> None:
    # The fourth step is the first on new completions. From there on, within the steps on the same
    # ones, a stopped run goes on.
    found, last = in_layout("adaptive", name), 4
    if name in GONE_ON_WITH:
        own = ppo(prompts, *CASES["adaptive"], *shallow)
        found, last = go_on(found, name, tmp_path / "run", world, own), 7
    keys = (*KEYS, "divergence", "beta")
    for row, other in zip(curve(found, *keys), curve(alone, *keys)[:last], strict=True):
        assert row == pytest.approx(other, rel=1e-5, abs=1e-5)
    said, other_said = (
        [row["completion"] for row in completions(one) if row["step"] <= last]
        for one in (found, alone)
    )
    assert said == other_said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("alone", "shards"),
        ("cp 2, ring", "tp 2"),
        ("tp 2", "alone"),
        ("shards, the critic tp 2", "tp 2"),
        ("shards", "tp 2, the critic zero 1"),
    ],
)
def test_a_run_goes_on_with_its_critic_in_another_layout(
    first: str,
    then: str,
    world: Path,
    prompts: Path,
    shallow: tuple[object, ...],
    in_layout: InLayout,
    alone: Path,
    tmp_path: Path,
) -> None:
    own = ppo(prompts, *CASES["adaptive"], *shallow)
    moved = go_on(in_layout("adaptive", first), then, tmp_path / "run", world, own)
    pairs = zip(curve(alone, *KEYS), curve(moved, *KEYS), strict=True)
    for row, other in pairs:
        assert row == pytest.approx(other, rel=2e-4, abs=1e-5)


@pytest.mark.slow
def test_a_killed_run_ends_as_the_straight_run(world: Path, prompts: Path, tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    own = ppo(prompts, *CASES["adaptive"], "--training.steps", 12, "--checkpoint.interval", 2)
    train(world, straight, *own)
    with ended(start("train", world / "run.toml", "--job.dump_folder", killed, *own)) as process:
        wait_until(lambda: bool(steps(killed)), process)
        process.kill()
    assert steps(killed)[-1] < 12
    assert "resum" in train(world, killed, *own)
    assert curve(straight, *KEYS) == curve(killed, *KEYS)
    assert completions(straight) == completions(killed)
    assert weights(straight) == weights(killed)


def test_a_critic_that_expects_nothing_learns_the_rewards(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    train(world, tmp_path / "base", "--training.steps", 1)
    base = ("--model.config", "none", "--model.name_or_path", tmp_path / "base" / "hf")
    own = ppo(prompts, *base, "--ppo.beta", 0, "--ppo.gae_lambda", 0.5, "--training.steps", 4)
    train(world, tmp_path / "run", *own)
    [first, *_] = [row for row in rows(tmp_path / "run") if "loss" in row]
    found = [row for row in completions(tmp_path / "run") if row["step"] == 1]
    squares = [
        (0.5 ** (row["tokens"] - 1 - place) * row["reward"]) ** 2
        for row in found
        for place in range(row["tokens"])
    ]
    assert first["critic_loss"] == pytest.approx(sum(squares) / len(squares) / 2, rel=1e-5)
    assert first["loss"] == pytest.approx(0, abs=1e-6) and first["clipped"] == 0
    assert "advantage" not in found[0]
    later = [row["critic_loss"] for row in rows(tmp_path / "run") if "loss" in row]
    assert later[-1] < first["critic_loss"]
    begun = [step for step, _ in groupby(completions(tmp_path / "run"), lambda row: row["step"])]
    assert begun == [1, 3], "two steps for each batch of prompts"


def test_values_are_what_is_expected_before_each_token(world: Path, judge: Path) -> None:
    model = {"config": str(world / "model")}
    settings = {"model": model, "training": {"seq_len": 16, "batch_size": 2}}
    rewards = {"functions": ("length",)}
    task = {"task": "ppo"}
    config = Config(job=task, ppo={"critic": str(judge)}, rewards=rewards, **settings)
    tokenizer = load_tokenizer(str(world / "model"))
    samples = [
        Sample([5, 6, 7], [8, 9, 256], [0.0] * 3, ended=True),
        Sample([1], [2, 3, 4, 5], [0.0] * 4, ended=False),
        Sample([11, 12], [13], [0.0], ended=False),
    ]
    objective = Ppo()
    objective.check(config, tokenizer)
    with one_rank():
        critic = build_critic(config, tokenizer, mesh_of(Layout()), CPU)
        laid = lay_out(samples, config.training, config.row_form, config.data, 0, objective.targets)
        found = values_of_samples(critic, laid, samples)
    own = AutoModelForSequenceClassification.from_pretrained(judge, num_labels=1)
    for sample, values in zip(samples, found, strict=True):
        for place, value in enumerate(values):
            before = torch.tensor([[*sample.prompt, *sample.tokens[:place]]])
            with torch.no_grad():
                assert value == pytest.approx(own(before).logits.item(), abs=1e-5)


def divided(world: Path) -> tuple[Layout, tuple[int, ...]]:
    """The layout of a critic beside a model that is sharded, and what a rank has of a matrix."""
    model = {"config": str(world / "model")}
    degrees = {"tensor_parallel_degree": 2}
    settings = {"training": {"seq_len": 32}, "critic_parallelism": degrees}
    config = Config(job={"task": "ppo"}, model=model, **settings)
    tokenizer = load_tokenizer(str(world / "model"))
    critic = build_critic(config, tokenizer, mesh_of(Layout(dp_shard=2)), CPU)
    weight = critic.model.get_parameter("model.layers.0.mlp.up_proj.weight")
    with torch.no_grad():
        assert isinstance(weight, DTensor)
        return critic.mesh.layout, tuple(weight.to_local().shape)


def test_a_critic_is_divided_by_its_own_settings(world: Path) -> None:
    for layout, shape in run_ranks(2, divided, world):
        assert (layout.tp, layout.dp_shard) == (2, 1), layout
        assert shape == (64, 64), "half of its outputs"


def test_the_critic_is_trained_whole_beside_adapters_and_frozen_rows() -> None:
    sections: dict[str, Any] = {"lora": {"rank": 4}, "quantization": {"base": "nf4"}}
    config = Config(job={"task": "ppo"}, model={"name_or_path": "base"}, **sections)
    own = critic_config(config)
    assert (own.lora.rank, own.quantization.base, own.gives_scores) == (0, "none", True)
    assert own.model.name_or_path == "base"


def test_a_critic_that_is_not_what_it_should_be_is_refused(
    world: Path, prompts: Path, judge: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(judge)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(tmp_path)
    LlamaConfig.from_pretrained(judge).save_pretrained(tmp_path)
    own = ppo(prompts, "--ppo.critic", tmp_path)
    said = train(world, tmp_path / "run", *own, status=2)
    assert "ppo.critic" in said and "token 257 is '<more>' for the critic alone" in said
    seed = tmp_path / "seed"
    own = ppo(prompts, "--ppo.beta", 0, "--checkpoint.create_seed_checkpoint")
    train(world, seed, *own)
    began = ("--checkpoint.initial_load_path", seed / "checkpoint" / "step-0")
    said = train(world, tmp_path / "run", *ppo(prompts, "--ppo.beta", 0, *began), status=2)
    assert "ppo.critic: the run begins with the weights of a checkpoint" in said
    empty = tmp_path / "empty"
    empty.mkdir()
    said = train(world, tmp_path / "run", *ppo(prompts, "--ppo.critic", empty), status=2)
    assert "ppo.critic: no tokenizer can be loaded" in said and "that has a tokenizer" in said


def test_a_critic_with_several_labels_is_refused_by_name(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    critic = write_model(tmp_path / "critic", num_labels=2)
    model_config = LlamaConfig.from_pretrained(critic)
    AutoModelForSequenceClassification.from_config(model_config).save_pretrained(critic)
    own = ppo(prompts, "--ppo.critic", critic)
    said = train(world, tmp_path / "run", *own, status=2)
    assert "ppo.critic: " in said
    assert "the model has 2 labels, and a score is one number" in said


def test_a_critic_of_a_kind_that_cannot_score_is_refused_by_a_dry_run_too(
    world: Path, prompts: Path, judge: Path, tmp_path: Path
) -> None:
    AutoTokenizer.from_pretrained(judge).save_pretrained(tmp_path)
    tiny_config("cohere", vocab_size=257).save_pretrained(tmp_path)
    own = ppo(prompts, "--ppo.critic", tmp_path, "--job.dump_folder", tmp_path / "run")
    said = refused("train", world / "run.toml", *own, "--dry-run")
    assert "ppo.critic: job.task: transformers has no sequence classifier" in said


def test_a_layout_that_no_critic_can_have_is_refused_by_name(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    cases = {
        "pipeline_parallel_degree": (2, "job.task: a critic is shared out by data, tensor or"),
        "data_parallel_shard_degree": (0, "must be"),
        "tensor_parallel_degree": (2, "= 2, but there are 1 processes"),
    }
    for setting, (value, reason) in cases.items():
        own = ppo(prompts, f"--critic_parallelism.{setting}", value)
        run = (world / "run.toml", "--job.dump_folder", tmp_path / "run", *own)
        for command in ("train", "plan"):
            said = refused(command, *run)
            assert "critic_parallelism" in said and reason in said, said
    said = refused("train", *run[:3], *flags(prompts), "--critic_parallelism.zero_stage", 1)
    assert "critic_parallelism.zero_stage, job.task: only ppo takes the first" in said


def test_a_critic_may_be_a_model_that_scores(
    world: Path, prompts: Path, judge: Path, tmp_path: Path
) -> None:
    own = ppo(prompts, "--training.steps", 2)
    train(world, tmp_path / "judged", *own, "--ppo.critic", judge)
    train(world, tmp_path / "plain", *own)
    judged, plain = (curve(tmp_path / name, "critic_loss") for name in ("judged", "plain"))
    assert judged != plain


def test_a_tokenizer_without_an_end_and_long_prompts_are_refused(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    own = ppo(prompts, "--model.tokenizer_path", tmp_path / "tokenizer")
    said = train(world, tmp_path, *own, "--chat.template", "none", status=2)
    assert "the tokenizer has no token that ends a text" in said
    said = lacuna("data", world / "run.toml", *ppo(prompts, "--training.seq_len", 18), status=2)
    assert "prompts have more than 18 - 5 = 13 tokens" in said


@pytest.mark.parametrize(
    ("sections", "setting"),
    [
        ({"parallelism": {"pipeline_parallel_degree": 2}}, "parallelism.pipeline_parallel_degree"),
        ({"parallelism": {"expert_parallel_degree": 2}}, "parallelism.expert_parallel_degree"),
        ({"training": {"enable_cpu_offload": True}}, "training.enable_cpu_offload"),
        ({"lora": {"rank": 2, "dropout": 0.1}}, "lora.dropout"),
        ({"data": {"streaming": True}}, "data.streaming"),
        ({"grpo": {"beta": 0.1}}, "grpo.beta"),
        ({"preference": {"beta": 0.5}}, "preference.beta"),
    ],
)
def test_what_ppo_cannot_have_is_refused(sections: dict, setting: str) -> None:
    found = contradictions_of(Config(job={"task": "ppo"}, **sections))
    assert any(one.startswith(f"{setting}, job.task") for one in found), found


@pytest.mark.parametrize(
    ("sections", "settings"),
    [
        ({"ppo": {"beta": 0.0, "kl_target": 1.0}}, "ppo.kl_target, ppo.beta"),
        ({"ppo": {"beta": 0.0, "reference": "copy"}}, "ppo.reference, ppo.beta"),
        ({"training": {"epochs": 1}}, "ppo.updates, training.epochs"),
        ({"ppo": {"critic_lr": 0.1}, "optimizer": {"lr": 0.0}}, "ppo.critic_lr, optimizer.lr"),
    ],
)
def test_settings_of_ppo_that_say_nothing_are_refused(sections: dict, settings: str) -> None:
    found = contradictions_of(Config(job={"task": "ppo"}, **sections))
    assert any(one.startswith(settings) for one in found), found
    other = contradictions_of(Config(job={"task": "grpo"}, ppo={"gamma": 0.5}))
    assert any(one.startswith("ppo.gamma, job.task: only ppo takes the first") for one in other)


def test_the_memory_of_the_critic_is_planned(world: Path, prompts: Path, tmp_path: Path) -> None:
    run = ("plan", world / "run.toml", "--job.dump_folder", tmp_path)
    said = lacuna(*run, *ppo(prompts))
    assert "critic" in said and "reference" in said
    assert "critic" not in lacuna(*run, *flags(prompts))


def test_groups_of_parameters_are_the_critics_too_where_it_has_them(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    """It has no head, of which nobody asks it."""
    table = '[[optimizer.groups]]\npattern = "lm_head.weight"\nlr_ratio = 0.5\n'
    table += '[[optimizer.groups]]\npattern = "*_proj.weight"\nname = "Muon"\n'
    (tmp_path / "run.toml").write_text((world / "run.toml").read_text() + table)
    own = ppo(prompts, "--training.steps", 2, "--job.dump_folder", tmp_path / "run")
    assert "critic" in lacuna("plan", tmp_path / "run.toml", *own)
    said = lacuna("train", tmp_path / "run.toml", *own)
    assert "'lm_head.weight' of optimizer.groups matches nothing of the critic" in said
    saved = torch.distributed.checkpoint.FileSystemReader(checkpoint(tmp_path / "run", 2))
    kept = saved.read_metadata().state_dict_metadata.keys()
    layer = "optimizer.model.layers.0.mlp.up_proj.weight.momentum_buffer"
    assert {layer, f"critic.{layer}"} <= kept


@pytest.mark.slow
def test_the_recipe_learns_in_minutes(tmp_path: Path) -> None:
    rewards = rewards_until(lambda rewards: rewards[-1] > 0.4, 44, "ppo.toml", tmp_path)
    assert rewards[0] < 0.1 and rewards[-1] > 0.4


def test_a_critic_has_the_attention_of_its_own_files() -> None:
    config = Config(
        job={"task": "ppo"},
        model={"attention": "softpick"},
        ppo={"critic": "folder"},
        rewards={"functions": ["length"]},
    )
    assert critic_config(config).model.attention == "auto"


def test_another_beta_counts_when_a_run_goes_on(world: Path, prompts: Path, tmp_path: Path) -> None:
    own = ppo(prompts, "--ppo.beta")
    train(world, tmp_path, *own, 0.05, "--training.steps", 2)
    train(world, tmp_path, *own, 0.5, "--training.steps", 4)
    assert [beta for _, beta in curve(tmp_path, "beta")] == [0.05, 0.05, 0.5, 0.5]
