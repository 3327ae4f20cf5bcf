"""`lacuna data`: examples as the model will see them, and what a pass over all of them takes."""

import math
from collections.abc import Iterator
from itertools import chain, groupby

import numpy as np
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from lacuna.config import Config
from lacuna.config.console import open_console
from lacuna.config.reinforcement import RolloutConfig
from lacuna.data import run_tokenizer
from lacuna.data.document import Span
from lacuna.data.micro_batches import STEPS_BEFORE_A_LANE_RETURNS
from lacuna.data.plan import RowPlan, make_row_plan
from lacuna.data.rows import rows_from_the_start
from lacuna.parallel.batch import resolve_batch
from lacuna.parallel.mesh import resolve_layout

SHOWN = 3
_BAR = 40


def show_data(config: Config, processes: int) -> None:
    """Prints examples of the first step, and counts of a pass, for a run of `processes` ranks.

    Raises `UserError` for what the run would refuse of the data.
    """
    layout = resolve_layout(config.parallelism, processes)
    batch = resolve_batch(config.training, config.parallelism, config.optimizer, layout)
    size = batch.global_batch
    lanes = size * STEPS_BEFORE_A_LANE_RETURNS
    tokenizer = run_tokenizer(config.model, config.conversations)
    plan = make_row_plan(config, tokenizer, config.data.resolved_sources(), lanes)
    rows = next(rows_from_the_start(plan, size))
    console = open_console(config.metrics)
    marked = console.color_system is None
    for number, span in enumerate(list(chain(*rows))[:SHOWN], 1):
        if config.trains_on == "prompts":
            ids = span.tokens[:-1]  # without the token that ends an answer
            console.print(f"[bold]prompt {number}[/bold]: {len(ids)} tokens")
            console.print(coloured(ids, span.trained[:-1], tokenizer, marked), "")
            continue
        for title, ids, trained in _shown_sequences(span):
            console.print(
                f"[bold]example {number}[/bold]{title}: {len(ids)} tokens, "
                "[green]trained[/green] and not"
            )
            console.print(coloured(ids, trained, tokenizer, marked), "")
    console.print(_counts_table(plan, rows, config.rollout))


def _shown_sequences(span: Span) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """For each sequence of a span, what it is, its tokens, and which of them are trained."""
    document = span.document
    if not document.sequence_columns:
        yield "", span.tokens, span.trained
        return
    chosen = document.sequence_columns["chosen"]
    mismatched = document.sequence_columns.get("mismatched", (0.0,) * len(chosen))
    for number, (begin, stop) in enumerate(document.bounds):
        kind = "chosen" if chosen[number] else "rejected"
        if mismatched[number]:
            kind = "with another row's answer"
        yield f", {kind}", span.tokens[begin:stop], span.trained[begin:stop]


def coloured(
    ids: np.ndarray, trained: np.ndarray, tokenizer: PreTrainedTokenizerBase, marked: bool
) -> Text:
    """Tokens as text: trained ones are green, special ones reversed.

    Where they are to be `marked`, because there are no colours, trained ones are in ⟦⟧ as well.
    """
    special = np.isin(ids, tokenizer.all_special_ids)
    text = Text()
    tokens = zip(trained, special, ids, strict=True)
    for (is_trained, is_special), alike in groupby(tokens, key=lambda token: token[:2]):
        numbers = [number for *_, number in alike]
        words = str(tokenizer.decode(numbers, clean_up_tokenization_spaces=False))
        if is_trained and marked:
            words = f"⟦{words}⟧"
        style = "green" if is_trained else "dim"
        text.append(words, f"{style} reverse" if is_special else style)
    return text


def _counts_table(plan: RowPlan, rows: list[list[Span]], rollout: RolloutConfig) -> Table:
    """Lengths, fill and sizes of a pass over the data, or of the first step where none is known.

    `rows` are those of the first step.
    """
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    batch = plan.batch(rows)
    length = plan.form.length
    is_preference = plan.form.trains_on == "preferences"
    is_prompts = plan.form.trains_on == "prompts"
    unit = "prompts" if is_prompts else "examples"
    if is_preference:
        unit = "answers" if plan.form.judged_by == "kto" else "pairs"
    lengths = np.array([len(span.tokens) for span in chain(*rows)])
    if plan.table is not None:
        lengths = plan.table.lengths[plan.table.lengths > 0]
    lengths = lengths - is_prompts  # their documents have a token more, that ends an answer
    _add_lengths(table, lengths, unit)
    if is_prompts:
        _add_rollouts(table, plan, rollout, len(rows))
        return table
    if plan.table is not None:
        long = f"{(lengths > length).sum():,} of {len(lengths):,} {unit}"
        table.add_row("longer than a row", long, f"{plan.left_out:,} left out" if plan.fits else "")
    name = "first step"
    tokens = batch.counts["tokens"]
    count = len(rows)
    room = batch.shape.numel()
    examples = [len(row) for row in rows]
    if plan.rows_per_pass is not None:
        name = "epoch"
        tokens = lengths.sum()
        count = plan.rows_per_pass
        room = count * length
        if plan.fits:
            tokens = sum((stops - starts).sum() for _, starts, stops in plan.bins)
            examples = [pieces.shape[1] for pieces in plan.bins]
        steps = math.ceil(count / len(rows))
        table.add_row("steps", f"{steps:,} an epoch", f"{len(rows)} rows each")
    if is_preference:
        mean = f"{np.mean(examples):.1f}"
        table.add_row(f"{unit} a row", mean, f"{sum(examples):,} {unit} in {name}")
    share = batch.counts["trained_tokens"] / max(batch.counts["tokens"], 1)
    fill = f"fill {tokens / room:.2%}; {share:.1%} of the first step's tokens are trained"
    table.add_row(name, f"{tokens:,} tokens in {count:,} rows", fill)
    return table


def _add_rollouts(table: Table, plan: RowPlan, rollout: RolloutConfig, prompts: int) -> None:
    """Adds to the table what is made of the prompts of a step."""
    made = f"{prompts} prompts × {rollout.samples} completions"
    table.add_row("step", made, f"of at most {rollout.max_tokens:,} tokens each")
    if plan.rows_per_pass is not None:
        steps = math.ceil(plan.rows_per_pass / prompts)
        table.add_row("batches", f"{steps:,} an epoch", f"{plan.rows_per_pass:,} prompts")


def _add_lengths(table: Table, lengths: np.ndarray, unit: str) -> None:
    """Adds to the table how many examples have fewer tokens than each power of two, with bars."""
    powers, counts = np.unique(np.frexp(lengths)[1], return_counts=True)
    for power, count in zip(powers.tolist(), counts.tolist(), strict=True):
        bar = "█" * math.ceil(_BAR * count / counts.max())
        table.add_row(f"below {1 << power:,} tokens", f"{count:,} {unit}", bar)
