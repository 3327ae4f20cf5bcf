"""What settings and rows must be like for pairs to stay whole."""

from collections.abc import Sequence

import numpy as np

from lacuna.config import UserError, in_curriculum_stage
from lacuna.config.documents import DataConfig, PackingConfig
from lacuna.config.row_form import RowForm


def require_whole_pairs(data: DataConfig, packing: PackingConfig, loss: str) -> None:
    """Raises UserError for settings of the data that would keep answers from being compared."""
    if packing.mode == "concatenate":
        raise UserError("packing.mode: pairs are not cut; set best_fit or none.")
    if not data.document_mask:
        raise UserError(
            "data.document_mask: the two answers of a pair must not see each other; leave it on."
        )
    if data.predict_across_documents:
        raise UserError(
            "data.predict_across_documents: pairs do not go on in others; leave it off."
        )
    if loss == "kto" and data.streaming:
        raise UserError(
            'data.streaming, preference.loss: "kto" sets answers beside those of the next row, for '
            "which it needs the cache; set data.streaming = false."
        )
    if loss == "kto" and data.tokenization == "online":
        raise UserError(
            'data.tokenization, preference.loss: "kto" sets answers beside those of the next row, '
            "for which it needs the cache; leave out data.tokenization."
        )


def refuse_long_pairs(lengths: np.ndarray, forms: Sequence[RowForm]) -> None:
    """Raises UserError for pairs that are too long for a row, unless long examples are dropped.

    `forms` are those of all stages, which are looked at before the first begins.
    """
    for number, form in enumerate(forms):
        space = form.length
        long = lengths[lengths > space]
        with in_curriculum_stage(number):
            if len(long) and form.packing.long_examples != "drop":
                raise UserError(
                    f"training.seq_len: {len(long):,} of {len(lengths):,} pairs are longer than a "
                    f"row of {space} tokens, the longest {long.max():,}, and a pair cannot be cut; "
                    'raise it, or set packing.long_examples = "drop" to leave them out.'
                )
