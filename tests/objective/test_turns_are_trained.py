"""What was given between turns is read and never trained: by hand, in every layout, resumed."""

import json
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedModel

from lacuna.config import Config
from lacuna.config.contradictions import contradictions_of
from lacuna.data.tokenizer import load_tokenizer
from lacuna.model.loss import TokenLoss
from lacuna.objective.critic import build_critic
from lacuna.objective.grpo import grpo_targets
from lacuna.objective.grpo_losses import NAMES, grpo_sums
from lacuna.objective.ppo import Ppo
from lacuna.objective.sample_batches import with_log_ratios
from lacuna.objective.sample_rows import lay_out
from lacuna.parallel.mesh import Layout
from lacuna.rollout.groups import Sample
from lacuna.train.step import accumulate_gradients, total_counts
from policies import one_rank, policy_of
from rewarded import completions
from runs import (
    as_stopped,
    curve,
    ended,
    lacuna,
    rows,
    start,
    steps,
    train,
    wait_until,
    weights,
    write_model,
)
from talking import flags, write_talks
from tiny import CPU, mesh_of, random_model, tiny_config

LONGEST = 12
PROMPTS = [[5, 6, 7], [9, 4], [20]]
# What follows each prompt, and which of it is the model's.
FOLLOWING = [
    [8, 9, 2, 30, 31, 10, 2],
    [11, 2, 32, 12, 13, 2, 33, 34, 35, 14],
    [15, 16, 17, 2],
]
OWN = [[1, 1, 1, 0, 0, 1, 1], [1, 1, 0, 1, 1, 1, 0, 0, 0, 1], [1, 1, 1, 1]]
GIVEN = [[(3, [30, 31])], [(2, [32]), (5, [33, 34, 35])], []]
ADVANTAGES = [1.2, -0.7, 0.4]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_model(tiny_config("llama"), seed=1)


def own_logprobs(model: PreTrainedModel, number: int, temperature: float) -> Tensor:
    """The log-probabilities of the model's own tokens of a sample, one conversation alone."""
    prompt, following = PROMPTS[number], FOLLOWING[number]
    logits = model(torch.tensor([prompt + following])).logits[0, len(prompt) - 1 : -1]
    found = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(following)[:, None])
    return found[torch.tensor(OWN[number], dtype=torch.bool), 0]


def samples_near(model: PreTrainedModel, temperature: float) -> list[Sample]:
    """The conversations, with other log-probabilities at random beside the model's own."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for number, prompt in enumerate(PROMPTS):
        pairs = zip(FOLLOWING[number], OWN[number], strict=True)
        tokens = [token for token, own in pairs if own]
        with torch.no_grad():
            logprobs = own_logprobs(model, number, temperature)
        noise = torch.randn(3, len(tokens), generator=generator)
        sampled, old, reference = (logprobs + 0.3 * noise).tolist()
        own = {"old": old, "reference": reference, "given": GIVEN[number]}
        found.append(Sample(prompt, tokens, sampled, True, advantage=ADVANTAGES[number], **own))
    return found


def loss_by_hand(
    model: PreTrainedModel, samples: list[Sample], name: str, temperature: float
) -> Tensor:
    """The loss with a divergence of weight 0.1 (k3) and weights of tokens up to 2."""
    total = torch.zeros(())
    below, above = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}.get(name, (0.2, 0.2))
    count = sum(map(sum, OWN))
    for number, sample in enumerate(samples):
        logprobs = own_logprobs(model, number, temperature)
        old, sampled = torch.tensor(sample.old), torch.tensor(sample.sampled)
        log_ratios = logprobs - old
        if name == "gspo":
            log_ratios = log_ratios.detach().mean() + logprobs - logprobs.detach()
        ratios = log_ratios.exp()
        advantage = sample.advantage
        if name == "cispo":
            losses = -ratios.detach().clamp(max=5) * advantage * logprobs
        else:
            kept = ratios.clamp(1 - below, 1 + above)
            losses = -torch.minimum(ratios * advantage, kept * advantage)
        apart = logprobs - torch.tensor(sample.reference)
        losses = losses * (old - sampled).exp().clamp(max=2)
        losses = losses + 0.1 * ((-apart).exp() - 1 + apart) * ratios
        if name in ("dapo", "cispo"):
            total = total + losses.sum() / count
        elif name == "dr_grpo":
            total = total + losses.sum() / (3 * LONGEST)
        else:
            total = total + losses.mean() / 3
    return total


@pytest.mark.parametrize("packing", ["best_fit", "none"])
@pytest.mark.parametrize("name", ["dapo", "grpo", "dr_grpo", "gspo", "cispo"])
def test_the_loss_and_its_gradient_are_those_of_the_models_own_tokens(
    name: str, packing: str, model: PreTrainedModel
) -> None:
    samples = samples_near(model, 0.7)
    mine = deepcopy(model)
    wanted = loss_by_hand(mine, samples, name, 0.7)
    wanted.backward()
    config = Config(
        grpo={"loss": name, "beta": 0.1, "importance": "token"},
        rollout={"temperature": 0.7, "max_tokens": LONGEST},
        training={"batch_size": 1, "seq_len": 24},
        packing={"mode": packing},
    )
    loss = TokenLoss(partial(grpo_sums, settings=config.grpo, temperature=0.7), NAMES)
    with one_rank():
        policy = policy_of(deepcopy(model), config)
        how = (config.training, config.row_form, config.data)
        targets = grpo_targets(config.grpo, config.rollout)
        batches = lay_out(samples, *how, 0, targets).batches
        assert len(batches) == (2 if packing == "best_fit" else 3)
        if name == "gspo":
            batches = [with_log_ratios(policy, batch, 0.7) for batch in batches]
        counts = total_counts(policy, batches)
        assert counts["trained_tokens"] == 5 + 6 + 4 and counts["tokens"] == 10 + 12 + 5
        divisor = counts["trained_tokens" if name in ("dapo", "cispo") else "sequences"]
        sums = accumulate_gradients(policy, batches, loss, divisor)
    assert (sums[0] / divisor).item() == pytest.approx(wanted.item(), rel=1e-5)
    pairs = zip(policy.model.parameters(), mine.parameters(), strict=True)
    for parameter, other in pairs:
        assert torch.allclose(parameter.grad, other.grad, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_talks(tmp_path_factory.mktemp("talks"))


def write_judge(folder: Path) -> Path:
    """Fills a folder with a tiny model that scores."""
    write_model(folder, num_labels=1)
    torch.manual_seed(5)
    shape = LlamaConfig.from_pretrained(folder)
    AutoModelForSequenceClassification.from_config(shape).save_pretrained(folder)
    return folder


def slow_returns(rewards: list[float], values: list[float], decay: float) -> list[float]:
    """What the critic learns, with nothing discounted: value and advantage, term by term."""
    following = [*values[1:], 0.0]
    surprises = [
        reward + ahead - value
        for reward, ahead, value in zip(rewards, following, values, strict=True)
    ]
    return [
        values[start] + sum(decay**ahead * one for ahead, one in enumerate(surprises[start:]))
        for start in range(len(values))
    ]


def test_values_and_advantages_are_of_the_models_own_tokens(world: Path, tmp_path: Path) -> None:
    judge = write_judge(tmp_path / "judge")
    config = Config(
        job={"task": "ppo"},
        ppo={"critic": str(judge), "beta": 0.0, "gae_lambda": 0.5},
        model={"config": str(world / "model")},
        rewards={"functions": ["length"]},
        training={"batch_size": 2, "seq_len": 32},
        compile={"enable": False},
    )
    policy_model = random_model(tiny_config("llama", vocab_size=257), seed=1)
    samples = samples_near(policy_model, 1.0)
    for sample, reward in zip(samples, (1.0, -0.5, 2.0), strict=True):
        sample.reward = reward
        sample.reference = []
    objective = Ppo()
    objective.check(config, load_tokenizer(str(world / "model")))
    with one_rank():
        objective.critic = build_critic(config, objective.tokenizer, mesh_of(Layout()), CPU)
        objective.note_findings(policy_of(policy_model, config), samples)
    critic = AutoModelForSequenceClassification.from_pretrained(judge, num_labels=1)
    for number, sample in enumerate(samples):
        values = []
        places = [place for place, own in enumerate(OWN[number]) if own]
        for place in places:
            before = torch.tensor([PROMPTS[number] + FOLLOWING[number][:place]])
            with torch.no_grad():
                values.append(critic(before).logits.item())
        assert sample.values == pytest.approx(values, abs=1e-5)
        rewards = [0.0] * (len(values) - 1) + [sample.reward]
        assert sample.returns == pytest.approx(slow_returns(rewards, values, 0.5), abs=1e-5)
        with torch.no_grad():
            assert sample.old == pytest.approx(
                own_logprobs(policy_model, number, 1.0).tolist(), abs=1e-5
            )
    flat = torch.tensor([value for one in samples for value in one.advantages])
    assert flat.mean().item() == pytest.approx(0, abs=1e-5)
    assert flat.std(correction=0).item() == pytest.approx(1, abs=1e-4)


PPO = ("--job.task", "ppo", "--ppo.updates", 2)
CASES: dict[str, tuple[object, ...]] = {
    "grpo": ("--grpo.updates", 2, "--grpo.loss", "gspo", "--grpo.beta", 0.1),
    "adapters": ("--lora.rank", 4, "--grpo.loss", "grpo", "--grpo.importance", "token"),
    "ppo": PPO,
}
KEYS = ("loss", "grad_norm", "reward", "turns", "tool_errors", "entropy", "mismatch_mean", "tokens")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ppo", "grpo", "adapters"])
def test_a_stopped_run_goes_on_to_the_bit(
    case: str, world: Path, talks: Path, tmp_path: Path
) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    own = flags(talks, *CASES[case], "--checkpoint.interval", 3)
    train(world, straight, *own, "--training.steps", 5, cwd=talks)
    if case == "ppo":  # of runs that have ended one is enough
        train(world, resumed, *own, "--training.steps", 3, cwd=talks)
    else:
        as_stopped(straight, resumed, 3)
    train(world, resumed, *own, "--training.steps", 5, cwd=talks)
    assert curve(straight, *KEYS) == curve(resumed, *KEYS)
    assert completions(straight) == completions(resumed)
    assert weights(straight) == weights(resumed)
    assert max(row["mismatch_largest"] for row in rows(straight) if "loss" in row) < 1e-4


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_to_the_bit(world: Path, talks: Path, tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    own = flags(talks, "--training.steps", 8, "--checkpoint.interval", 2)
    train(world, straight, *own, cwd=talks)
    run = ("train", world / "run.toml", "--job.dump_folder", killed, *own)
    with ended(start(*run, cwd=talks)) as process:
        wait_until(lambda: bool(steps(killed)), process)
        process.kill()
    assert steps(killed)[-1] < 8
    train(world, killed, *own, cwd=talks)
    assert curve(straight, *KEYS) == curve(killed, *KEYS)
    assert completions(straight) == completions(killed)
    assert weights(straight) == weights(killed)


LAYOUTS = {
    "shards": ("--cpus", 2, "--training.batch_size", 2),
    "unpacked": ("--packing.mode", "none", "--rollout.engine", "padded"),
    "zero 1": ("--cpus", 2, "--training.batch_size", 2, "--parallelism.zero_stage", 1),
    "context": ("--cpus", 2, "--parallelism.context_parallel_degree", 2),
    "tensor": ("--cpus", 2, "--parallelism.tensor_parallel_degree", 2),
    "accumulated": ("--training.batch_size", 2, "--training.gradient_accumulation_steps", 2),
}


def check_layouts(case: str, layouts: list[str], world: Path, talks: Path, folder: Path) -> None:
    """Runs a case in each layout, and compares what is logged with one process's."""
    own = flags(talks, *CASES[case], "--training.steps", 4, "--optimizer.lr", 1e-3)
    train(world, folder / "alone", *own, cwd=talks)
    wanted = curve(folder / "alone", *KEYS)
    for name in layouts:
        train(world, folder / name, *own, *LAYOUTS[name], cwd=talks)
        for row, other in zip(curve(folder / name, *KEYS), wanted, strict=True):
            assert row == pytest.approx(other, rel=2e-4, abs=1e-5), name
        said = [one["messages"] for one in completions(folder / name)]
        assert said == [one["messages"] for one in completions(folder / "alone")]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_layout_trains_as_one_process_does(
    case: str, world: Path, talks: Path, tmp_path: Path
) -> None:
    layouts = [*LAYOUTS] if case == "grpo" else ["shards", "context", "tensor"]
    check_layouts(case, layouts, world, talks, tmp_path)


def test_conversations_are_kept_and_judged_by_their_environment(
    world: Path, talks: Path, tmp_path: Path
) -> None:
    own = flags(talks, "--training.steps", 2, "--rewards.weights", "1,10")
    train(world, tmp_path, *own, cwd=talks)
    found = completions(tmp_path)
    assert {len(row["messages"]) for row in found} >= {1, 3}
    for row in found:
        said = [one["content"] for one in row["messages"] if one["role"] == "assistant"]
        assert row["completion"] == "\n".join(said) and len(said) <= 4
        assert row["prompt"].startswith("user ") and row["prompt"].endswith(" assistant")
        # Each turn but the last has ended, and counts its end among the tokens.
        ends = len(said) - 1 + (row["scores"]["environment"] == len(said))
        assert row["tokens"] == len(row["completion"].split()) + ends <= 24
        assert row["scores"]["asking:odd"] == len(row["completion"].split()) % 2
        assert row["reward"] == row["scores"]["environment"] + 10 * row["scores"]["asking:odd"]
    logged = [row for row in rows(tmp_path) if "loss" in row]
    for row in logged:
        of_step = [one for one in found if one["step"] == row["step"]]
        turns = [(len(one["messages"]) + 1) / 2 for one in of_step]
        assert row["turns"] == pytest.approx(sum(turns) / len(turns))
        tokens = [one["tokens"] for one in of_step]
        assert row["completion_tokens"] == pytest.approx(sum(tokens) / len(tokens))
        assert row["tool_errors"] >= 0


def test_an_environment_that_fails_stops_the_run_or_leaves_the_sample_out(
    world: Path, talks: Path, tmp_path: Path
) -> None:
    (tmp_path / "failing.py").write_text(
        "class Failing:\n"
        "    def __init__(self, row, seed):\n"
        "        self.number = int(row['answer'])\n"
        "    def reply(self, text):\n"
        "        assert self.number % 2, 'even'\n"
        "    def reward(self):\n"
        "        return 1\n"
    )
    own = flags(talks, "--rollout.environment", "failing:Failing", "--training.steps", 2)
    own += ["--rewards.functions", "environment"]
    said = train(world, tmp_path / "run", *own, status=1, cwd=tmp_path)
    assert "rollout.environment: it fails on" in said and "AssertionError: even" in said
    said = train(world, tmp_path / "run", *own, "--rewards.on_error", "skip", cwd=tmp_path)
    assert "samples are left out" in said
    assert {row["reward"] for row in completions(tmp_path / "run")} == {1.0, None}


TOOL = """
def add(first: int, second: int) -> int:
    '''Adds numbers.

    Args:
        first: A number.
        second: Another number.
    '''
    return first + second
"""


def test_prompts_tell_of_tools(world: Path, talks: Path, tmp_path: Path) -> None:
    (tmp_path / "adding.py").write_text(TOOL)
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"Add {n} and 2."}) + "\n" for n in range(8))
    )
    own = [
        *("--job.task", "grpo", "--data.dataset", tmp_path / "prompts.jsonl"),
        *("--model.new_tokens", "<|im_start|>,<|im_end|>", "--chat.template", "chatml"),
        *("--rollout.tools", "adding:add", "--rollout.max_tokens", 8, "--rollout.samples", 2),
        *("--rewards.functions", "length", "--rewards.length_margin", 4),
    ]
    said = lacuna("data", world / "run.toml", *own, "--training.seq_len", 900, cwd=tmp_path)
    assert '"name": "add"' in said and "<|im_start|>assistant" in said
    changed = TOOL.replace("Adds numbers", "Sums numbers")
    (tmp_path / "adding.py").write_text(changed)
    said = lacuna("data", world / "run.toml", *own, "--training.seq_len", 900, cwd=tmp_path)
    assert "Sums numbers" in said, "the cache knows what tools are described as"
    short = lacuna(
        "data", world / "run.toml", *own, "--training.seq_len", 200, cwd=tmp_path, status=2
    )
    assert "prompts have more than 200 - 8 = 192 tokens" in short
    words = ("--model.config", "none", "--model.name_or_path", talks / "model")
    words = (*words, "--training.seq_len", 120, "--training.steps", 1)
    train(world, tmp_path / "run", *own, *words, cwd=tmp_path)
    assert all("tool_errors" in row for row in rows(tmp_path / "run") if "loss" in row)
    row = {"prompt": "Add.", "tools": [{"type": "function", "function": {"name": "sing"}}]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    said = lacuna("data", world / "run.toml", *own, cwd=tmp_path, status=2)
    assert "has tools of its own, of which only rollout.tools could be called" in said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rollout": {"turns": 3}}, "nothing replies to the model"),
        ({"rollout": {"tools": ["a:b"], "environment": "a:C"}}, "either replies to the model"),
        ({"rewards": {"functions": ["environment"]}}, "no environment that says what"),
        (
            {"rewards": {"functions": ["environment"]}, "rollout": {"tools": ["a:b"]}},
            "no environment that says what",
        ),
    ],
)
def test_settings_of_turns_that_say_nothing_are_refused(
    settings: dict[str, Any], said: str
) -> None:
    base = {"job": {"task": "grpo"}, "rewards": {"functions": ["exact"]}}
    assert not [one for one in contradictions_of(Config(**base)) if said in one]
    found = contradictions_of(Config(**(base | settings)))
    assert len([one for one in found if said in one]) == 1
    other = contradictions_of(Config(rollout={"environment": "a:B"}))
    assert any(one.startswith("rollout.environment, job.task") for one in other)


def test_what_several_turns_cannot_have_is_refused_before_the_first_step(
    world: Path, talks: Path, tmp_path: Path
) -> None:
    own = ("--job.dump_folder", tmp_path / "run")
    run = ("train", world / "run.toml", *flags(talks, *own))
    elsewhere = ("--rollout.environment", "nowhere:A")
    assert "nowhere does not import" in lacuna(*run, *elsewhere, status=2, cwd=talks)
    tokenizer = load_tokenizer(str(talks / "model"))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    judge = write_judge(tmp_path / "judge")
    plain = ("--chat.template", "none", "--model.tokenizer_path", tmp_path / "tokenizer")
    assert "the tokenizer has no chat template" in lacuna(*run, *plain, status=2, cwd=talks)
    judged = ("--rewards.functions", judge)
    assert "models score a prompt with one answer" in lacuna(*run, *judged, status=2, cwd=talks)
