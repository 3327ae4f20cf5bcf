"""`lacuna data`: examples as the model will see them, and what a pass over all of them takes."""

from collections.abc import Iterator
from itertools import chain, groupby

import numpy as np
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from lacuna.config import Config
from lacuna.data import run_tokenizer
from lacuna.data.document import Span
from lacuna.data.plan import Plan, make_plan
from lacuna.data.rows import rows_from_the_start
from lacuna.parallel.mesh import resolve_layout
from lacuna.train.metrics import open_console
from lacuna.train.setup import plan_batch

SHOWN = 3
_BAR = 40


def show_data(config: Config, processes: int) -> None:
    """Prints examples of the first step, and counts of a pass, for a run of `processes` ranks.

    Raises `UserError` for what the run would refuse of the data.
    """
    size = plan_batch(config, resolve_layout(config, processes)).global_batch
    tokenizer = run_tokenizer(config)
    plan = make_plan(config, tokenizer, config.data.resolved_sources(), size)
    rows = next(rows_from_the_start(plan, size))
    console = open_console(config)
    marked = console.color_system is None
    for number, span in enumerate(list(chain(*rows))[:SHOWN], 1):
        for title, ids, trained in _sequences(span):
            console.print(
                f"[bold]example {number}[/bold]{title}: {len(ids)} tokens, "
                "[green]trained[/green] and not"
            )
            console.print(coloured(ids, trained, tokenizer, marked), "")
    console.print(_counts(plan, rows))


def _sequences(span: Span) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Of each sequence of a span what it is, its tokens, and which of them are trained."""
    document = span.document
    if not document.sequence_columns:
        yield "", span.tokens, span.trained
        return
    chosen = document.sequence_columns["chosen"]
    mismatched = document.sequence_columns.get("mismatched", (0.0,) * len(chosen))
    for number, (begin, stop) in enumerate(document.bounds):
        kind = "chosen" if chosen[number] else "rejected"
        kind = "with another row's answer" if mismatched[number] else kind
        yield f", {kind}", span.tokens[begin:stop], span.trained[begin:stop]


def coloured(
    ids: np.ndarray, trained: np.ndarray, tokenizer: PreTrainedTokenizerBase, marked: bool
) -> Text:
    """Tokens as text, those that are `trained` green, special ones reversed.

    `marked` sets trained ones in ⟦⟧ besides, for where there are no colours.
    """
    special = np.isin(ids, tokenizer.all_special_ids)
    text = Text()
    for (is_trained, is_special), run in groupby(
        zip(trained, special, ids, strict=True), key=lambda of: of[:2]
    ):
        words = tokenizer.decode([token for *_, token in run], clean_up_tokenization_spaces=False)
        words = f"⟦{words}⟧" if is_trained and marked else words
        text.append(words, f"{'green' if is_trained else 'dim'}{' reverse' if is_special else ''}")
    return text


def _counts(plan: Plan, rows: list[list[Span]]) -> Table:
    """Lengths, fill and sizes: of a pass over the data where it is known, else of the first step's `rows`."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    batch, length = plan.batch(rows), plan.config.training.seq_len
    whole = plan.table is not None
    pairs = plan.config.trains_on == "preferences"
    unit = "examples"
    if pairs:
        unit = "answers" if plan.config.preference.loss == "kto" else "pairs"
    lengths = plan.table.lengths if whole else np.array([len(span.tokens) for span in chain(*rows)])
    lengths = lengths[lengths > 0]
    sizes, counts = np.unique(np.frexp(lengths)[1], return_counts=True)
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        table.add_row(
            f"below {1 << size:,} tokens",
            f"{count:,} {unit}",
            "█" * -(-_BAR * count // counts.max()),
        )
    if whole:
        table.add_row(
            "longer than a row",
            f"{(lengths > length).sum():,} of {len(lengths):,} {unit}",
            "left out" if pairs else "",
        )
    name, tokens, count, room = "first step", batch.counts["tokens"], len(rows), batch.shape.numel()
    if plan.rows_per_pass is not None:
        name, count, room = "epoch", plan.rows_per_pass, plan.rows_per_pass * length
        tokens = (
            sum((stops - starts).sum() for _, starts, stops in plan.bins)
            if plan.fits
            else lengths.sum()
        )
        table.add_row("steps", f"{-(-count // len(rows)):,} an epoch", f"{len(rows)} rows each")
    if pairs:
        filled = [row.shape[1] for row in plan.bins] if name == "epoch" else list(map(len, rows))
        table.add_row(
            f"{unit} a row", f"{np.mean(filled):.1f}", f"{sum(filled):,} {unit} in {name}"
        )
    share = batch.counts["trained_tokens"] / max(batch.counts["tokens"], 1)
    trained = f"{share:.1%} of the first step's tokens are trained"
    table.add_row(
        name, f"{tokens:,} tokens in {count:,} rows", f"fill {tokens / room:.2%}; {trained}"
    )
    return table
