"""Context parallelism: rows of tokens are cut over ranks, and attention reaches across the cuts.

Attention is causal and stays inside documents.

A row of T tokens is cut into 2·C equal chunks over C ranks. Rank r has the chunks r and 2·C − 1 − r
(its head and its tail), one behind the other, so that causal attention costs every rank the same.
Documents are given as `bounds`, int32 [N + 1]: where they begin and end among the tokens of all
rows, flattened. Some may be empty.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed._functional_collectives  # makes the collectives differentiable
from torch import Tensor
from torch.distributed import ProcessGroup

from lacuna.parallel.partial_attention import PARTIAL_ATTENTIONS, SOFTMAX, Part

_collectives = torch.ops._c10d_functional


def causal_parts(bounds: Tensor, length: int, cp: int, rank: int, longest: int) -> Iterator[Part]:
    """Yields what a rank's head and what its tail see of the keys of whole rows of `length` tokens.

    No document has more than `longest` tokens.
    """
    size = length // (2 * cp)
    for chunk in _chunks_of_rank(cp, rank):
        stop = (chunk + 1) * size
        cu_q = _bounds_in_chunks(bounds, length, size, (chunk,))
        cu_k = _bounds_in_chunks(bounds, length, stop, (0,))
        yield Part(cu_q, cu_k, longest, stop)


def shard_sequence(tensor: Tensor, dim: int, cp: int, rank: int) -> Tensor:
    """Cuts a rank's head and tail out of a tensor that is whole along `dim`."""
    chunks = tensor.chunk(2 * cp, dim)
    return torch.cat([chunks[chunk] for chunk in _chunks_of_rank(cp, rank)], dim)


def gather_sequence(tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Gathers the whole tensor from the heads and tails along `dim` that the ranks have.

    Its gradients are summed over the ranks.
    """
    own = tensor.contiguous()
    gathered = _collectives.all_gather_into_tensor(own, group.size(), group.group_name)
    return join_sequence(_collectives.wait_tensor(gathered).chunk(group.size()), dim)


def join_sequence(shards: Sequence[Tensor], dim: int) -> Tensor:
    """Joins the heads and tails of all ranks along `dim` to the whole tensor."""
    heads, tails = zip(*(shard.chunk(2, dim) for shard in shards), strict=True)
    return torch.cat([*heads, *reversed(tails)], dim)


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    group: ProcessGroup,
    scaling: float,
    kind: str = SOFTMAX,
) -> Tensor:
    """Causal attention inside documents; keys and values travel round the ranks of `group`.

    `query` [B, heads, T/C, D], `key` and `value` [B, key heads, T/C, D] are a rank's head and tail,
    and so is the result, in the query's shape. No document has more than `longest` tokens. Beside
    its own keys and values a rank holds those of at most two others, and in the backward pass also
    their gradients. The outputs over each rank's keys are merged by their log-sum-exps in float32,
    which is the same as one softmax over all keys (Liu et al., Ring Attention, arXiv 2310.01889).
    The `kind` of attention names one of `PARTIAL_ATTENTIONS`.
    """
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    pair = torch.stack((key, value))
    cp, rank = group.size(), group.rank()
    output: Tensor
    output, _ = _ring_forward(
        query, pair, bounds, longest, scaling, group.group_name, cp, rank, kind
    )
    return output.transpose(1, 2)


def _chunks_of_rank(cp: int, rank: int) -> tuple[int, int]:
    return rank, 2 * cp - 1 - rank


def _bounds_in_chunks(bounds: Tensor, length: int, size: int, chunks: Sequence[int]) -> Tensor:
    """Turns bounds among the tokens of rows of `length` into those among the `chunks` of each row.

    A chunk has `size` tokens.
    """
    places = bounds % length
    found = bounds // length * (size * len(chunks))
    for chunk in chunks:
        found = found + (places - chunk * size).clamp(0, size)
    return found


def _ring_part(
    bounds: Tensor, rows: int, size: int, cp: int, rank: int, origin: int, longest: int
) -> tuple[int, Part]:
    """What a rank's queries see of the keys of rank `origin`.

    Returns the first query that sees any of them, and the part that begins with it. Unless the keys
    are the rank's own, all that are seen stand before all queries, so that at most one document of
    each row has both.
    """
    # Only the tail sees keys of later ranks, and of earlier ranks' keys only the head is seen.
    queries = _chunks_of_rank(cp, rank)[1 if origin > rank else 0 :]
    keys = _chunks_of_rank(cp, origin)[: 1 if origin < rank else 2]
    length = 2 * cp * size
    stop = len(keys) * size
    whole = len(bounds) == rows + 1
    own = origin == rank
    if not own:  # each row has three pieces: that one document, all before it, and all after it
        starts = torch.arange(0, rows * length, length, dtype=torch.int32, device=bounds.device)
        place = torch.searchsorted(bounds, starts + (keys[-1] + 1) * size - 1, right=True)
        pieces = torch.stack((bounds[place - 1], bounds[place], starts + length), 1)
        bounds = torch.cat((starts[:1], pieces.flatten()))
        longest = length
    cu_q = _bounds_in_chunks(bounds, length, size, queries)
    cu_k = _bounds_in_chunks(bounds, length, size, keys)
    return (2 - len(queries)) * size, Part(cu_q, cu_k, longest, stop, own, whole)


def _pass_on(tensor: Tensor, group: str, cp: int, rank: int) -> Tensor:
    """Starts to send a tensor to the next rank.

    Returns the tensor that the rank before sends, which must be waited for.
    """
    sent = [0] * cp
    received = [0] * cp
    sent[(rank + 1) % cp] = len(tensor)
    received[rank - 1] = len(tensor)
    arriving: Tensor = _collectives.all_to_all_single(tensor.contiguous(), received, sent, group)
    return arriving


def _visit_ranks(
    pair: Tensor, bounds: Tensor, longest: int, group: str, cp: int, rank: int
) -> Iterator[tuple[int, Part, Tensor, Tensor]]:
    """Yields what this rank's queries see of the keys of each rank, its own first.

    That is the first query that sees any, the part, and the keys and values that are seen. The next
    rank's are on their way while these are worked on.
    """
    _, rows, tokens, *_ = pair.shape
    for step in range(cp):
        arriving = _pass_on(pair, group, cp, rank) if step + 1 < cp else None
        start, part = _ring_part(bounds, rows, tokens // 2, cp, rank, (rank - step) % cp, longest)
        yield start, part, *pair[:, :, : part.stop]
        if arriving is not None:
            pair = _collectives.wait_tensor(arriving)


def _sum_dtype(tensor: Tensor, terms: int) -> torch.dtype:
    """What partial results are added up in: two are rounded only once in their own dtype too."""
    return tensor.dtype if terms <= 2 else torch.float32


def _merge(output: Tensor, lse: Tensor, partial: Tensor, partial_lse: Tensor) -> None:
    """Takes a partial output into the output, in place, and so its log-sum-exp; in float32."""
    weight = torch.sigmoid(partial_lse - lse).nan_to_num()  # where neither has any weight
    output.copy_(output.float().lerp(partial.float(), weight.unsqueeze(-1)))
    lse.copy_(torch.logaddexp(lse, partial_lse))


@cache
def _compiled_merge() -> Callable[..., None]:
    """The same, compiled. Made when it is asked for, because this imports torch's compiler."""
    return torch.compile(_merge, fullgraph=True)


# Operations of their own: `torch.compile` takes them as they are, and recomputation can keep their
# results. From here on tensors are [B, tokens, heads, D], key and value a pair [2, ...],
# log-sum-exps [B, tokens, heads].
@torch.library.custom_op("lacuna::ring_attention", mutates_args=())
def _ring_forward(
    query: Tensor,
    pair: Tensor,
    bounds: Tensor,
    longest: int,
    scaling: float,
    group: str,
    cp: int,
    rank: int,
    kind: str,
) -> tuple[Tensor, Tensor]:
    """The output and its log-sum-exp."""
    output = lse = query.new_empty(0)
    compute, _ = PARTIAL_ATTENTIONS[kind]
    merge = _compiled_merge() if query.is_cuda else _merge
    for start, part, keys, values in _visit_ranks(pair, bounds, longest, group, cp, rank):
        partial, partial_lse = compute(query[:, start:], keys, values, part, scaling)
        if part.causal:  # these are its own, of which every query sees one
            output = partial.to(_sum_dtype(partial, cp)).contiguous()
            lse = partial_lse.contiguous()
        else:
            merge(output[:, start:], lse[:, start:], partial, partial_lse)
        del keys, values  # else they would still be in memory when those after the next are sent
    return output.to(query.dtype), lse


@torch.library.custom_op("lacuna::ring_attention_backward", mutates_args=())
def _ring_backward(
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    pair: Tensor,
    bounds: Tensor,
    longest: int,
    scaling: float,
    group: str,
    cp: int,
    rank: int,
    kind: str,
) -> tuple[Tensor, Tensor]:
    """The gradients of the query, and those of the pair, which travel round with their keys."""
    grad_query = grads = query.new_empty(0)
    _, differentiate = PARTIAL_ATTENTIONS[kind]
    for start, part, keys, values in _visit_ranks(pair, bounds, longest, group, cp, rank):
        of_query, of_key, of_value = differentiate(
            grad[:, start:],
            output[:, start:],
            lse[:, start:],
            query[:, start:],
            keys,
            values,
            part,
            scaling,
        )
        if part.causal:
            grad_query = of_query.to(_sum_dtype(of_query, cp)).contiguous()
            grads = torch.stack((of_key, of_value)).to(grad_query.dtype)
        else:  # these are another rank's, so that their gradients are on their way
            grad_query[:, start:] += of_query
            grads = _collectives.wait_tensor(grads)
            grads[:, :, : part.stop] += torch.stack((of_key, of_value))
        grads = _pass_on(grads, group, cp, rank)
        del keys, values
    return grad_query.to(query.dtype), _collectives.wait_tensor(grads).to(pair.dtype)


@_ring_forward.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:-1], dtype=torch.float32)


@_ring_backward.register_fake
def _(
    grad: Tensor, output: Tensor, lse: Tensor, query: Tensor, pair: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), pair.new_empty(pair.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:3])
    ctx.settings = inputs[3:]


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_ring_backward(grad, *ctx.saved_tensors, *ctx.settings), *[None] * 7


_ring_forward.register_autograd(_differentiate, setup_context=_save)
