"""The held-out loss of a model as it is, and with the weights of its layers in few bits."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from lacuna.model.architecture import decoder_layers
from lacuna.model.layers.bits import dequantize, quantize

GROUP = 64  # neighbouring weights of a row that share a scale and an offset
BITS = (8, 4, 3, 2)
OURS = ("int8", "nf4")


def losses_by_bits(model: PreTrainedModel, rows: Sequence[Tensor]) -> dict[str, float]:
    """The mean loss in nats on rows of tokens [T], by the form of the weights.

    `none` is the model itself. `rtn8` to `rtn2` round each weight of the decoder layers' linear
    maps to the nearest of 2^bits evenly spaced values between the least and the largest of its
    group. `int8` and `nf4` are lacuna's own forms. Embedding, head and norms stay as they are.
    """
    losses = {"none": held_out_loss(model, rows)}
    forms = {f"rtn{bits}": bits for bits in BITS} | dict.fromkeys(OURS)
    linears = [one for one in decoder_layers(model).modules() if isinstance(one, nn.Linear)]
    kept = [linear.weight.detach().clone() for linear in linears]
    for form, bits in forms.items():
        for linear, weight in zip(linears, kept, strict=True):
            if bits is None:
                changed = dequantize(quantize(weight, form), form, weight.shape, weight.dtype)
            else:
                changed = rounded(weight, bits)
            linear.weight.data.copy_(changed)
        losses[form] = held_out_loss(model, rows)
    for linear, weight in zip(linears, kept, strict=True):
        linear.weight.data.copy_(weight)
    return losses


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, rows: Sequence[Tensor]) -> float:
    """The mean loss, in nats, of the tokens after the first of each row."""
    total = 0.0
    for row in rows:
        ids = row.to(model.device)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        total += float(cross_entropy(logits.float(), ids[1:]))
    return total / len(rows)


def rounded(weight: Tensor, bits: int) -> Tensor:
    """A weight [rows, columns] of so many bits for each number, in groups along its rows."""
    size = GROUP if weight.shape[1] % GROUP == 0 else weight.shape[1]
    groups = weight.unflatten(1, (-1, size)).float()
    least = groups.amin(-1, keepdim=True)
    step = (groups.amax(-1, keepdim=True) - least) / (2**bits - 1)
    levels = ((groups - least) / step.clamp(min=1e-12)).round()
    values: Tensor = levels * step + least
    return values.flatten(1).to(weight.dtype)
