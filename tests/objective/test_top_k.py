"""Likeliest tokens and the rest: the formulas over k + 1 outcomes, exact where none is left out."""

import pytest
import torch
from torch import Tensor

from lacuna.config.objectives import DistillationConfig
from lacuna.data.packing import IGNORED
from lacuna.objective.distillation import distillation_sums
from lacuna.objective.top_k import likeliest, outcomes, top_k_sums

TOKENS, WORDS = 6, 11
LABELS = torch.tensor([3, 1, IGNORED, 10, 0, 7])
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")


def logits(seed: int, words: int = WORDS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(TOKENS, words, generator=generator, dtype=torch.float64)


def columns_of(teacher: Tensor, top_k: int) -> dict[str, Tensor]:
    """What a batch has of the teacher: float32 from the disk, zeros where nothing is trained."""
    ids, logprobs = likeliest(teacher, top_k)
    columns = {"labels": LABELS, "teacher_ids": ids.int(), "teacher_logprobs": logprobs}
    for name in ("teacher_ids", "teacher_logprobs"):
        columns[name] = torch.where(LABELS[:, None] == IGNORED, 0, columns[name])
    return columns


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_all_tokens_but_one_teach_what_the_teacher_itself_does(
    divergence: str, alpha: float
) -> None:
    settings = DistillationConfig(divergence=divergence, beta=0.3, alpha=alpha)
    student, teacher = logits(0), logits(1)
    both = {"labels": LABELS, "teacher_states": teacher}
    exact = distillation_sums(student, both, settings, lambda states: states, None)
    found = top_k_sums(student, columns_of(teacher, WORDS - 1), settings, WORDS)
    for name, value in exact.items():
        assert found[name].item() == pytest.approx(value.item(), rel=1e-12), name


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("top_k", [1, 4])
def test_the_others_are_one_outcome(divergence: str, top_k: int) -> None:
    """The loss is that of distributions in which those are merged."""
    settings = DistillationConfig(divergence=divergence, beta=0.3)
    student, teacher = logits(0), logits(1)
    ids = teacher.argsort(dim=-1, descending=True)
    merged = []
    for one in (student, teacher):
        shares = one.softmax(-1).gather(-1, ids)
        rest = shares[:, top_k:].sum(-1, keepdim=True)
        merged.append(torch.cat([shares[:, :top_k], rest], -1).log())
    both = {"labels": LABELS.clamp(max=top_k), "teacher_states": merged[1]}
    wanted = distillation_sums(merged[0], both, settings, lambda states: states, None)
    found = top_k_sums(student, columns_of(teacher, top_k), settings, WORDS)
    assert found["divergence"].item() == pytest.approx(wanted["divergence"].item(), rel=1e-12)


def test_logits_of_no_token_are_left_out() -> None:
    padding = torch.full((TOKENS, 5), 3.0, dtype=torch.float64)
    columns = columns_of(logits(1), 4)
    settings = DistillationConfig()
    narrow = top_k_sums(logits(0), columns, settings, WORDS)
    wide = top_k_sums(torch.cat([logits(0), padding], -1), columns, settings, WORDS)
    assert narrow["divergence"].item() == pytest.approx(wide["divergence"].item(), rel=1e-12)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_where_hardly_anything_is_left_losses_and_gradients_are_finite_and_right(
    divergence: str,
) -> None:
    """The rest has e^-80 of the student's probability: 1 less the others would be 0 or below."""
    settings = DistillationConfig(divergence=divergence)
    student = logits(0).float()
    student[:, :3] += 80
    teacher = logits(1).float()
    teacher[:, :3] += 60
    results = []
    for dtype in (torch.float32, torch.float64):
        leaf = student.to(dtype, copy=True).requires_grad_()
        columns = columns_of(teacher.to(dtype), 3)
        top_k_sums(leaf, columns, settings, WORDS)["loss"].backward()
        results.append(leaf.grad)
    assert results[0].isfinite().all()
    assert torch.allclose(results[0].double(), results[1], rtol=1e-4, atol=1e-5)
    ids = torch.arange(3).expand(TOKENS, 3)
    assert outcomes(student, ids)[:, -1].max() < -70


def test_the_loss_works_under_the_transform_that_chunks_use() -> None:
    settings = DistillationConfig()
    columns = columns_of(logits(1), 4)

    def loss(student: Tensor) -> Tensor:
        return top_k_sums(student, columns, settings, WORDS)["loss"]

    leaf = logits(0).requires_grad_()
    loss(leaf).backward()
    assert torch.allclose(torch.func.grad(loss)(logits(0)), leaf.grad)
    assert (leaf.grad[LABELS == IGNORED] == 0).all()
