"""`lacuna plan RUN.toml [--draw]`: says before the run what it takes, or draws its layout.

usage: lacuna plan [RUN.toml] [--section.key value ...] [--gpus N | --cpus N] [--draw]

Checks the run of RUN.toml and shows its sizes, steps and memory, as lacuna train --dry-run does;
starts nothing.

  --gpus N, --cpus N  processes to plan for, here or not (default: the product of the degrees, -1
                      counted as 1)
  --draw              draw instead which rank holds what, and when the ranks of a pipeline work,
                      here and in job.dump_folder/plan.svg
"""

import math

from lacuna.commands.arguments import parse_run


def run(words: list[str]) -> None:
    """Runs the command."""
    options, config = parse_run("plan", str(__doc__), words, "--draw")
    # torch takes seconds to import, so mistakes above are told first.
    from lacuna.parallel.mesh import AXES
    from lacuna.parallel.processes import device_type
    from lacuna.plan.draw import draw
    from lacuna.plan.dry_run import dry_run

    show = draw if options.draw else dry_run
    degrees = (getattr(config.parallelism, setting) for setting in AXES.values())
    processes = options.gpus or options.cpus or abs(math.prod(degrees))  # -1 counts as 1
    show(config, processes, "cuda" if options.gpus else device_type())
