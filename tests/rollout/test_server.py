"""A server samples the model in training, whatever happens to it; another is refused."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lacuna.config import Config, OutageError, UserError
from lacuna.config.contradictions import contradictions_of
from lacuna.config.reinforcement import RolloutConfig
from lacuna.rollout import server as server_module
from lacuna.rollout.drawing import Completion
from lacuna.rollout.sampling import check_engine, generate
from lacuna.rollout.server_calls import UnansweredCallError
from policies import one_rank, policy_of
from rewarded import KEYS as LOGGED
from rewarded import SHARED_LAYOUTS, completions, flags, write_prompts
from runs import curve, rows, steps, train, weights
from sampled import (
    ENDS,
    KEYS,
    LAYOUTS,
    PROMPTS,
    SAMPLING,
    SECTIONS,
    config_of,
    differences,
    ending_model,
    of_changing_weights,
    tokens_of,
)
from talking import flags as talking_flags
from talking import write_talks
from tasks import write_weights
from tiny import run_ranks, tiny_config
from vllm_like import VllmLike, serving


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that servers begin with: it is never the one in training."""
    return write_weights(tmp_path_factory.mktemp("model"), tiny_config("llama"), seed=9)


@pytest.fixture(autouse=True)
def no_folder_is_taken() -> Iterator[None]:
    yield
    for lock in server_module._LOCKS:
        lock.release()
    server_module._LOCKS.clear()


def sampling_by(address: str, folder: Path, **changes: Any) -> RolloutConfig:
    own = {"engine": "server", "server": address, "server_folder": str(folder / "handed over")}
    return SAMPLING.model_copy(update={**own, "server_timeout": 60.0, **changes})


def test_training_finds_the_probabilities_that_the_server_drew_with(
    model: Path, tmp_path: Path
) -> None:
    server = VllmLike(model)
    with one_rank(), serving(server) as address:
        policy = policy_of(ending_model("llama"), config_of())
        sampling = sampling_by(address, tmp_path)
        check_engine(policy, sampling)
        said = generate(policy, PROMPTS, KEYS, sampling, ENDS, seed=1)
        again = generate(policy, PROMPTS[:2], KEYS[:2], sampling, ENDS, seed=1)
        other = generate(policy, PROMPTS, KEYS, sampling, ENDS, seed=2)
        assert differences(policy, said, PROMPTS) < 1e-4
        assert differences(policy, other, PROMPTS) < 1e-4
    assert said[:2] == again and tokens_of(said) != tokens_of(other)
    flat = [one for group in said for one in group]
    assert {one.ended for one in flat} == {True, False}
    for one in flat:
        assert one.ended == (one.tokens[-1] == 2) and (one.ended or len(one.tokens) == 9)
    assert len({tuple(one.tokens) for one in said[2]}) == 3
    assert {body["temperature"] for body in server.bodies} == {0.8}
    # Only the first request is not of a rollout: the two models are compared by it.
    assert [body["n"] for body in server.bodies] == [1] + [3] * 10


@pytest.mark.parametrize("layout", ["shards", pytest.param("alone", marks=pytest.mark.slow)])
@pytest.mark.parametrize("sections", SECTIONS)
def test_the_server_follows_the_weights(
    sections: str, layout: str, model: Path, tmp_path: Path
) -> None:
    trained = write_weights(tmp_path / "trained", tiny_config("llama"), seed=1)
    server = VllmLike(model)
    with serving(server) as address:
        own = sampling_by(address, tmp_path)
        case = (trained, LAYOUTS[layout], SECTIONS[sections], own)
        of_ranks = run_ranks(LAYOUTS[layout].data_parallel, of_changing_weights, *case)
    for rank, found in enumerate(of_ranks):
        (first, apart), (second, apart_later) = found
        assert first != second, "the weights changed, and so must what is said"
        assert max(apart, apart_later) < 1e-4
        assert first == of_ranks[0][0][0][: 4 - rank], "ranks have the same of the same prompts"
    assert len(server.loads) == 3, "once for the comparison and once a rollout, by one rank alone"


def refusal(policy: Any, sampling: RolloutConfig) -> str:
    with pytest.raises(UserError) as caught:
        check_engine(policy, sampling)
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "start it with --logprobs-mode processed_logprobs"),
        ({"quantization": "fp8"}, "quantises its model"),
        ({"max_model_len": 31}, "takes 31 tokens, fewer than training.seq_len = 32"),
        ({"model": "/nowhere/at/all"}, "has no configuration that can be read here"),
    ],
)
def test_a_server_with_other_settings_is_refused(
    settings: dict[str, object], said: str, model: Path, tmp_path: Path
) -> None:
    server = VllmLike(model, **settings)
    with one_rank(), serving(server) as address:
        policy = policy_of(ending_model("llama"), config_of())
        assert said in refusal(policy, sampling_by(address, tmp_path))
    assert not server.loads, "what is not ours is left alone"


@pytest.mark.parametrize(
    ("architecture", "changes", "said"),
    [
        ("llama", {"vocab_size": 200}, "embed_tokens.weight is (200, "),
        ("llama", {"num_hidden_layers": 1}, "is missing, not ("),
        ("llama", {"num_hidden_layers": 5}, "not missing"),
        ("mistral", {}, "is of the kind mistral, not llama"),
    ],
)
def test_another_model_is_refused(
    architecture: str, changes: dict[str, int], said: str, tmp_path: Path
) -> None:
    other = write_weights(tmp_path / "other", tiny_config(architecture, **changes), seed=1)
    server = VllmLike(other)
    with one_rank(), serving(server) as address:
        policy = policy_of(ending_model("llama"), config_of())
        told = refusal(policy, sampling_by(address, tmp_path))
    assert "has another model than the one in training" in told and said in told
    assert not server.loads, "vLLM would end, or keep layers of its own"


@pytest.mark.parametrize(("dtype", "off"), [("torch.float32", 0.01), ("torch.bfloat16", 0.2)])
def test_a_server_that_computes_something_else_is_refused(
    dtype: str, off: float, model: Path, tmp_path: Path
) -> None:
    server = VllmLike(model, dtype=dtype)
    with one_rank(), serving(server) as address:
        policy = policy_of(ending_model("llama"), config_of())
        server.logprobs_off = off
        told = refusal(policy, sampling_by(address, tmp_path / "far"))
        assert f"differ by {off:g} nats from those of training: it computes another" in told
        server.logprobs_off = off / 20
        check_engine(policy, sampling_by(address, tmp_path / "near"))


@pytest.mark.parametrize(
    ("architecture", "said"), [("llama_tied", "new heads of"), ("qwen3_moe", "new experts")]
)
def test_models_that_a_cpu_does_not_load_anew_are_refused(
    architecture: str, said: str, tmp_path: Path
) -> None:
    config = tiny_config(architecture)
    server = VllmLike(write_weights(tmp_path / "served", config, seed=9))
    server.device = "cpu"
    with one_rank(), serving(server) as address:
        policy = policy_of(ending_model(architecture), config_of())
        told = refusal(policy, sampling_by(address, tmp_path))
    assert "runs on a CPU, where vLLM does not take" in told and said in told and not server.loads


def test_a_server_that_is_not_there_is_refused(model: Path, tmp_path: Path) -> None:
    with one_rank():
        policy = policy_of(ending_model("llama"), config_of())
        with serving(VllmLike(model)) as address:
            elsewhere = sampling_by(f"{address}/elsewhere", tmp_path)
            assert "VLLM_SERVER_DEV_MODE=1" in refusal(policy, elsewhere)
            check_engine(policy, sampling_by(address, tmp_path))
            taken = refusal(policy, sampling_by(address, tmp_path))
            assert "rollout.server_folder: another run writes to" in taken
        told = refusal(policy, sampling_by(address, tmp_path / "other"))
    assert f"{address} does not answer" in told and "start the server first" in told


@pytest.mark.slow
def test_a_server_that_is_started_anew_is_handed_the_weights_again(
    model: Path, tmp_path: Path
) -> None:
    server = VllmLike(model)
    with one_rank(), serving(server) as address:
        policy = policy_of(ending_model("llama"), config_of())
        sampling = sampling_by(address, tmp_path)
        wanted = generate(policy, PROMPTS, KEYS, sampling, ENDS, seed=1)
        server.bodies.clear()
        server.ends_after, server.comes_back = 2, True
        found = generate(policy, PROMPTS, KEYS, sampling, ENDS, seed=1)
        assert found == wanted and differences(policy, found, PROMPTS) < 1e-4
        assert len(server.loads) == 3
        # Its files may be another model's by then, which must not be handed ours.
        server.ends_after, server.settings["max_model_len"] = len(server.bodies) + 1, 16
        with pytest.raises(OutageError, match="takes 16 tokens"):
            generate(policy, PROMPTS, KEYS, sampling, ENDS, seed=1)
        assert len(server.loads) == 4


def test_what_another_run_hands_over_meanwhile_is_noticed(model: Path, tmp_path: Path) -> None:
    server = VllmLike(model)

    def complete(body: dict[str, Any]) -> Any:
        answer = VllmLike.complete(server, body)
        if len(server.bodies) == 2:
            server.version = "another's"
        return answer

    with one_rank(), serving(server) as address:
        policy = policy_of(ending_model("llama"), config_of())
        sampling = sampling_by(address, tmp_path)
        server.complete = complete  # type: ignore[method-assign]
        generate(policy, PROMPTS, KEYS, sampling, ENDS, seed=1)
    assert len(server.loads) == 2 and len(server.bodies) == 8


def test_a_completion_that_the_server_cut_short_is_refused(model: Path, tmp_path: Path) -> None:
    with one_rank(), serving(VllmLike(model)) as address:
        policy = policy_of(ending_model("llama"), config_of())
        sampling = sampling_by(address, tmp_path, max_tokens=62)
        with pytest.raises(OutageError, match="of a completion of 62 tokens the server returned"):
            generate(policy, PROMPTS, KEYS, sampling, [], seed=1)


def test_an_answer_without_token_ids_is_refused(model: Path, tmp_path: Path) -> None:
    server = VllmLike(model)

    def complete(body: dict[str, Any]) -> Any:
        status, said = VllmLike.complete(server, body)
        for choice in said["choices"]:  # as servers that know nothing of return_token_ids
            del choice["token_ids"]
        return status, said

    server.complete = complete  # type: ignore[method-assign]
    with one_rank(), serving(server) as address:
        policy = policy_of(ending_model("llama"), config_of())
        assert "no answer of vLLM's" in refusal(policy, sampling_by(address, tmp_path))


def test_a_server_that_is_gone_is_waited_for_no_longer_than_said(
    model: Path, tmp_path: Path
) -> None:
    server = VllmLike(model)
    server.ends_after = 1
    with one_rank(), serving(server) as address:
        policy = policy_of(ending_model("llama"), config_of())
        sampling = sampling_by(address, tmp_path, server_timeout=0.6)
        with pytest.raises(OutageError, match=r"server_timeout = 0.6 s .*: start it again"):
            generate(policy, PROMPTS, KEYS, sampling, ENDS, seed=1)


def test_a_server_that_has_answered_meanwhile_is_waited_for_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It fails three times, half a second apart, and completes something before each failure."""
    order = SimpleNamespace(sampling=RolloutConfig(server_timeout=0.8), answers=0)

    def ask(order: Any) -> list[list[Completion]]:
        time.sleep(0.5)
        order.answers += 1
        if order.answers < 4:
            raise UnansweredCallError("it is gone")
        return []

    monkeypatch.setattr(server_module, "_ask", ask)
    assert server_module._ask_patiently(order) == []


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ({"engine": "server"}, "rollout.engine, rollout.server: give the address"),
        ({"engine": "server", "server": "http://a:1"}, "rollout.engine, rollout.server_folder"),
        ({"server": "http://a:1"}, "rollout.server, rollout.engine: only server takes"),
        ({"server_folder": "a"}, "rollout.server_folder, rollout.engine: only server takes"),
        ({"server_timeout": 1.0}, "rollout.server_timeout, rollout.engine: only server takes"),
        (
            {"engine": "server", "server": "a:1", "server_folder": "a"},
            "rollout.server: it should begin with http:// or https://",
        ),
        *(
            (
                {"engine": "server", "server": address, "server_folder": "a"},
                "rollout.server: it is no address",
            )
            for address in (
                "http://",
                "http://a b",
                "http://[::1",
                "http://a:99999999",
                "http://:1",
            )
        ),
    ],
)
def test_settings_that_do_not_go_with_a_server_are_refused(
    rollout: dict[str, object], said: str
) -> None:
    own = {"training": {"seq_len": 64}, "rewards": {"functions": ("exact",)}}
    config = Config(job={"task": "grpo"}, rollout={"max_tokens": 16, **rollout}, **own)
    assert any(said in one for one in contradictions_of(config)), contradictions_of(config)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="module")
def begun(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights, as the world's configuration makes it."""
    folder = tmp_path_factory.mktemp("begun")
    AutoTokenizer.from_pretrained(world / "model").save_pretrained(folder)
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(world / "model"))
    made.save_pretrained(folder)
    return folder


def flags_by(address: str, begun: Path, prompts: Path, folder: Path, *more: object) -> list[object]:
    """The flags of a run whose completions come from a server, on the model that it begins with."""
    return [
        *flags(prompts, "--model.name_or_path", begun, "--model.config", "none"),
        *("--rollout.engine", "server", "--rollout.server", address, "--optimizer.lr", 1e-3),
        *("--rollout.server_folder", folder, "--rollout.server_timeout", 1.5, *more),
    ]


FILE = "validation_completions.jsonl"
CASES: dict[str, tuple[object, ...]] = {
    "grpo": ("--grpo.resample", 1, "--grpo.importance", "token"),
    "ppo": ("--job.task", "ppo", "--ppo.updates", 2, "--ppo.beta", 0.0),
    "two ranks": ("--cpus", 2, "--training.batch_size", 2, "--lora.rank", 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["grpo", "ppo", "two ranks"])
def test_a_run_whose_server_is_gone_saves_and_goes_on(
    case: str, world: Path, begun: Path, prompts: Path, tmp_path: Path
) -> None:
    server = VllmLike(begun, max_model_len=32)
    with serving(server) as address:
        own = flags_by(address, begun, prompts, tmp_path / "handed over", *CASES[case])
        own += ["--training.steps", 4]
        train(world, tmp_path / "straight", *own)
    straight = curve(tmp_path / "straight", "loss", "grad_norm", "reward", "mismatch_mean")
    logged = [row for row in rows(tmp_path / "straight") if "loss" in row]
    assert max(row["mismatch_largest"] for row in logged) < 1e-4
    assert any(norm for _, _, norm, *_ in straight)

    port = int(address.rpartition(":")[2])
    folder = tmp_path / "resumed"
    gone = VllmLike(begun, max_model_len=32)
    gone.ends_after = 3 * len(server.bodies) // 4
    with serving(gone, port):
        said = train(world, folder, *own, status=1)
    [last] = steps(folder)
    assert 0 < last < 4 and f"Stopped and saved after step {last}. The same command goes on" in said
    assert "server_timeout = 1.5 s" in said and "Traceback" not in said
    assert "start the server first" in train(world, folder, *own, status=2)
    with serving(VllmLike(begun, max_model_len=32), port):
        train(world, folder, *own)
    assert curve(folder, "loss", "grad_norm", "reward", "mismatch_mean") == straight
    assert completions(folder) == completions(tmp_path / "straight")
    assert weights(folder) == weights(tmp_path / "straight")


@pytest.mark.slow
def test_ranks_train_by_a_server_as_one_process_does(
    world: Path, begun: Path, prompts: Path, tmp_path: Path
) -> None:
    with serving(VllmLike(begun, max_model_len=32)) as address:
        own = flags_by(address, begun, prompts, tmp_path / "handed over", "--training.steps", 4)
        own += ["--rollout.server_timeout", 60.0]
        train(world, tmp_path / "alone", *own)
        layouts = {"two": ("--cpus", 2, "--training.batch_size", 2), **SHARED_LAYOUTS}
        for name in ("two", "cp 2, ring", "tp 2"):
            train(world, tmp_path / name, *own, *layouts[name])
            found = curve(tmp_path / name, *LOGGED)
            for row, other in zip(found, curve(tmp_path / "alone", *LOGGED), strict=True):
                assert row == pytest.approx(other, rel=2e-4, abs=1e-5), name


@pytest.mark.slow
def test_held_out_prompts_are_answered_by_the_server_too(
    world: Path, begun: Path, prompts: Path, tmp_path: Path
) -> None:
    with serving(VllmLike(begun, max_model_len=32)) as address:
        own = flags_by(address, begun, prompts, tmp_path / "handed over", "--training.steps", 1)
        own += ["--validation.dataset", prompts / "prompts.jsonl", "--validation.steps", 1]
        train(world, tmp_path / "server", *own)
    own = flags(prompts, "--training.steps", 1, *own[-4:], "--model.name_or_path", begun)
    train(world, tmp_path / "own", *own, "--model.config", "none")
    first, other = (
        [
            (row["prompt"], row["completion"], row["ended"])
            for row in map(json.loads, (tmp_path / name / FILE).read_bytes().splitlines())
            if row["step"] == 0
        ]
        for name in ("server", "own")
    )
    assert first == other and len(first) == 4


@pytest.mark.slow
def test_the_server_is_handed_the_weights_once_for_all_turns(world: Path, tmp_path: Path) -> None:
    talks = write_talks(tmp_path / "talks")
    server = VllmLike(talks / "model", max_model_len=64)
    own = talking_flags(talks, "--training.steps", 2)
    with serving(server) as address:
        by_server = ("--rollout.engine", "server", "--rollout.server", address)
        folder = ("--rollout.server_folder", tmp_path / "handed over")
        train(world, tmp_path / "run", *own, *by_server, *folder, cwd=talks)
    said = [row["messages"] for row in completions(tmp_path / "run")]
    assert max(sum(one["role"] == "assistant" for one in messages) for messages in said) > 2
    assert len(server.loads) == 1 + 2, "for the comparison, and in each step"
    assert max(row["mismatch_largest"] for row in rows(tmp_path / "run") if "loss" in row) < 1e-4
