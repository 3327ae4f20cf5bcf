"""Which examples share a row: long ones are treated as the configuration says, the others are never cut."""

from collections.abc import Callable

import numpy as np

from lacuna.config import Config, UserError
from lacuna.data.packing import Document


def packing_mode(config: Config) -> str:
    """`packing.mode`, by default that of the task: conversations are not cut, texts laid end to end."""
    automatic = "best_fit" if config.job.task == "sft" else "concatenate"
    return automatic if config.packing.mode == "auto" else config.packing.mode


def fill_rows(lengths: np.ndarray, document: Callable[[int], Document], config: Config) -> list[np.ndarray]:
    """The pieces of each row: int64 [3, n], the number of a document, its first token and the one after the last.

    `lengths` are those of all documents, of which `document` gives one; an empty one takes no room. Raises UserError
    when nothing is left of them.
    """
    pieces = _cut(lengths, document, config)
    if not len(pieces) and len(lengths):
        raise UserError(
            f"packing.long_examples: none of {len(lengths)} examples has a trained token within "
            f"{config.training.seq_len} tokens; raise training.seq_len, or split them"
        )
    if packing_mode(config) == "none":
        return [piece[:, None] for piece in pieces]
    return [pieces[chosen].T for chosen in best_fit(pieces[:, 2] - pieces[:, 1], config.training.seq_len)]


def _cut(lengths: np.ndarray, document: Callable[[int], Document], config: Config) -> np.ndarray:
    """int64 [pieces, 3]; pieces of long documents in which nothing is trained are left out."""
    most, long_examples = config.training.seq_len, config.packing.long_examples
    fitting, long = np.flatnonzero((lengths > 0) & (lengths <= most)), np.flatnonzero(lengths > most)
    pieces = [np.stack([fitting, np.zeros_like(fitting), lengths[fitting]], axis=1)]
    for number in long.tolist() if long_examples != "drop" else ():
        stop = int(lengths[number]) if long_examples == "split" else most
        whole = document(number)
        parts = [(number, start, min(start + most, stop)) for start in range(0, stop, most)]
        pieces.append(np.array([part for part in parts if whole.trains(*part[1:])], dtype=np.int64).reshape(-1, 3))
    return np.concatenate(pieces)


def best_fit(lengths: np.ndarray, space: int) -> list[list[int]]:
    """Bins of at most `space` tokens, each the numbers of the pieces in it, by best-fit decreasing (Johnson, 1973).

    Each piece, the longest first, goes to the fullest bin that has room for it.
    """
    bins: list[list[int]] = []
    roomy: dict[int, list[list[int]]] = {0: [], space: []}  # bins by the tokens that they have room for
    rooms = 0  # bit n is set where a bin has room for n > 0, so that the least room that suffices is found at once
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = rooms >> length
        room = length + (fitting & -fitting).bit_length() - 1 if fitting else space
        if not roomy[room]:
            bins.append([])
            roomy[room].append(bins[-1])
        chosen = roomy[room].pop()
        chosen.append(piece)
        roomy.setdefault(room - length, []).append(chosen)
        rooms |= 1 << room - length
        rooms &= ~(1 | (not roomy[room]) << room)
    return bins
