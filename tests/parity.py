"""Makes the tables of parity: python tests/parity.py > docs/parity.md.

Its first three tables take 25 minutes on two cores. Every layout trains five steps of every
architecture, or of every task, and so does one process. A cell is the largest relative difference
of the loss and of the gradient norm over them, or why lacuna refuses the combination when it reads
the configuration.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PretrainedConfig

from lacuna.config.adapters import LoraConfig
from lacuna.config.machine import SCHEDULES, ActivationCheckpointConfig
from lacuna.config.objectives import DistillationConfig, PreferenceConfig
from lacuna.config.reinforcement import GrpoConfig, PpoConfig
from lacuna.parallel.mesh import Layout
from layouts import Case, pipelined
from tasks import Losses, Task, four_layers, steps_of, write_weights

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


TASK_ARCHITECTURES = ("llama", "gemma3")
TASK_CASES = {
    name: CASES[name]
    for name in (
        "accumulation 4",
        "dp_replicate 2 (DDP)",
        "dp_shard 2, ZeRO-3",
        "tp 2",
        "tp 2, loss of whole sequences",
        "cp 2, all-gather",
        "cp 2, ring",
        "pp 2, 1F1B",
        "pp 2, InterleavedZeroBubble",
        "dp_replicate 2 × dp_shard 2 (HSDP)",
        "dp_shard 2 × tp 2",
        "dp_shard 2 × pp 2, 1F1B",
        "cp 2 × tp 2",
        "cp 2 × pp 2, 1F1B",
    )
}
"""The layouts of the second table: a task adds one pass without gradients, and sequence sums."""
EXPERT_ARCHITECTURES: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, load-balancing loss": (
        "qwen3_moe",
        {"output_router_logits": True, "router_aux_loss_coef": 0.5},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "gpt_oss": ("gpt_oss", {}),
}
"""The models of the table of experts by its columns, with changes of their configurations."""
_SPREAD = {"expert_parallel_degree": 2}
EXPERT_CASES: dict[str, Case] = {
    "dp_shard 2": Case(Layout(dp_shard=2)),
    "dp_shard 2, ep 2": Case(Layout(dp_shard=2, ep=2), parallelism=_SPREAD),
    "dp_shard 2, ep 2, ZeRO-2": Case(Layout(dp_shard=2, ep=2), zero_stage=2, parallelism=_SPREAD),
    "dp_shard 2, ep 2, CPU offload": Case(
        Layout(dp_shard=2, ep=2), offload=True, parallelism=_SPREAD
    ),
    "dp_shard 2, ep 2, full checkpointing": Case(
        Layout(dp_shard=2, ep=2),
        recompute=ActivationCheckpointConfig(mode="full"),
        parallelism=_SPREAD,
    ),
    "cp 2, all-gather, ep 2": Case(Layout(cp=2, ep=2), parallelism=_SPREAD),
    "dp_shard 4, ep 2": Case(Layout(dp_shard=4, ep=2), parallelism=_SPREAD),
    "dp_shard 4, ep 4": Case(Layout(dp_shard=4, ep=4), parallelism={"expert_parallel_degree": 4}),
    "dp_replicate 2 × dp_shard 2, ep 2 (HSDP)": Case(Layout(2, 2, ep=2), parallelism=_SPREAD),
    "dp_shard 2 × cp 2, ep 4": Case(
        Layout(dp_shard=2, cp=2, ep=4), parallelism={"expert_parallel_degree": 4}
    ),
    "dp_shard 2 × pp 2, ep 2, 1F1B": Case(
        Layout(dp_shard=2, pp=2, ep=2), 4, parallelism=_SPREAD | {"pipeline_parallel_degree": 2}
    ),
}
ADAPTERS = {"lora": LoraConfig(rank=2, alpha=4.0)}

EXACT = 4e-6
"""What rounding in float32 comes to at most, in a loss of DPO."""

EXPERTS_READ = (
    "`ep` is the number of ranks that the four experts of a layer are spread over, two of which "
    "are chosen for a token."
)

COMPLETIONS_READ = (
    "Every two steps are made on completions that are given; tests of whole runs compare what is "
    "generated. GRPO, with the loss of DAPO, and PPO compare the model with a frozen copy of what "
    "it began as, with LoRA with itself without its adapters, and GSPO with neither. The loss of "
    "PPO is that of the model and of the critic together, and its norm is the model's."
)

Columns = dict[str, dict[str, str]]
"""The cells of a table by column and layout."""


def tasks_taught_by(teacher: Path) -> dict[str, Task]:
    """The tasks of the second table. With adapters the reference is the model without them."""
    preference = PreferenceConfig(beta=0.5)
    distillation = DistillationConfig(teacher=str(teacher), alpha=0.7)
    return {
        "DPO": Task("preference", preference=preference),
        "DPO, LoRA": Task("preference", preference=preference, changes=ADAPTERS),
        "distillation": Task("distill", distillation=distillation),
        "distillation, LoRA": Task("distill", distillation=distillation, changes=ADAPTERS),
        "reward model": Task("reward"),
    }


def tasks_by_rewards() -> dict[str, Task]:
    """The tasks of the last table, whose bounds are wide enough that rounding crosses none."""
    dapo = GrpoConfig(beta=0.1, importance="token")
    gspo = GrpoConfig(loss="gspo", epsilon=0.5, epsilon_high=0.5)
    return {
        "GRPO": Task("grpo", grpo=dapo),
        "GRPO, LoRA": Task("grpo", grpo=dapo, changes=ADAPTERS),
        "GSPO": Task("grpo", grpo=gspo),
        "PPO": Task("ppo", ppo=PpoConfig(updates=2, kl_target=0.01)),
    }


def write_models(
    architecture: str, folder: Path, make: Callable[..., PretrainedConfig] = four_layers
) -> tuple[Path, Path]:
    """Writes a model and a larger teacher for it into `folder`."""
    small = make(architecture)
    large = make(architecture, hidden_size=64)
    model = write_weights(folder / "model", small, seed=1)
    return model, write_weights(folder / "teacher", large, seed=2)


def column(model: Path, task: Task, cases: dict[str, Case]) -> dict[str, str]:
    """The cells of one task of one model, by layout."""
    alone, *others = steps_of(model, [(case, task) for case in (Case(), *cases.values())], STEPS)
    assert not isinstance(alone, str), alone
    return {
        name: found if isinstance(found, str) else difference(found, alone)
        for name, found in zip(cases, others, strict=True)
    }


def columns_of_architectures() -> Columns:
    """Every layout pretrains every architecture."""
    columns = {}
    for architecture in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            four_layers(architecture).save_pretrained(folder)
            columns[architecture] = column(Path(folder), Task(), CASES)
        print(f"{architecture}: done", file=sys.stderr, flush=True)
    return columns


def columns_of_experts() -> Columns:
    """The layouts of the table of experts train every mixture of experts."""
    columns = {}
    for name, (architecture, changes) in EXPERT_ARCHITECTURES.items():
        with tempfile.TemporaryDirectory() as folder:
            four_layers(architecture, **changes).save_pretrained(folder)
            columns[name] = column(Path(folder), Task(), EXPERT_CASES)
        print(f"{name}: done", file=sys.stderr, flush=True)
    return columns


def columns_of_tasks(tasks_of: Callable[[Path], dict[str, Task]]) -> Columns:
    """The layouts of the tables of tasks train every task; `tasks_of` makes them for a teacher."""
    columns = {}
    for architecture in TASK_ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            model, teacher = write_models(architecture, Path(folder))
            for name, task in tasks_of(teacher).items():
                columns[f"{name}, {architecture}"] = column(model, task, TASK_CASES)
                print(f"{name}, {architecture}: done", file=sys.stderr, flush=True)
    return columns


def difference(results: Losses, expected: Losses) -> str:
    """The largest relative differences of losses and of norms."""
    largest = []
    for kind in (0, 1):
        pairs = zip(results, expected, strict=True)
        largest.append(max(abs(one[kind] / other[kind] - 1) for one, other in pairs))
    return " / ".join(f"{one:.0e}" for one in largest)


def print_table(columns: Columns, refusals: list[str]) -> None:
    """Prints a table; `refusals`, numbered in it, grows by those that are new."""
    print("\n| layout | " + " | ".join(columns) + " |")
    print("|" + "---|" * (len(columns) + 1))
    for name in next(iter(columns.values())):
        cells = []
        for of_column in columns.values():
            cell = of_column[name]
            if ": " in cell:
                if cell not in refusals:
                    refusals.append(cell)
                cell = f"refused ({refusals.index(cell) + 1})"
            cells.append(cell)
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    of_architectures = columns_of_architectures()
    of_experts = columns_of_experts()
    of_tasks = columns_of_tasks(tasks_taught_by)
    by_rewards = columns_of_tasks(lambda _: tasks_by_rewards())
    refusals: list[str] = []
    print("# Every layout is one device\n")
    print(
        f"Each layout trains {STEPS} steps, and so does one process. A cell is the largest "
        "relative difference of the loss / of the gradient norm over them. The models are small: "
        "four layers, four heads, two key-value heads, float32. They train on packed documents of "
        f"uneven length, on CPUs with gloo; torch {torch.__version__.split('+')[0]}.\n"
    )
    print("Made by `python tests/parity.py > docs/parity.md`.\n")
    print("## Pretraining")
    print_table(of_architectures, refusals)
    print("\n## Mixtures of experts\n")
    print(EXPERTS_READ)
    print_table(of_experts, refusals)
    print("\n## Preference, distillation and reward models\n")
    print(
        "DPO compares the model with a frozen copy of what it began as, and with LoRA with itself "
        "without its adapters. Distillation mixes the forward divergence from a teacher twice as "
        "wide with the cross-entropy of the data. The copy and the teacher are spread over the "
        "ranks as the model is. A loss of DPO is made of differences between log-probabilities of "
        "whole answers, which are far larger than it is: of their rounding it shows more."
    )
    print_table(of_tasks, refusals)
    print(f"\n## Completions\n\n{COMPLETIONS_READ}")
    print_table(by_rewards, refusals)
    print("\nRefused when the configuration is read:\n")
    for number, refusal in enumerate(refusals, 1):
        print(f"{number}. {refusal}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
