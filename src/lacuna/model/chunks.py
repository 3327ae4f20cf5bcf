"""Of which tokens logits are made at once: as many as fit in memory, of all or of chosen ones."""

from collections.abc import Sequence

from torch import Tensor

# Logits of a chunk take about this much memory in float32; larger chunks gain no speed.
CHUNK_BYTES = 1024 * 2**20

Parts = Sequence[slice | Tensor]
"""What picks each chunk out of the tokens: from one to another, or at places, int64 [chunk]."""


def chunk_size(weight: Tensor) -> int:
    """The number of tokens whose logits exist at once, by a head's weight [vocabulary, width].

    A frozen head takes fewer, since it has no gradient to accumulate.
    """
    size = CHUNK_BYTES if weight.requires_grad else CHUNK_BYTES // 4
    return max(256, size // (4 * len(weight)) // 256 * 256)


def chunks_of(tokens: int, chunk: int, places: Tensor | None) -> Parts:
    """The chunks of so many tokens, or of those among them at `places`, int64 [places]."""
    count = tokens if places is None else len(places)
    parts = [slice(start, start + chunk) for start in range(0, count, chunk)]
    return parts if places is None else [places[part] for part in parts]
