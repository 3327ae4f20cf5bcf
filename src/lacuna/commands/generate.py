"""`lacuna generate MODEL --prompt TEXT`: text from a Hugging Face model, a checkpoint step or a run folder."""

import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from lacuna.commands.arguments import TRUST, CommandParser
from lacuna.config import explained, refuse

ABOUT = """Prints the completion of a prompt while it is made, and nothing else. With --chat and no prompt it is a
conversation: a line of standard input is a message, until its end (Ctrl-D) or Ctrl-C."""


def run(words: list[str]) -> None:
    """Runs the command."""
    parser = CommandParser(prog="lacuna generate", description=ABOUT)
    parser.add_argument(
        "model", metavar="MODEL", help="HF folder or Hub id, checkpoint step, or run folder"
    )
    parser.add_argument(
        "--prompt", help="the text to go on from; with --chat a question, or left out"
    )
    parser.add_argument(
        "--max-new-tokens", "--max_new_tokens", type=int, default=128, help="default: 128"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument(
        "--top-p", "--top_p", type=float, default=1.0, help="draw from the likeliest of this share"
    )
    parser.add_argument(
        "--top-k", "--top_k", type=int, default=0, help="draw from this many; default: 0, from all"
    )
    parser.add_argument("--seed", type=int, default=0, help="for temperatures above 0; default: 0")
    parser.add_argument(
        "--chat", action="store_true", help="answer, by the tokenizer's chat template"
    )
    parser.add_argument(
        "--trust-remote-code", "--trust_remote_code", action="store_true", help=TRUST
    )
    given = parser.parse_args(words)
    refuse(
        {
            "generate: --max-new-tokens must be at least 1 and --temperature not negative": given.max_new_tokens
            < 1
            or given.temperature < 0,
            "generate: --top-p must be above 0 and at most 1, and --top-k not negative": not 0
            < given.top_p
            <= 1
            or given.top_k < 0,
            "generate: --top-p and --top-k are for drawing: give --temperature above 0 as well": given.temperature
            == 0
            and (given.top_p < 1 or given.top_k > 0),
            "generate: give --prompt TEXT, or --chat for a conversation": given.prompt is None
            and not given.chat,
        }
    )
    from lacuna.data.template import require_questions
    from lacuna.formats.opening import load_any_model
    from lacuna.parallel.processes import (
        device_type,
    )  # torch takes seconds to import: not before the words are right
    from lacuna.rollout.generate import Printer, generate_text

    model, tokenizer = load_any_model(given.model, device_type(), given.trust_remote_code)
    if given.chat:
        absent = "generate: --chat: the tokenizer has no chat template: drop it, or train with job.task = sft"
        refuse({absent: not tokenizer.chat_template})
        require_questions(tokenizer)

    def say(prompt: str | list[dict[str, str]]) -> str:
        sampling = (
            given.max_new_tokens,
            given.temperature,
            given.seed,
            False,
            given.top_k,
            given.top_p,
        )
        return generate_text(model, tokenizer, prompt, *sampling, streamer=Printer(tokenizer))

    if not given.chat:
        say(_readable(given.prompt))
    elif given.prompt is not None:
        say([{"role": "user", "content": _readable(given.prompt)}])
    else:
        _converse(say)


def _readable(text: str) -> str:
    """A text of the user's. Raises UserError where it is no UTF-8."""
    with explained("generate: a prompt is no valid text", UnicodeError, mend="give it in UTF-8"):
        text.encode()
    return text


def _converse(answer: Callable[[list[dict[str, Any]]], str]) -> None:
    """Has each line of standard input answered, until its end, or on a terminal until Ctrl-C."""
    said: list[dict[str, Any]] = []
    here = sys.stdin.isatty()
    # To standard error: the other output is for what the model says.
    note = partial(print, end="", file=sys.stderr, flush=True) if here else lambda _: None
    if here:
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # which raises, and here that is a good end
    with suppress(EOFError, *[KeyboardInterrupt] * here):
        while True:
            note("> ")
            with explained(
                "generate: standard input cannot be read", UnicodeError, mend="give it in UTF-8"
            ):
                line = input()
            if line.strip():
                said.append({"role": "user", "content": _readable(line)})
                said.append({"role": "assistant", "content": answer(said)})
    note("\n")
