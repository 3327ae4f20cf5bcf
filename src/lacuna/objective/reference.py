"""The reference that preferences are measured from: the model as it was before training."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lacuna.config import Config, UserError
from lacuna.config.adapters import LoraConfig
from lacuna.config.machine import CheckpointConfig
from lacuna.config.objectives import PreferenceConfig
from lacuna.config.reinforcement import GrpoConfig, PpoConfig
from lacuna.data import Batch
from lacuna.data.tokenizer import grown_tokenizer
from lacuna.model.build import BuiltModel, build_frozen
from lacuna.model.forward import sequence_logprobs
from lacuna.model.layers.lora import without_adapters
from lacuna.parallel.fsdp import inference


def begins_as_base(lora: LoraConfig) -> bool:
    """Whether a model without its adapters is what training begins with."""
    return lora.rank > 0 and not (lora.modules or lora.adapter or lora.init != "zero")


def reference_kind(
    settings: PreferenceConfig, lora: LoraConfig, checkpoint: CheckpointConfig, folder: str
) -> str | None:
    """Where the reference comes from (base, copy or cached), or None where the loss needs none.

    `folder` is that of the run. Raises `UserError` where the reference would not be what training
    begins with.
    """
    if not settings.needs_reference:
        return None
    if settings.reference == "cached":
        return "cached"
    kind = _base_or_copy(settings.reference, "preference", lora, "copy or cached")
    setting = f"preference.reference = {kind}"
    require_files_of_model(setting, "set it to cached, or ", checkpoint, folder)
    return kind


def on_policy_reference_kind(
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
    if not settings.beta:
        return None
    kind = _base_or_copy(settings.reference, task, lora, "copy")
    require_files_of_model(f"{task}.beta", "", checkpoint, folder)
    return kind


def _base_or_copy(asked: str, task: str, lora: LoraConfig, others: str) -> str:
    """The kind that is asked for, or the cheaper one where that is auto.

    Raises `UserError` for a base that is not what training begins with; `others` may be used.
    """
    is_base = begins_as_base(lora)
    if asked == "base" and not is_base:
        raise UserError(
            f"{task}.reference = base: without its adapters the model is not what training begins "
            f"with (lora.rank is 0, or lora.modules, lora.adapter or lora.init is set): use "
            f"{others}."
        )
    return "base" if is_base and asked != "copy" else "copy"


def require_files_of_model(
    setting: str, mend: str, checkpoint: CheckpointConfig, folder: str
) -> None:
    """Raises `UserError` for a run that begins with a checkpoint: what a setting adds would not."""
    checkpoints = Path(folder, checkpoint.folder)
    start = checkpoint.initial_load_path
    if start or (checkpoints / "step-0").exists():
        raise UserError(
            f"{setting}: the run begins with the weights of a checkpoint "
            f"({start or checkpoints / 'step-0'}), and what this adds with those of the model's "
            f"own files: {mend}convert the checkpoint with lacuna convert --to hf and give that as "
            "model.name_or_path."
        )


@dataclass
class Reference:
    """Log-probabilities of sequences by the model that training began with.

    `kind` says where they come from: the model without its adapters (base), a frozen copy, or a
    pass over all data before training (cached). `config` is that of the run: the trained model may
    have another, since where a run goes on its adapters no longer begin with what the settings say.
    """

    kind: str
    config: Config
    known: dict[str, float] = field(default_factory=dict)
    copy: BuiltModel | None = None

    def prepare(self, policy: BuiltModel, all_batches: Callable[[], Iterable[Batch]]) -> None:
        """Makes the copy, or asks the model, as it is before training, for every sequence."""
        if self.kind == "copy":
            tokenizer = grown_tokenizer(self.config.model)
            self.copy = build_frozen(self.config, tokenizer, policy.mesh, policy.device)
        elif self.kind == "cached" and not self.known:
            own: dict[str, float] = {}
            for batch in all_batches():
                logprobs = read_without_gradient(policy, batch)
                if logprobs is not None:
                    own |= zip(sequence_keys(batch), logprobs.tolist(), strict=True)
            of_ranks: list[dict[str, float]] = [{}] * dist.get_world_size()
            dist.all_gather_object(of_ranks, own)
            self.known = {key: value for part in of_ranks for key, value in part.items()}

    def load(self, known: dict[str, float]) -> None:
        """Goes on with what was computed before training.

        Raises `UserError` where nothing was, and it is too late to ask.
        """
        if self.kind == "cached" and not known:
            raise UserError(
                "preference.reference = cached: this run began without one, and its model is no "
                "longer what it began with: take the setting back, or start a new run."
            )
        self.known = known

    def annotate(self, policy: BuiltModel, batch: Batch) -> Batch:
        """The batch with the sequence column `reference`.

        Raises `UserError` for a sequence that was not in the data when training began.
        """
        if self.kind == "cached":
            values = [self.known.get(key) for key in sequence_keys(batch)]
            if None in values:
                raise UserError(
                    "preference.reference = cached: the data has answers that it had not when "
                    "training began: start a new run, or set it to copy."
                )
            logprobs: Tensor | None = torch.tensor(values, dtype=torch.float32)
        else:
            asked = self.copy or policy
            logprobs = read_without_gradient(asked, batch, is_base=self.kind == "base")
        return with_sequence_column(batch, "reference", logprobs)


def read_without_gradient(asked: BuiltModel, batch: Batch, is_base: bool = False) -> Tensor | None:
    """The log-probabilities of the sequences of a batch, None on ranks without the head.

    The layers record what a backward pass would need, as in training: compiled, they would round in
    other places without it, and what these are compared with would differ from them though nothing
    had changed. So it is in all stages of a pipeline.
    """
    context: AbstractContextManager[None] = nullcontext()
    if is_base:
        context = without_adapters(asked.model)
    with inference(*(stage.module for stage in asked.stages)), context, torch.enable_grad():
        found = asked.read(batch, sequence_logprobs)
    return None if found is None else found.detach()


def with_sequence_column(batch: Batch, name: str, column: Tensor | None) -> Batch:
    """The batch with one more column of its sequences, or one value for them all.

    Without a `column` it is zeros: another rank knows the values.
    """
    chosen = batch.sequence_columns["chosen"]
    column = torch.zeros_like(chosen) if column is None else column.expand(len(chosen))
    return replace(batch, sequence_columns=batch.sequence_columns | {name: column})


def with_divergence(policy: BuiltModel, batches: Sequence[Batch]) -> list[Batch]:
    """Batches of a step with KTO's estimate of how far the model is from the reference.

    It is a mean over the answers of other rows, on all ranks, and at least 0.
    """
    total = torch.zeros(2, device=policy.device)
    for batch in batches:
        logprobs = read_without_gradient(policy, batch)
        if logprobs is not None:
            mismatched = batch.sequence_columns["mismatched"].to(policy.device)
            ratios = logprobs - batch.sequence_columns["reference"].to(policy.device)
            total += torch.stack([(ratios * mismatched).sum(), mismatched.sum()])
    dist.all_reduce(total)
    divergence = (total[0] / total[1].clamp(min=1)).clamp(min=0)
    return [with_sequence_column(batch, "divergence", divergence) for batch in batches]


def sequence_keys(batch: Batch) -> list[str]:
    """What tells each sequence of a batch from all others: a digest of its tokens and labels."""
    ids, labels, real = (
        batch.columns[name].flatten().numpy() for name in ("input_ids", "labels", "real")
    )
    bounds = batch.cu_seqlens.tolist()
    return [
        hashlib.blake2b(ids[a:b].tobytes() + labels[a:b].tobytes(), digest_size=16).hexdigest()
        for a, b in zip(bounds[:-1], bounds[1:], strict=True)
        if a < b and real[a]
    ]
