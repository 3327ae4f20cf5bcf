"""AdamW's update of all weights of a GPU as one kernel, which also scales their gradients."""

# Triton's arguments have no types but constexpr.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lacuna.train.optimizer import LocalAdamW

# Numbers that a program updates.
_BLOCK = 2048
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class _Table:
    """What the device is told of the tensors of an update.

    Attributes:
        rows: addresses of weights, gradients, both averages and lower halves, and sizes.
        addresses: these rows, int64 [6, tensors].
        programs: the tensor that each program works on, and which block of it, int32 [2, programs].
        sent: what those two are copies of, in the host's memory.
        is_aligned: whether all tensors begin at multiples of 16 bytes.
    """

    rows: list[list[int]]
    addresses: Tensor
    programs: Tensor
    sent: tuple[Tensor, Tensor]
    is_aligned: bool


class OneKernelAdamW(LocalAdamW):
    """AdamW as torch's fused kernel makes it, in fewer passes over memory.

    Gradients are divided by `grad_scale` as they are read, and stay as they are. Where `found_inf`
    is 1, a step leaves everything as it is, without waiting for the device.

    Attributes:
        rests: the lower halves of weights that are split (`SplitWeights`), int16.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.tables: dict[Any, _Table] = {}
        self.rests: dict[Tensor, Tensor] = {}
        self.recorded: list[_Table] = []  # which graphs read

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates all parameters that have a gradient."""
        parts = []
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)
            parts += [(group, *part) for part in _by_dtype(lists[:4], lists[5], self.rests)]
        if not all(_is_suitable(tensors) for _, tensors, _ in parts):
            assert not self.rests, "weights in halves are updated by the kernel alone"
            return super().step(closure)
        is_recorded = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        for number, (group, tensors, steps) in enumerate(parts):
            key = number, len(steps)  # state is made by steps of one weight each, in between
            table = _table_of(tensors, self.tables.get(key))
            if is_recorded:
                self.recorded.append(table)  # only a replay fills a new one
            else:
                self.tables[key] = table
            self._advance(group, tensors, steps, table)
        return None

    def _advance(
        self,
        group: dict[str, Any],
        tensors: list[list[Tensor]],
        steps: list[Tensor],
        table: _Table,
    ) -> None:
        """Makes the update of a group, in place."""
        weights = tensors[0]
        device = weights[0].device
        scale = self._told("grad_scale", 1.0, device)
        skip = self._told("found_inf", 0.0, device)
        torch._foreach_add_(steps, 1.0)
        count = torch.stack(steps).double()
        first, second = (1 - torch.pow(beta, count) for beta in group["betas"])
        rate = group["lr"] * torch.ones_like(count)
        numbers = torch.stack([rate * group["weight_decay"], rate / first, second.sqrt()]).float()
        torch._foreach_sub_(steps, [skip] * len(steps))
        beta, beta_of_squares = group["betas"]
        _advance_all[(table.programs.shape[1],)](
            *(table.addresses, table.programs, numbers, scale, skip, len(weights)),
            *(1 - beta, beta_of_squares, 1 - beta_of_squares, group["eps"]),
            TYPE=_TYPES[weights[0].dtype],
            GRADIENT=_TYPES[tensors[1][0].dtype],
            STATE=_TYPES[tensors[2][0].dtype],
            SPLIT=len(tensors) > 4,
            ALIGNED=table.is_aligned,
            BLOCK=_BLOCK,
        )

    def _told(self, name: str, default: float, device: torch.device) -> Tensor:
        """The scalar that the loop has set as an attribute of this name, or the default."""
        given = getattr(self, name, None)
        return torch.full((), default, device=device) if given is None else given.to(device)


def _by_dtype(
    tensors: list[list[Tensor]], steps: list[Tensor], rests: dict[Tensor, Tensor]
) -> list[tuple[list[list[Tensor]], list[Tensor]]]:
    """A group's tensors and their counts, in parts of the same dtypes, with lower halves last.

    The tensors are weights, gradients, and the averages of these and of their squares.
    """
    parts: dict[Any, tuple[list[list[Tensor]], list[Tensor]]] = {}
    for *one, step in zip(*tensors, steps, strict=True):
        if one[0] in rests:
            one.append(rests[one[0]])
        kind = tuple(tensor.dtype for tensor in one)
        lists, counts = parts.setdefault(kind, ([[] for _ in one], []))
        for place, tensor in zip(lists, one, strict=True):
            place.append(tensor)
        counts.append(step)
    return [*parts.values()]


def _is_suitable(tensors: list[list[Tensor]]) -> bool:
    """Whether the kernel can update weights, given with all tensors that belong to them."""
    dtypes = {kind[0].dtype for kind in tensors[:4]}
    is_split = len(tensors) > 4
    return (
        dtypes <= _TYPES.keys()
        and (is_split or len(dtypes) == 1)
        and all(one.is_contiguous() for kind in tensors for one in kind)
    )


def _table_of(tensors: list[list[Tensor]], before: _Table | None) -> _Table:
    """What the device is told of tensors; `before`, if that is of the same ones where they are."""
    rows = [[one.data_ptr() for one in kind] for kind in tensors]
    if len(rows) == 4:
        rows.append([0] * len(tensors[0]))
    rows.append([one.numel() for one in tensors[0]])
    if before is not None and before.rows == rows:
        return before
    device = tensors[0][0].device
    addresses = _in_page_locked_memory(torch.tensor(rows), device)
    is_aligned = all(address % 16 == 0 for row in rows[:-1] for address in row)
    if before is not None and before.rows[-1] == rows[-1]:
        programs, programs_there = before.sent[1], before.programs
    else:
        programs = _in_page_locked_memory(_programs_for(rows[-1]), device)
        programs_there = programs.to(device, non_blocking=True)
    there = addresses.to(device, non_blocking=True)
    return _Table(rows, there, programs_there, (addresses, programs), is_aligned)


def _in_page_locked_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor from where a GPU can take it without a wait.

    `to_device` would let go of it, and a copy that is recorded reads it at every replay.
    """
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _programs_for(sizes: list[int]) -> Tensor:
    """The programs that update tensors of these sizes, as in `_Table`."""
    blocks = torch.tensor([triton.cdiv(size, _BLOCK) for size in sizes])
    tensors = torch.arange(len(sizes)).repeat_interleave(blocks)
    before = (blocks.cumsum(0) - blocks).repeat_interleave(blocks)
    return torch.stack([tensors, torch.arange(len(tensors)) - before]).int()


@triton.jit
def _advance_all(
    addresses,
    programs,
    numbers,
    scale,
    skip,
    tensors,
    one_less_beta,
    beta_of_squares,
    one_less_beta_of_squares,
    eps,
    TYPE: tl.constexpr,
    GRADIENT: tl.constexpr,
    STATE: tl.constexpr,
    SPLIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Updates a block of one weight; `numbers` are those of the tensors, float32 [3, tensors]."""
    if tl.load(skip) == 0:
        program = tl.program_id(0)
        tensor = tl.load(programs + program)
        first = tl.load(programs + tl.num_programs(0) + program).to(tl.int64) * BLOCK
        place = addresses + tensor
        left = tl.load(place + 5 * tensors) - first
        pointers = (
            _pointer(tl.load(place), first, tl.int16 if SPLIT else TYPE, ALIGNED),
            _pointer(tl.load(place + tensors), first, GRADIENT, ALIGNED),
            _pointer(tl.load(place + 2 * tensors), first, STATE, ALIGNED),
            _pointer(tl.load(place + 3 * tensors), first, STATE, ALIGNED),
            _pointer(tl.load(place + 4 * tensors), first, tl.int16, ALIGNED),
        )
        known = (
            tl.load(numbers + tensor),
            tl.load(numbers + tensors + tensor),
            tl.load(numbers + 2 * tensors + tensor),
            1 / tl.load(scale),
            one_less_beta,
            beta_of_squares,
            one_less_beta_of_squares,
            eps,
        )
        # A whole block needs no mask, without which several numbers are read at once.
        within = tl.arange(0, BLOCK)
        if left >= BLOCK:
            _advance_block(pointers, known, within, None, SPLIT)
        else:
            _advance_block(pointers, known, within, within < left, SPLIT)


@triton.jit
def _pointer(address, first, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to the first number of a program's share in a tensor at an address."""
    pointer = address.to(tl.pointer_type(TYPE)) + first
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _advance_block(pointers, known, within, mask, SPLIT: tl.constexpr):
    """AdamW's update of the numbers that are so far from the pointers (arXiv 1711.05101)."""
    weights, gradients, means, squares, rests = pointers
    decay, rate, root, factor, one_less_beta, beta_of_squares, one_less_beta_of_squares, eps = known
    if SPLIT:
        upper = tl.load(weights + within, mask).to(tl.int32) << 16
        weight = (upper + tl.load(rests + within, mask)).to(tl.float32, bitcast=True)
    else:
        weight = tl.load(weights + within, mask).to(tl.float32)
    gradient = tl.load(gradients + within, mask).to(tl.float32) * factor
    mean = tl.load(means + within, mask).to(tl.float32)
    square = tl.load(squares + within, mask).to(tl.float32)
    mean += one_less_beta * (gradient - mean)
    square = beta_of_squares * square + one_less_beta_of_squares * gradient * gradient
    weight -= decay * weight
    weight -= rate * mean / (tl.sqrt(square) / root + eps)
    if SPLIT:
        # As `halves_of` has it; what is no number stays none, also in the upper half alone.
        bits = weight.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        near = tl.where(weight == weight, near, 0x7FC0)
        rest = tl.minimum(bits - (near << 16), 0x7FFF)
        tl.store(weights + within, near.to(tl.int16), mask)
        tl.store(rests + within, rest.to(tl.int16), mask)
    else:
        tl.store(weights + within, weight, mask)
    tl.store(means + within, mean, mask)
    tl.store(squares + within, square, mask)
