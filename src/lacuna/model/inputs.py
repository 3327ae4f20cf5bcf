"""A micro-batch as one rank's model takes it: on the device, its share of every sequence."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lacuna.config.attentions import TRAINED
from lacuna.data import Batch
from lacuna.data.packing import IGNORED
from lacuna.model.attention import BOUNDS, PACKED, UNTOLD
from lacuna.parallel.context import causal_parts, shard_sequence
from lacuna.parallel.mesh import Layout, Mesh
from lacuna.parallel.partial_attention import Part

# Bounds grow, by empty documents, in steps of this many, so that compiled layers meet few different
# lengths.
DOCUMENT_STEP = 64
# The head is computed for all tokens where it could leave out less than this share of them. So rows
# that are trained but for the ends of documents, as in pretraining, all have one length.
_LEFT_OUT = 1 / 16


@dataclass(frozen=True)
class Inputs:
    """What the forward pass of one micro-batch needs.

    Attributes:
        arguments: what the model is called with. Among them are `input_ids`, int64 [B, T], this
            rank's share of the sequences, and `position_ids`, int64 [B, T·tp], since layers see
            the shares of all tensor-parallel ranks. There is no mask and no cache: either would
            let documents see each other.
        columns: all other columns of the batch, [B, T, ...], the same share as `input_ids`.
        sequence_columns: the columns of its sequences, [sequences], whole on every rank.
        split: the mesh over which a sequence's labels are spread, if they are.
        gather: the mesh over which hidden states are gathered before the head, if they are. The
            columns then have the same share of the sequences as `position_ids`.
        places: of which tokens the head is to be computed, int64 [places], their numbers in the
            flattened `columns`; None where that is all of them. Others are not trained.
    """

    arguments: dict[str, Any]
    columns: dict[str, Tensor]
    sequence_columns: dict[str, Tensor] = field(default_factory=dict)
    split: DeviceMesh | None = None
    gather: DeviceMesh | None = None
    places: Tensor | None = None


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to a device, unless it is there already.

    To a GPU it is copied without waiting, through page-locked memory.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def packing_arguments(
    attention: str,
    cu_seqlens: Tensor,
    max_seqlen: int,
    length: int,
    device: torch.device,
    mesh: Mesh | None = None,
) -> dict[str, Any]:
    """The arguments that tell `attention` of the documents in rows of `length` tokens.

    The model takes them beside the position ids.
    """
    if attention.startswith((PACKED, TRAINED)):
        documents = len(cu_seqlens) - 1
        whole = int(cu_seqlens[-1]) == length * documents
        added = 0 if whole else -documents % DOCUMENT_STEP
        bounds = to_device(torch.cat([cu_seqlens, cu_seqlens[-1:].expand(added)]), device)
        # An upper bound that takes few values.
        longest = min(1 << (max_seqlen - 1).bit_length(), length)
        if mesh is None or mesh.layout.cp == 1:
            return {"parts": (Part(bounds, bounds, longest, length, whole=whole),)}
        parts = tuple(causal_parts(bounds, length, mesh.layout.cp, mesh.rank("cp"), longest))
        ring = (bounds, longest) if mesh.layout.ring else None
        return {"parts": parts, "group": mesh.named.get_group("cp"), "ring": ring}
    if attention == BOUNDS:
        return {"cu_seqlens": to_device(cu_seqlens, device)}
    if not attention.startswith("flash_attention"):
        return {}  # transformers builds the mask from position ids that start again
    bounds = to_device(cu_seqlens, device)
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max_seqlen,
        "max_length_k": max_seqlen,
    }


def prepare_inputs(
    batch: Batch,
    attention: str,
    device: torch.device,
    mesh: Mesh | None = None,
    gather: bool = False,
    routed: bool = False,
) -> Inputs:
    """Makes the inputs of this rank's share of `batch`, on the device; without a mesh of all of it.

    With `gather` all tensor-parallel ranks compute the loss of all their tokens. If it is `routed`,
    the model is told not to collect the logits of its routers, which compiled layers could not.
    """
    layout = Layout() if mesh is None else mesh.layout
    split = None
    gathering = None
    if mesh is not None:
        gathering = mesh.tensor if gather and layout.tp > 1 else None
        split = _mesh_of_labels(mesh, gathering is not None)
    own = _columns_of_rank(batch.columns, attention, mesh, gathering is not None)
    places = trained_places(own)
    columns = {name: to_device(column, device) for name, column in own.items()}
    position_ids = columns.pop("position_ids")
    input_ids = columns.pop("input_ids")
    told = packing_arguments(
        attention, batch.cu_seqlens, batch.max_seqlen, batch.shape[1], device, mesh
    )
    arguments = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False, **told}
    if attention in (BOUNDS, UNTOLD):
        del arguments["position_ids"]
    if routed:
        arguments["output_router_logits"] = False
    return Inputs(
        arguments,
        columns | batch.own_columns,
        {name: to_device(column, device) for name, column in batch.sequence_columns.items()},
        split,
        gathering,
        None if places is None else to_device(places, device),
    )


def trained_places(columns: dict[str, Tensor]) -> Tensor | None:
    """Where labels are not `IGNORED`, of prompts neither, int64 [places] of the flattened tokens.

    None where that is nearly everywhere. The labels are those of a rank's share, while they are in
    the host's memory: of a GPU's it would have to wait for their number.
    """
    trained = columns["labels"] != IGNORED
    if "prompt_labels" in columns:
        trained = trained | (columns["prompt_labels"] != IGNORED)
    if int(trained.sum()) > (1 - _LEFT_OUT) * trained.numel():
        return None
    return trained.flatten().nonzero().flatten()


def _columns_of_rank(
    columns: dict[str, Tensor], attention: str, mesh: Mesh | None, is_gathered: bool
) -> dict[str, Tensor]:
    """A rank's share of the columns, in the rows that `attention` wants.

    Tensor-parallel ranks share all `position_ids`, and where hidden states are gathered, all but
    `input_ids`.
    """
    if attention.startswith(("flash_attention", BOUNDS)):  # other people's kernels want one row
        columns = {
            name: column.reshape(1, -1, *column.shape[2:]) for name, column in columns.items()
        }
    if mesh is not None and mesh.layout.cp > 1:
        cp = mesh.layout.cp
        rank = mesh.rank("cp")
        columns = {name: shard_sequence(column, 1, cp, rank) for name, column in columns.items()}
    if mesh is not None and mesh.layout.tp > 1:
        cut = {"input_ids"} if is_gathered else columns.keys() - {"position_ids"}
        tp, rank = mesh.layout.tp, mesh.rank("tp")
        # What is not contiguous would be copied to a GPU with a wait.
        own = {name: columns[name].chunk(tp, dim=1)[rank].contiguous() for name in cut}
        columns = columns | own
    return columns


def _mesh_of_labels(mesh: Mesh, is_gathered: bool) -> DeviceMesh | None:
    """The mesh over which a sequence's labels are spread, if they are.

    Labels are not spread over tensor-parallel ranks where hidden states are gathered over these.
    """
    names = []
    if mesh.layout.cp > 1:
        names.append("cp")
    if mesh.layout.tp > 1 and not is_gathered:
        names.append("tp")
    return mesh.named[tuple(names)] if names else None
