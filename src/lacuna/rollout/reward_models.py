"""Models that score completions: sequence classifiers with one label, of a folder or the Hub."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lacuna.config import UserError, explained
from lacuna.config.attentions import is_own
from lacuna.config.conversations import ChatConfig
from lacuna.data.chat import encode_texts
from lacuna.data.messages import columns_by_our_names
from lacuna.data.questions import question_of
from lacuna.data.remote_code import open_with
from lacuna.data.template import render
from lacuna.model.kind import is_scoring
from lacuna.rollout.verifiers import Answered, OwnTime

_MEND = "give a folder or a Hub id of a sequence classifier with one label"


class RewardModel(OwnTime):
    """A model that scores completions, whole on every rank; it is a reward once it is loaded.

    How long it may take is not limited: it takes the longer the more completions there are.
    """

    def __init__(
        self, name: str, chat: ChatConfig, batch_size: int, trust_remote_code: bool
    ) -> None:
        """Reads what describes the model.

        Raises `UserError` where there is none, or it gives other than one score.
        """
        self.name = name
        self.chat = chat
        self.batch_size = batch_size
        self.trust_remote_code = trust_remote_code
        self.model: PreTrainedModel | None = None
        self.settings: PretrainedConfig = self._open(AutoConfig)
        if is_own(self.settings._attn_implementation):
            from lacuna.model.own_attention_choice import restore_attention  # an extension

            restore_attention(self.settings, trust_remote_code)
        self.tokenizer: PreTrainedTokenizerBase = self._open(AutoTokenizer)
        if not is_scoring(self.settings):
            raise UserError(f"rewards.functions: {name} is no sequence classifier: {_MEND}.")
        if self.settings.num_labels != 1:
            raise UserError(
                f"rewards.functions: {name} has {self.settings.num_labels} labels, and a reward is "
                f"one number: {_MEND}."
            )

    def _open(self, kind: Any, **settings: Any) -> Any:
        problem = f"rewards.functions: {self.name} cannot be opened"
        with explained(problem, OSError, ValueError, KeyError, mend=_MEND):
            return open_with(kind, self.name, self.trust_remote_code, **settings)

    def load(self, device: torch.device) -> None:
        """Loads the weights, in the dtype that they have in their files."""
        model = self._open(AutoModelForSequenceClassification, dtype="auto", config=self.settings)
        self.model = model.to(device).eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, answers: Sequence[Answered]) -> list[float]:
        """The score of each completion behind its prompt.

        Raises `ValueError` for one that has more tokens than the model has positions.
        """
        assert self.model is not None, "it is loaded before the first step"
        sequences = [self._tokens(answer) for answer in answers]
        padding = self.settings.get_text_config().pad_token_id
        is_padded = padding is not None and padding >= 0
        size = self.batch_size if is_padded else 1
        scores = []
        for start in range(0, len(sequences), size):
            part = sequences[start : start + size]
            longest = max(map(len, part))
            ids = torch.full((len(part), longest), padding if is_padded else 0)
            mask = torch.zeros_like(ids)
            for row, tokens in enumerate(part):
                ids[row, : len(tokens)] = torch.tensor(tokens)
                mask[row, : len(tokens)] = 1
            device = self.model.device
            found = self.model(input_ids=ids.to(device), attention_mask=mask.to(device))
            scores += found.logits[:, 0].float().tolist()
        return scores

    def _tokens(self, answer: Answered) -> list[int]:
        """The tokens of the prompt and the completion, as a model is trained to score them.

        Texts stand one behind the other; conversations are written by the chat template of the
        model's own tokenizer.
        """
        prompt = answer.row.get(columns_by_our_names(answer.row, self.chat).get("prompt", ""))
        if isinstance(prompt, str):
            tokens = encode_texts(prompt, answer.text, self.tokenizer)[0].tolist()
        else:
            asked = question_of(answer.row, answer.where, self.chat, self.tokenizer).chat
            said = [*asked.messages, {"role": "assistant", "content": answer.text}]
            text = render(replace(asked, messages=said))[0]
            tokens = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        positions = getattr(self.settings.get_text_config(), "max_position_embeddings", None) or 0
        if 0 < positions < len(tokens):
            raise ValueError(f"{len(tokens)} tokens are more than the {positions} it has positions")
        return [*tokens]


def load_models(functions: Sequence[object], device: torch.device) -> None:
    """Loads those of the rewards that are models."""
    for function in functions:
        if isinstance(function, RewardModel):
            function.load(device)
