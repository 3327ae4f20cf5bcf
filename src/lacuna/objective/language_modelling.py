"""Next-token prediction: the cross-entropy of trained tokens, and what is told of held-out text."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lacuna.config import Config, UserError
from lacuna.data import Batch, Loader
from lacuna.data.packing import IGNORED
from lacuna.model.build import BuiltModel
from lacuna.model.loss import Columns, Loss, Sums, TokenLoss

if TYPE_CHECKING:  # an extension
    from lacuna.objective.critic import SecondModel


def cross_entropy(logits: Tensor, columns: Columns) -> Sums:
    """The summed cross-entropy (nats) of the labels that are not `IGNORED`."""
    labels = columns["labels"]
    return {"loss": F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")}


def warped_cross_entropy(logits: Tensor, columns: Columns) -> Sums:
    """The same as `cross_entropy`, with a gradient that pulls the largest logits towards 0.

    That is of half the square of each trained token's largest logit, times 1e-4, as RWKV's L2Wrap
    has it (fla's `use_l2warp`). The loss that is told is without it.
    """
    trained = columns["labels"] != IGNORED
    penalty = 5e-5 * (logits.amax(-1).square() * trained).sum()
    return {"loss": cross_entropy(logits, columns)["loss"] + penalty - penalty.detach()}


def judged_cross_entropy(logits: Tensor, columns: Columns) -> Sums:
    """The summed cross-entropy, and how many labels the model finds the likeliest token."""
    right = (logits.argmax(-1) == columns["labels"]).sum()
    return cross_entropy(logits, columns) | {"right_tokens": right}


@dataclass(frozen=True)
class FrozenModel:
    """A model that a run has beside the one that it is for, and mostly does not train.

    Attributes:
        config: the settings of a run that would train it.
        keeps_states: whether its hidden states are kept for a whole step, and its head is whole on
            every rank.
        rows: how many rows it sees, at most, for each row of the data.
        is_trained: whether it is trained as well.
    """

    config: Config
    keeps_states: bool = False
    rows: int = 1
    is_trained: bool = False


class LanguageModelling:
    """Trains on the next token of texts; of conversations where `trains_on` says so."""

    trains_on: Literal["texts", "conversations", "preferences", "prompts"] = "texts"
    denominator = "trained_tokens"
    loss: Loss = TokenLoss(cross_entropy)
    held_out_loss: Loss = TokenLoss(judged_cross_entropy, ("loss", "right_tokens"))

    def check(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuses nothing: whatever the settings ask for can be had."""

    def frozen_models(self, config: Config) -> dict[str, FrozenModel]:
        """None: the model itself is all that there is."""
        return {}

    def prepare(
        self, policy: BuiltModel, all_batches: Callable[[], Iterable[Batch]]
    ) -> "SecondModel | None":
        """Needs nothing but the model itself, which may ask for a penalty of large logits."""
        is_cross_entropy = type(self).loss is LanguageModelling.loss
        if is_cross_entropy and getattr(policy.model.config, "use_l2warp", False):
            self.loss = TokenLoss(warped_cross_entropy)
        return None

    def next_step(self, policy: BuiltModel, source: Loader) -> Sequence[Batch]:
        """The next micro-batches of the data, whatever the model is by now."""
        return source.next_step(whole=policy.pipeline is not None)

    def annotate(self, policy: BuiltModel, batches: Sequence[Batch], loss: Loss) -> Sequence[Batch]:
        """The batches as they are: the loss takes nothing else."""
        return batches

    def report(self, sums: dict[str, float], counts: dict[str, float]) -> dict[str, float | None]:
        """What the log has of a step: the loss in nats per trained token."""
        return {"loss": sums["loss"] / max(counts["trained_tokens"], 1)}

    def report_held_out(
        self, sums: dict[str, float], counts: dict[str, float]
    ) -> dict[str, float | None]:
        """What the log has of held-out data.

        That is the loss in nats per trained token, the share of trained tokens that the model finds
        the likeliest, and bits per byte of text. The last is None where the bytes are unknown. No
        model is asked for the first token of a document, so its share of the bytes is left out.
        Raises `UserError` where there is nothing to measure.
        """
        trained, size = counts["trained_tokens"], counts["text_bytes"]
        if not trained:
            raise UserError(
                "validation.dataset: none of its tokens is one to be trained, as of documents of "
                "one token or conversations without an answer: choose another."
            )
        mean = sums["loss"] / trained
        return {
            "val_loss": mean,
            "val_bits_per_byte": mean / math.log(2) * counts["tokens"] / size if size else None,
            "val_token_accuracy": sums["right_tokens"] / trained,
        }

    def state_dict(self) -> dict[str, object]:
        """Nothing: all that this objective knows is in the configuration."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Takes what `state_dict` gave."""


class ChatModelling(LanguageModelling):
    """Trains on the answers of conversations."""

    trains_on = "conversations"
