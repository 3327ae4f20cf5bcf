"""The command line: finds the command, and turns errors into messages and exit statuses."""

import errno
import importlib
import os
import sys
import warnings

from lacuna import __version__
from lacuna.config.cores import thread_settings
from lacuna.config.errors import LAUNCHED, RunError, UnansweredError, UserError, did_you_mean
from lacuna.launch import GAVE_UP, RUN_FAILED, die_with_launcher

COMMANDS = ("train", "plan", "data", "generate", "convert", "bloat")

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: list[str] | None = None) -> int:
    """Runs one command. Exit status: 0 done, 130 or 143 saved and stopped, 2 the input is wrong, 1 anything else."""
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["help"]
    die_with_launcher()
    os.environ |= thread_settings(int(os.environ.get("LOCAL_WORLD_SIZE", 1))) | dict(os.environ)
    _quiet_libraries()
    if command in ("-h", "--help", "help"):
        print(
            f"lacuna {__version__}: trains the Hugging Face causal language model you already have.\n"
        )
        for name in COMMANDS:
            about, *_ = str(importlib.import_module(f"lacuna.commands.{name}").__doc__).splitlines()
            print(" ", about.replace("`", ""))
        print("\nlacuna train alone runs the quickstart. lacuna COMMAND --help tells more.")
        return 0
    if command == "--version":
        print(__version__)
        return 0
    try:
        if command not in COMMANDS:
            guess = did_you_mean(command, COMMANDS) or "."
            raise UserError(f"{command!r} is no command{guess} Known: {', '.join(COMMANDS)}.")
        status = importlib.import_module(f"lacuna.commands.{command}").run(rest)
        sys.stdout.flush()
        return status or 0
    except (UserError, RunError) as error:
        return _complain(error, 2 if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        return _complain("interrupted at once, without saving.", 130)
    except BrokenPipeError:  # who reads has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        return _complain(
            f"the disk is full: {error}. Checkpoints are intact; make room and start it again.", 1
        )


def _complain(error: Exception | str, status: int) -> int:
    """Prints the message, once for all ranks where it is likely the same on each."""
    print(f"lacuna: {error}", file=sys.stderr, flush=True)
    if "RANK" in os.environ:
        # Other ranks may still wait in a collective that will never come: leave without their
        # consent.
        failed = GAVE_UP if isinstance(error, UnansweredError) else RUN_FAILED
        os._exit(failed if status == 1 and LAUNCHED in os.environ else status)
    return status


def _quiet_libraries() -> None:
    """Progress bars and advice of libraries would drown the run's own display."""
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.filterwarnings(
        "ignore", message="torch.distributed is disabled"
    )  # it is, for convert and generate
    # Fragmentation is what long runs die of; must be set before the first allocation.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
