"""Sharded matrices made whole, each on one home rank that its shards go to and come back from."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

# How many values a rank has of whole matrices at a time, unless a single one has more.
ROUND_VALUES = 2**25

Part = tuple[slice, ...]
# What to wait for, the pieces that are there then, and what must live until then.
_Exchange = tuple[dist.Work, list[Tensor], Tensor]


@dataclass(frozen=True)
class _Round:
    """The matrices that are whole at the same time.

    Attributes:
        homes: the matrices that are whole on each rank.
        sent: those whose parts this rank sends to each rank.
        received: those whose parts this rank gets from each rank.
    """

    homes: list[list[int]]
    sent: list[list[int]]
    received: list[list[int]]


def balanced_homes(shapes: Sequence[torch.Size], ranks: int) -> list[list[int]]:
    """The matrices that each rank is home to, so that all have about as much to compute.

    A matrix costs its size times its smaller side. The most expensive is placed first, on the rank
    that has least so far.
    """
    costs = [math.prod(shape) * min(shape[-2:]) for shape in shapes]
    homes: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for matrix in sorted(range(len(shapes)), key=lambda matrix: -costs[matrix]):
        home = loads.index(min(loads))
        loads[home] += costs[matrix]
        homes[home].append(matrix)
    return homes


def _batches(matrices: Sequence[int], shapes: Sequence[torch.Size]) -> list[list[int]]:
    """The matrices of one home, in batches of at most `ROUND_VALUES` values or one matrix."""
    batches: list[list[int]] = []
    values = ROUND_VALUES
    for matrix in matrices:
        size = math.prod(shapes[matrix])
        if values + size > ROUND_VALUES:
            batches.append([])
            values = 0
        batches[-1].append(matrix)
        values += size
    return batches


class Homes:
    """Where sharded matrices, or stacks of them, are made whole.

    They must lie on all ranks of one and the same set, which all must make an object of the same
    matrices, and the same calls. Of a part that several ranks have, the one nearest to its home
    sends it. Tensors that are not sharded are at home on every rank.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.shapes = [tensor.shape for tensor in tensors]
        self.rank = 0
        self.group: dist.ProcessGroup | None = None
        parts = [tuple(slice(0, size) for size in shape) for shape in self.shapes]
        self.parts: list[list[Part]] = [parts]
        self.rounds: dict[tuple[int, ...], list[_Round]] = {}
        sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        if not sharded:
            return
        assert len(sharded) == len(tensors), "either all are sharded, or none is"
        ranks = sharded[0].device_mesh.mesh.flatten().tolist()
        self.rank = ranks.index(dist.get_rank())
        if len(ranks) < dist.get_world_size():  # a stage of a pipeline
            self.group = dist.new_group(ranks, use_local_synchronization=True)
        chunks = [tensor.__create_chunk_list__()[0] for tensor in sharded]
        own = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
        found: list[Any] = [None] * len(ranks)
        dist.all_gather_object(found, own, self.group)
        self.parts = [
            [
                tuple(slice(start, start + size) for start, size in zip(*place, strict=True))
                for place in of_rank
            ]
            for of_rank in found
        ]

    @property
    def are_here(self) -> bool:
        """Whether this rank is the home of all, so that nothing is sent."""
        return len(self.parts) == 1

    def has_whole_matrices(self, tensor: int) -> bool:
        """Whether every rank's part of a stack [..., m, n] is made of whole matrices."""
        whole = tuple(slice(0, size) for size in self.shapes[tensor][-2:])
        return all(of_rank[tensor][-2:] == whole for of_rank in self.parts)

    def _size(self, rank: int, matrix: int) -> int:
        return math.prod(part.stop - part.start for part in self.parts[rank][matrix])

    def _is_sender(self, rank: int, matrix: int, home: int) -> bool:
        """Whether a rank is the one that sends its part of a matrix to the matrix' home."""
        part = self.parts[rank][matrix]
        others = (other for other, of in enumerate(self.parts) if of[matrix] == part)
        return rank == min(others, key=lambda other: abs(other - home))

    def _rounds(self, matrices: tuple[int, ...]) -> list[_Round]:
        """The rounds in which these matrices are made whole; they are worked out once."""
        if matrices not in self.rounds:
            ranks = range(len(self.parts))
            places = balanced_homes([self.shapes[matrix] for matrix in matrices], len(ranks))
            homes = [[matrices[place] for place in of_home] for of_home in places]
            batches = [_batches(of_home, self.shapes) for of_home in homes]
            self.rounds[matrices] = []
            for number in range(max(map(len, batches), default=0)):
                now = [each[number] if number < len(each) else [] for each in batches]
                sent = [[m for m in now[to] if self._is_sender(self.rank, m, to)] for to in ranks]
                received = [
                    [m for m in now[self.rank] if self._is_sender(source, m, self.rank)]
                    for source in ranks
                ]
                self.rounds[matrices].append(_Round(now, sent, received))
        return self.rounds[matrices]

    def _exchange(
        self, pieces: list[list[Tensor]], sizes: list[list[int]], like: Tensor
    ) -> _Exchange:
        """Starts to send each rank its `pieces`, while pieces of these `sizes` come from each."""
        flat = [piece for of_rank in pieces for piece in of_rank]
        outgoing = like.new_empty(sum(piece.numel() for piece in flat))
        places = outgoing.split([piece.numel() for piece in flat])
        copy_each([place.view(one.shape) for place, one in zip(places, flat, strict=True)], flat)
        lengths = [sum(of_rank) for of_rank in sizes]
        counts = [sum(piece.numel() for piece in of_rank) for of_rank in pieces]
        incoming = like.new_empty(sum(lengths))
        work = dist.all_to_all_single(
            incoming, outgoing, lengths, counts, self.group, async_op=True
        )
        split = incoming.split([size for of_rank in sizes for size in of_rank])
        return work, [*split], outgoing

    def _gather(
        self, this: _Round, parts_of: Callable[[list[int]], list[Tensor]], like: Tensor
    ) -> _Exchange:
        """Starts to send the parts of the matrices of a round to the matrices' homes."""
        numbers = [matrix for of_home in this.homes for matrix in of_home]
        own = dict(zip(numbers, parts_of(numbers), strict=True))
        pieces = [[own[matrix] for matrix in of_home] for of_home in this.sent]
        sizes = [[self._size(rank, m) for m in of] for rank, of in enumerate(this.received)]
        return self._exchange(pieces, sizes, like)

    def _assemble(self, this: _Round, pieces: list[Tensor], like: Tensor) -> dict[int, Tensor]:
        """The whole matrices that this rank is home to in a round, of the pieces that came."""
        wholes = {m: like.new_empty(self.shapes[m]) for m in this.homes[self.rank]}
        sources = [(rank, matrix) for rank, of in enumerate(this.received) for matrix in of]
        places = [wholes[matrix][self.parts[rank][matrix]] for rank, matrix in sources]
        shaped = [piece.view(place.shape) for piece, place in zip(pieces, places, strict=True)]
        copy_each(places, shaped)
        return wholes

    def transform(
        self,
        matrices: Sequence[int],
        parts_of: Callable[[list[int]], list[Tensor]],
        function: Callable[[dict[int, Tensor]], dict[int, Tensor]],
        put: Callable[[list[int], list[Tensor]], None],
        like: Tensor,
    ) -> None:
        """Puts back this rank's parts of what a `function` makes of whole matrices.

        `parts_of` gives this rank's parts of the matrices of a round. It is asked for every part
        once, also for one that another rank sends. They are sent with the dtype of `like`, on its
        device, and what is not sent comes as it is. The parts of the next round are on their way
        while this one's matrices are computed. The `function` may empty what it is given.
        """
        rounds = self._rounds(tuple(matrices))
        if self.are_here:
            for here in rounds:
                [numbers] = here.homes
                results = function(dict(zip(numbers, parts_of(numbers), strict=True)))
                put(numbers, [results[number] for number in numbers])
            return
        coming = self._gather(rounds[0], parts_of, like) if rounds else None
        for this, following in zip(rounds, [*rounds[1:], None], strict=False):
            assert coming is not None
            wholes = self._assemble(this, _arrived(coming), like)
            coming = self._gather(following, parts_of, like) if following else None
            results = function(wholes)
            back = [[results[m][of[m]] for m in this.homes[self.rank]] for of in self.parts]
            sizes = [[self._size(self.rank, m) for m in of_home] for of_home in this.homes]
            pieces = _arrived(self._exchange(back, sizes, like))
            changed = [matrix for of_home in this.homes for matrix in of_home]
            own = self.parts[self.rank]
            shapes = [[part.stop - part.start for part in own[matrix]] for matrix in changed]
            put(changed, [one.view(shape) for one, shape in zip(pieces, shapes, strict=True)])


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies tensors into others of the same shapes, with whatever dtypes and devices."""
    if targets:  # torch refuses none
        torch._foreach_copy_([*targets], [*sources])


def _arrived(coming: _Exchange) -> list[Tensor]:
    """The pieces of an exchange, after waiting for it."""
    work, pieces, _ = coming
    work.wait()
    return pieces
