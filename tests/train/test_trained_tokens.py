"""Steps are those of logits of all tokens, though only those of trained tokens are made."""

from pathlib import Path
from unittest import mock

import pytest
from torch import Tensor

from lacuna.config.objectives import PreferenceConfig
from lacuna.model import inputs
from lacuna.model.head import Head
from lacuna.parallel.mesh import Layout
from layouts import Case, pipelined
from tasks import Losses, Task, Trained, four_layers, train_all, write_weights
from tiny import run_ranks

STEPS = 2
CASES = {
    "one rank, in micro-batches": Case(accumulation=4),
    "data": Case(Layout(dp_shard=2), accumulation=4),
    "tensor": Case(Layout(tp=2), parallelism={"tensor_parallel_degree": 2}),
    "tensor, loss of whole sequences": Case(
        Layout(tp=2),
        parallelism={"tensor_parallel_degree": 2, "disable_loss_parallel": True},
    ),
    "context": Case(Layout(cp=2), parallelism={"context_parallel_degree": 2}),
    "pipeline": pipelined(Layout(pp=2), 4),
    "pipeline that goes backward twice": pipelined(Layout(pp=2), 4, "InterleavedZeroBubble"),
}
"""Of the sequences some are trained wholly, and some not at all, so that a micro-batch, or what a
rank has of it, may have nothing to train."""
TASKS = {
    "sft": Task("sft"),
    "dpo": Task("preference"),
    "orpo": Task("preference", preference=PreferenceConfig(loss="orpo", beta=0.5)),
    "grpo": Task("grpo"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weights(tmp_path_factory.mktemp("model"), four_layers("llama"), seed=0)


def both_ways(trained: list[Trained]) -> list[tuple[Losses | str, int]]:
    """What a rank comes to, and of how many tokens it makes logits: as ever, and of all tokens."""
    makes = Head.logits
    made: list[int] = []

    def noted(head: Head, product: Tensor) -> Tensor:
        made.append(len(product))
        return makes(head, product)

    found = []
    with mock.patch.object(Head, "logits", noted):
        for select in (inputs.trained_places, lambda columns: None):
            with mock.patch.object(inputs, "trained_places", select):
                for one in trained:
                    made.clear()
                    [result] = train_all([one], STEPS)
                    found.append((result, sum(made)))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_are_those_of_logits_of_all_tokens(ranks: int, model: Path) -> None:
    cases = {
        (layout, name): (model, case, task)
        for layout, case in CASES.items()
        for name, task in TASKS.items()
        if case.layout.data_parallel * case.layout.sharing == ranks
        and not (name == "grpo" and case.layout.pp > 1)  # which is refused
    }
    found = run_ranks(ranks, both_ways, [*cases.values()])
    for number, name in enumerate(cases):
        selected, whole = found[0][number], found[0][number + len(cases)]
        assert not isinstance(selected[0], str), (name, selected[0])
        for one, other in zip(selected[0], whole[0], strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-7), name
        of_ranks = [(rank[number][1], rank[number + len(cases)][1]) for rank in found]
        assert sum(some for some, _ in of_ranks) < sum(every for _, every in of_ranks), name
