"""`lacuna train [RUN.toml] [--section.key value ...]`: trains, or says what would be trained.

usage: lacuna train [RUN.toml] [--section.key value ...] [--gpus N | --cpus N] [--dry-run]

Trains the model that RUN.toml describes; without a file, the embedded quickstart. A run that was
stopped goes on where its last checkpoint left it when it is started again.

  RUN.toml         settings in TOML, one table per section; also a recipe of lacuna's own (below)
  --section.key V  one setting, over the file's; V may be left out for true
  --gpus N         processes, one per GPU (default: all GPUs, or $NGPU)
  --cpus N         processes on the CPU instead (default without a GPU, or where the environment
                   has LACUNA_DEVICE=cpu: 1)
  --dry-run        check everything, show sizes, steps and memory, and stop
"""

import os

from lacuna.commands.arguments import parse_run
from lacuna.launch import launch, processes_to_start


def run(words: list[str]) -> int | None:
    """Runs the command; returns the exit status of the run, if there is one."""
    options, config = parse_run("train", str(__doc__), words, "--dry-run", "--dry_run")
    # torch takes seconds to import, so mistakes above are told first.
    from lacuna.imports import without_collections, without_unused_libraries  # an extension

    with without_collections():
        processes = processes_to_start(options.gpus, options.cpus)
    if options.dry_run or config.memory_estimation.enabled:
        from lacuna.plan.dry_run import dry_run

        dry_run(config, int(os.environ.get("WORLD_SIZE", processes)))
        return None
    if processes > 1:
        return launch(["train", *words], processes, str(config.job.dump_folder))
    with without_collections(), without_unused_libraries():
        from lacuna.train.session import train_here
    return train_here(config)
