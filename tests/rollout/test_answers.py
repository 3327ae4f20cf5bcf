"""Answers to several questions at once are those to each alone; what does not end is told apart."""

import pytest
import torch
from transformers import PreTrainedModel

from lacuna.rollout.answers import Sampling, generate_answers
from lacuna.rollout.generate import generate_text
from tiny import random_model, tiny_config, tokenizer_of_words

TOKENIZER = tokenizer_of_words()
QUESTIONS = ["w5 w6 w7", "w9", "w20 w21 w22 w23 w24"]


def ending_model(architecture: str = "llama") -> PreTrainedModel:
    """One that likes to end."""
    model = random_model(tiny_config(architecture))
    with torch.no_grad():
        model.get_output_embeddings().weight[2] *= 3
    return model


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mistral"])
def test_greedy_answers_are_those_to_each_question_alone(architecture: str) -> None:
    model = ending_model(architecture)
    alone = [generate_text(model, TOKENIZER, one, 8, temperature=0, seed=1) for one in QUESTIONS]
    ended = [len(text.split()) < 8 for text in alone]  # the end itself is not in the text
    assert any(ended)
    found = generate_answers(model, TOKENIZER, QUESTIONS, Sampling(max_tokens=8))
    expected = [[text if end else None] for text, end in zip(alone, ended, strict=True)]
    assert found == expected


def test_drawn_answers_are_by_the_seed_and_end_or_are_none() -> None:
    model = ending_model()
    sampling = Sampling(samples=8, temperature=1.0, max_tokens=12, seed=3)
    first, again = (generate_answers(model, TOKENIZER, QUESTIONS, sampling) for _ in range(2))
    assert first == again
    assert [len(answers) for answers in first] == [8, 8, 8]
    flat = [answer for answers in first for answer in answers]
    assert None in flat
    assert len({answer for answer in flat if answer is not None}) > 2
    assert all("</s>" not in answer for answer in flat if answer is not None)
    other = Sampling(samples=8, temperature=1.0, max_tokens=12, seed=4)
    assert generate_answers(model, TOKENIZER, QUESTIONS, other) != first


def test_a_question_that_leaves_no_room_has_no_answers() -> None:
    long = " ".join(["w7"] * 64)  # as many as the model has positions
    model = ending_model()
    answers = generate_answers(model, TOKENIZER, [long, "w9"], Sampling(max_tokens=4))
    assert answers[0] == [] and len(answers[1]) == 1
    assert generate_answers(model, TOKENIZER, [long], Sampling()) == [[]]


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_question_with_little_room_takes_none_from_the_others(architecture: str) -> None:
    long = " ".join(["w7"] * 62)  # two positions are left
    questions = [f"w{number} w{number + 1}" for number in (21, 23, 32)]
    model = ending_model(architecture)
    sampling = Sampling(max_tokens=16)
    alone = [generate_answers(model, TOKENIZER, [one], sampling)[0] for one in questions]
    assert any(answer is not None and len(answer.split()) > 2 for [answer] in alone)
    found = generate_answers(model, TOKENIZER, [long, *questions], sampling)
    assert found[1:] == alone
