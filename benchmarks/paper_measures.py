"""Measures a model of softpick_paper.py."""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from quantised_losses import losses_by_bits
from torch import Tensor

from lacuna import __version__
from lacuna.config import Config, load_config
from lacuna.data import build_validation, run_tokenizer
from lacuna.data.micro_batches import BatchSizes
from lacuna.formats.opening import load_any_model
from lacuna.parallel.processes import device_type
from lacuna.rollout.inspection import inspect_model, summary_of


def measured(own: Path, most_rows: int) -> dict[str, Any]:
    """What softpick_paper.py tells of the model in the folder of a run that is done."""
    config = load_config(str(own / "config.toml"), ())
    rows = held_out_rows(config, most_rows)
    model, _ = load_any_model(str(own / "hf"), device_type())
    looked = inspect_model(model, evenly(rows, 8))
    curves = [json.loads(line) for line in (own / "metrics.jsonl").read_text().splitlines()]
    training = [one for one in curves if "loss" in one]
    speeds = [one["tokens_per_second"] for one in training if one["tokens_per_second"]]
    return {
        "steps": training[-1]["step"],
        "tokens": training[-1]["tokens"],
        "parameters": model.num_parameters(),
        "train_loss": training[-1]["loss"],
        "val_loss": next(one["val_loss"] for one in reversed(curves) if "val_loss" in one),
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "rows": len(rows),
        "row_tokens": len(rows[0]),
        "seconds": sum(map(float, (own / "seconds.txt").read_text().split())),
        **summary_of(looked),
        "losses": losses_by_bits(model, rows),
        "layers": [vars(layer) for layer in looked],
        "curves": [one for one in curves if {"val_loss", "attention_sparsity"} & one.keys()],
        "device": torch.cuda.get_device_name() if device_type() == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "lacuna": __version__},
        "settings": config.model_dump(mode="json"),
    }


def held_out_rows(config: Config, most: int) -> list[Tensor]:
    """At most so many whole rows of the held-out texts of a run, tokens [T], from all over them."""
    everything = config.validation.model_copy(update={"steps": -1})
    config = config.model_copy(update={"validation": everything})
    tokenizer = run_tokenizer(config.model, None)
    batches = [one.columns for one in build_validation(config, tokenizer, BatchSizes(1, 1, 1), 0)()]
    rows = [batch["input_ids"][0] for batch in batches if bool(batch["real"].all())]
    if not rows:
        sys.exit("--held-out: it has not one whole row: give longer texts")
    return evenly(rows, most)


def evenly(rows: list[Tensor], most: int) -> list[Tensor]:
    """At most so many of the rows, at even distances: neighbours are often of one text."""
    count = min(most, len(rows))
    return [rows[place * len(rows) // count] for place in range(count)]
