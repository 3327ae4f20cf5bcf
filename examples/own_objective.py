"""An objective of your own, without a change to lacuna: label smoothing and a z-loss.

In this folder: lacuna train RUN.toml --job.task own_objective:SmoothedModelling
"""

import torch.nn.functional as F
from torch import Tensor

from lacuna.data.packing import IGNORED
from lacuna.model.loss import Columns, Sums, TokenLoss
from lacuna.objective.language_modelling import LanguageModelling

SMOOTHING = 0.1
Z_LOSS = 1e-4  # PaLM (arXiv 2204.02311), section 5


def smoothed_cross_entropy(logits: Tensor, columns: Columns) -> Sums:
    """Sums over a chunk of tokens, by their logits [tokens, vocabulary] and columns [tokens]."""
    labels = columns["labels"]
    nats = F.cross_entropy(
        logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=SMOOTHING
    )
    z_loss = (logits.logsumexp(-1).square() * (labels != IGNORED)).sum()
    return {"loss": nats + Z_LOSS * z_loss, "z_loss": z_loss}


class SmoothedModelling(LanguageModelling):
    """Trains with the loss above; held-out text is measured by the plain cross-entropy."""

    loss = TokenLoss(smoothed_cross_entropy, ("loss", "z_loss"))

    def report(self, sums: dict[str, float], counts: dict[str, float]) -> dict[str, float | None]:
        """The row of the log, with one column more."""
        trained = max(counts["trained_tokens"], 1)
        return super().report(sums, counts) | {"z_loss": sums["z_loss"] / trained}
