"""Activations in CPU memory change no gradient, come back in time, and do not stay."""

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from every_model import configuration_class, small_config
from lacuna.config import UserError
from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.model.architecture import decoder_layers
from lacuna.parallel import offload
from lacuna.parallel.backbone import backbone
from lacuna.parallel.offload import offload_activations, widest
from lacuna.parallel.recompute import recompute
from tiny import random_model, tiny_config

LAYERS = 4
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]
FULL = ActivationCheckpointConfig(mode="full", offload=True)
NONE = ActivationCheckpointConfig(offload=True, offload_share=0.6)
PRODUCTS = {"mode": "selective", "selective_ac_option": "products"}


def deep_model(device: str, settings: ActivationCheckpointConfig, backend: str) -> PreTrainedModel:
    """A model of some layers that recompute as the settings say."""
    torch._dynamo.reset()
    model = random_model(tiny_config("llama", num_hidden_layers=LAYERS)).to(device).train()
    if backend:
        for layer in decoder_layers(model):
            layer.compile(fullgraph=True, backend=backend)
    recompute(decoder_layers(model), settings)
    return model


def offloading_model(
    device: str,
    settings: ActivationCheckpointConfig,
    backend: str = "aot_eager",
    pipelined: bool = False,
) -> PreTrainedModel:
    model = deep_model(device, settings, backend)
    layers = decoder_layers(model)
    offload_activations(model, layers, settings, bool(backend), pipelined, device)
    return model


def gradients(model: PreTrainedModel, times: int = 3) -> list[Tensor]:
    """The gradients of some passes, each over other tokens, and the last over more."""
    device = next(model.parameters()).device
    for number in range(times):
        tokens = (torch.arange(64 * (1 + (number == 2)), device=device)[None] * (number + 1)) % 60
        output: Any = model(input_ids=tokens, use_cache=False)
        output.logits.square().mean().backward()
    return [one.grad for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("settings", "compiled"),
    [
        (FULL, False),
        *(
            pytest.param(settings, True, marks=pytest.mark.slow)
            for settings in (
                FULL,
                NONE,
                ActivationCheckpointConfig(**PRODUCTS, offload=True),
                ActivationCheckpointConfig(**PRODUCTS, offload=True, offload_share=0.4),
                ActivationCheckpointConfig(mode="selective", offload=True),
            )
        ),
    ],
)
def test_gradients_are_the_same_to_the_bit(
    settings: ActivationCheckpointConfig, compiled: bool, device: str
) -> None:
    backend = ("inductor" if device == "cuda" else "aot_eager") if compiled else ""
    plain = gradients(deep_model(device, settings, backend))
    offloaded = gradients(offloading_model(device, settings, backend))
    for ours, theirs in zip(offloaded, plain, strict=True):
        assert torch.equal(ours, theirs)


class Watched:
    """Notes what a model moves, of what it could have moved, and when it comes back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moved: list[weakref.ref[Any]] = []
        self.bytes: dict[tuple[int, bool], int] = {}
        self.was_on_its_way: list[bool] = []
        self.layers_back = 0
        self.held = 0
        monkeypatch.setattr(offload._Keeper, "pack", self.packing(offload._Keeper.pack))
        monkeypatch.setattr(offload._Keeper, "unpack", self.unpacking(offload._Keeper.unpack))

    def packing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def pack(keeper: Any, tensor: Tensor) -> Any:
            packed = real(keeper, tensor)
            is_moved = isinstance(packed, offload._Moved)
            if is_moved:
                self.moved.append(weakref.ref(packed))
                self.held = max(self.held, len({one.layer for one in keeper.leaving}))
            if keeper._is_activation(tensor):
                key = keeper.layer, is_moved
                self.bytes[key] = self.bytes.get(key, 0) + tensor.nbytes
            return packed

        return pack

    def unpacking(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def unpack(keeper: Any, packed: Any) -> Tensor:
            if isinstance(packed, offload._Moved):
                self.was_on_its_way.append(packed.fetched is not None)
            tensor: Tensor = real(keeper, packed)
            back = {one.layer for ref in self.moved if (one := ref()) and one.fetched is not None}
            self.layers_back = max(self.layers_back, len(back))
            return tensor

        return unpack


@pytest.mark.parametrize("settings", [FULL, NONE])
def test_each_layers_come_back_while_the_next_layer_uses_its_own_and_none_stay(
    settings: ActivationCheckpointConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    model = offloading_model("cpu", settings)
    gradients(model, times=2)
    gc.collect()
    assert len(watched.was_on_its_way) == len(watched.moved) >= 2 * (LAYERS - 1)
    assert all(watched.was_on_its_way)
    assert watched.layers_back <= 2
    assert watched.held <= 2
    assert not any(ref() for ref in watched.moved)


def test_of_every_layer_but_the_last_about_the_same_share_is_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = offloading_model("cpu", NONE)
    gradients(model, times=1)
    watched = Watched(monkeypatch)
    gradients(model, times=1)
    shares = [
        moved / (moved + watched.bytes[layer, False])
        for layer in range(LAYERS - 1)
        if (moved := watched.bytes[layer, True])
    ]
    assert len(set(shares)) == 1 and 0.4 < shares[0] <= NONE.offload_share
    assert (LAYERS - 1, True) not in watched.bytes


def test_the_widest_that_fit_a_share_are_chosen() -> None:
    llama = [2, 2, 2, 2, 7, 7]  # of a layer of Llama 3 8B: input, query, attention, sum, gate, up
    assert widest(llama, 0.41) == {4, 0}
    assert widest(llama, 0.3) == {0, 1, 2}
    assert widest(llama, 1.0) == {*range(6)}
    assert widest([], 0.5) == set()


def test_weights_do_not_count_as_activations() -> None:
    """A row of as many tokens as a matrix has rows: 32 × 32 numbers."""
    model = deep_model("cpu", NONE, "")
    layers = decoder_layers(model)
    keeper = offload._Keeper(model, layers, 1.0, -1, "cpu")
    keeper.begin(model.config.hidden_size)
    query = layers[1].self_attn.q_proj.weight
    assert query.numel() == keeper.least
    assert not keeper._is_activation(query)
    assert not keeper._is_activation(query.detach().t())
    assert keeper._is_activation(torch.zeros_like(query).detach())


def test_nothing_is_kept_of_a_pass_that_is_only_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities are found with gradients recorded, and no backward pass."""
    kept: list[Tensor] = []
    monkeypatch.setattr(offload._Keeper, "pack", lambda _, tensor: kept.append(tensor) or tensor)
    model = offloading_model("cpu", FULL).eval()
    model(input_ids=torch.arange(64)[None] % 60, use_cache=False)
    assert not kept


@pytest.mark.parametrize("ends_badly", [False, True])
def test_a_forward_pass_without_a_backward_pass_leaves_nothing(ends_badly: bool) -> None:
    model = offloading_model("cpu", NONE)
    gradients(model, times=1)
    norm = model.base_model.norm

    def fails(*_: Any) -> None:
        raise RuntimeError("half-way")

    if ends_badly:
        norm.register_forward_pre_hook(fails)
    kept = []
    pack = offload._Keeper.pack

    def noted(keeper: Any, tensor: Tensor) -> Any:
        packed = pack(keeper, tensor)
        kept.append(weakref.ref(packed if isinstance(packed, offload._Moved) else tensor))
        return packed

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(offload._Keeper, "pack", noted)
        with contextlib.suppress(RuntimeError):
            model(input_ids=torch.arange(64)[None] % 60, use_cache=False)
    gc.collect()
    held = [one for ref in kept if (one := ref()) is not None]
    weights = {id(one) for one in model.parameters()}
    assert kept
    assert not [one for one in held if isinstance(one, offload._Moved)]
    tensors = [one for one in held if isinstance(one, Tensor) and id(one) not in weights]
    assert not [one for one in tensors if one.requires_grad]


def test_a_pass_that_records_nothing_does_not_say_what_is_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = offloading_model("cpu", NONE)
    gradients(model, times=1)
    with torch.no_grad():
        model(input_ids=torch.arange(64)[None] % 60, use_cache=False)
    watched = Watched(monkeypatch)
    gradients(model, times=1)
    assert watched.moved


def test_the_last_layer_of_a_pipelines_stage_moves_its_share_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = offloading_model("cpu", NONE, pipelined=True)
    watched = Watched(monkeypatch)
    gradients(model, times=1)
    assert watched.bytes[LAYERS - 1, True]


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_layers_that_are_not_compiled_move_their_inputs_alone(mode: Any) -> None:
    settings = ActivationCheckpointConfig(mode=mode, offload=True)
    with pytest.raises(UserError, match="only their inputs can be moved: set"):
        offloading_model("cpu", settings, backend="")


def test_a_model_that_calls_its_layers_past_its_decoder_is_refused() -> None:
    model = random_model(small_config(configuration_class("opt"))).train()
    recompute(decoder_layers(model), FULL)
    offload_activations(model, decoder_layers(model), FULL, False, False, "cpu")
    tokens = torch.arange(32)[None] + 2
    backbone(model)(input_ids=tokens, use_cache=False)
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    with pytest.raises(UserError, match="activation_checkpoint.offload: .* in another way"):
        model(input_ids=tokens, use_cache=False)
