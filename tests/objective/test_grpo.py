"""Runs by rewards: alike in every layout, resumed to the bit, refused where impossible."""

import json
import shlex
import shutil
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from lacuna.config import Config
from lacuna.config.adapters import LoraConfig
from lacuna.config.contradictions import contradictions_of
from lacuna.config.machine import CheckpointConfig
from lacuna.config.reinforcement import GrpoConfig
from lacuna.objective.reference import on_policy_reference_kind
from lacuna.rollout.sandbox import Limits, missing_protections
from rewarded import (
    DEEP,
    KEYS,
    SHARED_LAYOUTS,
    InLayout,
    completions,
    flags,
    made_once,
    shallow_model,
    write_prompts,
)
from runs import (
    as_stopped,
    curve,
    ended,
    environment,
    lacuna,
    refused,
    rows,
    start,
    steps,
    train,
    wait_until,
    weights,
    write_model,
)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts"))


def test_completions_are_kept_with_what_they_are_worth(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    said = train(world, tmp_path, *flags(prompts, "--training.steps", 3))
    assert "reward" in said
    found = completions(tmp_path)
    assert [row["step"] for row in found] == [1] * 16 + [2] * 16 + [3] * 16
    assert len({row["prompt"] for row in found}) == 3 * 4, "each prompt is asked once a pass"
    logged = [row for row in rows(tmp_path) if "loss" in row]
    for row, of_step in zip(logged, groupby(found, lambda one: one["step"]), strict=True):
        own = [*of_step[1]]
        rewards = [one["reward"] for one in own]
        assert row["reward"] == pytest.approx(sum(rewards) / 16)
        tokens = [one["tokens"] for one in own]
        assert row["completion_tokens"] == pytest.approx(sum(tokens) / 16)
        assert row["tokens"] >= sum(tokens)
        groups = [rewards[start : start + 4] for start in range(0, 16, 4)]
        assert row["flat_groups"] == sum(len({*group}) == 1 for group in groups) / 4
        assert row["mismatch_largest"] < 1e-4 and row["mismatch_share"] == 0
        assert row["entropy"] > 3 and row["clipped"] == 0
        for group in groups:
            advantages = [one["advantage"] for one in own if one["reward"] in group]
            assert any(advantages) or len({*group}) == 1
    assert {None} < {one["scores"]["pattern"] for one in found}
    assert {one["ended"] for one in found if one["tokens"] < 5} <= {True}


CASES: dict[str, tuple[object, ...]] = {
    "dapo": ("--grpo.mask_truncated", "true"),
    "updates": ("--grpo.updates", 3, "--grpo.importance", "masked"),
    "gspo, divergence": ("--grpo.loss", "gspo", "--grpo.updates", 2, "--grpo.beta", 0.1),
    "adapters": ("--grpo.loss", "grpo", "--grpo.beta", 0.1, "--lora.rank", 4),
    "resampled": ("--grpo.resample", 2, "--grpo.loss", "dr_grpo"),
    "cispo": ("--grpo.loss", "cispo", "--grpo.updates", 2, "--rollout.temperature", 0.7),
}


@pytest.mark.parametrize(
    "case",
    [
        "updates",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                *("dapo", "gspo, divergence", "adapters", "resampled", "cispo"),
                *("updates, cp 2, ring", "updates, tp 2"),
            )
        ),
    ],
)
def test_a_stopped_run_goes_on_to_the_bit(
    case: str, world: Path, prompts: Path, tmp_path: Path
) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    name, _, layout = (case, "", "") if case in CASES else case.partition(", ")
    own = flags(prompts, *CASES[name], *SHARED_LAYOUTS.get(layout, ()), "--checkpoint.interval", 2)
    train(world, straight, *own, "--training.steps", 6)
    if case == "updates":  # of runs that have ended one is enough
        train(world, resumed, *own, "--training.steps", 4)
    else:
        as_stopped(straight, resumed, 4)
    # A run that was killed later had written completions that the run that goes on makes anew.
    with open(resumed / "completions.jsonl", "a") as file:
        file.write(json.dumps({"step": 5, "prompt": "lost"}) + '\n{"step": 5, "pro')
    train(world, resumed, *own, "--training.steps", 6)
    assert curve(straight, *KEYS) == curve(resumed, *KEYS)
    assert completions(straight) == completions(resumed)
    assert weights(straight) == weights(resumed)
    norms = [norm for _, _, norm, *_ in curve(straight, *KEYS)]
    assert any(norms)


LAYOUTS: dict[str, tuple[object, ...]] = {
    "alone": (),
    "shards": ("--cpus", 2, "--training.batch_size", 2),
    "replicas": (
        *("--cpus", 2, "--training.batch_size", 2),
        *("--parallelism.data_parallel_replicate_degree", 2),
        *("--parallelism.data_parallel_shard_degree", 1),
    ),
    "zero 1": (
        *("--cpus", 2, "--training.batch_size", 2, "--parallelism.zero_stage", 1),
        *("--packing.mode", "none"),
    ),
    "accumulated": ("--training.batch_size", 2, "--training.gradient_accumulation_steps", 2),
    "unpacked": ("--packing.mode", "none"),
    **SHARED_LAYOUTS,
}


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    return shallow_model(tmp_path_factory.mktemp("shallow"))


@pytest.fixture(scope="module")
def in_layout(
    world: Path,
    prompts: Path,
    shallow: tuple[object, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> InLayout:
    def flags_of(case: str, layout: str) -> list[object]:
        model = DEEP if case == "adapters" else shallow
        return flags(prompts, *CASES[case], *model, *LAYOUTS[layout])

    return made_once(world, tmp_path_factory.mktemp("layouts"), flags_of)


def test_a_layout_trains_as_one_process_does(in_layout: InLayout) -> None:
    check_layouts("gspo, divergence", ["tp 2"], in_layout)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gspo, divergence", "adapters", "resampled"])
def test_every_layout_trains_as_one_process_does(case: str, in_layout: InLayout) -> None:
    layouts = ["shards", "cp 2 × tp 2"]
    if case == "gspo, divergence":  # PPO and distillation have the others
        layouts = [name for name in LAYOUTS if name not in ("alone", *[*SHARED_LAYOUTS][::2])]
    check_layouts(case, layouts, in_layout)


def check_layouts(case: str, layouts: list[str], in_layout: InLayout) -> None:
    """Runs a case in each layout, and compares what is logged with one process's."""
    keys = (*KEYS, *(["divergence"] if "--grpo.beta" in CASES[case] else []))
    alone = in_layout(case, "alone")
    wanted = curve(alone, *keys)
    for name in layouts:
        found = in_layout(case, name)
        for row, other in zip(curve(found, *keys), wanted, strict=True):
            assert row == pytest.approx(other, rel=2e-4, abs=1e-5), name
        assert said(found) == said(alone), name


def said(folder: Path) -> list[tuple[str, str, float]]:
    """The prompts and completions of a run, and the advantages to four digits."""
    return [
        (row["prompt"], row["completion"], round(row["advantage"], 4))
        for row in completions(folder)
    ]


def test_groups_that_vary_come_first_where_prompts_are_drawn_again(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    # Few completions of one token are a digit: most groups are flat.
    rare = ("--rewards.functions", "format", "--rewards.format", "[0-9].*", "--training.steps", 2)
    own = [*flags(prompts), *rare, "--rewards.length_margin", 32]
    train(world, tmp_path / "once", *own)
    train(world, tmp_path / "again", *own, "--grpo.resample", 3)
    once, again = completions(tmp_path / "once"), completions(tmp_path / "again")
    assert len(once) == 32 and len(again) > 64
    assert once[:16] == again[:16]
    varying = [row["flat_groups"] for row in rows(tmp_path / "again") if "loss" in row]
    assert max(varying) < 1


def test_prompts_are_shown(world: Path, prompts: Path) -> None:
    said = lacuna("data", world / "run.toml", *flags(prompts))
    assert "prompt 3: " in said and "ask" in said and "ask 1<end>" not in said
    assert "4 prompts × 4 completions" in said and "8 an epoch" in said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rollout": {"samples": 1}}, "one completion has no other to be compared with"),
        ({"rollout": {"max_tokens": 64}}, "must fit into training.seq_len"),
        (
            {
                "parallelism": {"tensor_parallel_degree": 2},
                "activation_checkpoint": {"mode": "full", "mlp_chunks": 2},
            },
            "pieces are those of divided sequences",
        ),
        ({"parallelism": {"pipeline_parallel_degree": 2}}, "every rank generates with a whole"),
        ({"parallelism": {"expert_parallel_degree": 2}}, "every rank generates with a whole"),
        ({"training": {"enable_cpu_offload": True}}, "needs the weights on the device"),
        ({"training": {"context_len": 16}}, "completions are not cut"),
        ({"optimizer": {"early_step_in_backward": True}}, "how many micro-batches"),
        ({"float8": {"enable_float8_linear": True}}, "no shape that float8 takes"),
        ({"lora": {"rank": 2, "dropout": 0.1}}, "would be those of dropout"),
        (
            {"rollout": {"validation_samples": 2, "validation_temperature": 1.0}},
            "n_samples, validat",
        ),
        ({"rollout": {"validation_temperature": 1.0}}, "no held-out prompts are answered"),
        ({"rewards": {"solved_at": 0.5}}, "nobody asks which prompts are solved"),
        (
            {"rollout": {"validation_samples": 2}, "validation": {"dataset": "a.jsonl"}},
            "the same in all completions",
        ),
        ({"data": {"streaming": True}}, "read from the cache"),
        ({"data": {"tokenization": "online"}}, "read from the cache"),
        ({"data": {"document_mask": False}}, "must not see each other"),
        ({"data": {"predict_across_documents": True}}, "do not go on in others"),
        ({"packing": {"mode": "concatenate"}}, "best_fit or none"),
        ({"packing": {"long_examples": "drop"}}, "too long are refused"),
        ({"curriculum": {"rank_every": 2}}, "no loss to be ranked by"),
        ({"curriculum": {"stages": ({"from_step": 2, "seq_len": 32},)}}, "cannot change rollouts"),
        ({"grpo": {"loss": "cispo", "epsilon": 0.1}}, "cispo clips above alone"),
        ({"grpo": {"loss": "cispo", "dual_clip": 4.0}}, "cispo clips above alone"),
        ({"grpo": {"kl": "k2"}}, "grpo.kl, grpo.beta"),
        ({"grpo": {"reference": "copy"}}, "grpo.reference, grpo.beta"),
        ({"grpo": {"importance_bound": 3.0}}, "none has no bound"),
        ({"grpo": {"resample": 1}, "training": {"epochs": 1}}, "no common end"),
        ({"grpo": {"updates": 2}, "training": {"epochs": 1}}, "one step for each batch"),
    ],
)
def test_settings_that_do_not_go_with_rewards_are_refused(settings: dict, said: str) -> None:
    def problems(**sections: Any) -> list[str]:
        training = {"seq_len": 64} | sections.pop("training", {})
        rollout = {"max_tokens": 16} | sections.pop("rollout", {})
        rewards = {"functions": ("exact",)} | sections.pop("rewards", {})
        own = {"training": training, "rollout": rollout, "rewards": rewards}
        config = Config(job={"task": "grpo"}, **own, **sections)
        return [one for one in contradictions_of(config) if said in one]

    assert not problems()
    assert len(problems(**settings)) == 1


@pytest.mark.parametrize("setting", ["grpo.beta", "rollout.samples", "rewards.timeout_seconds"])
def test_settings_of_rewards_are_refused_with_another_task(setting: str) -> None:
    section, name = setting.split(".")
    config = Config(**{section: {name: 3}})
    assert any(f"{setting}, job.task" in one for one in contradictions_of(config))


def test_the_reference_is_what_training_begins_with(tmp_path: Path) -> None:
    def kind(beta: float = 0.1, reference: str = "auto", **sections: Any) -> str | None:
        return on_policy_reference_kind(
            GrpoConfig(beta=beta, reference=reference),
            LoraConfig(**sections.get("lora", {})),
            CheckpointConfig(**sections.get("checkpoint", {})),
            str(tmp_path),
        )

    assert kind() == "copy" and kind(beta=0) is None
    assert kind(lora={"rank": 2}) == "base" and kind(lora={"rank": 2}, reference="copy") == "copy"
    assert kind(lora={"rank": 2, "modules": ("norm",)}) == "copy"
    for message, sections in (
        ("lora.rank is 0", {"reference": "base"}),
        ("convert the checkpoint", {"checkpoint": {"initial_load_path": "elsewhere/step-5"}}),
    ):
        with pytest.raises(Exception, match=message):
            kind(**sections)


def test_prompts_that_leave_no_room_are_refused(world: Path, prompts: Path) -> None:
    said = lacuna("data", world / "run.toml", *flags(prompts, "--training.seq_len", 18), status=2)
    assert "prompts have more than 18 - 5 = 13 tokens, the longest 14: raise" in said


@pytest.mark.parametrize(
    ("row", "message"), [({"text": "a"}, "asks nothing"), ({"prompt": ""}, "prompt is empty")]
)
def test_rows_without_a_prompt_are_refused(
    row: dict[str, str], message: str, world: Path, prompts: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text(json.dumps(row) + "\n")
    own = flags(prompts, "--data.dataset", tmp_path / "bad.jsonl")
    assert message in lacuna("data", world / "run.toml", *own, status=2)


def test_a_reward_that_cannot_be_had_is_refused(world: Path, prompts: Path, tmp_path: Path) -> None:
    none = refused("train", world / "run.toml", *flags(prompts, "--rewards.functions", ""))
    assert "nothing says what completions are worth" in none
    own = flags(prompts, "--rewards.functions", "no_such_module:score")
    assert "no_such_module does not import" in train(world, tmp_path, *own, status=2)


def test_a_reward_that_fails_stops_the_run_on_all_ranks(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    (tmp_path / "failing.py").write_text(
        "import os\n"
        "calls = 0\n"
        "def score(rows, completions):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    is_first = os.environ.get('RANK', '0') == '0'\n"
        "    assert is_first or calls < 3 or os.path.exists('mended'), 'gone'\n"
        "    return [float(len(one)) for one in completions]\n"
    )
    own = flags(prompts, "--rewards.functions", "failing:score", "--training.batch_size", 2)
    own += ["--cpus", 2, "--training.steps", 4]
    said = train(world, tmp_path / "run", *own, status=1, cwd=tmp_path)
    assert "failing:score fails on" in said and "row" in said and "gone" in said
    assert "Stopped and saved after step 2. The same command goes on" in said
    assert "did not answer" not in said and "Traceback" not in said
    (tmp_path / "mended").touch()
    train(world, tmp_path / "run", *own, cwd=tmp_path)
    assert [step for step, *_ in curve(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.parametrize("task", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_completions_that_nothing_judged_are_not_trained(
    task: str, world: Path, prompts: Path, tmp_path: Path
) -> None:
    (tmp_path / "failing.py").write_text("def score(rows, completions):\n    raise OSError\n")
    own = flags(prompts, "--rewards.functions", "failing:score", "--rewards.on_error", "skip")
    own += ["--job.task", task, f"--{task}.beta", 1, f"--{task}.reference", "copy"]
    own += [f"--{task}.updates", 1]
    said = train(world, tmp_path / "run", *own, "--training.steps", 12, status=1, cwd=tmp_path)
    assert "no function has said what any completion of the last 10 batches is worth" in said
    told = [row for row in rows(tmp_path / "run") if "loss" in row]
    assert len(told) == 9 and {row["grad_norm"] for row in told} == {0.0}


def test_completions_are_dropped_where_a_run_goes_on_with_another_temperature(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    own = flags(prompts, "--grpo.updates", 2, "--optimizer.lr", 1e-9)
    train(world, tmp_path, *own, "--training.steps", 1)
    own += ["--rollout.temperature", 2.0, "--training.steps", 2]
    said = " ".join(train(world, tmp_path, *own).split())
    assert "completions that updates were left for are dropped" in said
    told = [row for row in rows(tmp_path) if "loss" in row]
    assert told[-1]["clipped"] == 0 and told[-1]["mismatch_largest"] < 1e-4


def test_ranks_without_a_prompt_ask_no_reward(world: Path, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "asked.py").write_text(
        "def score(rows, completions):\n"
        "    assert rows, 'nothing'\n"
        "    return [float(len(one)) for one in completions]\n"
    )
    own = flags(prompts, "--rewards.functions", "asked:score", "--training.batch_size", 1)
    own += [*SHARED_LAYOUTS["cp 2, ring"], "--training.steps", 2]
    train(world, tmp_path / "run", *own, cwd=tmp_path)
    assert [row["step"] for row in completions(tmp_path / "run")] == [1] * 4 + [2] * 4


@pytest.mark.skipif(
    missing_protections(Limits(10, 2**30)) != (), reason="this system cannot shut in a process"
)
def test_code_is_tested_on_all_ranks(world: Path, tmp_path: Path) -> None:
    write_prompts(tmp_path)
    tests = [["assert 1 == 1"], ["assert 1 == 2"], None]
    lines = [{"prompt": f"ask {n}", "tests": tests[n % 3]} for n in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    nothing = ("--rewards.answer_pattern", "()", "--rewards.code_seconds", 60)
    own = flags(tmp_path, "--rewards.functions", "code,length", "--training.batch_size", 2)
    run = ("--training.steps", 2, "--cpus", 2)
    said = train(world, tmp_path / "run", *own, *nothing, *run)
    wanted = {f"ask {n}": [1, 0, None][n % 3] for n in range(12)}
    found = completions(tmp_path / "run")
    assert len(found) == 2 * 16, said
    assert all(row["scores"]["code"] == wanted[row["prompt"]] for row in found)


def test_a_terminal_is_shown_completions_when_a_step_logs(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    own = flags(prompts, "--training.steps", 4, "--metrics.log_freq", 2)
    on_terminal = environment(FORCE_COLOR="1", COLUMNS="120")
    two = ("--cpus", 2, "--training.batch_size", 2)
    said = train(world, tmp_path / "terminal", *own, *two, env=on_terminal)
    assert [f"completions of step {n}" in said for n in range(1, 5)] == [True, False, True, False]
    assert said.count("completions of step 1") == 1, "the first rank alone shows them"
    assert "completions of step" not in train(world, tmp_path / "pipe", *own)
    none = ("--rollout.shown", 0)
    assert "completions of" not in train(world, tmp_path / "none", *own, *none, env=on_terminal)


@pytest.mark.slow  # a rank must wait for longer than its limits
def test_ranks_wait_for_one_whose_rewards_take_long(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(
        "import asyncio\n"
        "import torch.distributed as dist\n"
        "async def score(rows, completions):\n"
        "    await asyncio.sleep(9 * dist.get_rank())\n"
        "    return [float(len(one)) for one in completions]\n"
    )
    own = flags(prompts, "--rewards.functions", "slow:score", "--training.batch_size", 2)
    limits = ("--comm.train_timeout_seconds", 5, "--comm.save_timeout_seconds", 5)
    steps_of = ("--training.steps", 2, "--cpus", 2)
    train(world, tmp_path / "run", *own, *limits, *steps_of, cwd=tmp_path)
    assert len(completions(tmp_path / "run")) == 2 * 16


def test_a_tokenizer_without_an_end_is_refused(world: Path, prompts: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    own = flags(prompts, "--model.tokenizer_path", tmp_path / "tokenizer")
    said = train(world, tmp_path, *own, "--chat.template", "none", status=2)
    assert "the tokenizer has no token that ends a text" in said


def test_texts_need_no_template_and_conversations_do(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    (tmp_path / "texts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "<end>"}\n' * 4)
    (tmp_path / "talks.jsonl").write_text('{"prompt": [{"role": "user", "content": "a"}]}\n' * 4)
    own = flags(prompts, "--training.steps", 1, "--chat.template", "none")
    own += ["--rewards.functions", "length"]
    train(world, tmp_path / "run", *own, "--data.dataset", tmp_path / "texts.jsonl")
    assert {row["prompt"] for row in completions(tmp_path / "run")} == {"a", "<end>"}
    talks = ("--data.dataset", tmp_path / "talks.jsonl")
    said = train(world, tmp_path / "other", *own, *talks, status=2)
    assert "chat.template" in said


def test_a_killed_run_ends_as_the_straight_run(world: Path, prompts: Path, tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    more = ("--grpo.updates", 3, "--grpo.beta", 0.1, "--training.steps", 12)
    own = flags(prompts, *more, "--checkpoint.interval", 2)
    train(world, straight, *own)
    with ended(start("train", world / "run.toml", "--job.dump_folder", killed, *own)) as process:
        wait_until(lambda: bool(steps(killed)), process)
        process.kill()
    assert steps(killed)[-1] < 12
    assert "resum" in train(world, killed, *own)
    assert curve(straight, *KEYS) == curve(killed, *KEYS)
    assert completions(straight) == completions(killed)
    assert weights(straight) == weights(killed)


@pytest.fixture(scope="module")
def alone(
    world: Path,
    prompts: Path,
    shallow: tuple[object, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A run of 7 steps in one process; to be read only."""
    folder = tmp_path_factory.mktemp("alone")
    train(world, folder, *flags(prompts, *CASES["updates"], *shallow, "--training.steps", 7))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("alone", "shards"),
        ("alone", "tp 2"),
        ("cp 2, ring", "alone"),
        ("cp 2, ring", "tp 2"),
        ("cp 2 × tp 2", "shards"),
    ],
)
def test_a_run_goes_on_with_its_completions_in_another_layout(
    first: str,
    then: str,
    world: Path,
    prompts: Path,
    shallow: tuple[object, ...],
    in_layout: InLayout,
    alone: Path,
    tmp_path: Path,
) -> None:
    moved = shutil.copytree(in_layout("updates", first), tmp_path / "moved")
    own = flags(prompts, *CASES["updates"], *shallow, "--training.steps", 7)
    train(world, moved, *own, *LAYOUTS[then])
    assert said(alone) == said(moved)
    for row, other in zip(curve(alone, *KEYS), curve(moved, *KEYS), strict=True):
        assert row == pytest.approx(other, rel=2e-4, abs=1e-5)


def test_the_next_command_that_is_printed_works(world: Path, prompts: Path, tmp_path: Path) -> None:
    own = flags(prompts, "--training.steps", 1, "--grpo.updates", 2)
    own += ["--validation.dataset", prompts / "prompts.jsonl", "--validation.steps", 1]
    own += ["--rollout.validation_samples", 2, "--rollout.validation_temperature", 0.5]
    own += ["--curriculum.by_success", "--rewards.solved_at", 0.5]
    said = train(world, tmp_path / "run", *own)
    [line] = [line for line in said.splitlines() if "your data" in line]
    assert line.endswith("(rows with a prompt, or messages)")
    command = line.partition("lacuna ")[2].partition(" (rows")[0]
    words = shlex.split(command.replace("my.jsonl", str(prompts / "prompts.jsonl")))
    assert "pattern,length" in words
    lacuna(*words, "--chat.template", prompts / "chat.jinja", cwd=tmp_path)


@pytest.mark.slow
def test_the_recipe_learns_in_a_minute(tmp_path: Path) -> None:
    lacuna(
        "train", "grpo.toml", "--job.dump_folder", tmp_path, "--metrics.log_freq", 1, timeout=300
    )
    rewards = [row["reward"] for row in rows(tmp_path)]
    assert rewards[0] < 0.1 and sum(rewards[-5:]) / 5 > 0.8


def test_steps_with_nothing_to_train_do_not_end_a_run(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    own = flags(prompts, "--training.steps", 12, "--rollout.max_tokens", 1)
    said = train(world, tmp_path, *own, "--grpo.mask_truncated", True)
    assert "Done: 12 steps" in said
    assert rows(tmp_path)[-1]["skipped_steps"] >= 10


def test_a_reference_that_comes_while_updates_are_left_is_asked(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    own = flags(prompts, "--grpo.updates", 2, "--training.steps")
    train(world, tmp_path, *own, 1)
    train(world, tmp_path, *own, 2, "--grpo.beta", 0.05)
    assert rows(tmp_path)[-1]["divergence"] < 0.1


def test_dropout_is_no_part_of_ratios(world: Path, prompts: Path, tmp_path: Path) -> None:
    own = flags(prompts, "--training.steps", 3)
    train(world, tmp_path / "without", *own)
    model = write_model(tmp_path / "model", attention_dropout=0.5)
    said = train(world, tmp_path / "with", *own, "--model.config", model)
    assert "dropout of 0.5 is left out" in said
    assert curve(tmp_path / "with") == curve(tmp_path / "without")
    exported = json.loads((tmp_path / "with" / "hf" / "config.json").read_text())
    assert exported["attention_dropout"] == 0.5


def test_a_column_that_no_data_has_is_refused_in_the_first_step(
    world: Path, prompts: Path, tmp_path: Path
) -> None:
    own = flags(prompts, "--rewards.answer_column", "ansver", "--training.steps", 2)
    said = " ".join(train(world, tmp_path, *own, status=2).split())
    assert "rewards.answer_column: pattern reads the column ansver, and the data has" in said
    assert not (tmp_path / "completions.jsonl").exists()


def test_a_column_that_only_a_later_row_has_is_taken(world: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path)
    lines = ['{"prompt": [{"role": "user", "content": "a"}]}\n'] * 9
    lines.append('{"prompt": [{"role": "user", "content": "b"}], "answer": "c"}\n')
    (prompts / "prompts.jsonl").write_text("".join(lines))
    own = flags(prompts, "--rewards.functions", "exact", "--training.steps", 2)
    assert "Done: 2 steps" in train(world, tmp_path / "run", *own)
