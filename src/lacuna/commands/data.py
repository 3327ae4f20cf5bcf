"""`lacuna data RUN.toml`: shows what the model will see.

usage: lacuna data [RUN.toml] [--section.key value ...] [--gpus N | --cpus N]

Prints a few examples of the first step, trained tokens green and special tokens visible, then
lengths, how full rows are, what is longer than a row, and tokens and steps an epoch. Nothing is
trained.

  --gpus N, --cpus N  processes that share a step (default: 1)
"""

from lacuna.commands.arguments import parse_run


def run(words: list[str]) -> None:
    """Runs the command."""
    options, config = parse_run("data", str(__doc__), words)
    # torch takes seconds to import, so mistakes above are told first.
    from lacuna.plan.examples import show_data

    show_data(config, options.gpus or options.cpus or 1)
