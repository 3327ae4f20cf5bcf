"""GRPO and its kin: the model learns its own completions by what they are worth."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from lacuna.config import Config, UserError
from lacuna.config.adapters import LoraConfig
from lacuna.config.machine import CheckpointConfig
from lacuna.config.reinforcement import GrpoConfig, PpoConfig
from lacuna.data import Batch, Loader
from lacuna.data.chat import end_of_turn
from lacuna.data.tokenizer import grown_tokenizer
from lacuna.model.build import BuiltModel, build_frozen
from lacuna.model.layers.lora import without_adapters
from lacuna.model.loss import Loss, TokenLoss
from lacuna.objective.critic import SecondModel
from lacuna.objective.grpo_batches import (
    LaidOut,
    Targets,
    grpo_targets,
    lay_out,
    logprobs_of_samples,
    with_log_ratios,
)
from lacuna.objective.grpo_losses import NAMES, advantages_of, grpo_sums
from lacuna.objective.language_modelling import FrozenModel, LanguageModelling
from lacuna.objective.reference import begins_as_base
from lacuna.parallel.processes import set_timeout
from lacuna.rollout.groups import (
    CompletionsFile,
    Group,
    Sample,
    draw_groups,
    put_back_on_outage,
    statistics,
)
from lacuna.rollout.reward_models import RewardModel, load_models
from lacuna.rollout.sampling import check_engine
from lacuna.rollout.verifiers import Reward, find_rewards

# Beyond this many nats a token's log-probabilities of generating and of training differ.
_MISMATCH = 0.1


def reference_kind(
    settings: GrpoConfig | PpoConfig,
    lora: LoraConfig,
    checkpoint: CheckpointConfig,
    folder: str,
    task: Literal["grpo", "ppo"] = "grpo",
) -> str | None:
    """Where the reference of a task comes from: base or copy; None without a divergence from one.

    `folder` is that of the run. Raises `UserError` where the reference would not be what training
    begins with.
    """
    asked = settings.reference
    if not settings.beta:
        return None
    is_base = begins_as_base(lora)
    if asked == "base" and not is_base:
        raise UserError(
            f"{task}.reference = base: without its adapters the model is not what training begins "
            "with (lora.rank is 0, or lora.modules, lora.adapter or lora.init is set): use copy."
        )
    checkpoints = Path(folder, checkpoint.folder)
    start = checkpoint.initial_load_path
    if start or (checkpoints / "step-0").exists():
        raise UserError(
            f"{task}.beta: the run begins with the weights of a checkpoint "
            f"({start or checkpoints / 'step-0'}), and the reference with those of the model's own "
            "files: convert the checkpoint with lacuna convert --to hf and give that as "
            "model.name_or_path."
        )
    return "base" if is_base and asked != "copy" else "copy"


def _part_of_rank(groups: list[list[Sample]], policy: BuiltModel) -> list[list[Sample]]:
    """This rank's part of the groups of all."""
    ranks = policy.mesh.layout.data_parallel
    rank = policy.mesh.data_rank
    return groups[len(groups) * rank // ranks : len(groups) * (rank + 1) // ranks]


class Grpo(LanguageModelling):
    """Trains on groups of the model's own completions, by their rewards."""

    trains_on = "prompts"
    config: Config
    tokenizer: PreTrainedTokenizerBase
    functions: dict[str, Reward]
    targets: Targets
    ends: list[int]
    reference: BuiltModel | None = None
    kind: str | None = None
    exchange: dist.ProcessGroup | None = None

    def check(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises `UserError` for rewards, ends or a reference that cannot be had."""
        settings = config.grpo
        folder = str(config.job.dump_folder)
        kind = reference_kind(settings, config.lora, config.checkpoint, folder)
        self.begin(config, tokenizer, kind, settings.updates)
        self.targets = grpo_targets(settings, config.rollout)
        is_by_tokens = settings.loss in ("dapo", "cispo")
        self.denominator = "trained_tokens" if is_by_tokens else "sequences"
        of = partial(grpo_sums, settings=settings, temperature=config.rollout.temperature)
        self.loss = TokenLoss(of, NAMES)
        self.held_out_loss = self.loss

    def begin(
        self, config: Config, tokenizer: PreTrainedTokenizerBase, kind: str | None, updates: int
    ) -> None:
        """Begins with no completions; raises `UserError` for rewards that cannot be had.

        `kind` is that of the reference, and `updates` are made on the same completions.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.functions = find_rewards(
            config.rewards,
            partial(
                RewardModel,
                chat=config.chat,
                batch_size=config.rollout.batch_size,
                trust_remote_code=config.model.trust_remote_code,
            ),
        )
        self.ends = end_of_turn(tokenizer)
        self.kind = kind
        self.updates = updates
        self.steps = 0  # of the run so far
        self.updates_left = 0
        self.own: list[list[Sample]] = []  # this rank's groups
        self.resumed: list[list[Sample]] = []  # those of all ranks, where a run goes on with them
        self.told: dict[str, float | None] = {}  # of the newest completions
        self.is_under_way = False  # whether this process has made a step
        self.file = CompletionsFile(str(config.job.dump_folder))

    def frozen_models(self, config: Config) -> dict[str, FrozenModel]:
        """The frozen copy, where that is the reference."""
        folder = str(config.job.dump_folder)
        kind = reference_kind(config.grpo, config.lora, config.checkpoint, folder)
        return {"grpo.reference": FrozenModel(config)} if kind == "copy" else {}

    def prepare(
        self, policy: BuiltModel, all_batches: Callable[[], Iterable[Batch]]
    ) -> SecondModel | None:
        """Loads models that score, and builds the reference where that is a copy."""
        if not policy.head.chunked:
            raise UserError(
                "model: its head does more than lacuna knows, so that log-probabilities cannot be "
                f"made chunk by chunk for job.task = {self.config.job.task}: choose another model."
            )
        self.exchange = dist.new_group(backend="gloo")
        check_engine(policy, self.config.rollout, self.exchange)
        load_models([*self.functions.values()], policy.device)
        if self.kind == "copy":
            tokenizer = grown_tokenizer(self.config.model)
            self.reference = build_frozen(self.config, tokenizer, policy.mesh, policy.device)
        return None

    def next_step(self, policy: BuiltModel, source: Loader) -> Sequence[Batch]:
        """This rank's completions in micro-batches, newly made unless updates are left for them."""
        if not self.is_under_way and dist.get_rank() == 0:
            self.file.go_on(self.steps)
        self.is_under_way = True
        is_new = not self.updates_left
        if is_new:
            with put_back_on_outage(source):
                groups = [group.samples for group in self.roll_out(policy, source)]
            self.own = _part_of_rank(groups, policy)
            self.updates_left = self.updates
        elif self.resumed:
            self.own = _part_of_rank(self.resumed, policy)
        self.resumed = []
        self.steps += 1
        self.updates_left -= 1
        own = [sample for group in self.own for sample in group]
        if is_new:
            self.note_findings(policy, own)
        return self.laid_out(own).batches

    def laid_out(self, samples: Sequence[Sample]) -> LaidOut:
        """Samples in this rank's micro-batches, as many as on all others."""
        config = self.config
        padding = self.tokenizer.eos_token_id or 0
        return lay_out(
            samples, config.training, config.row_form, config.data, padding, self.targets
        )

    def draw(self, policy: BuiltModel, source: Loader) -> list[Group]:
        """The groups of the next prompts of all ranks, on every rank."""
        config = self.config
        how = (config.rollout, config.rewards, config.training.seed, self.exchange)
        if self.exchange is not None:
            set_timeout(self.exchange, config.comm.save_timeout_seconds)  # longer than any step
        return draw_groups(policy, source, self.functions, self.ends, *how)

    def roll_out(self, policy: BuiltModel, source: Loader) -> list[Group]:
        """New groups of all ranks, on every rank: one for each prompt of a step.

        Where prompts may be drawn again, groups whose rewards vary come first.
        """
        settings = self.config.grpo
        drawn: list[Group] = []
        wanted = 0
        for _ in range(1 + settings.resample):
            drawn += self.draw(policy, source)
            wanted = wanted or len(drawn)
            if sum(group.varies for group in drawn) >= wanted:
                break
        for group in drawn:
            advantages = advantages_of([group.rewards], settings)[0].tolist()
            for sample, advantage in zip(group.samples, advantages, strict=True):
                sample.advantage = advantage
        self.told = statistics(drawn)
        if dist.get_rank() == 0:
            self.file.write(drawn, self.steps + 1)
        if len(drawn) > wanted:
            drawn.sort(key=lambda group: not group.varies)
        return drawn[:wanted]

    def note_findings(self, policy: BuiltModel, own: list[Sample]) -> None:
        """Notes what training and the reference find of the samples, and how sampling differs."""
        temperature = self.config.rollout.temperature
        laid = self.laid_out(own)
        found = logprobs_of_samples(policy, laid, own, temperature)
        for sample, old in zip(own, found, strict=True):
            sample.old = old
        if self.kind is not None:
            context: AbstractContextManager[None] = nullcontext()
            if self.kind == "base":
                context = without_adapters(policy.model)
            with context:
                asked = self.reference or policy
                reference = logprobs_of_samples(asked, laid, own, temperature)
            for sample, values in zip(own, reference, strict=True):
                sample.reference = values
        trained = [one for one in own if self.targets.is_trained(one)]
        pairs = [pair for one in trained for pair in zip(one.sampled, one.old, strict=True)]
        apart = torch.tensor(pairs, device=policy.device).view(-1, 2).diff(dim=1).abs()
        largest = apart.max() if len(apart) else apart.sum()
        sums = torch.stack([apart.sum(), (apart > _MISMATCH).sum(), apart.new_tensor(len(apart))])
        dist.all_reduce(sums)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        count = max(sums[2].item(), 1)
        self.told |= {
            "mismatch_mean": sums[0].item() / count,
            "mismatch_largest": largest.item(),
            "mismatch_share": sums[1].item() / count,
        }

    def annotate(self, policy: BuiltModel, batches: Sequence[Batch], loss: Loss) -> Sequence[Batch]:
        """Adds the ratios of whole completions, where gspo needs them."""
        if self.config.grpo.loss != "gspo":
            return batches
        temperature = self.config.rollout.temperature
        return [with_log_ratios(policy, batch, temperature) for batch in batches]

    def report(self, sums: dict[str, float], counts: dict[str, float]) -> dict[str, float | None]:
        """The loss, what the newest completions are worth, and means over trained tokens."""
        trained = max(counts["trained_tokens"], 1)
        row: dict[str, float | None] = {"loss": sums["loss"] / max(counts[self.denominator], 1)}
        row |= self.told
        row |= {name: sums[name] / trained for name in ("entropy", "clipped")}
        if self.kind is not None:
            row["divergence"] = sums["divergence"] / trained
        return row

    def state_dict(self) -> dict[str, object]:
        """The number of steps, and the completions that updates are left for, of all ranks."""
        kept: list[list[dict[str, Any]]] = []
        if self.updates_left:
            of_ranks: list[list[list[Sample]]] = [[]] * dist.get_world_size()
            dist.all_gather_object(of_ranks, self.own)
            kept = [[asdict(one) for one in group] for part in of_ranks for group in part]
        numbers = {"steps": self.steps, "updates_left": self.updates_left, "told": self.told}
        return numbers | {"groups": kept}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Goes on from what `state_dict` gave."""
        self.steps = cast(int, state["steps"])
        self.updates_left = cast(int, state["updates_left"])
        self.told = cast(dict[str, float | None], state["told"])
        saved = cast(list[list[dict[str, Any]]], state["groups"])
        self.resumed = [[Sample(**one) for one in group] for group in saved]
