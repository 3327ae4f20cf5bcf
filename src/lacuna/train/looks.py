"""Looks at attention and hidden states while a model is trained, as `lacuna inspect` does."""

from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch import Tensor

from lacuna.data import Batch
from lacuna.data.micro_batches import BatchSizes
from lacuna.model.architecture import decoder_layers
from lacuna.model.build import BuiltModel
from lacuna.model.inputs import to_device
from lacuna.rollout.inspection import (
    LOOK,
    Layer,
    layers_of,
    look,
    numbers_of,
    require_visible_attention,
    summary_of,
)

# As much as `lacuna inspect` reads, unless it is told otherwise.
ROWS = 8
TOKENS = 512


class Looks:
    """The first held-out rows of a run, shared out over its ranks, which `report` looks at.

    Of each row the first `TOKENS` tokens are read, without padding, as one text: documents in it
    see each other. The rows are the same ones at every look, and in every layout. Raises
    `UserError` where a model's attention cannot be seen.

    Attributes:
        own: the rows that this rank reads, by their number; where the number is None it reads the
            row because other ranks read one, which all must do together.
    """

    def __init__(
        self, built: BuiltModel, held_out: Callable[[], Iterator[Batch]], batch: BatchSizes
    ) -> None:
        require_visible_attention(built.model.config)
        self.built = built
        ranks = built.mesh.layout.data_parallel
        first = built.mesh.data_rank * batch.micro_batch
        self.own: list[tuple[int | None, Tensor]] = []
        for number, micro_batch in enumerate(held_out()):
            start = number * batch.micro_batch * ranks
            if start >= ROWS:
                break
            # As many as the first rank, which has most.
            for place in range(min(batch.micro_batch, ROWS - start)):
                row = micro_batch.columns["input_ids"][place]
                real = micro_batch.columns["real"][place]
                tokens = row[real][:TOKENS]
                known = start + first + place
                is_own = known < ROWS and len(tokens) > 0
                read = to_device(tokens if is_own else row[:2], built.device)
                self.own.append((known if is_own else None, read))

    def layers(self) -> list[Layer]:
        """What the layers do to the rows as the weights are; all ranks must call it."""
        model = self.built.model
        rows = [row for _, row in self.own]
        seen = look(model, decoder_layers(model), rows, LOOK, one_by_one=True)
        known = seen.new_zeros(ROWS, *seen.shape[1:])
        is_read = seen.new_zeros(ROWS)
        for place, (number, _) in enumerate(self.own):
            if number is not None:
                known[number] = seen[place]
                is_read[number] = 1
        whole, is_read = (to_device(one, self.built.device) for one in (known, is_read))
        dist.all_reduce(whole)
        dist.all_reduce(is_read)
        return layers_of(whole.cpu()[is_read.cpu() > 0])

    def report(self) -> dict[str, float | list[float]]:
        """A row of metrics: each layer's numbers, counted from 0, and those of all layers."""
        layers = self.layers()
        row: dict[str, float | list[float]] = {}
        for place, layer in enumerate(layers):
            row |= _named(numbers_of(layer), f"_{place}")
            row[f"attention_first_of_heads_{place}"] = layer.first
        return _named(summary_of(layers), "") | row


def _named(numbers: dict[str, float], ending: str) -> dict[str, float | list[float]]:
    of_states = ("kurtosis", "largest")
    kinds = {name: "hidden" if name in of_states else "attention" for name in numbers}
    return {f"{kinds[name]}_{name}{ending}": number for name, number in numbers.items()}
