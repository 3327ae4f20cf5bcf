"""The plain loop beside lacuna: it trains fla's model on packed documents as on documents alone."""

# ruff: noqa: E402

import importlib
import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

# The variable must be there before anything imports Triton.
if importlib.util.find_spec("fla") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs flash-linear-attention and TRITON_INTERPRET=1", allow_module_level=True)

import fla_on_cpu

fla_on_cpu.interpret()

from fla.models import GLAConfig

from lacuna.commands import bench

sys.path.insert(0, str(bench.DRIVERS))
fla_steps = importlib.import_module("fla_steps")

LENGTHS = (20, 9, 19)
ALONE = {"device": "cpu", "dtype": "float32", "compute": "float32"}


def gla() -> GLAConfig:
    return GLAConfig(
        hidden_size=32, num_hidden_layers=1, num_heads=2, vocab_size=64, fuse_cross_entropy=False
    )


def documents() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randint(64, (length,)) for length in LENGTHS]


def packed() -> dict[str, torch.Tensor]:
    """Documents in a row of 48, with labels as lacuna shifts them."""
    made = documents()
    return {
        "input_ids": torch.cat(made)[None],
        "position_ids": torch.cat([torch.arange(len(one)) for one in made])[None],
        "labels": torch.cat([F.pad(one[1:], (0, 1), value=-100) for one in made])[None],
    }


def test_a_row_has_the_loss_and_gradients_of_its_documents_alone() -> None:
    model = AutoModelForCausalLM.from_config(gla()).train()
    trained = sum(LENGTHS) - len(LENGTHS)
    task = SimpleNamespace(settings=ALONE, is_on_gpu=False)
    assert fla_steps.mix_precisions(model, task) == "all in float32"
    loss = fla_steps.backward(model, fla_steps.whole_rows(packed()), trained, task)
    gradients = {name: one.grad.clone() for name, one in model.named_parameters()}
    model.zero_grad()
    alone = sum(
        F.cross_entropy(model(one[None]).logits[0, :-1], one[1:], reduction="sum")
        for one in documents()
    )
    (alone / trained).backward()
    assert float(loss) == pytest.approx(float(alone / trained), rel=1e-5)
    for name, one in model.named_parameters():
        torch.testing.assert_close(gradients[name], one.grad, rtol=1e-3, atol=1e-6)


def test_precisions_are_mixed_as_flame_mixes_them() -> None:
    model = AutoModelForCausalLM.from_config(gla()).train()
    settings = ALONE | {"compute": "bfloat16"}
    task = SimpleNamespace(settings=settings, is_on_gpu=False)
    assert fla_steps.mix_precisions(model, task).endswith("fully_shard casts to bfloat16")
    try:
        loss = fla_steps.backward(model, fla_steps.whole_rows(packed()), 45, task)
    finally:
        dist.destroy_process_group()
    assert loss.isfinite()
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    assert all(one.grad.dtype == torch.float32 for one in model.parameters())
