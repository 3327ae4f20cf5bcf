"""Text from a model, also while it is trained: completions of prompts, and one as it is made."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from os.path import commonprefix
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lacuna.config import UserError, logger
from lacuna.config.attentions import TRAINED, is_own
from lacuna.data.chat import end_of_turn
from lacuna.data.template import ask
from lacuna.model.attention import BOUNDS, UNTOLD
from lacuna.parallel.fsdp import inference
from lacuna.rollout.drawing import Asked, Completion, Drawing
from lacuna.rollout.engine import complete_in_pages
from lacuna.rollout.gathered import cast_once, gathered, looked_up_on
from lacuna.rollout.joined import joined, of_one_input
from lacuna.rollout.padded import complete_padded
from lacuna.rollout.paged_probe import reason_against_pages
from lacuna.rollout.pages import PAGED
from lacuna.rollout.recording import give_back_memory


class Printer:
    """Prints a completion while it is made, except for what its newest token may still change.

    transformers' TextStreamer does not print what `decode` makes of the whole: with tokenizers that
    begin words with a blank it loses the blanks at the beginning of lines.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.text = self.shown = ""

    def __call__(self, tokens: list[int]) -> None:
        """Takes all tokens so far."""
        before = self.text
        self.text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        self._print_up_to(commonprefix([before, self.text]).rstrip("\N{REPLACEMENT CHARACTER}"))

    def end(self) -> None:
        """Prints the rest, and ends the line."""
        self._print_up_to(self.text)
        print(flush=True)

    def _print_up_to(self, text: str) -> None:
        print(text[len(self.shown) :], end="", flush=True)
        self.shown = max(self.shown, text, key=len)


@contextmanager
def generating(model: PreTrainedModel, in_pages: bool) -> Iterator[None]:
    """A context in which a model can generate, with its keys and values in pages or not.

    Afterwards its mode and its attention are as they were.
    """
    attention = model.config._attn_implementation
    name = attention.removeprefix(TRAINED)
    chosen = "sdpa" if model._supports_sdpa else "eager"
    if in_pages:
        chosen = PAGED
    elif is_own(name) or name in ("eager", "sdpa", BOUNDS, UNTOLD):
        chosen = name
    try:
        model.set_attn_implementation(chosen)
        with inference(model), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.set_attn_implementation(attention)


def complete(
    model: PreTrainedModel,
    asked: Sequence[Asked],
    drawing: Drawing,
    ends: Sequence[int],
    rows: int,
    device: torch.device,
    whole: bool = False,
    listen: Callable[[list[int]], None] | None = None,
    engine: str = "auto",
    small: bool = False,
) -> list[list[Completion]]:
    """All completions of what is `asked`, `rows` of them at a time.

    What is sampled depends on the weights as they are, on the seeds and on the tokens alone, but
    for rounding. Keys and values are in pages where the model is exact with that, unless the
    `engine` is "padded"; pages that are to be `small` are in float8. On a sharded model every rank
    must call it, and with the same prompts, unless the `whole` model is to be gathered on each for
    it. `listen` is given the tokens so far, where there is one completion.
    """
    in_pages = engine != "padded" and reason_against_pages(model, device) is None
    with generating(model, in_pages), gathered(model) if whole else nullcontext():
        if not in_pages:
            return complete_padded(model, asked, drawing, ends, rows, device, listen)
        modules = [*model.modules()]
        # Only many completions are worth waiting for the compiler.
        compiled = whole and any(one._compiled_call_impl is not None for one in modules)
        # Gathering in each pass cannot be part of a graph.
        graphs = whole or not any(isinstance(one, FSDPModule) for one in modules)
        groups = of_one_input(model, device) if whole else []
        with looked_up_on(device, model), joined(model, groups), cast_once(model):
            found = complete_in_pages(
                model,
                asked,
                drawing,
                ends,
                rows,
                device,
                graphs,
                compiled and device.type == "cuda",
                listen=listen,
                small=small,
            )
        if device.type == "cuda" and _is_mostly_taken(device):
            give_back_memory()
            torch.cuda.empty_cache()  # pages and graphs: NCCL and other streams cannot take them
        return found


def _is_mostly_taken(device: torch.device) -> bool:
    """Whether less than half of a GPU's memory is free; giving some back takes time."""
    free, total = torch.cuda.mem_get_info(device)
    return free < total / 2


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
    listen: Callable[[list[int]], None] | None = None,
    whole: bool = False,
) -> str:
    """The completion of `prompt`, without the prompt, or with `chat` the answer to it.

    A prompt may also be the messages of a conversation; the completion is then the next one.
    Temperature 0 is greedy; otherwise tokens are drawn from the `top_k` likeliest (0: from all)
    that have the share `top_p` of the probability together. On a sharded model every rank must call
    it, and all draw the same tokens; the `whole` model is gathered on each where tensor-parallel
    ranks divide it. The model is left as it was. `listen` is given the tokens so far. A warning is
    logged when the text ends at the model's last position. Raises `UserError` where the prompt
    leaves no position.
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
    asked = Asked(tokens, [seed], min(max_new_tokens, room))
    drawing = Drawing(temperature, top_k, top_p)
    ends = end_of_turn(tokenizer) or _own_ends(model)
    [[said]] = complete(model, [asked], drawing, ends, 1, device, whole, listen)
    if len(said.tokens) == room < max_new_tokens and not said.ended:
        logger.warning("the text ends at the last of the model's %d positions", positions)
    return str(tokenizer.decode(said.tokens, skip_special_tokens=True))


def _own_ends(model: PreTrainedModel) -> list[int]:
    """The tokens that end a text by a model's own files."""
    found = getattr(model.generation_config, "eos_token_id", None)
    return found if isinstance(found, list) else [] if found is None else [found]


def _prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, Any]]
) -> list[int]:
    """The tokens of a text or of a conversation, at least one."""
    is_text = isinstance(prompt, str)
    text = prompt if isinstance(prompt, str) else ask(tokenizer, prompt)
    first = tokenizer.bos_token_id or tokenizer.eos_token_id or 0
    # The template of a conversation writes the special tokens itself.
    return tokenizer(text, add_special_tokens=is_text).input_ids or [first]
