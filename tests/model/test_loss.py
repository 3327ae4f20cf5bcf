"""The chunked loss and its gradients are those of torch's cross-entropy over all logits at once."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lacuna.data.packing import IGNORED
from lacuna.model.head import Head
from lacuna.model.loss import (
    TokenLoss,
    _compiled,
    _gradient_and_sums,
    _gradient_in_place,
    _scaled,
    chunked_logprobs,
    chunked_sums,
    logprobs_of,
)
from lacuna.objective.language_modelling import LanguageModelling
from tiny import relative_error

TOKENS, WIDTH, WORDS = 50, 24, 97


def problem(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Hidden states, weight and bias of a head whose logits are large enough to be soft-capped."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"hidden": (TOKENS, WIDTH), "weight": (WORDS, WIDTH), "bias": (WORDS,)}
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def some_labels() -> Tensor:
    labels = torch.arange(TOKENS) * 31 % WORDS
    labels[::3] = IGNORED
    return labels


def with_gradients(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in tensors.items()}


def gradients_of(loss: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    loss.backward()
    return {name: tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}


def chunked(
    tensors: dict[str, Tensor],
    labels: Tensor,
    bias: bool,
    head: Head,
    chunk: int,
    places: Tensor | None = None,
) -> Tensor:
    return sums(tensors, labels, bias, head, chunk, LanguageModelling.loss, places)[0]


def sums(
    tensors: dict[str, Tensor],
    labels: Tensor,
    bias: bool,
    head: Head,
    chunk: int,
    loss: TokenLoss,
    places: Tensor | None = None,
) -> Tensor:
    columns = {"labels": labels}
    linear = linear_of(tensors, bias)
    return chunked_sums(linear, head, loss, tensors["hidden"], columns, places, chunk)


def linear_of(tensors: dict[str, Tensor], bias: bool) -> SimpleNamespace:
    return SimpleNamespace(weight=tensors["weight"], bias=tensors["bias"] if bias else None)


def truth(
    tensors: dict[str, Tensor], labels: Tensor, bias: bool, head: Head
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients in float64 from the whole matrix of logits."""
    exact = with_gradients(tensors, torch.float64)
    logits = (
        F.linear(exact["hidden"], exact["weight"], exact["bias"] if bias else None) * head.scale
    )
    if head.soft_cap is not None:
        logits = head.soft_cap * torch.tanh(logits / head.soft_cap)
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return loss.item(), gradients_of(loss, exact)


HEADS = {
    "plain": Head(),
    "scale": Head(scale=0.25),
    "soft cap": Head(soft_cap=3.0),
    "scale and soft cap": Head(scale=1.7, soft_cap=5.0),
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("chunk", [7, 25, 50, 1000, 0])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_equal_cross_entropy(head: Head, chunk: int, bias: bool) -> None:
    tensors, labels = problem(), some_labels()
    expected, expected_gradients = truth(tensors, labels, bias, head)
    given = with_gradients(tensors, torch.float32)
    loss = chunked(given, labels, bias, head, chunk)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    gradients = gradients_of(loss, given)
    for name in expected_gradients:
        assert relative_error({name: gradients[name]}, {name: expected_gradients[name]}) < 2e-6, (
            name
        )


def test_a_scaled_loss_scales_its_gradients() -> None:
    tensors, labels = problem(), some_labels()
    _, expected = truth(tensors, labels, True, Head())
    given = with_gradients(tensors, torch.float32)
    loss = chunked(given, labels, True, Head(), 8)
    gradients = gradients_of(loss / 37, given)
    assert (
        relative_error(gradients, {name: gradient / 37 for name, gradient in expected.items()})
        < 2e-6
    )


def test_rows_without_a_single_label_give_zero_and_no_gradient() -> None:
    given = with_gradients(problem(), torch.float32)
    labels = torch.full((TOKENS,), IGNORED)
    loss = chunked(given, labels, True, Head(), 8)
    assert loss.item() == 0.0
    assert all(not gradient.any() for gradient in gradients_of(loss, given).values())


def test_ignored_rows_get_no_gradient_even_from_hidden_states_that_are_not_finite() -> None:
    tensors, labels = problem(), some_labels()
    tensors["hidden"][labels == IGNORED] = 1e30
    given = with_gradients(tensors, torch.float32)
    loss = chunked(given, labels, False, Head(), 8)
    gradients = gradients_of(loss, given)
    assert torch.isfinite(loss) and torch.isfinite(gradients["weight"]).all()
    assert not gradients["hidden"][labels == IGNORED].any()


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_the_loss_without_gradients_is_the_same_and_labels_that_are_likeliest_are_counted(
    head: Head,
) -> None:
    tensors, labels = problem(), some_labels()
    with torch.no_grad():
        logits = head.logits(F.linear(tensors["hidden"], tensors["weight"], tensors["bias"]))
        labels[1::3] = logits.argmax(-1)[1::3]
        expected = F.cross_entropy(
            logits.double(), labels, ignore_index=IGNORED, reduction="sum"
        ).item()
        loss, right = sums(tensors, labels, True, head, 7, LanguageModelling.held_out_loss)
    assert right == (logits.argmax(-1) == labels).sum() > 0
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert loss.dtype == torch.float32 and not loss.requires_grad


def test_a_frozen_head_still_passes_gradients_on() -> None:
    tensors, labels = problem(), some_labels()
    _, expected = truth(tensors, labels, False, Head())
    hidden = tensors["hidden"].requires_grad_()
    chunked(tensors, labels, False, Head(), 8).backward()
    assert tensors["weight"].grad is None
    assert relative_error({"hidden": hidden.grad}, {"hidden": expected["hidden"]}) < 2e-6


def test_half_precision_accumulates_the_gradient_of_the_weight_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, chunk = 4096, 16
    tensors = {
        "hidden": torch.randn(tokens, WIDTH, generator=generator) + 1,
        "weight": torch.randn(WORDS, WIDTH, generator=generator) / 50,
        "bias": torch.zeros(WORDS),
    }
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    labels = torch.randint(0, WORDS // 2, (tokens,), generator=generator)
    _, expected = truth(tensors, labels, True, Head())
    given = with_gradients(tensors, torch.bfloat16)
    loss = chunked(given, labels, True, Head(), chunk)
    assert loss.dtype == torch.float32
    ours = gradients_of(loss, given)

    naive = with_gradients(tensors, torch.bfloat16)
    for start in range(0, tokens, chunk):  # autograd adds each chunk's gradient to a bfloat16 sum
        part = slice(start, start + chunk)
        logits = F.linear(naive["hidden"][part], naive["weight"], naive["bias"]).float()
        F.cross_entropy(logits, labels[part], reduction="sum").backward()
    for name in ("weight", "bias"):
        error = relative_error({name: ours[name]}, {name: expected[name]})
        assert error < 3e-3, name  # about one rounding to bfloat16
        assert error < relative_error({name: naive[name].grad}, {name: expected[name]}) / 10, name
        assert ours[name].dtype == torch.bfloat16


LABELS = {
    "some": some_labels(),
    "one": torch.full((TOKENS,), IGNORED).index_fill(0, torch.tensor([31]), 5),
    "none": torch.full((TOKENS,), IGNORED),
}


def places_of(labels: Tensor) -> Tensor:
    return (labels != IGNORED).nonzero().flatten()


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS.keys())
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("chunk", [7, 1000])
@pytest.mark.parametrize("bias", [False, True])
def test_sums_and_gradients_of_trained_tokens_are_those_of_all(
    labels: Tensor, head: Head, chunk: int, bias: bool
) -> None:
    tensors = problem()
    expected, expected_gradients = truth(tensors, labels, bias, head)
    tensors["hidden"][labels == IGNORED] = torch.nan  # which nobody looks at
    given = with_gradients(tensors, torch.float32)
    loss = chunked(given, labels, bias, head, chunk, places_of(labels))
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    gradients = gradients_of(loss, given)
    assert gradients.keys() == expected_gradients.keys()
    assert not gradients["hidden"][labels == IGNORED].any()
    for name, gradient in expected_gradients.items():
        assert torch.allclose(
            gradients[name].double(), gradient, rtol=0, atol=2e-6 * gradient.norm().item()
        ), name
    with torch.no_grad():
        ours = sums(
            given, labels, bias, head, chunk, LanguageModelling.held_out_loss, places_of(labels)
        )
        tensors["hidden"].nan_to_num_()
        theirs = sums(tensors, labels, bias, head, chunk, LanguageModelling.held_out_loss)
    assert ours.tolist() == pytest.approx(theirs.tolist(), rel=1e-6)


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS.keys())
@pytest.mark.parametrize("bias", [False, True])
def test_log_probabilities_are_put_back_at_their_places(labels: Tensor, bias: bool) -> None:
    tensors, head = problem(), Head(soft_cap=3.0)
    weights = torch.arange(TOKENS) / TOKENS
    exact = with_gradients(tensors, torch.float64)
    product = F.linear(exact["hidden"], exact["weight"], exact["bias"] if bias else None)
    expected = logprobs_of(3 * torch.tanh(product / 3), labels)
    wanted = gradients_of((expected * weights).sum(), exact)
    given = with_gradients(tensors, torch.float32)
    linear, places = linear_of(given, bias), places_of(labels)
    found = chunked_logprobs(linear, head, given["hidden"], labels, places, 7)
    torch.testing.assert_close(found, expected.float())
    gradients = gradients_of((found * weights).sum(), given)
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient.float(), rtol=1e-5, atol=1e-5)


def test_logits_of_other_tokens_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    linear = F.linear

    def noted(states: Tensor, *parameters: Tensor) -> Tensor:
        made.append(len(states))
        return linear(states, *parameters)

    monkeypatch.setattr(F, "linear", noted)
    labels = some_labels()
    given = with_gradients(problem(), torch.float32)
    places = places_of(labels)
    chunked(given, labels, True, Head(), 16, places).backward()
    assert made == [16, 16, 1]
    made.clear()
    hidden = given["hidden"]
    chunked_logprobs(linear_of(given, True), Head(), hidden, labels, places, 16).sum().backward()
    assert made == [16, 16, 1] * 2, "forward, and once more backward"
    made.clear()
    chunked(given, LABELS["none"], True, Head(), 16, places_of(LABELS["none"])).backward()
    assert made == []


@torch._dynamo.config.patch(recompile_limit=3)
@pytest.mark.slow
def test_one_compiled_loss_serves_chunks_of_many_lengths() -> None:
    """Rows of one example each have many lengths, and torch compiles only so many graphs.

    Of trained tokens there may be any number, and a single one is compiled for itself.
    """
    torch._dynamo.reset()
    step = _compiled(_gradient_in_place)
    for tokens in (64, 128, 192, 256, 97, 51, 3, 1, 2, 255, 1024):
        product = torch.randn(tokens, WORDS)
        given = {"labels": torch.arange(tokens) % WORDS}, Head(), LanguageModelling.loss
        expected = _gradient_and_sums(product, *given)
        gradient, sums = step(product, *given)
        assert gradient.data_ptr() == product.data_ptr()
        torch.testing.assert_close((gradient, sums), expected)


@torch._dynamo.config.patch(recompile_limit=7)
@pytest.mark.slow
def test_one_compiled_product_scales_the_gradients_of_all_that_a_head_has() -> None:
    torch._dynamo.reset()
    scaled = _compiled(_scaled)
    scale = torch.tensor(0.3)
    of_weight, of_bias = torch.randn(WORDS, 8), torch.randn(WORDS)
    for tokens in (64, 1, 128, 3, 97):
        for gradient in (torch.randn(tokens, 8).bfloat16(), of_weight, of_bias):
            given = gradient, scale, torch.bfloat16
            assert torch.equal(scaled(*given), _scaled(*given))


def test_logits_that_a_loss_keeps_stay_as_they_are() -> None:
    kept: list[Tensor] = []

    def keeping(logits: Tensor, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        kept.append(logits.detach())
        return {"loss": logits.square().sum()}

    tensors = with_gradients(problem(), torch.float32)
    linear = linear_of(tensors, False)
    chunked_sums(linear, Head(), TokenLoss(keeping), tensors["hidden"], {}).backward(torch.ones(1))
    torch.testing.assert_close(torch.cat(kept), tensors["hidden"] @ tensors["weight"].t())
