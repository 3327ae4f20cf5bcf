"""Next-token prediction: the summed cross-entropy of one micro-batch."""

from torch import Tensor

from lacuna.data import Batch
from lacuna.model.build import BuiltModel


def language_modelling_loss(built: BuiltModel, batch: Batch, trained: Tensor | None = None) -> Tensor:
    """Summed loss (nats, float32 scalar) over this rank's share of the trained tokens of `batch`.

    Without gradients [2]: that, and of how many trained tokens the likeliest is right. With how
    many are `trained` in the whole step, losses that are no sum over tokens are in it as often.
    """
    inputs = built.inputs(batch)
    if built.pipeline is not None:
        return built.pipeline.evaluate(inputs)
    return built.model.summed_loss(built.head, inputs, trained)
