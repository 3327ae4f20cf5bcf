"""The command line: finds the command, and turns errors into messages and exit statuses."""

import errno
import importlib
import os
import sys
import warnings
from contextlib import suppress

from lacuna import __version__
from lacuna.config.cores import thread_settings
from lacuna.config.errors import LAUNCHED, RunError, UnansweredError, UserError, did_you_mean
from lacuna.launch import GAVE_UP, RUN_FAILED, die_with_launcher

COMMANDS = ("train", "plan", "data", "teach", "generate", "convert", "bench", "inspect", "bloat")
HELP = ("-h", "--help", "help")

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# What libraries read from the environment where the user has set nothing else.
FOR_LIBRARIES = {
    # Their progress bars and advice would drown the run's display.
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    # Keeps memory from fragmenting, of which long runs die. Must be set before it is first used.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    That is 0 when it is done, 130 or 143 when it has saved and stopped, 2 when the input is wrong,
    and 1 for anything else.
    """
    words = sys.argv[1:] if arguments is None else arguments
    command, *rest = words or ["help"]
    if command in HELP and rest:  # that of a command, or of sections of the settings
        command, rest = (
            (rest[0], ["--help"]) if rest[0] in COMMANDS else ("train", ["--help", *rest])
        )
    die_with_launcher()
    threads = thread_settings(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    for name, value in (threads | FOR_LIBRARIES).items():
        os.environ.setdefault(name, value)
    # `convert` and `generate` do without torch.distributed on purpose.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    _keep_compiled()
    if command in HELP:
        _print_help()
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
        return _end_with_message(error, 2 if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        return _end_with_message("interrupted at once, without saving.", 130)
    except BrokenPipeError:  # the reader has seen enough, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        return _end_with_message(
            f"the disk is full: {error}. Checkpoints are intact; make room and start it again.", 1
        )


def _print_help() -> None:
    """Prints the commands, a line each."""
    print(f"lacuna {__version__}: trains the Hugging Face causal language model you already have.")
    print()
    for name in COMMANDS:
        module = importlib.import_module(f"lacuna.commands.{name}")
        about = str(module.__doc__).partition("\n")[0]
        print(" ", about.replace("`", ""))
    print("\nlacuna train alone runs the quickstart. lacuna COMMAND --help tells more.")


def _end_with_message(error: Exception | str, status: int) -> int:
    """Prints the message and returns the status; one of several ranks ends here with it."""
    print(f"lacuna: {error}", file=sys.stderr, flush=True)
    if "RANK" not in os.environ:
        return status
    if status == 1 and LAUNCHED in os.environ:  # our launcher tells these two apart
        status = GAVE_UP if isinstance(error, UnansweredError) else RUN_FAILED
    # Others may wait in a collective that will never come, and an ordinary end would wait for them.
    os._exit(status)


def _keep_compiled() -> None:
    """Has compiled code outlive the machine's next start, so that the same run starts sooner."""
    caches = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    folder = os.path.join(caches, "lacuna", "compiled")
    with suppress(OSError):
        os.makedirs(folder, exist_ok=True)
    if os.access(folder, os.W_OK):  # else torch takes a folder for temporary files
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)
