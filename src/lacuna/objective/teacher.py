"""The teacher of a distillation: a model of its own, or what is on disk of it."""

import os
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lacuna.config import Config, UserError, explained
from lacuna.config.adapters import LoraConfig, QuantizationConfig
from lacuna.config.attentions import is_own
from lacuna.config.objectives import DistillationConfig
from lacuna.config.sections import ModelConfig
from lacuna.data.cache import fingerprint
from lacuna.data.teacher import read_description
from lacuna.data.tokenizer import grown_tokenizer
from lacuna.model.architecture import decoder_layers, load_model_config, meta_model
from lacuna.model.build import BuiltModel, build_frozen
from lacuna.model.head import Head
from lacuna.model.layers.wrapping import whole_tensor
from lacuna.model.weights import weight_files
from lacuna.parallel.mesh import Mesh


@dataclass(frozen=True)
class TeacherHead:
    """The teacher's head, whole on every rank: it makes logits of a chunk of hidden states."""

    weight: Tensor
    bias: Tensor | None
    head: Head

    def __call__(self, states: Tensor) -> Tensor:
        """Logits [tokens, vocabulary], float32, of hidden states [tokens, width]."""
        return self.head.logits(F.linear(states.to(self.weight.dtype), self.weight, self.bias))


def build_teacher(config: Config, mesh: Mesh, device: torch.device) -> BuiltModel:
    """The teacher of a run, spread over the ranks of `mesh`.

    Raises `UserError` for one that cannot be had, or whose logits cannot be made chunk by chunk.
    """
    settings = teacher_config(config)
    if settings.parallelism.expert_parallel_degree == 1:
        mesh = replace(mesh, layout=replace(mesh.layout, ep=1), experts=None)
    with explained("distillation.teacher", UserError, mend="choose another teacher"):
        teacher = build_frozen(settings, grown_tokenizer(settings.model), mesh, device)
    if not teacher.head.chunked:
        raise UserError(
            "distillation.teacher: its head does more than lacuna knows, so that its logits cannot "
            "be made chunk by chunk: choose another teacher."
        )
    return teacher


def teacher_head(teacher: BuiltModel) -> TeacherHead:
    """The head of a teacher, which this rank runs, whole."""
    linear: nn.Linear = teacher.stages[-1].module.get_output_embeddings()
    bias = None if linear.bias is None else whole_tensor(linear.bias)
    return TeacherHead(whole_tensor(linear.weight).detach(), bias, teacher.head)


def stored_by(settings: DistillationConfig) -> dict[str, str]:
    """The checksums of `distillation.teacher_logprobs`.

    Raises `UserError` where the files are damaged, or of another teacher than the one that is set,
    or of one that was quantised otherwise.
    """
    folder, teacher = str(settings.teacher_logprobs), settings.teacher
    told = read_description(folder)
    is_other = teacher is not None and told["teacher"] != teacher
    if teacher is not None and os.path.isdir(teacher):
        is_other = told["weights"] != fingerprint(weight_files(teacher))
    if is_other:
        raise UserError(
            f"distillation.teacher_logprobs: {folder} holds what {told['teacher']} said, and "
            f"distillation.teacher is {teacher}, another model: drop one of the two, or write the "
            "first anew with: lacuna teach RUN.toml"
        )
    if teacher is not None and told["teacher_base"] != settings.teacher_base:
        raise UserError(
            f"distillation.teacher_base: {folder} holds what {teacher} said with "
            f"{told['teacher_base']}, not with {settings.teacher_base}: take the change back, or "
            "write the folder anew with: lacuna teach RUN.toml"
        )
    files: dict[str, str] = told["files"]
    return files


def _teacher_model(settings: DistillationConfig, student: ModelConfig) -> ModelConfig:
    """The settings of the teacher as a model; it has the attention that its own files say."""
    return ModelConfig(
        name_or_path=settings.teacher,
        trust_remote_code=student.trust_remote_code,
        attention="auto" if is_own(student.attention) else student.attention,
    )


def teacher_config(config: Config) -> Config:
    """The settings of a run whose model is the teacher: the same layout, its own weights.

    Only experts are spread otherwise where it has none. Raises `UserError` for one that cannot be
    had.
    """
    model = _teacher_model(config.distillation, config.model)
    base = QuantizationConfig(base=config.distillation.teacher_base)
    changes = {"model": model, "lora": LoraConfig(), "quantization": base}
    if config.parallelism.expert_parallel_degree > 1 and not _has_experts(model):
        alone = {"expert_parallel_degree": 1}
        changes["parallelism"] = config.parallelism.model_copy(update=alone)
    return config.model_copy(update=changes)


def _has_experts(settings: ModelConfig) -> bool:
    """Whether a teacher's layers have stacks of experts, which can be spread over ranks."""
    from lacuna.parallel.expert_stacks import stacks_of

    with explained("distillation.teacher", UserError, mend="choose another teacher"):
        model_config = load_model_config(settings, grown_tokenizer(settings))
        model = meta_model(model_config, None, torch.float32)
    return bool(stacks_of(decoder_layers(model)))


def teacher_tokenizer(
    settings: DistillationConfig, student: ModelConfig
) -> PreTrainedTokenizerBase:
    """The tokenizer of the teacher of a `student`. Raises `UserError` where there is none."""
    try:
        return grown_tokenizer(_teacher_model(settings, student))
    except UserError as error:
        reason = str(error).rpartition(";")[0]  # what would mend it is for the model's own
        raise UserError(
            f"distillation.teacher: {reason}; give a Hub id or a folder that has a tokenizer."
        ) from error


def check_vocabulary(
    settings: DistillationConfig, student: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raises `UserError` unless the teacher has the same tokens as the `student`'s tokenizer."""
    theirs = teacher_tokenizer(settings, student).get_vocab()
    ours = tokenizer.get_vocab()
    if theirs == ours:
        return
    token, number = min(ours.items() ^ theirs.items(), key=lambda pair: (pair[1], pair[0]))
    of = "the model" if (token, number) in ours.items() else "the teacher"
    raise UserError(
        f"distillation.teacher: {settings.teacher} has another vocabulary: token "
        f"{number} is {token!r} for {of} alone: choose a teacher with the model's tokenizer."
    )
