"""Divergences are the papers' formulas; a teacher has the student's vocabulary."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lacuna.config import Config, UserError
from lacuna.config.objectives import DistillationConfig
from lacuna.data.packing import IGNORED
from lacuna.objective.distillation import Distillation, distillation_sums
from lacuna.objective.top_k import outcomes
from runs import curve, train
from tiny import random_model, tiny_config, tokenizer_of_words

TOKENS, WORDS = 6, 11


def problem(words: int = WORDS) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of student and teacher, and labels, one of which is not trained."""
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(TOKENS, words, generator=generator, dtype=torch.float64)
    teacher = 2 * torch.randn(TOKENS, words, generator=generator, dtype=torch.float64)
    return student, teacher, torch.tensor([3, 1, IGNORED, 10, 0, 7])


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum(-1)


def wanted(divergence: str, beta: float, temperature: float, alpha: float) -> float:
    student, teacher, labels = problem()
    p, q = ((one / temperature).softmax(-1) for one in (teacher, student))
    mixture = beta * p + (1 - beta) * q
    each = {
        "forward_kl": kl(p, q),
        "reverse_kl": kl(q, p),
        "jsd": beta * kl(p, mixture) + (1 - beta) * kl(q, mixture),
    }[divergence]
    trained = labels != IGNORED
    nats = -student.log_softmax(-1)[trained].gather(1, labels[trained][:, None]).sum()
    return (alpha * each[trained].sum() + (1 - alpha) * nats).item()


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_losses_are_the_formulas(divergence: str, temperature: float, alpha: float) -> None:
    student, teacher, labels = problem()
    settings = DistillationConfig(
        divergence=divergence, beta=0.3, temperature=temperature, alpha=alpha
    )
    columns = {"labels": labels, "teacher_states": teacher}
    found = distillation_sums(student, columns, settings, lambda states: states, None)
    expected = wanted(divergence, 0.3, temperature, alpha)
    assert found["loss"].item() == pytest.approx(expected, rel=1e-9)


def test_logits_of_no_token_are_left_out() -> None:
    student, teacher, labels = problem()
    padded = torch.cat([teacher, torch.full((TOKENS, 5), 3.0, dtype=torch.float64)], dim=1)
    settings = DistillationConfig()
    found = [
        distillation_sums(
            student,
            {"labels": labels, "teacher_states": one},
            settings,
            lambda states: states,
            WORDS,
        )["loss"].item()
        for one in (teacher, padded)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_tokens_above_ids_that_are_left_out_are_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Tokenizer(models.WordLevel({"<end>": 0, "cat": 1, "dog": 7}, unk_token="<end>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    monkeypatch.setattr("lacuna.objective.distillation.stored_by", lambda settings: {})
    objective = Distillation()
    settings = DistillationConfig(teacher_logprobs="said")
    objective.check(Config(distillation=settings), tokenizer)
    logits = torch.randn(1, 8)
    ids = torch.tensor([[7, 1, 0]])
    said = {"teacher_ids": ids, "teacher_logprobs": outcomes(logits, ids)}
    sums = objective.loss.of(logits, said | {"labels": torch.tensor([7])})
    assert sums["divergence"].item() == pytest.approx(0, abs=1e-6)


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_of_words()
    tokenizer.save_pretrained(tmp_path)
    settings = Config(distillation=DistillationConfig(teacher=str(tmp_path)))
    Distillation().check(settings, tokenizer)
    other = tokenizer_of_words()
    other.add_tokens(["<think>"])
    with pytest.raises(UserError, match=r"'<think>' for the model alone"):
        Distillation().check(settings, other)


def test_a_teacher_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    settings = Config(distillation=DistillationConfig(teacher=str(tmp_path)))
    with pytest.raises(UserError, match=r"^distillation.teacher: no tokenizer .*") as refusal:
        Distillation().check(settings, tokenizer_of_words())
    assert "model.tokenizer_path" not in str(refusal.value)


def test_a_student_learns_from_a_teacher_and_is_refused_a_stranger(
    world: Path, tmp_path: Path
) -> None:
    teacher = tmp_path / "teacher"
    train(world, tmp_path / "first", "--training.steps", 8)
    flags = ("--job.task", "distill", "--distillation.teacher")
    train(world, tmp_path / "run", *flags, tmp_path / "first" / "hf")
    rows = curve(tmp_path / "run", "loss", "divergence", "cross_entropy")
    assert all(loss == pytest.approx(divergence, rel=1e-6) for _, loss, divergence, _ in rows)
    assert rows[-1][1] < rows[0][1]
    random_model(tiny_config("llama")).save_pretrained(teacher)
    tokenizer_of_words().save_pretrained(teacher)
    for dry in ((), ("--dry-run",)):
        message = train(world, tmp_path / "other", *flags, teacher, *dry, status=2)
        assert "has another vocabulary" in message


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_a_teacher_has_its_experts_spread_only_if_it_has_some(
    kind: str, world: Path, tmp_path: Path
) -> None:
    teacher, student = tmp_path / "teacher", tmp_path / "student"
    random_model(tiny_config(kind, vocab_size=257)).save_pretrained(teacher)
    tiny_config("qwen3_moe", vocab_size=257).save_pretrained(student)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        for folder in (teacher, student):
            (folder / name).write_bytes((world / "model" / name).read_bytes())
    flags = ("--job.task", "distill", "--distillation.teacher", teacher)
    steps = ("--model.config", student, "--training.steps", 3, "--training.batch_size")
    train(world, tmp_path / "alone", *flags, *steps, 4)
    spread = ("--cpus", 2, "--parallelism.expert_parallel_degree", 2)
    train(world, tmp_path / "spread", *flags, *steps, 2, *spread)
    columns = ("loss", "grad_norm")
    for one, other in zip(
        curve(tmp_path / "alone", *columns), curve(tmp_path / "spread", *columns), strict=True
    ):
        assert one == pytest.approx(other, rel=1e-5)
    said = train(world, tmp_path / "planned", *flags, *steps, 2, *spread, "--dry-run")
    assert "teacher" in said
