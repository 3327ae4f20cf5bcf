"""The settings of adapters and of the weights beside them, and peft's description of adapters."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, TypeAdapter, model_validator
from safetensors import SafetensorError, safe_open

from lacuna.config.errors import UserError, explained
from lacuna.config.fields import Names, Paths, Section, read_value

# The files that peft writes an adapter to.
ADAPTER_FILE = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

# Our name of an adapter's setting -> peft's name.
ADAPTER_FIELDS = {
    "rank": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "targets": "target_modules",
    "parameters": "target_parameters",
    "modules": "modules_to_save",
    "rslora": "use_rslora",
    "dora": "use_dora",
}

# With one of these (not empty) an adapter of peft's computes something that lacuna does not.
_UNKNOWN = ("alpha_pattern", "rank_pattern", "lora_bias", "alora_invocation_tokens")
# peft's ways to initialise an adapter that also change the weights of the base.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
# Where one of these is set, target_modules alone does not tell which layers have an adapter: the
# file of weights does.
_CHOICES = {"exclude_modules", "layers_to_transform"}


def described_adapter(folder: str) -> dict[str, Any]:
    """What peft's description says of the LoRA adapter in a folder; its layers are listed by name.

    Raises `UserError` where it cannot be read, or describes something that lacuna does not know.
    """
    file = Path(folder, ADAPTER_FILE)
    unreadable = (OSError, ValueError, SafetensorError)
    wrong = f"lora.adapter: cannot read {file}"
    with explained(wrong, *unreadable, mend="give the folder of an adapter"):
        described = dict(json.loads(file.read_text()))
        stated = {name: value for name, value in described.items() if value is not None}
        _move_layers_to_modules(stated)
        chosen = stated.get("target_modules", ())
        if stated.keys() & _CHOICES or isinstance(chosen, str):
            stated["target_modules"] = _adapted_layers(file.with_name(ADAPTER_WEIGHTS))
    for name in _UNKNOWN:
        if stated.get(name):
            raise UserError(f"lora.adapter: {file} has {name}, which lacuna does not know.")
    if stated.get("peft_type") != "LORA":
        raise UserError(f"lora.adapter: {file} is of no LoRA adapter.")
    start = str(stated.get("init_lora_weights")).partition("_")[0]
    if start in _CHANGES_BASE:
        raise UserError(
            f"lora.adapter: {file} began by {start}, which changes the base: save it with peft's "
            "path_initial_model_for_weight_conversion."
        )
    return stated


def _move_layers_to_modules(stated: dict[str, Any]) -> None:
    """Moves layers from the list of parameters, where they are named by their weight, to modules.

    Users of peft list them as parameters where peft would misread the layers' own names.
    """
    named = stated.get("target_parameters", ())
    chosen = stated.get("target_modules", ())
    layers = [name.removesuffix(".weight") for name in named if name.endswith(".weight")]
    if layers and not isinstance(chosen, str):
        stated["target_modules"] = [*chosen, *layers]
        stated["target_parameters"] = [name for name in named if not name.endswith(".weight")]


def _adapted_layers(weights: Path) -> list[str]:
    """The names of the layers that an adapter's file of weights has matrices for."""
    with safe_open(weights, framework="pt") as file:
        keys = " ".join(file.keys())
    return re.findall(r"base_model\.model\.(\S+)\.lora_A\.weight", keys)


class LoraConfig(Section):
    """Adapters (LoRA): the model stays as it is, and small matrices beside its layers learn."""

    adapter: Paths = ()
    """Folder of an adapter, peft's or a run's hf/adapter, that training starts from; the settings
    below are by default those of that adapter. Several, which must be for the same layers, are
    added up to one adapter; its rank is the sum of their ranks."""

    rank: NonNegativeInt = 0
    """Width of the adapters; 0 trains the model itself."""

    alpha: float = Field(default=16.0, gt=0)
    """The adapters' part of a layer's output is multiplied by alpha / rank."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the inputs, drawn at random, that adapters are not shown."""

    targets: Names = ("all-linear",)
    """Linear layers that get an adapter: names or patterns. all-linear means all but the head and
    gates that have a single output."""

    parameters: Names = ()
    """Stacks of weights, such as those of experts, that get an adapter: names or patterns of
    parameters (peft's target_parameters)."""

    modules: Names = ()
    """Modules that are trained whole beside the adapters, by name or pattern (peft's
    modules_to_save)."""

    rslora: bool = False
    """Multiply the adapters' part by alpha / sqrt(rank) instead of alpha / rank (rsLoRA)."""

    dora: bool = False
    """Learn the lengths of the rows of weights apart from their directions (DoRA)."""

    init: Literal["zero", "loftq"] = "zero"
    """What new adapters begin as: zero changes nothing; loftq gives back as much of what
    quantization.base rounds off as their rank can hold (LoftQ), and learns best at a somewhat lower
    rate."""

    @model_validator(mode="before")
    @classmethod
    def _as_described(cls, given: Any) -> Any:
        """Takes settings that are not given from the adapters that training starts from."""
        if not isinstance(given, dict) or not given.get("adapter"):
            return given
        if given.keys() >= ADAPTER_FIELDS.keys():
            return given
        folders = TypeAdapter(Paths).validate_python(given["adapter"])
        stated = [{"target_modules": ()} | described_adapter(folder) for folder in folders]
        for description, (setting, name) in product(stated, ADAPTER_FIELDS.items()):
            cls._check_described(setting, name, description)
        fields = ADAPTER_FIELDS.items()
        adapters = [{ours: one[name] for ours, name in fields if name in one} for one in stated]
        settings = adapters[0]
        if len(adapters) > 1:
            settings["rank"] = sum(adapter["rank"] for adapter in adapters)
        return settings | given

    @classmethod
    def _check_described(cls, setting: str, name: str, description: dict[str, Any]) -> None:
        """Raises `UserError` where the setting cannot have the value that the description says."""
        field = cls.model_fields[setting]
        wrong = (
            f"lora.adapter: its description has {name} = {description.get(name)}, "
            f"which is not what lora.{setting} takes"
        )
        with explained(wrong, ValueError, mend="mend it there"):
            read_value(field, description.get(name, field.get_default()))


class QuantizationConfig(Section):
    """Fewer bits for weights that are not trained (QLoRA)."""

    base: Literal["none", "int8", "nf4"] = "none"
    """How the linear layers and stacks of experts beside adapters are stored, all but the head: nf4
    takes 4.13 bits a weight, int8 a little more than 8. On a GPU nf4 needs bitsandbytes. With a
    single GPU, a frozen embedding that is not also the head stays in CPU memory."""
