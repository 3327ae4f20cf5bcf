"""The settings of learning from rewards: how completions are made, judged and learnt."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from lacuna.config.fields import Names, Path, Seconds, Section, Shares, Temperature


class RolloutConfig(Section):
    """How the model makes the completions that it learns from (grpo, ppo; distill on prompts)."""

    samples: PositiveInt = 8
    """Completions of each prompt; grpo compares them with each other."""
    temperature: Temperature = Field(default=1.0, gt=0)
    """Divides the logits of the model when it generates, and when it is trained on what it said.
    Tokens are drawn from all of the vocabulary."""
    max_tokens: PositiveInt = 256
    """Longest completion, in tokens of the model in all its turns; a prompt and a completion must
    fit into training.seq_len."""
    batch_size: PositiveInt = 64
    """Completions that a rank generates at a time."""
    engine: Literal["auto", "pages", "padded", "server"] = "auto"
    """How they are generated: with keys and values in pages, or beside padding by transformers'
    own generate; server has a vLLM server make them. auto is pages where the model is exact with
    them."""
    cache_dtype: Literal["auto", "float8"] = "auto"
    """What keys and values are kept in while generating, in pages: what the model computes in, or
    float8, rounded for each head of a token. Half the memory and traffic; the probabilities of what
    is generated then differ, which the log tells and importance can correct."""
    server: str | None = None
    """Address of a vLLM server of the same model, such as http://localhost:8000."""
    server_folder: Path | None = None
    """Folder through which the server gets the weights of each rollout; it must find the folder
    under the same absolute path."""
    server_timeout: Seconds = 600.0
    """Seconds that the server may take for an answer, and for coming back where it is gone."""
    shown: NonNegativeInt = 3
    """Completions of one prompt that are shown with their rewards where a run writes to a terminal,
    every metrics.log_freq steps. 0: none."""
    environment: str | None = None
    """Class or function of your own, as module:name, that makes what replies to the model, so that
    a completion has several turns. Unset: it has one."""
    tools: Names = ()
    """Functions of your own, as module:function, that the model is told of and may call; what they
    return is given to it. Unset: none."""
    turns: PositiveInt = 8
    """Most turns of the model in a completion, with rollout.environment or rollout.tools."""
    validation_samples: PositiveInt = 1
    """Completions of each prompt of validation.dataset."""
    validation_temperature: Temperature = 0.0
    """Temperature of these completions; 0 takes the likeliest token."""

    @property
    def takes_turns(self) -> bool:
        """Whether something replies to the model."""
        return bool(self.environment or self.tools)


class RewardsConfig(Section):
    """What completions are worth (grpo, ppo; told and not learnt by distill on prompts)."""

    functions: Names = ()
    """Functions of the rows of data and their completions, as module:function; folders or Hub ids
    of models that score, as reward trains them; or those that come with lacuna: exact (the answer
    is the row's), math (it is equal to the row's, by math-verify), code (its Python passes all
    tests of the row), code_share (the share of them), pattern (the row's regular expression is
    found), format (the completion is as rewards.format says), length (it does not come near
    rollout.max_tokens), environment (what rollout.environment says)."""
    weights: Shares = ()
    """Weight of each function in the reward. Unset: 1 each."""
    on_error: Literal["stop", "skip"] = "stop"
    """Whether a function that fails on a completion or takes too long stops the run, or the
    completion is not learnt from."""
    timeout_seconds: Seconds = 60.0
    """Longest time that a call of a function of your own may take."""
    answer_column: str = "answer"
    """Column of the data with the right answer (exact, math), a list of right ones (exact) or the
    regular expression (pattern)."""
    answer_pattern: str | None = None
    """Regular expression whose last match in a completion, or its first group, is the answer that
    exact compares, or the code that is tested. Unset: the whole completion; for code its last block
    of Python."""
    tests_column: str = "tests"
    """Column of the data with the tests of code: asserts, or inputs with outputs."""
    code_seconds: Seconds = 10.0
    """Longest time that all tests of a completion may take."""
    code_memory_gib: float = Field(default=1.0, ge=0.125, le=65536)
    """Addresses that its code may take, libraries included, in GiB."""
    code_processes: PositiveInt | None = None
    """Completions whose code a rank runs at a time. Unset: as many as it has cores."""
    code_unprotected: bool = False
    """Run code even where nothing can keep it from files, networks or processes."""
    format: str | None = None
    """Regular expression that a whole completion must match, for format."""
    solved_at: float = 1.0
    """Reward from which on a completion solves its prompt, as held-out prompts and
    curriculum.by_success count it."""
    length_margin: PositiveInt = 32
    """Tokens before rollout.max_tokens over which length falls from 0 to -1."""


class PolicyConfig(Section):
    """What the losses of all policies have that learn from their own completions."""

    dual_clip: float = Field(default=3.0, gt=1)
    """A token that is to become less likely is left out where its ratio is above this; 1e9 leaves
    none out."""
    reference: Literal["auto", "base", "copy"] = "auto"
    """The reference: the model with its adapters switched off, or a frozen copy. auto is base where
    only new adapters are trained, else copy."""
    importance: Literal["none", "token", "sequence", "masked"] = "none"
    """Correction where generating and training find other probabilities: weights of tokens or of
    completions, up to importance_bound; masked leaves out completions beyond it."""
    importance_bound: float = Field(default=2.0, gt=1)
    """Largest weight of the correction; the smallest that masked keeps is 1 divided by it."""


class GrpoConfig(PolicyConfig):
    """How a model learns from the rewards of its own completions (job.task = grpo)."""

    loss: Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo"] = "dapo"
    """How completions are weighed: dapo and cispo by all tokens of a step, grpo and gspo by the
    mean of each completion, dr_grpo by rollout.max_tokens. cispo keeps the gradient of tokens whose
    ratio it clips, gspo clips the ratio of whole completions."""
    epsilon: float | None = Field(default=None, gt=0, lt=1)
    """How far below 1 the ratio of new to old probability counts. Unset: 0.2, for gspo 3e-4."""
    epsilon_high: PositiveFloat | None = None
    """How far above 1 it counts. Unset: 0.2; for dapo 0.28, for gspo 4e-4, for cispo 4."""
    beta: NonNegativeFloat = 0.0
    """Weight of the divergence from what the model was before training; 0 needs no reference."""
    kl: Literal["k2", "k3", "k3_plain"] = "k3"
    """Estimator of the divergence. k2 and k3, which is weighed by the ratio, have the gradient of
    KL(model, reference); k3_plain, as in the first GRPO, has that of KL(reference, model)."""
    scale: Literal["group", "none"] | None = None
    """What rewards less their group's mean are divided by: the group's standard deviation, or
    nothing. Unset: group, for dr_grpo none."""
    updates: PositiveInt = 1
    """Steps that train on the same completions."""
    resample: NonNegativeInt = 0
    """Further batches of prompts that may be tried where all completions of a prompt have the same
    reward."""
    mask_truncated: bool = False
    """Do not train completions that did not end within rollout.max_tokens."""

    @property
    def clip(self) -> tuple[float, float]:
        """How far below and above 1 ratios count, as set or by the loss."""
        below, above = _CLIPS.get(self.loss, (0.2, 0.2))
        return self.epsilon or below, self.epsilon_high or above


class PpoConfig(PolicyConfig):
    """How a model and its critic learn from the rewards of completions (job.task = ppo)."""

    critic: str | None = Field(default=None, min_length=1)
    """Folder or Hub id of the model that the critic begins as, such as a model that scores; it must
    have the same tokens. Unset: as the model itself, expecting 0."""
    critic_lr: PositiveFloat | None = None
    """Learning rate of the critic at the end of the warmup. Unset: optimizer.lr."""
    updates: PositiveInt = 4
    """Steps that train on the same completions."""
    epsilon: float = Field(default=0.2, gt=0, lt=1)
    """How far from 1 the ratio of new to old probability counts."""
    value_epsilon: PositiveFloat = 0.2
    """How far the critic's values may move on the same completions and still be learnt freely."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """What a reward one token later is worth."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Share of later surprises in an advantage: 0 trusts the critic, 1 the rewards."""
    beta: NonNegativeFloat = 0.05
    """What each nat of divergence from what the model was before training costs in the reward; 0
    needs no reference."""
    kl_target: PositiveFloat | None = None
    """Divergence of a completion, in nats, towards which beta is adapted. Unset: beta is fixed."""
    reward_clip: PositiveFloat | None = None
    """Largest reward of a completion that counts, and with a minus the smallest. Unset: any."""
    unended_penalty: NonNegativeFloat = 0.0
    """What completions lose that did not end within rollout.max_tokens."""


# Loss -> how far below and above 1 ratios count, where it is not 0.2 both: by the papers, for cispo
# by TRL's advice.
_CLIPS = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
