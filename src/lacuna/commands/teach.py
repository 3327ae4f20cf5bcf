"""`lacuna teach RUN.toml`: writes down what a teacher finds likely, or answers.

usage: lacuna teach RUN.toml [--section.key value ...] [--gpus N | --cpus N] [--top-k K]
       lacuna teach RUN.toml [--section.key value ...] --answers OUT.jsonl [--verifier M:F]
                    [--samples N] [--temperature T] [--max-tokens M]

Writes what distillation.teacher finds likely at every trained token of the data to the folder
distillation.teacher_logprobs. The same RUN.toml then trains from that, without the teacher.
With --answers the teacher answers the questions of the data instead: conversations, whose last
answer it gives anew, or rows with a prompt. Its conversations are data for job.task = sft.
Made again, an interrupted call with --answers goes on; one without starts over.

  --gpus N         processes, one per GPU (default: all GPUs, or $NGPU); with --answers one
  --cpus N         processes on the CPU instead (default without a GPU: 1)
  --top-k K        how many of the likeliest tokens to keep (default: 64); 8 K + 4 bytes a token
  --answers FILE   JSON lines to write, a conversation each
  --verifier M:F   your function of a row of the data and an answer: whether to keep it
  --samples N      answers to each question (default: 1)
  --temperature T  0, the default, is greedy
  --max-tokens M   longer answers are left out (default: 1024)
"""

import os
from argparse import Namespace

from lacuna.commands.arguments import CommandParser, parse_run
from lacuna.config import Config, UserError
from lacuna.config.fields import is_temperature
from lacuna.config.objectives import DistillationConfig
from lacuna.launch import launch, processes_to_start

_ONLY_FOR_ANSWERS = ("verifier", "samples", "temperature", "max_tokens")


def run(words: list[str]) -> int | None:
    """Runs the command; returns the exit status of the processes, if it starts some."""
    parser = CommandParser(prog="lacuna teach", add_help=False, allow_abbrev=False)
    parser.add_argument("--top-k", "--top_k", type=int)
    parser.add_argument("--answers")
    parser.add_argument("--verifier")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--max-tokens", "--max_tokens", type=int)
    given, rest = parser.parse_known_args(words)
    options, config = parse_run("teach", str(__doc__), rest)
    _check_run(config.job.task, config.distillation, config.data.streaming, given.answers)
    _check_words(given)
    processes = processes_to_start(options.gpus, options.cpus)
    if given.answers:
        _refuse_ranks(options.gpus or options.cpus or 1)
        processes = 1
    if processes > 1:
        return launch(["teach", *words], processes, str(config.job.dump_folder))
    _teach(given, config)
    return None


def _check_run(
    task: str, distillation: DistillationConfig, streaming: bool, answers: str | None
) -> None:
    """Raises UserError for a run without a teacher, or without a place for what it says."""
    if task != "distill" or distillation.teacher is None:
        raise UserError(
            'teach: RUN.toml is no distillation: set job.task = "distill" and distillation.teacher.'
        )
    if streaming:
        raise UserError("teach: streams have no end: leave out data.streaming.")
    folder = distillation.teacher_logprobs
    if answers is not None:
        return
    if folder is None:
        raise UserError(
            "teach: set distillation.teacher_logprobs to the folder to write, or give --answers "
            "FILE."
        )
    if os.path.exists(folder):
        raise UserError(
            f"distillation.teacher_logprobs: {folder} exists already: choose another folder, or "
            "remove it."
        )


def _check_words(given: Namespace) -> None:
    """Raises UserError for options that cannot be, or do not go together."""
    if given.answers is None:
        extra = [name for name in _ONLY_FOR_ANSWERS if getattr(given, name) is not None]
        if extra:
            raise UserError(
                f"teach: --{extra[0].replace('_', '-')} is for --answers FILE: give that as well."
            )
    elif given.top_k is not None:
        raise UserError("teach: --top-k is for log-probabilities: leave it out with --answers.")
    elif os.path.exists(given.answers):
        raise UserError(
            f"teach: {given.answers} exists already: choose another file, or remove it."
        )
    for name in ("top_k", "samples", "max_tokens"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise UserError(f"teach: --{name.replace('_', '-')} must be at least 1.")
    if not is_temperature(given.temperature or 0):
        raise UserError("teach: --temperature must be 0 or from 0.01 to 100.")
    if (given.samples or 1) > 1 and not given.temperature:
        raise UserError("teach: greedy answers are all alike: give --samples a --temperature.")


def _refuse_ranks(asked: int) -> None:
    if asked > 1 or int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("teach: --answers works in one process: leave out --gpus and --cpus.")


def _teach(given: Namespace, config: Config) -> None:
    """Has the teacher speak, in this process and those beside it."""
    # torch takes seconds to import: not before the words are right
    from lacuna.config.console import set_up_logging
    from lacuna.config.devices import check_device
    from lacuna.objective.teaching import teaching_config, write_likeliest
    from lacuna.parallel.processes import (
        device_type,
        naming_silent_ranks,
        require_same_config,
        start_process,
        stop_process,
    )

    is_first = int(os.environ.get("RANK", 0)) == 0
    set_up_logging(config.metrics, visible=is_first)
    check_device(config, device_type())
    process = start_process(
        config.comm, str(config.job.dump_folder), config.training.enable_cpu_offload
    )
    own = teaching_config(config)
    with naming_silent_ranks(config.comm):
        require_same_config(config, process)
        if given.answers is None:
            said = write_likeliest(own, process, given.top_k or 64)
        else:
            from lacuna.objective.accepted_answers import write_answers
            from lacuna.rollout.answers import Sampling

            asked = {"samples": given.samples, "temperature": given.temperature}
            asked |= {"max_tokens": given.max_tokens, "seed": config.training.seed}
            sampling = Sampling(**{name: one for name, one in asked.items() if one is not None})
            said = write_answers(own, process, given.answers, given.verifier, sampling)
        stop_process()
    if is_first:
        print(said)
