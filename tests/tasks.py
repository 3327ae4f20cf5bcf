"""Steps of any task on the same sequences in any layout, to be compared with those of one rank."""

from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from lacuna.config import Config, UserError
from lacuna.config.contradictions import contradictions_of
from lacuna.config.objectives import DistillationConfig, PreferenceConfig
from lacuna.config.reinforcement import GrpoConfig, PpoConfig, RewardsConfig, RolloutConfig
from lacuna.config.sections import JobConfig
from lacuna.data import Batch
from lacuna.model.build import build_model
from lacuna.objective.find import find_objective
from lacuna.objective.on_policy import OnPolicy
from lacuna.objective.top_k import likeliest
from lacuna.rollout.groups import Sample
from lacuna.train.optimizer import build_optimizer, update
from lacuna.train.second import Learner
from lacuna.train.step import accumulate_gradients, total_counts
from layouts import FOUR_LAYERS, LENGTH, SEQUENCES, Case, configuration, own_batches
from tiny import CPU, VOCABULARY, mesh_of, random_model, run_ranks, tiny_config, tokenizer_of_words

STEPS = 3
"""Of a task: by the first update, and by what the optimizer kept of it."""
Losses = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


@dataclass(frozen=True)
class Task:
    """A task, and what else a case is for it."""

    name: str = "pretrain"
    preference: PreferenceConfig = PreferenceConfig()
    distillation: DistillationConfig = DistillationConfig()
    grpo: GrpoConfig = GrpoConfig()
    ppo: PpoConfig = PpoConfig()
    changes: dict[str, Any] = field(default_factory=dict)


Trained = tuple[Path, Case, Task]
"""The folder of a model, and what trains it in which layout."""


def four_layers(architecture: str, **changes: Any) -> PretrainedConfig:
    """The configuration of a tiny model that a pipeline can cut into four stages."""
    extra = FOUR_LAYERS.get(architecture, {})
    return tiny_config(architecture, num_hidden_layers=4, **extra, **changes)


def write_weights(folder: Path, model_config: PretrainedConfig, seed: int) -> Path:
    """Fills `folder` with a tiny random model and its tokenizer."""
    random_model(model_config, seed=seed).save_pretrained(folder)
    tokenizer_of_words().save_pretrained(folder)
    return folder


def as_answers(batch: Batch, is_kto: bool) -> Batch:
    """The two documents of each row as the answers of a pair, or as one and a mismatched one."""
    rows = len(batch.columns["input_ids"])
    starts = (batch.columns["position_ids"] == 0).flatten()
    sequence = (starts.cumsum(0) - 1).view(rows, LENGTH)
    labels = batch.columns["labels"].clone()
    # Neither answer is empty, and each has a prompt.
    positions = batch.columns["position_ids"]
    following = batch.columns["input_ids"].roll(-1, dims=1)
    ends = starts.roll(-1).view(rows, LENGTH)
    labels = torch.where((positions < 2) | ends, -100, following)
    sequence_columns = {"chosen": torch.tensor([1.0, 0.0] * rows)}
    if is_kto:
        kinds = batch.columns["input_ids"].sum(1) % 2  # whatever micro-batch a row is in
        sequence_columns["chosen"] = kinds.repeat_interleave(2).float()
        sequence_columns["mismatched"] = torch.tensor([0.0, 1.0] * rows)
    counts = batch.counts | {"pairs": float(rows), "sequences": float(rows)}
    counts["trained_tokens"] = float((labels != -100).sum())
    columns = batch.columns | {"labels": labels, "sequence": sequence}
    return replace(batch, columns=columns, counts=counts, sequence_columns=sequence_columns)


def as_said(batch: Batch, top_k: int = 4) -> Batch:
    """The batch with what a teacher said, which depends on the labels alone."""
    generator = torch.Generator().manual_seed(5)
    ids, logprobs = likeliest(torch.randn(VOCABULARY, VOCABULARY, generator=generator), top_k)
    labels = batch.columns["labels"].clamp(min=0)
    said = {"teacher_ids": ids[labels].int(), "teacher_logprobs": logprobs[labels]}
    return replace(batch, columns=batch.columns | said)


def samples_of(number: int) -> list[Sample]:
    """Completions, two for each sequence of the other tasks, which no model has made.

    They are worth anything at all, and some did not end.
    """
    generator = torch.Generator().manual_seed(100 + number)

    def drawn(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    samples = []
    for place in range(2 * SEQUENCES):
        tokens = drawn(2 + place % 5)
        worth, *sampled = torch.randn(1 + len(tokens), generator=generator).tolist()
        sample = Sample(drawn(1 + place % 4), tokens, sampled, ended=place % 3 > 0)
        sample.advantage = sample.reward = worth
        samples.append(sample)
    return samples


def train_steps(model: Path, case: Case, task: Task, count: int) -> Losses | str:
    """Trains this rank's share of so many steps, or says why that is refused."""
    config = configuration(model, replace(case, **task.changes))
    config = settings_of(config, task)
    rows = SEQUENCES // case.layout.data_parallel // case.accumulation
    training = config.training.model_copy(update={"batch_size": rows})
    config = config.model_copy(update={"training": training})
    mesh = mesh_of(case.layout)
    objective = find_objective(task.name)
    is_kto = task.preference.loss == "kto"

    def batches_of(step: int) -> list[Batch]:
        found = own_batches(case, mesh, seed=step)
        if task.distillation.teacher_logprobs is not None:
            return [as_said(batch) for batch in found]
        if task.name not in ("preference", "reward"):
            return found
        return [as_answers(batch, is_kto) for batch in found]

    def laid_out(step: int) -> list[Batch]:
        """This rank's part of the completions that two steps are made on."""
        every = samples_of(step // 2)
        own = every[mesh.data_rank :: case.layout.data_parallel]
        if step % 2 == 0:
            objective.note_findings(built, own)
            found[:] = own
        return objective.laid_out(found, objective.targets).batches

    found: list[Sample] = []
    is_own = isinstance(objective, OnPolicy)
    refusals = "; ".join(contradictions_of(config)) if is_own else ""
    if refusals:
        return refusals
    try:
        objective.check(config, tokenizer_of_words())
        built = build_model(config, tokenizer_of_words(), mesh, CPU)
        steps = chain.from_iterable(map(batches_of, range(count)))
        second = objective.prepare(built, lambda: steps)
    except UserError as error:
        return str(error)
    learner = None
    if second is not None:
        learner = Learner(second, build_optimizer(second.built.model, config.optimizer))
    names = (*objective.loss.names, *(learner.names if learner else ()))
    optimizer = build_optimizer(built.model, config.optimizer)
    results = []
    for step in range(count):
        batches = laid_out(step) if is_own else batches_of(step)
        batches = objective.annotate(built, batches, objective.loss)
        counts = total_counts(built, batches)
        divisor = counts[objective.denominator]
        sums = accumulate_gradients(built, batches, objective.loss, divisor)
        norm, skip = update(built, optimizer, divisor)
        if learner:
            sums, norm, _ = learner.train(batches, divisor, 0.01, (sums, norm, skip))
        dist.all_reduce(sums)
        named = dict(zip(names, sums.tolist(), strict=True))
        row = objective.report(named, {name: one.item() for name, one in counts.items()})
        # The loss of PPO's policy is 0 in the first step on completions, but for rounding.
        results.append((row["loss"] + row.get("critic_loss", 0.0), norm.item()))
    return results


def settings_of(config: Config, task: Task) -> Config:
    """The settings of a case for a task."""
    optimizer = config.optimizer.model_copy(update={"lr": 0.01})
    changes = {"job": JobConfig(task=task.name), "optimizer": optimizer}
    changes |= {"preference": task.preference, "distillation": task.distillation}
    if task.name in ("grpo", "ppo"):
        changes |= {"grpo": task.grpo, "ppo": task.ppo, "rollout": RolloutConfig(max_tokens=8)}
        changes["rewards"] = RewardsConfig(functions=("length",))
    return config.model_copy(update=changes)


def train_all(cases: list[Trained], count: int) -> list[Losses | str]:
    found = []
    for model, case, task in cases:
        try:
            found.append(train_steps(model, case, task, count))
        except Exception as error:
            error.add_note(f"in {task.name}, {case}")
            raise
    return found


def results_of(cases: list[Trained], count: int = STEPS) -> list[Losses | str]:
    """What each case came to; cases of equally many ranks share their processes."""
    found: dict[int, Losses | str] = {}
    ranks_of = [case.layout.data_parallel * case.layout.sharing for _, case, _ in cases]
    for ranks in sorted(set(ranks_of)):
        places = [place for place, of_case in enumerate(ranks_of) if of_case == ranks]
        results = run_ranks(ranks, train_all, [cases[place] for place in places], count)[0]
        found |= dict(zip(places, results, strict=True))
    return [found[place] for place in range(len(cases))]


def steps_of(model: Path, cases: list[tuple[Case, Task]], count: int = STEPS) -> list[Losses | str]:
    """The same of cases that train one model."""
    return results_of([(model, case, task) for case, task in cases], count)
