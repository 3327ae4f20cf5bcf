"""What a teacher finds likely at each trained token of a run's data, written to disk once."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from lacuna.config import Config, UserError, explained, logger
from lacuna.config.documents import PackingConfig
from lacuna.data import Batch, run_tokenizer
from lacuna.data.cache import fingerprint
from lacuna.data.disk import whole_folder
from lacuna.data.document import Span
from lacuna.data.packing import IGNORED
from lacuna.data.plan import RowPlan, make_row_plan
from lacuna.data.teacher import (
    IDS,
    LOGPROBS,
    SETTING,
    annotated,
    create_files,
    describe_files,
    row_counts,
    rows_of,
    vocabulary_key,
)
from lacuna.data.tokenizer import rows_of_tokens
from lacuna.model.build import BuiltModel
from lacuna.model.chunks import CHUNK_BYTES
from lacuna.model.forward import head_input
from lacuna.model.weights import weight_files
from lacuna.objective.teacher import build_teacher, check_vocabulary, teacher_head
from lacuna.objective.top_k import likeliest
from lacuna.parallel.fsdp import inference
from lacuna.parallel.mesh import Mesh, build_mesh, resolve_layout
from lacuna.parallel.processes import Process, on_first

_TOLD_EVERY_SECONDS = 30.0


def write_likeliest(config: Config, process: Process, top_k: int) -> str:
    """Writes the `top_k` likeliest tokens of the teacher to `distillation.teacher_logprobs`.

    The teacher is sharded over all processes. It sees each document alone, from its beginning; one
    that is longer than `training.seq_len` in parts of that many tokens. Returns what was done.
    Raises `UserError` for whatever the configuration or the data get wrong.
    """
    folder = str(config.distillation.teacher_logprobs)
    tokenizer = run_tokenizer(config.model, config.conversations)
    check_vocabulary(config.distillation, config.model, tokenizer)
    plan = make_row_plan(config, tokenizer, config.data.resolved_sources(), lanes=1, endless=False)
    ends = np.cumsum(row_counts(plan.tokens))
    firsts = np.concatenate([[0], ends[:-1]])
    table = annotated(
        plan.tokens, lambda number, document: {"place": rows_of(document, int(firsts[number]))}
    )
    plan = replace(plan, table=table, kinds={"place": np.zeros(0, dtype=np.int64)})
    words = rows_of_tokens(tokenizer)
    # With one token less than there are, the others together are that one: nothing is lost.
    top_k = min(top_k, words - 1)
    rows = int(ends[-1])
    on_first(process, lambda: require_room(folder, rows * (8 * top_k + 4)))
    mesh = build_mesh(resolve_layout(config.parallelism, process.world_size), process.device.type)
    teacher = build_teacher(config, mesh, process.device)
    place: AbstractContextManager[object] = nullcontext()
    if process.rank == 0:
        place = whole_folder(folder)
    unfinished = f"{folder}.unfinished"
    with place:
        on_first(process, lambda: create_files(unfinished, rows, top_k))
        _fill(unfinished, plan, teacher, words, config.training.batch_size)
        dist.barrier()
        told = {
            "teacher": config.distillation.teacher,
            "weights": fingerprint(weight_files(str(config.distillation.teacher))),
            "teacher_base": config.distillation.teacher_base,
            "vocabulary": vocabulary_key(tokenizer),
            "top_k": top_k,
        }
        on_first(process, lambda: describe_files(unfinished, plan.tokens, firsts, told))
    dist.barrier()  # until the folder has its name
    documents = len(firsts)
    return f"Wrote {folder}: {top_k} tokens at each of {rows:,} in {documents:,} documents."


def teaching_config(config: Config) -> Config:
    """The settings of a run for its teacher: spread by data parallelism, documents kept apart."""
    own = {
        "parallelism": type(config.parallelism)(),
        "packing": PackingConfig(mode="best_fit", long_examples="split"),
        "data": config.data.model_copy(
            update={"document_mask": True, "predict_across_documents": False}
        ),
    }
    return config.model_copy(update=own)


def require_room(folder: str, size: int) -> None:
    """Raises `UserError` unless a folder of so many bytes can be made."""
    parent = Path(folder).absolute().parent
    with explained(f"{SETTING}: cannot write {folder}", OSError, mend="choose another folder"):
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
    if free < size:
        raise UserError(
            f"{SETTING}: {folder} takes {size / 2**30:.1f} GiB, and the disk has "
            f"{free / 2**30:.1f} GiB left: make room, or give a smaller --top-k."
        )


def _fill(folder: str, plan: RowPlan, teacher: BuiltModel, words: int, size: int) -> None:
    """Writes what the teacher says of this rank's share of the rows to the files in a folder.

    The column `place` of the batches, which have `size` rows, says where.
    """
    ids = np.load(os.path.join(folder, IDS), mmap_mode="r+")
    logprobs = np.load(os.path.join(folder, LOGPROBS), mmap_mode="r+")
    head = teacher_head(teacher)
    step = max(1, CHUNK_BYTES // 16 // len(head.weight))  # there are a few tensors of logits
    told = time.monotonic()
    for done, batch in _batches(plan, teacher.mesh, size):
        with inference(*(stage.module for stage in teacher.stages)):
            states = teacher.read(batch, head_input)
        assert states is not None, "without a pipeline every rank has the head"
        trained = batch.columns["labels"].flatten() != IGNORED
        places = batch.columns["place"].flatten()[trained].numpy()
        wanted = states.flatten(0, 1)[trained.to(states.device)]
        for start in range(0, len(places), step):
            part = slice(start, start + step)
            found, values = likeliest(head(wanted[part])[:, :words], ids.shape[1])
            ids[places[part]] = found.to("cpu", torch.int32).numpy()
            logprobs[places[part]] = values.to("cpu", torch.float32).numpy()
        if time.monotonic() > told + _TOLD_EVERY_SECONDS:
            told = time.monotonic()
            logger.info("%d of %d rows are done", done, len(plan.bins))
    ids.flush()
    logprobs.flush()


def _batches(plan: RowPlan, mesh: Mesh, size: int) -> Iterator[tuple[int, Batch]]:
    """This rank's micro-batches of `size` rows, each after the number of rows before it.

    All ranks have equally many, since all must take part in each.
    """
    for before in range(0, len(plan.bins), size * mesh.layout.data_parallel):
        first = before + mesh.data_rank * size
        rows = [
            [Span(*plan.tokens.document(index), *ends) for index, *ends in pieces.T.tolist()]
            for pieces in plan.bins[first : first + size]
        ]
        yield before, plan.batch(rows + [[]] * (size - len(rows)))
