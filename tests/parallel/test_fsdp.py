"""Sharded models free what the rest of a step has no use for."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from lacuna.config import Config
from lacuna.parallel.fsdp import _ReduceScatterIntoMainPool
from tiny import VOCABULARY, run_ranks, sharded_model, tiny_config


def _gathered_weights(tied: bool) -> list[dict[str, bool]]:
    """Whether embedding and head are gathered after the forward and after the backward pass."""
    model = sharded_model(tiny_config("llama", tie_word_embeddings=tied), Config())
    modules = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    ids = torch.arange(8).view(1, 8) % VOCABULARY
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss

    def gathered() -> dict[str, bool]:
        return {name: not isinstance(one.weight, DTensor) for name, one in modules.items()}

    after_forward = gathered()
    loss.backward()
    return [after_forward, gathered()]


def test_an_embedding_is_freed_after_the_forward_pass_unless_the_head_is_tied_to_it() -> None:
    freed = {"embedding": False, "head": False}
    apart, _ = run_ranks(2, _gathered_weights, False)
    assert apart == [{"embedding": False, "head": True}, freed]
    tied, _ = run_ranks(2, _gathered_weights, True)
    assert tied == [{"embedding": True, "head": True}, freed]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gradients_take_memory_that_activations_leave() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.empty(2**26, dtype=torch.uint8, device=device)  # is free again, for the default stream
    reserved = torch.cuda.memory_reserved()
    with torch.cuda.stream(torch.cuda.Stream()):
        gradient = _ReduceScatterIntoMainPool().allocate(
            (2**24,), dtype=torch.float32, device=device
        )
    assert torch.cuda.memory_reserved() == reserved
    assert gradient.shape == (2**24,)
