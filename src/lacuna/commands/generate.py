"""`lacuna generate`: text from a Hugging Face model, a checkpoint step or a run folder."""

import argparse
from collections.abc import Sequence

from lacuna.commands.train import quiet_libraries
from lacuna.config import UserError


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose complaints are `UserError`s."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{self.prog}: {message}. See {self.prog} --help.")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command's arguments. Raises `UserError` for wrong ones."""
    parser = CommandParser(prog="lacuna generate", description="Prints the completion of a prompt, and nothing else.")
    parser.add_argument("model", metavar="MODEL", help="HF folder or Hub id, checkpoint step, or run folder")
    parser.add_argument("--prompt", required=True, help="the text to go on from")
    parser.add_argument("--max-new-tokens", "--max_new_tokens", type=int, default=128, help="default: 128")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--seed", type=int, default=0, help="for temperatures above 0; default: 0")
    arguments = parser.parse_args(list(words))
    if arguments.max_new_tokens < 1 or arguments.temperature < 0:
        raise UserError("generate: --max-new-tokens must be at least 1 and --temperature not negative.")
    return arguments


def run(words: Sequence[str]) -> int:
    """Runs the command."""
    arguments = parse(words)
    quiet_libraries()
    import torch

    from lacuna.parallel.processes import device_type
    from lacuna.rollout.generate import generate_text
    from lacuna.train.forms import load_any_model

    model, tokenizer = load_any_model(arguments.model, torch.device(device_type()))
    text = generate_text(
        model, tokenizer, arguments.prompt, arguments.max_new_tokens, arguments.temperature, arguments.seed
    )
    print(text)
    return 0
