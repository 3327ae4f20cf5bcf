"""The settings of how gradients change the weights, and how the learning rate goes."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from lacuna.config.fields import Section, other_spellings


class OptimizerGroup(Section):
    """Parameters that learn otherwise than the rest."""

    pattern: str
    """Names of parameters, or pattern of names, whole or from a dot on."""

    lr_ratio: NonNegativeFloat = 1.0
    """Their learning rate, as a ratio of optimizer.lr."""

    weight_decay: NonNegativeFloat | None = None
    """Their weight decay, also that of vectors and embeddings among them."""

    name: Annotated[
        Literal["AdamW", "Muon"] | None, other_spellings(adamw="AdamW", muon="Muon")
    ] = None
    """Their optimizer; Muon has the matrices of layers among them."""


class OptimizerConfig(Section):
    """How gradients change the weights."""

    name: Annotated[Literal["AdamW", "Muon"], other_spellings(adamw="AdamW", muon="Muon")] = "AdamW"
    """Optimizer; upper and lower case are the same. Muon is for matrices; embeddings, the head and
    vectors have AdamW beside it."""

    lr: NonNegativeFloat = 8e-4
    """Learning rate at the end of the warmup."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the running mean of gradients."""

    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the running mean of squared gradients."""

    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator."""

    weight_decay: NonNegativeFloat = 0.1
    """Share of a weight taken away per step, times the learning rate."""

    state_dtype: Annotated[
        Literal["bfloat16", "int8"] | None, other_spellings(bf16="bfloat16", **{"8bit": "int8"})
    ] = None
    """AdamW: what its two means are kept in: bfloat16, rounded at random, or int8, 8 bits with a
    scale a block for matrices. Unset: the dtype of the weights."""

    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Muon: decay of the running mean of gradients."""

    nesterov: bool = True
    """Muon: look ahead by adding the gradient to its mean once more."""

    ns_steps: int = Field(default=5, ge=1, lt=100)
    """Muon: steps of Newton and Schulz' iteration that makes updates orthogonal."""

    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Muon: how lr depends on a matrix' shape; match_rms_adamw makes updates as large as AdamW's,
    so that its lr and weight_decay serve."""

    neuron_beta2: float | None = Field(default=None, ge=0, lt=1)
    """Muon: decay of the running mean of each neuron's squared update, by whose root the update is
    divided (NorMuon, which has 0.95). Unset: it is not."""

    groups: tuple[OptimizerGroup, ...] = Field(default=(), strict=False)
    """Parameters that learn otherwise: [[optimizer.groups]] tables with pattern, lr_ratio,
    weight_decay, name; the first pattern that matches a parameter counts; TOML only."""

    implementation: Annotated[
        Literal["fused", "foreach", "for-loop"], other_spellings(true="fused", false="foreach")
    ] = "fused"
    """How torch applies the update; fused is the fastest."""

    state_offload_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the optimizer's state that is in CPU memory while gradients are computed, by bytes,
    at most."""

    early_step_in_backward: bool = False
    """Update each parameter in the backward pass and drop its gradient at once; leaves nothing to
    clip or to skip. Not for Muon."""

    @property
    def names(self) -> set[str | None]:
        """The names of all optimizers that are asked for."""
        return {self.name, *(group.name for group in self.groups)}

    @property
    def is_plain(self) -> bool:
        """Whether a fused AdamW updates all weights once their gradients are complete."""
        return (
            self.name == "AdamW"
            and self.implementation == "fused"
            and not (self.groups or self.state_dtype or self.early_step_in_backward)
        )


class LRSchedulerConfig(Section):
    """How the learning rate rises and falls."""

    warmup_steps: NonNegativeInt | None = None
    """Steps over which the learning rate rises from near 0. Unset: a tenth of the run, at most
    200."""

    decay_type: Literal["linear", "sqrt", "cosine", "constant", "wsd"] = "linear"
    """Shape of the fall; constant means none, wsd is linear over the last tenth unless decay_ratio
    is given."""

    decay_ratio: float | None = Field(
        default_factory=lambda given: {"wsd": 0.1}.get(given["decay_type"]), ge=0, le=1
    )
    """Share of all steps over which it falls at the end. Unset: all steps after the warmup, a tenth
    with wsd."""

    lr_min: float = Field(default=0.0, ge=0, le=1)
    """Where the fall ends, as a ratio of optimizer.lr."""
