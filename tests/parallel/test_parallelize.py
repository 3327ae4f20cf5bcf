"""A compiled model takes batches of every kind that a run may bring."""

from functools import partialmethod
from itertools import product

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from every_model import configuration_class, model_types, small_config
from lacuna.config import Config
from lacuna.parallel.parallelize import norms_to_compile
from tiny import VOCABULARY, run_ranks, sharded_model, tiny_config


def _losses_of_many_kinds(compiled: bool) -> list[float]:
    # What torch counts does not depend on who makes code of its graphs.
    nn.Module.compile = partialmethod(nn.Module.compile, backend="eager")
    model = sharded_model(tiny_config("llama"), Config(compile={"enable": compiled}))
    losses = []
    for trained, learns, packed, rows in product(
        (True, False), (True, False), (True, False), (1, 2)
    ):
        model.train(trained)
        ids = torch.arange(8 * rows).view(rows, 8) % VOCABULARY
        positions = (torch.arange(8) % 4 if packed else torch.arange(8)).expand(rows, 8)
        with torch.set_grad_enabled(learns):
            losses.append(
                model(
                    input_ids=ids, position_ids=positions, labels=ids, use_cache=False
                ).loss.item()
            )
    return losses


@pytest.mark.slow
def test_a_compiled_model_takes_batches_of_more_kinds_than_torch_would() -> None:
    (compiled,), (eager,) = (
        run_ranks(1, _losses_of_many_kinds, compiled) for compiled in (True, False)
    )
    torch.testing.assert_close(compiled, eager)


def _dtypes_kept_by_the_last_norm(compiled: bool) -> set[torch.dtype]:
    config = Config(compile={"enable": compiled})
    norm = sharded_model(tiny_config("llama"), config).model.norm.bfloat16()
    hidden = torch.randn(1, 8, len(norm.weight), dtype=torch.bfloat16, requires_grad=True)
    kept: set[torch.dtype] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() >= hidden.numel():
            kept.add(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        norm(hidden)
    return kept


@pytest.mark.slow
def test_a_compiled_model_keeps_nothing_in_float32_for_its_last_norm() -> None:
    (compiled,), (eager,) = (
        run_ranks(1, _dtypes_kept_by_the_last_norm, compiled) for compiled in (True, False)
    )
    assert torch.float32 in eager
    assert compiled == {torch.bfloat16}


@pytest.mark.slow
def test_the_norms_of_every_kind_of_model_are_compiled_as_one_graph() -> None:
    seen: set[type[nn.Module]] = set()
    for kind in model_types():
        model = AutoModelForCausalLM.from_config(small_config(configuration_class(kind)))
        for norm in norms_to_compile(model):
            if type(norm) not in seen:
                seen.add(type(norm))
                hidden = torch.randn(1, 4, model.config.get_text_config().hidden_size)
                found = torch.compile(norm, backend="eager", fullgraph=True)(hidden)
                torch.testing.assert_close(found, norm(hidden))
    assert len(seen) > 40
