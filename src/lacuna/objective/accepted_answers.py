"""A teacher's answers to the questions of a run's data: those that are accepted, to train on."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

from datasets.fingerprint import Hasher

from lacuna.config import Config, UserError, explained, logger
from lacuna.config.user_code import import_attribute
from lacuna.data.chat import use_template
from lacuna.data.disk import sync
from lacuna.data.mixture import random_key
from lacuna.data.questions import Question, read_questions
from lacuna.data.sources import open_source
from lacuna.objective.teacher import build_teacher, teacher_config, teacher_tokenizer
from lacuna.parallel.mesh import build_mesh, resolve_layout
from lacuna.parallel.processes import Process
from lacuna.rollout.answers import Sampling, generate_answers

Verifier = Callable[[dict[str, Any], str], object]


def find_verifier(name: str | None) -> Verifier:
    """The user's function of a row and an answer, named as `module:function`; without, all pass.

    Raises `UserError` where there is none.
    """
    if name is None:
        return lambda row, answer: True
    with explained(f"teach: --verifier {name}", ValueError, mend="give it as module:function"):
        found: Verifier = import_attribute(name)
    if not callable(found):
        raise UserError(
            f"teach: --verifier {name}: is no function: give one of a row and an answer, which "
            "returns whether to keep it."
        )
    return found


def write_answers(
    config: Config, process: Process, output: str, verifier: str | None, sampling: Sampling
) -> str:
    """Has the teacher answer the questions of the data, and writes what is kept to a JSONL file.

    What is done stands in a file beside it, from which an interrupted call goes on. Returns what
    became of the answers. Raises `UserError` for whatever the configuration or data get wrong.
    """
    verify = find_verifier(verifier)
    settings = teacher_config(config).model
    tokenizer = teacher_tokenizer(config.distillation, config.model)
    use_template(tokenizer, config.chat)
    chat = config.conversations
    judged = config.judged_answers
    sources = [
        open_source(one, config.data, chat, judged, whole=True)
        for one in config.data.resolved_sources()
    ]
    fingerprints = [source.dataset._fingerprint for source in sources]
    made_of = [fingerprints, str(settings), tokenizer.chat_template, astuple(sampling), verifier]
    made_of += [str(config.distillation.teacher_base), str(config.chat)]
    size = config.training.batch_size
    progress = Path(f"{output}.unfinished")
    done = begin(progress, Hasher.hash([*made_of, size]))
    mesh = build_mesh(resolve_layout(config.parallelism, process.world_size), process.device.type)
    model = build_teacher(config, mesh, process.device).model
    questions = read_questions(sources, config.chat, tokenizer, config.data.max_broken_records)
    with open(progress, "a", encoding="utf-8") as file:
        for number in count():
            batch = list(islice(questions, size))
            if not batch:
                break
            if number < done:
                continue
            drawn = replace(sampling, seed=random_key(sampling.seed, number) % 2**63)
            answers = generate_answers(model, tokenizer, [one.text for one in batch], drawn)
            rows, counts = [], Counter(questions=len(batch))
            for question, found in zip(batch, answers, strict=True):
                kept = keep(question, found, verify, str(verifier))
                rows += kept
                counts += counts_of(found, len(kept))
            file.write(json.dumps({"rows": rows, "counts": counts}, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
    return finish(progress, output)


def keep(
    question: Question, answers: list[str | None], verify: Verifier, name: str
) -> list[dict[str, Any]]:
    """The conversations with the answers to a question that came to an end and are accepted.

    Raises `UserError` where the verifier fails.
    """
    rows = []
    for answer in answers:
        if answer is None:
            continue
        row, said = question.answered(answer)
        try:
            is_kept = bool(verify(question.row, said))
        except Exception as error:  # whatever the user's own lines raise
            raise UserError(
                f"teach: --verifier {name} fails on {question.chat.where} "
                f"({type(error).__name__}: {error}): mend it there; the same command goes on."
            ) from error
        if is_kept:
            rows.append(row)
    return rows


def counts_of(answers: list[str | None], kept: int) -> Counter[str]:
    """What became of the answers to a question."""
    counts = Counter(answers=len(answers), kept=kept, cut=answers.count(None))
    counts["too long"] = not answers
    return counts


def begin(progress: Path, made_of: str) -> int:
    """How many batches a file of what is done has; begins it where there is none.

    Raises `UserError` where it is of other questions or settings.
    """
    if not progress.exists():
        with explained(f"teach: cannot write {progress}", OSError, mend="choose another file"):
            progress.parent.mkdir(parents=True, exist_ok=True)
            progress.write_text(json.dumps(made_of) + "\n")
        return 0
    content = progress.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    os.truncate(progress, len(whole))  # a last line that was not written to its end
    first, *lines = whole.split(b"\n")[:-1] or [b""]
    if first.decode() != json.dumps(made_of):
        raise UserError(
            f"teach: {progress} has answers of another teacher, to other questions or with other "
            "settings: take the change back to go on, or remove it to start over."
        )
    logger.info("going on after %d batches in %s", len(lines), progress)
    return len(lines)


def finish(progress: Path, output: str) -> str:
    """Writes the rows of a file of what is done to `output`, whole or not at all; removes the file.

    Returns what became of the answers.
    """
    counts: Counter[str] = Counter()
    new = Path(f"{output}.new")
    with open(new, "w", encoding="utf-8") as file:
        for entry in _entries(progress):
            counts.update(entry["counts"])
            for row in entry["rows"]:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    sync(new)
    new.replace(output)
    sync(Path(output).absolute().parent)
    progress.unlink()
    said = f"Kept {counts['kept']:,} of {counts['answers']:,} answers to {counts['questions']:,} "
    said += f"questions in {output}."
    if counts["cut"]:
        said += f" {counts['cut']:,} did not end within --max-tokens and are left out."
    if counts["too long"]:
        said += f" {counts['too long']:,} questions leave no room for an answer."
    return said


def _entries(progress: Path) -> Iterator[dict[str, Any]]:
    """What became of each batch."""
    with open(progress, encoding="utf-8") as file:
        next(file)
        yield from map(json.loads, file)
