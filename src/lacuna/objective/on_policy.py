"""What all objectives share that learn from completions of the model in training."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from lacuna.config import Config, UserError, logger
from lacuna.config.row_form import RowForm
from lacuna.data import Batch, HeldOut, Loader
from lacuna.data.chat import end_of_turn
from lacuna.data.tokenizer import grown_tokenizer
from lacuna.model.build import BuiltModel, build_frozen
from lacuna.model.layers.lora import without_adapters
from lacuna.objective.critic import SecondModel
from lacuna.objective.dropout import leave_out_dropout
from lacuna.objective.held_out import held_out_groups, held_out_row
from lacuna.objective.language_modelling import LanguageModelling
from lacuna.objective.sample_batches import logprobs_of_samples, mismatch_of, part_of_rank
from lacuna.objective.sample_rows import LaidOut, Targets, lay_out
from lacuna.objective.success import Successes, put_back_on_outage
from lacuna.objective.worth import unjudged_batches
from lacuna.parallel.processes import set_timeout
from lacuna.rollout.completions_file import CompletionsFile
from lacuna.rollout.completions_table import show_completions
from lacuna.rollout.environment import check_environment
from lacuna.rollout.groups import Group, Sample, draw_groups, next_prompts
from lacuna.rollout.reward_models import RewardModel, load_models
from lacuna.rollout.rewards import longest_wait
from lacuna.rollout.sampling import check_engine
from lacuna.rollout.verifiers import Reward


class OnPolicy(LanguageModelling):
    """Draws completions of the model's prompts, and gives them to the loop as batches.

    Attributes:
        functions: say what completions are worth.
        targets: what the loss takes of each.
        reference: a frozen copy, where the model is compared with one.
        kind: where the reference comes from: base, copy, or None without one.
        sharing: how many ranks, one after the other, have the same completions.
        successes: how often prompts were solved, where that says which come next.
        told: what the log has of the newest completions.
    """

    trains_on = "prompts"
    config: Config
    tokenizer: PreTrainedTokenizerBase
    functions: Mapping[str, Reward]
    targets: Targets
    ends: list[int]
    reference: BuiltModel | None = None
    kind: str | None = None
    exchange: dist.ProcessGroup | None = None
    sharing = 1
    successes: Successes | None = None

    def begin(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        functions: Mapping[str, Reward],
        updates: int,
    ) -> None:
        """Begins with no completions; `updates` steps are made on the same ones.

        Raises `UserError` for completions of several turns that cannot be had.
        """
        if config.rollout.takes_turns:
            check_environment(config.rollout, config.rewards.functions, tokenizer)
            if any(isinstance(function, RewardModel) for function in functions.values()):
                raise UserError(
                    "rewards.functions, rollout.environment: models score a prompt with one "
                    "answer, and completions have several turns: drop the model, or ask it in a "
                    "function of your own."
                )
        self.config = config
        self.tokenizer = tokenizer
        self.functions = functions
        self.ends = end_of_turn(tokenizer)
        self.updates = updates
        self.steps = 0  # of the run so far
        self.updates_left = 0
        self.own: list[list[Sample]] = []  # this rank's groups
        self.rows_of_own: LaidOut | None = None  # what they are laid out as, once they are
        self.resumed: list[list[Sample]] = []  # those of all ranks, where a run goes on with them
        self.told: dict[str, float | None] = {}
        if config.curriculum.by_success:
            how = (config.curriculum, config.rewards.solved_at, config.training.seed)
            self.successes = Successes(*how)
        self.unjudged = 0  # batches of completions in a row of which none is worth anything
        self.is_under_way = False  # whether this process has made a step or a validation
        self.next_shown = 0  # the step from which on completions are shown again
        folder = str(config.job.dump_folder)
        self.file = CompletionsFile(folder)
        self.held_out_file = CompletionsFile(folder, "validation_completions.jsonl")

    def roll_out(self, policy: BuiltModel, source: Loader) -> list[Group]:
        """New groups of all ranks, on every rank: one for each prompt of a step."""
        raise NotImplementedError

    def prepare(
        self, policy: BuiltModel, all_batches: Callable[[], Iterable[Batch]]
    ) -> SecondModel | None:
        """Loads models that score, and builds the reference where that is a copy."""
        if not policy.head.chunked:
            raise UserError(
                "model: its head does more than lacuna knows, so that log-probabilities cannot be "
                f"made chunk by chunk for job.task = {self.config.job.task}: choose another model."
            )
        leave_out_dropout(policy.model)
        self.sharing = policy.mesh.layout.sharing
        self.exchange = dist.new_group(backend="gloo")
        check_engine(policy, self.config.rollout, self.exchange)
        load_models([*self.functions.values()], policy.device)
        if self.kind == "copy":
            tokenizer = grown_tokenizer(self.config.model)
            self.reference = build_frozen(self.config, tokenizer, policy.mesh, policy.device)
        return None

    def next_step(self, policy: BuiltModel, source: Loader) -> Sequence[Batch]:
        """This rank's completions in micro-batches, newly made unless updates are left for them."""
        self._go_on_with_files()
        is_new = not self.updates_left
        if is_new or self.resumed:
            self.rows_of_own = None
        if is_new:
            with put_back_on_outage(source, self.successes):
                groups = [group.samples for group in self.roll_out(policy, source)]
            self.own = part_of_rank(groups, policy)
            self.updates_left = self.updates
            if self.successes is not None:
                self.told |= self.successes.shares()
        elif self.resumed:
            self.own = part_of_rank(self.resumed, policy)
        # A run may go on with a reference that it had none of before.
        is_lacking = any(not one.reference for group in self.resumed for one in group)
        self.resumed = []
        self.steps += 1
        self.updates_left -= 1
        own = [sample for group in self.own for sample in group]
        if is_new:
            self.note_findings(policy, own)
        elif is_lacking and self.kind is not None:
            self._note_reference(policy, own)
        return self.own_rows(own).with_columns(self.targets.of(own)).batches

    def laid_out(
        self, samples: Sequence[Sample], targets: Targets, form: RowForm | None = None
    ) -> LaidOut:
        """Samples in this rank's micro-batches, as many as on all others.

        Their rows have the form that the settings say, unless another is given.
        """
        config = self.config
        padding = self.tokenizer.eos_token_id or 0
        form = form or config.row_form
        return lay_out(samples, config.training, form, config.data, padding, targets)

    def own_rows(self, own: Sequence[Sample]) -> LaidOut:
        """This rank's newest completions without columns, as every reading and step has them.

        They are laid out once: what becomes known of them later is in columns.
        """
        if self.rows_of_own is None:
            self.rows_of_own = self.laid_out(own, self.targets.only_read())
        return self.rows_of_own

    def draw(self, policy: BuiltModel, source: Loader) -> list[Group]:
        """The groups of the next prompts of all ranks, on every rank."""
        config = self.config
        how = (config.rollout, config.rewards, config.training.seed, self.exchange)
        training = config.training
        prompts = training.batch_size * (training.gradient_accumulation_steps or 1)
        self._wait_for_completions(prompts * config.rollout.samples)
        draw_prompts = next_prompts if self.successes is None else self.successes.next_prompts
        asked, keys = draw_prompts(policy, source)
        groups = draw_groups(policy, source.plan, asked, keys, self.functions, self.ends, *how)
        if self.functions:
            self.unjudged = unjudged_batches(groups, self.unjudged)
        if self.successes is not None:
            self.successes.note(groups)
        return groups

    def measure_held_out(
        self, policy: BuiltModel, held_out: HeldOut
    ) -> tuple[dict[str, float | None], float]:
        """What rewards say of the answers to held-out prompts, and minus their mean.

        Writes the answers to the run folder.
        """
        config = self.config
        self._go_on_with_files()
        prompts = -(-len(held_out.plan.tokens.lengths) // dist.get_world_size())
        self._wait_for_completions(prompts * config.rollout.validation_samples)
        how = (config.rollout, config.rewards, config.training.seed, self.exchange)
        groups = held_out_groups(policy, held_out, self.functions, self.ends, *how)
        if dist.get_rank() == 0:
            self.held_out_file.write(groups, self.steps, leave_out=("advantage",))
        row = held_out_row(groups, config.rewards.solved_at)
        reward = row["val_reward"]
        return row, math.inf if reward is None else -reward

    def _wait_for_completions(self, count: int) -> None:
        """Has ranks wait longer than any of them makes so many, and is told what they are worth."""
        if self.exchange is None:
            return
        waiting = longest_wait(self.config.rewards, count)
        if self.config.rollout.takes_turns:  # each environment may fail to reply in time
            waiting += count * self.config.rewards.timeout_seconds
        set_timeout(self.exchange, self.config.comm.save_timeout_seconds + int(waiting))

    def _go_on_with_files(self) -> None:
        """Drops from the files, once, what a run wrote that was killed after this one's start."""
        if not self.is_under_way and dist.get_rank() == 0:
            self.file.go_on(self.steps)
            # A run from the start asks held-out prompts before its first step, as once before.
            self.held_out_file.go_on(self.steps or -1)
        self.is_under_way = True

    def keep(self, groups: Sequence[Group], leave_out: Sequence[str] = ()) -> None:
        """Writes new completions to the run folder, and shows some on the terminal."""
        if dist.get_rank() > 0:
            return
        step = self.steps + 1
        self.file.write(groups, step, leave_out)
        if step >= self.next_shown:
            self.next_shown = step + self.config.metrics.log_freq
            show_completions(groups, step, self.config.rollout.shown, leave_out)

    def note_findings(self, policy: BuiltModel, own: list[Sample]) -> None:
        """Notes what training and the reference find of the samples, and how sampling differs."""
        temperature = self.config.rollout.temperature
        found = logprobs_of_samples(policy, self.own_rows(own), own, temperature)
        for sample, old in zip(own, found, strict=True):
            sample.old = old
        if self.kind is not None:
            self._note_reference(policy, own)
        trained = [one for one in own if self.targets.is_trained(one)]
        self.told |= mismatch_of(trained, policy.device)

    def _note_reference(self, policy: BuiltModel, own: list[Sample]) -> None:
        """Notes what the reference finds of the samples."""
        laid = self.own_rows(own)
        context: AbstractContextManager[None] = nullcontext()
        if self.kind == "base":
            context = without_adapters(policy.model)
        with context:
            asked = self.reference or policy
            found = logprobs_of_samples(asked, laid, own, self.config.rollout.temperature)
        for sample, values in zip(own, found, strict=True):
            sample.reference = values

    @property
    def _found_with(self) -> list[object]:
        """The settings that the log-probabilities of samples depend on."""
        return [self.config.rollout.temperature, self.config.grpo.mask_truncated]

    def state_dict(self) -> dict[str, object]:
        """The number of steps, and the completions that updates are left for, of all ranks."""
        kept: list[list[dict[str, Any]]] = []
        if self.updates_left:
            of_ranks: list[list[list[Sample]]] = [[]] * dist.get_world_size()
            dist.all_gather_object(of_ranks, self.own)
            different = of_ranks[:: self.sharing]  # ranks that share sequences have the same
            kept = [[dict(vars(one)) for one in group] for part in different for group in part]
        numbers = {"steps": self.steps, "updates_left": self.updates_left, "told": self.told}
        numbers |= {"found_with": self._found_with}
        successes = None if self.successes is None else self.successes.state_dict()
        return numbers | {"groups": kept, "successes": successes}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Goes on from what `state_dict` gave."""
        self.steps = cast(int, state["steps"])
        self.updates_left = cast(int, state["updates_left"])
        self.told = cast(dict[str, float | None], state["told"])
        successes = cast(dict[str, Any] | None, state.get("successes"))
        if self.successes is not None and successes is not None:
            self.successes.load_state_dict(successes)
        if state.get("found_with", self._found_with) != self._found_with:
            logger.warning(
                "completions that updates were left for are dropped: their log-probabilities were "
                "found with another rollout.temperature or mask_truncated"
            )
            self.updates_left = 0
        saved = cast(list[list[dict[str, Any]]], state["groups"])
        self.resumed = [[Sample(**one) for one in group] for group in saved]
