"""A trained model as a Hugging Face folder: safetensors with an index, configuration, tokenizer."""

import json
import os
import shutil
from collections.abc import Iterator

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from lacuna.config.errors import RunError
from lacuna.model.architecture import decoder_layers
from lacuna.model.build import meta_model

FILE_BYTES = 5 * 10**9


def _full(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole tensor on the CPU, gathered from the ranks that share it (a collective)."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().to("cpu", dtype if whole.is_floating_point() else whole.dtype)


def hub_tensors(model: PreTrainedModel, shadow: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors one decoder layer at a time, under the names that files on the Hub have.

    Every rank must iterate: gathering is a collective. `shadow` is the same model unsharded, whose class tells
    transformers which fused weights (experts) to take apart again.
    """
    tensors = dict(model.named_parameters())
    persistent = set(model.state_dict(keep_vars=True))
    tensors.update({name: buffer for name, buffer in model.named_buffers() if name in persistent})
    layers = decoder_layers(shadow)
    root = next(name for name, module in shadow.named_modules() if module is layers)
    prefixes = [f"{root}.{index}." for index in range(len(layers))]
    rest = [name for name in tensors if not name.startswith(f"{root}.")]
    groups = [rest, *([name for name in tensors if name.startswith(prefix)] for prefix in prefixes)]
    for names in groups:
        gathered = {name: _full(tensors[name], dtype) for name in names}
        yield from revert_weight_conversion(shadow, gathered).items()


def _numbered(index: int, total: int) -> str:
    return "model.safetensors" if total == 1 else f"model-{index + 1:05d}-of-{total:05d}.safetensors"


class _ShardWriter:
    """Collects tensors into files of at most `FILE_BYTES`, so that memory stays bounded, then names them."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.pending: dict[str, Tensor] = {}
        self.size = 0
        self.files: list[list[str]] = []
        self.total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self.pending and self.size + size > FILE_BYTES:
            self.flush()
        self.pending[name] = tensor.contiguous()
        self.size += size
        self.total += size

    def flush(self) -> None:
        path = os.path.join(self.folder, f"part-{len(self.files)}")
        try:
            save_file(self.pending, path, metadata={"format": "pt"})
        except SafetensorError as error:  # what the system says of a full disk arrives as this
            raise RunError(f"cannot write the model to {self.folder}: {error}. Checkpoints are intact.") from error
        self.files.append(list(self.pending))
        self.pending, self.size = {}, 0

    def finish(self) -> None:
        if self.pending:
            self.flush()
        count = len(self.files)
        for index in range(count):
            os.replace(os.path.join(self.folder, f"part-{index}"), os.path.join(self.folder, _numbered(index, count)))
        if count > 1:
            weight_map = {name: _numbered(index, count) for index, names in enumerate(self.files) for name in names}
            with open(os.path.join(self.folder, "model.safetensors.index.json"), "w") as file:
                json.dump({"metadata": {"total_size": self.total}, "weight_map": weight_map}, file, indent=2)


def save_model_description(
    folder: str, model_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, source: str | None = None
) -> None:
    """Writes configuration, generation configuration and tokenizer into `folder`.

    `source` is the HF folder or id that the model came from, whose generation settings are kept.
    """
    model_config.save_pretrained(folder)
    generation = None
    if source is not None:
        try:
            generation = GenerationConfig.from_pretrained(source)
        except OSError:  # many models have none: the configuration's tokens are used then
            generation = None
    generation = generation or GenerationConfig.from_model_config(model_config)
    if generation.eos_token_id is None:
        generation.eos_token_id = tokenizer.eos_token_id
    if generation.pad_token_id is None:
        generation.pad_token_id = tokenizer.pad_token_id
    generation.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str,
    dtype: torch.dtype,
    is_first: bool,
    source: str | None = None,
) -> None:
    """Writes `model` to `folder` as `AutoModelForCausalLM.from_pretrained` opens it. All ranks must call it.

    The folder appears whole or not at all: it is written beside its place and renamed.
    """
    model_config = type(model.config).from_dict({**model.config.to_dict(), "use_cache": True})
    model_config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model_config.dtype = dtype
    shadow = meta_model(model.config, "eager", dtype)
    unfinished = f"{folder.rstrip(os.sep)}.unfinished"
    writer = _ShardWriter(unfinished) if is_first else None
    if is_first:
        shutil.rmtree(unfinished, ignore_errors=True)
        os.makedirs(unfinished)
    for name, tensor in hub_tensors(model, shadow, dtype):
        if writer is not None:
            writer.add(name, tensor)
    if writer is not None:
        writer.finish()
        save_model_description(unfinished, model_config, tokenizer, source)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unfinished, folder)
