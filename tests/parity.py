"""Makes the parity table: python tests/parity.py > docs/parity.md.

It takes 15 minutes on two cores. Every layout trains five steps of every architecture, and so does
one process. A cell is the largest relative difference of the loss and of the gradient norm over
them, or why lacuna refuses the combination when it reads the configuration.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from lacuna.config import UserError
from lacuna.config.machine import SCHEDULES, ActivationCheckpointConfig
from lacuna.model.build import build_model
from lacuna.objective.language_modelling import LanguageModelling
from lacuna.parallel.mesh import Layout, build_mesh
from lacuna.train.optimizer import build_optimizer, update
from lacuna.train.step import accumulate_gradients, total_counts
from layouts import FOUR_LAYERS, Case, configuration, own_batches, pipelined
from tiny import CPU, run_ranks, tiny_config, tokenizer_of_words

STEPS = 5
ARCHITECTURES = ("llama", "llama_tied", "qwen3", "gemma3", "gpt2")
RING = {"context_parallel_rotate_method": "alltoall"}
OFFLOADED = ActivationCheckpointConfig(mode="full", offload=True)
BY_OPERATION = ActivationCheckpointConfig(mode="selective", selective_ac_option="op")
CASES: dict[str, Case] = {
    "accumulation 4": Case(Layout(), 4),
    "dp_replicate 2 (DDP)": Case(Layout(dp_replicate=2), 2),
    "dp_shard 2, ZeRO-1": Case(Layout(dp_shard=2), 2, zero_stage=1),
    "dp_shard 2, ZeRO-2": Case(Layout(dp_shard=2), 2, zero_stage=2),
    "dp_shard 2, ZeRO-3": Case(Layout(dp_shard=2), 2),
    "dp_shard 2, CPU offload": Case(Layout(dp_shard=2), 2, offload=True),
    "dp_shard 2, checkpointing by operation": Case(Layout(dp_shard=2), 2, recompute=BY_OPERATION),
    "dp_shard 2, full checkpointing, offloaded": Case(Layout(dp_shard=2), 2, recompute=OFFLOADED),
    "tp 2": Case(Layout(tp=2), 2),
    "tp 2, loss of whole sequences": Case(
        Layout(tp=2), 2, parallelism={"disable_loss_parallel": True}
    ),
    "cp 2, all-gather": Case(Layout(cp=2), 2),
    "cp 2, ring": Case(Layout(cp=2, ring=True), 2, parallelism=RING),
    **{f"pp 2, {schedule}": pipelined(Layout(pp=2), 4, schedule) for schedule in SCHEDULES},
    "dp_replicate 2 × dp_shard 2 (HSDP)": Case(Layout(2, 2)),
    "cp 4, all-gather": Case(Layout(cp=4)),
    "dp_shard 2 × tp 2": Case(Layout(dp_shard=2, tp=2), 2),
    "dp_replicate 2 × tp 2": Case(Layout(dp_replicate=2, tp=2)),
    "dp_shard 2 × cp 2": Case(Layout(dp_shard=2, cp=2), 2),
    "dp_shard 2 × pp 2, 1F1B": pipelined(Layout(dp_shard=2, pp=2), 4),
    "dp_shard 2 × pp 2, ZBVZeroBubble": pipelined(Layout(dp_shard=2, pp=2), 4, "ZBVZeroBubble"),
    "cp 2 × tp 2": Case(Layout(cp=2, tp=2), 2),
    "cp 2, ring × tp 2": Case(Layout(cp=2, tp=2, ring=True), 2, parallelism=RING),
    "tp 2 × pp 2, 1F1B": pipelined(Layout(tp=2, pp=2), 4),
    "tp 2 × pp 2, Interleaved1F1B": pipelined(Layout(tp=2, pp=2), 4, "Interleaved1F1B"),
    "cp 2 × pp 2, 1F1B": pipelined(Layout(cp=2, pp=2), 4),
    "dp_shard 2 × tp 2, offload, full checkpointing": Case(
        Layout(dp_shard=2, tp=2), 2, offload=True, recompute=OFFLOADED
    ),
    "dp_shard 2 × tp 2 × pp 2": pipelined(Layout(dp_shard=2, tp=2, pp=2), 4),
    "dp_shard 2 × cp 2 × tp 2": Case(Layout(dp_shard=2, cp=2, tp=2), 2),
    "dp_shard 2 × cp 2 × pp 2": pipelined(Layout(dp_shard=2, cp=2, pp=2), 4),
    "cp 2 × tp 2 × pp 2, Interleaved1F1B": pipelined(
        Layout(cp=2, tp=2, pp=2), 4, "Interleaved1F1B"
    ),
    "dp_replicate 2 × dp_shard 2 × tp 2": Case(Layout(2, 2, tp=2), 2),
    "dp_shard 2 × tp 2 × pp 2 × cp 2": pipelined(Layout(dp_shard=2, cp=2, tp=2, pp=2), 4),
    "dp_replicate 2 × dp_shard 2 × tp 2 × pp 2": pipelined(Layout(2, 2, tp=2, pp=2), 2),
}


def train(model_config: Path, case: Case) -> list[tuple[float, float]] | str:
    """Loss and gradient norm of each step, or the refusal."""
    config, mesh = configuration(model_config, case), build_mesh(case.layout, "cpu")
    config = config.model_copy(
        update={"optimizer": config.optimizer.model_copy(update={"lr": 0.01})}
    )
    try:
        built = build_model(config, tokenizer_of_words(), mesh, CPU)
    except UserError as error:
        return str(error)
    optimizer = build_optimizer(built.model, config)
    results = []
    for step in range(STEPS):
        batches = own_batches(case, mesh, seed=step)
        trained = total_counts(built, batches)["trained_tokens"]
        loss = accumulate_gradients(built, batches, LanguageModelling.loss, trained)[0]
        dist.all_reduce(loss)
        norm, _ = update(built, optimizer, trained)
        results.append((loss.item() / trained.item(), norm.item()))
    return results


def train_all(model_config: Path, cases: list[Case]) -> list[list[tuple[float, float]] | str]:
    return [train(model_config, case) for case in cases]


def column(architecture: str, cases: dict[str, Case]) -> dict[str, str]:
    """The cells of an architecture; layouts over equally many ranks share their processes."""
    cells = {}
    with tempfile.TemporaryDirectory() as folder:
        tiny_config(
            architecture, num_hidden_layers=4, **FOUR_LAYERS.get(architecture, {})
        ).save_pretrained(folder)
        [expected] = run_ranks(1, train_all, Path(folder), [Case(Layout())])[0]
        for ranks in sorted(
            {case.layout.data_parallel * case.layout.sharing for case in cases.values()}
        ):
            own = {
                name: case
                for name, case in cases.items()
                if case.layout.data_parallel * case.layout.sharing == ranks
            }
            results = run_ranks(ranks, train_all, Path(folder), list(own.values()))
            for name, result in zip(own, results[0], strict=True):
                cells[name] = result if isinstance(result, str) else difference(result, expected)
            print(f"{architecture}, {ranks} ranks: done", file=sys.stderr, flush=True)
    return cells


def difference(results: list[tuple[float, float]], expected: list[tuple[float, float]]) -> str:
    """The largest relative differences of losses and of norms."""
    pairs = [
        list(zip(*rows, strict=True))
        for rows in zip(zip(*results, strict=True), zip(*expected, strict=True), strict=True)
    ]
    return " / ".join(
        f"{max(abs(value / right - 1) for value, right in kind):.0e}" for kind in pairs
    )


def main() -> None:
    columns = {architecture: column(architecture, CASES) for architecture in ARCHITECTURES}
    refusals: list[str] = []
    print("# Every layout is one device\n")
    print(
        f"Each layout trains {STEPS} steps, and so does one process. A cell is the largest relative "
        "difference of the loss / of the gradient norm over them. The models are small: four layers, "
        "four heads, two key-value heads, float32. They train on packed documents of uneven length, "
        f"on CPUs with gloo; torch {torch.__version__.split('+')[0]}.\n"
    )
    print("Made by `python tests/parity.py > docs/parity.md`.\n")
    print("| layout | " + " | ".join(ARCHITECTURES) + " |\n|" + "---|" * (len(ARCHITECTURES) + 1))
    for name in CASES:
        cells = []
        for architecture in ARCHITECTURES:
            cell = columns[architecture][name]
            if ": " in cell:
                if cell not in refusals:
                    refusals.append(cell)
                cell = f"refused ({refusals.index(cell) + 1})"
            cells.append(cell)
        print(f"| {name} | " + " | ".join(cells) + " |")
    print("\nRefused when the configuration is read:\n")
    for number, refusal in enumerate(refusals, 1):
        print(f"{number}. {refusal}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
