"""A compiled model takes batches of every kind that a run may bring."""

from functools import partialmethod
from itertools import product

import torch
from torch import nn

from lacuna.config import Config
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


def test_a_compiled_model_takes_batches_of_more_kinds_than_torch_would() -> None:
    (compiled,), (eager,) = (
        run_ranks(1, _losses_of_many_kinds, compiled) for compiled in (True, False)
    )
    torch.testing.assert_close(compiled, eager)
