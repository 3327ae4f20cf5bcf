"""`lacuna train`: trains, or with --dry-run says what would be trained."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from lacuna.config import UserError, load_config
from lacuna.config.describe import help_text
from lacuna.config.packaged import recipe_names
from lacuna.launch import launch, runs_here

USAGE = """usage: lacuna train [RUN.toml] [--section.key value ...] [--gpus N | --cpus N] [--dry-run]

Trains the model that RUN.toml describes; without a file, the embedded quickstart. A run that was stopped goes on
where its last checkpoint left it when it is started again.

  RUN.toml         settings in TOML, one table per section; also a recipe of lacuna's own:
                   {recipes}
  --section.key V  one setting, over the file's; V may be left out for true
  --gpus N         processes, one per GPU (default: all GPUs, or $NGPU)
  --cpus N         processes on the CPU instead (default without a GPU: 1)
  --dry-run        check everything, show sizes, steps and memory, and stop

Every setting, with its default:
"""


@dataclass(frozen=True)
class TrainArguments:
    """The words after `lacuna train`, sorted."""

    path: str | None
    flags: tuple[str, ...]
    gpus: int | None
    cpus: int | None
    dry_run: bool


def parse_arguments(words: Sequence[str]) -> TrainArguments:
    """Takes the launcher's own options and the file out of `words`; the rest are settings.

    Raises `UserError` for a count that is none.
    """
    path, flags, counts, dry_run = None, [], {}, False
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        name, _, value = word.partition("=")
        if name in ("--gpus", "--cpus"):
            value = value or (remaining.pop(0) if remaining else "")
            if not value.isdigit() or int(value) < 1:
                raise UserError(f"{name}: wants a number of processes of at least 1, not {value!r}.")
            counts[name] = int(value)
        elif word in ("--dry-run", "--dry_run"):
            dry_run = True
        elif not flags and path is None and not word.startswith("-"):
            path = word
        else:
            flags.append(word)
    if len(counts) == 2:
        raise UserError("--gpus and --cpus exclude each other: give one.")
    return TrainArguments(path, tuple(flags), counts.get("--gpus"), counts.get("--cpus"), dry_run)


def run(words: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    if any(word in ("-h", "--help") for word in words):
        print(USAGE.format(recipes=", ".join(recipe_names())) + help_text())
        return 0
    arguments = parse_arguments(words)
    config = load_config(arguments.path, arguments.flags)
    if arguments.cpus:
        os.environ["LACUNA_DEVICE"] = "cpu"
    quiet_libraries()
    processes = runs_here(arguments.gpus, arguments.cpus)
    if arguments.dry_run or config.memory_estimation.enabled:  # torch takes seconds to import: not before it is needed
        from lacuna.plan.dry_run import dry_run

        dry_run(config, int(os.environ.get("WORLD_SIZE", processes)))
    elif processes > 1:
        return launch(["train", *words], processes, str(config.job.dump_folder))
    else:
        from lacuna.train.session import train_here

        train_here(config)
    return 0


def quiet_libraries() -> None:
    """Progress bars and advice of libraries would drown the run's own display."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is, for convert and generate
    # Fragmentation is what long runs die of; must be set before the first allocation.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
