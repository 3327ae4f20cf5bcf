"""What the rows of a batch are like, as several sections of the settings decide it together."""

from dataclasses import dataclass

from lacuna.config.documents import PackingConfig


@dataclass(frozen=True)
class RowForm:
    """What the rows of a batch are like.

    Attributes:
        length: the most tokens that a row has.
        longest_piece: the most tokens that see each other; longer documents are cut into pieces.
        trains_on: what the data are: texts, conversations, preferences or prompts.
        judged_by: the loss that compares answers, where the data are preferences.
        packing: how documents share rows; its mode is never auto.
        document_mask: whether documents do not see each other.
        predict_across_documents: whether the first token of a document is predicted from the one
            before it.
        is_shared: whether several ranks work on one row, so that all rows are equally long.
    """

    length: int
    longest_piece: int
    trains_on: str
    judged_by: str
    packing: PackingConfig
    document_mask: bool
    predict_across_documents: bool
    is_shared: bool
