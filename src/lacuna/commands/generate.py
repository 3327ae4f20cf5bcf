"""`lacuna generate MODEL --prompt TEXT`: text from a model, a checkpoint step or a run folder."""

import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lacuna.commands.arguments import TRUST, CommandParser
from lacuna.config import UserError, explained
from lacuna.config.fields import is_temperature

ABOUT = """Prints the completion of a prompt while it is made, and nothing else. With --chat and no
prompt it is a conversation: a line of standard input is a message, until its end (Ctrl-D) or
Ctrl-C."""


def _build_parser() -> CommandParser:
    """The parser of the command's arguments."""
    parser = CommandParser(prog="lacuna generate", description=ABOUT)
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder of a model or an adapter, Hub id, checkpoint step, run folder or .gguf file",
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
    return parser


def _check_options(given: Namespace) -> None:
    """Raises `UserError` for numbers out of range, and options that do not go together."""
    if given.max_new_tokens < 1 or not is_temperature(given.temperature):
        raise UserError(
            "generate: --max-new-tokens must be at least 1 and --temperature 0 or from 0.01 to 100."
        )
    if not 0 < given.top_p <= 1 or given.top_k < 0:
        raise UserError(
            "generate: --top-p must be above 0 and at most 1, and --top-k not negative."
        )
    if given.temperature == 0 and (given.top_p < 1 or given.top_k > 0):
        raise UserError(
            "generate: --top-p and --top-k are for drawing: give --temperature above 0 as well."
        )
    if given.prompt is None and not given.chat:
        raise UserError("generate: give --prompt TEXT, or --chat for a conversation.")


def run(words: list[str]) -> None:
    """Runs the command."""
    given = _build_parser().parse_args(words)
    _check_options(given)
    # torch takes seconds to import, so the arguments are checked first.
    from lacuna.data.template import require_questions
    from lacuna.formats.opening import load_any_model
    from lacuna.parallel.processes import device_type
    from lacuna.rollout.generate import Printer, generate_text

    model, tokenizer = load_any_model(given.model, device_type(), given.trust_remote_code)
    if given.chat:
        if not tokenizer.chat_template:
            raise UserError(
                "generate: --chat: the tokenizer has no chat template: drop it, or train with "
                "job.task = sft."
            )
        require_questions(tokenizer)

    def say(prompt: str | list[dict[str, Any]]) -> str:
        printer = Printer(tokenizer)
        text = generate_text(
            model,
            tokenizer,
            prompt,
            given.max_new_tokens,
            given.temperature,
            given.seed,
            top_k=given.top_k,
            top_p=given.top_p,
            listen=printer,
        )
        printer.end()
        return text

    if not given.chat:
        say(_valid_text(given.prompt))
    elif given.prompt is not None:
        say([{"role": "user", "content": _valid_text(given.prompt)}])
    else:
        _answer_each_line(say)


def _valid_text(text: str) -> str:
    """The text that a user gave. Raises UserError where it cannot be written in UTF-8."""
    with explained("generate: a prompt is no valid text", UnicodeError, mend="give it in UTF-8"):
        text.encode()
    return text


def _answer_each_line(answer: Callable[[list[dict[str, Any]]], str]) -> None:
    """Answers each line of standard input, until its end, or on a terminal until Ctrl-C."""
    said: list[dict[str, Any]] = []
    here = sys.stdin.isatty()

    # Standard output is only for what the model says.
    def note(text: str) -> None:
        if here:
            print(text, end="", file=sys.stderr, flush=True)

    good_ends: list[type[BaseException]] = [EOFError]
    if here:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it raises KeyboardInterrupt
        good_ends.append(KeyboardInterrupt)
    unreadable = "generate: standard input cannot be read"
    with suppress(*good_ends):
        while True:
            note("> ")
            with explained(unreadable, UnicodeError, mend="give it in UTF-8"):
                line = input()
            if line.strip():
                said.append({"role": "user", "content": _valid_text(line)})
                said.append({"role": "assistant", "content": answer(said)})
    note("\n")
