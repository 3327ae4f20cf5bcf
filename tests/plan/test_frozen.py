"""What a run asks beside its model is counted as it is spread: a frozen copy, or a teacher."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from lacuna.config import Config
from lacuna.config.machine import ParallelismConfig
from lacuna.config.objectives import DistillationConfig
from lacuna.config.sections import JobConfig, ModelConfig, TrainingConfig
from lacuna.model.build import build_frozen
from lacuna.objective.find import find_objective
from lacuna.objective.language_modelling import FrozenModel
from lacuna.parallel.batch import resolve_batch
from lacuna.parallel.fsdp import local
from lacuna.parallel.mesh import Layout
from lacuna.plan.frozen import frozen_memory
from runs import lacuna
from tiny import CPU, mesh_of, random_model, run_ranks, tiny_config, tokenizer_of_words

LENGTH = 24
VOCABULARY = 97
WIDTH = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frozen")
    model_config = tiny_config("llama", hidden_size=WIDTH, num_hidden_layers=4)
    random_model(model_config).save_pretrained(folder)
    tokenizer_of_words().save_pretrained(folder)
    return folder


def frozen_of(folder: Path, task: str, layout: Layout, base: str = "none") -> FrozenModel:
    """What a run with this model, which is also the teacher, asks beside it."""
    config = Config(
        job=JobConfig(task=task),
        model=ModelConfig(name_or_path=str(folder)),
        training=TrainingConfig(seq_len=LENGTH, batch_size=2),
        parallelism=ParallelismConfig(pipeline_parallel_degree=layout.pp),
        distillation=DistillationConfig(teacher=str(folder), teacher_base=base),
    )
    models = find_objective(task).frozen_models(config).values()
    return next(one for one in models if one.is_trained == (task == "ppo"))


def estimate(frozen: FrozenModel, layout: Layout, device: str = "cpu") -> float:
    config = frozen.config
    batch = resolve_batch(config.training, config.parallelism, config.optimizer, layout)
    return frozen_memory(frozen, layout, batch, device, CPU if device == "cpu" else None)


def allocated(config: Config, layout: Layout) -> int:
    """The bytes of the weights that this rank has of a model that is only asked."""
    built = build_frozen(config, tokenizer_of_words(), mesh_of(layout), CPU)
    return sum(local(one).numel() * one.element_size() for one in built.model.parameters())


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(dp_shard=2), Layout(dp_replicate=2), Layout(tp=2), Layout(pp=2)]
)
@pytest.mark.parametrize("task", ["preference", "distill"])
def test_a_frozen_model_takes_what_is_allocated_for_it(
    folder: Path, task: str, layout: Layout
) -> None:
    frozen = replace(frozen_of(folder, task, layout), keeps_states=False)
    ranks = layout.data_parallel * layout.sharing
    most = max(run_ranks(ranks, allocated, frozen.config, layout))
    assert estimate(frozen, layout) == pytest.approx(most, rel=0.02)


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_a_quantised_teacher_takes_its_bits(folder: Path, base: str) -> None:
    layout = Layout(dp_shard=2)
    frozen = replace(frozen_of(folder, "distill", layout, base), keeps_states=False)
    most = max(run_ranks(2, allocated, frozen.config, layout))
    plain = replace(frozen_of(folder, "distill", layout), keeps_states=False)
    assert estimate(frozen, layout) == pytest.approx(most, rel=0.02)
    assert most < 0.7 * estimate(plain, layout)


def test_on_a_gpu_it_has_the_dtype_of_its_products(folder: Path) -> None:
    frozen = frozen_of(folder, "preference", Layout())
    assert estimate(frozen, Layout(), "cuda") == estimate(frozen, Layout()) / 2


def test_a_teacher_hands_on_hidden_states_and_has_a_whole_head(folder: Path) -> None:
    for layout, whole_head in ((Layout(), 0), (Layout(dp_shard=2), VOCABULARY)):
        frozen = frozen_of(folder, "distill", layout)
        weights = estimate(replace(frozen, keeps_states=False), layout)
        states = (2 * LENGTH + whole_head) * WIDTH * 4
        assert estimate(frozen, layout) == pytest.approx(weights + states)


def test_a_teacher_of_completions_hands_on_states_of_each(folder: Path) -> None:
    teacher = DistillationConfig(teacher=str(folder), data="prompts")
    config = Config(
        job=JobConfig(task="distill"),
        model=ModelConfig(name_or_path=str(folder)),
        training=TrainingConfig(seq_len=LENGTH, batch_size=2),
        distillation=teacher,
        rollout={"samples": 3},
    )
    [frozen] = find_objective("distill", "prompts").frozen_models(config).values()
    weights = estimate(replace(frozen, keeps_states=False), Layout())
    states = 3 * 2 * LENGTH * WIDTH * 4
    assert estimate(frozen, Layout()) == pytest.approx(weights + states)


def test_only_a_copy_is_a_model_of_its_own() -> None:
    adapted = Config(job=JobConfig(task="preference"), lora={"rank": 2})
    assert find_objective("preference").frozen_models(adapted) == {}
    cached = Config(job=JobConfig(task="preference"), preference={"reference": "cached"})
    assert find_objective("preference").frozen_models(cached) == {}
    assert find_objective("sft").frozen_models(Config()) == {}


def test_a_plan_has_a_row_for_the_teacher(world: Path, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    model_config = AutoConfig.from_pretrained(world / "model")
    model_config.hidden_size = 512
    model_config.num_hidden_layers = 8
    random_model(model_config).save_pretrained(teacher)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (teacher / name).write_bytes((world / "model" / name).read_bytes())
    flags = ("--job.task", "distill", "--distillation.teacher", teacher, "--cpus", 1)
    said = lacuna("plan", world / "run.toml", "--job.dump_folder", tmp_path / "run", *flags)
    parameters = sum(one.stat().st_size for one in teacher.glob("*.safetensors"))
    assert f"teacher {parameters / 2**30:.2f}" in said
    (teacher / "model.safetensors").unlink()
    words = ("plan", world / "run.toml", "--job.dump_folder", tmp_path / "run", *flags)
    assert "distillation.teacher: " in lacuna(*words, status=2)


def test_a_critic_on_one_gpu_has_whole_weights_and_gradients(folder: Path) -> None:
    critic = frozen_of(folder, "ppo", Layout())
    assert estimate(critic, Layout(), "cuda") == estimate(critic, Layout(), "cpu")
