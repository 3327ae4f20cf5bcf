"""`lacuna generate MODEL --prompt TEXT`: text from a Hugging Face model, a checkpoint step or a run folder."""

from lacuna.commands.arguments import CommandParser
from lacuna.config import UserError


def run(words: list[str]) -> None:
    """Runs the command."""
    parser = CommandParser(prog="lacuna generate", description="Prints the completion of a prompt, and nothing else.")
    parser.add_argument("model", metavar="MODEL", help="HF folder or Hub id, checkpoint step, or run folder")
    parser.add_argument("--prompt", required=True, help="the text to go on from")
    parser.add_argument("--max-new-tokens", "--max_new_tokens", type=int, default=128, help="default: 128")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--seed", type=int, default=0, help="for temperatures above 0; default: 0")
    parser.add_argument("--chat", action="store_true", help="answer the prompt, by the tokenizer's chat template")
    given = parser.parse_args(words)
    if given.max_new_tokens < 1 or given.temperature < 0:
        raise UserError("generate: --max-new-tokens must be at least 1 and --temperature not negative.")
    from lacuna.parallel.processes import device_type  # torch takes seconds to import: not before the words are right
    from lacuna.rollout.generate import generate_text
    from lacuna.train.forms import load_any_model

    model, tokenizer = load_any_model(given.model, device_type())
    if given.chat and not tokenizer.chat_template:
        raise UserError("generate: --chat: the tokenizer has no chat template: drop it, or train with job.task = sft.")
    sampling = (given.max_new_tokens, given.temperature, given.seed, given.chat)
    print(generate_text(model, tokenizer, given.prompt, *sampling))
