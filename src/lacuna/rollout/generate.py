"""Text from a model by transformers' own `generate`, also while it is trained."""

from collections.abc import Iterator
from contextlib import contextmanager
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from lacuna.config import UserError, logger
from lacuna.config.attentions import TRAINED, is_own
from lacuna.data.chat import end_of_turn
from lacuna.data.template import ask
from lacuna.model.attention import BOUNDS, UNTOLD
from lacuna.parallel.fsdp import inference


class Printer(BaseStreamer):
    """Prints a completion while it is made, except for what its newest token may still change.

    transformers' TextStreamer does not print what `decode` makes of the whole: with tokenizers that
    begin words with a blank it loses the blanks at the beginning of lines.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] | None = None  # None: the prompt is still to come
        self.text = self.shown = ""

    def put(self, value: Tensor) -> None:
        """Takes the prompt, then token by token."""
        if self.tokens is None:
            self.tokens = []
            return
        self.tokens += value.flatten().tolist()
        before = self.text
        self.text = str(self.tokenizer.decode(self.tokens, skip_special_tokens=True))
        self._print_up_to(commonprefix([before, self.text]).rstrip("\N{REPLACEMENT CHARACTER}"))

    def end(self) -> None:
        """Prints the rest, and ends the line."""
        self._print_up_to(self.text)
        print(flush=True)

    def _print_up_to(self, text: str) -> None:
        print(text[len(self.shown) :], end="", flush=True)
        self.shown = max(self.shown, text, key=len)


@contextmanager
def generating(model: PreTrainedModel, device: torch.device, seed: int) -> Iterator[None]:
    """A context in which a model can generate, and draws tokens by the seed.

    Afterwards its mode, its attention and the random state are as they were.
    """
    attention = model.config._attn_implementation
    devices = [device] if device.type == "cuda" else []
    try:
        plain = "sdpa" if model._supports_sdpa else "eager"
        name = attention.removeprefix(TRAINED)
        known = is_own(name) or name in ("eager", "sdpa", BOUNDS, UNTOLD)
        model.set_attn_implementation(name if known else plain)
        with (
            inference(model),
            torch.random.fork_rng(devices),
            torch.compiler.set_stance("force_eager"),
        ):
            torch.manual_seed(seed)
            yield
    finally:
        model.set_attn_implementation(attention)


def generate_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | list[dict[str, Any]],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    chat: bool = False,
    top_k: int = 0,
    top_p: float = 1.0,
    streamer: BaseStreamer | None = None,
) -> str:
    """The completion of `prompt`, without the prompt, or with `chat` the answer to it.

    A prompt may also be the messages of a conversation; the completion is then the next one.
    Temperature 0 is greedy; otherwise tokens are drawn from the `top_k` likeliest (0: from all)
    that have the share `top_p` of the probability together. On a sharded model every rank must call
    it, and all draw the same tokens. The model is left as it was. A warning is logged when the text
    ends at the model's last position. Raises `UserError` where the prompt leaves no position.
    """
    device = next(model.buffers(), next(model.parameters())).device
    messages = [{"role": "user", "content": prompt}] if chat else prompt
    tokens = _prompt_tokens(tokenizer, messages)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    room = max_new_tokens if positions is None else positions - len(tokens)
    if room < 1:
        raise UserError(
            f"the prompt has {len(tokens)} tokens, and the model {positions} positions: shorten it."
        )
    ids = torch.tensor([tokens], device=device)
    ends = end_of_turn(tokenizer)
    drawing: dict[str, Any] = {}
    if temperature > 0:
        drawing = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    with generating(model, device, seed):
        output = model.generate(  # type: ignore[operator]  # torch calls it a tensor
            ids,
            attention_mask=torch.ones_like(ids),
            use_cache=True,
            max_new_tokens=min(max_new_tokens, room),
            do_sample=temperature > 0,
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
            eos_token_id=ends or None,
            streamer=streamer,
            **drawing,
        )
    if output.shape[1] == positions and room < max_new_tokens and output[0, -1] not in ends:
        logger.warning("the text ends at the last of the model's %d positions", positions)
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def _prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, Any]]
) -> list[int]:
    """The tokens of a text or of a conversation, at least one."""
    is_text = isinstance(prompt, str)
    text = prompt if isinstance(prompt, str) else ask(tokenizer, prompt)
    first = tokenizer.bos_token_id or tokenizer.eos_token_id or 0
    # The template of a conversation writes the special tokens itself.
    return tokenizer(text, add_special_tokens=is_text).input_ids or [first]
