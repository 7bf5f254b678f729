# SPDX-License-Identifier: Apache-2.0
"""The demo's chains: counting on in steps, with a reward for each right word. A task of answers as long as one likes.

The question names a number and a step; every word of the answer should be the number before it plus the step, modulo
the size of the circle. What is right depends on the word that was said, so a wrong one spoils nothing after it. The
warm-up shows chains in which a word is the right one or any other: the model knows what comes next, and says it half of
the time. Beside the circle the tokenizer may have words that are never right, a tail of the vocabulary.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_ext.lab.demo.assets import Progress
from verl_ext.lab.demo.model import Codec, make_model, sample, save_model, seeded
from verl_ext.lab.demo.recipes import ChainRecipe
from verl_ext.lab.demo.words import imitate, word_tokenizer
from verl_ext.rewards.arguments import refuse_unknown
from verl_ext.rollout.environments.data import write_parquet

#: verl's loop of one turn.
AGENT_LOOP = "single_turn_agent"


def make_tokenizer(recipe: ChainRecipe) -> PreTrainedTokenizerFast:
    """A token for each number and each step."""
    numbers = [str(number) for number in range(recipe.circle + recipe.tail)]
    return word_tokenizer([*(f"+{step}" for step in recipe.steps), *numbers], pre_tokenizers.WhitespaceSplit())


def count_right(text: str, first: int, step: int, circle: int) -> tuple[int, int]:
    """Words of an answer that are the number before them plus `step` modulo `circle`, and all of its words."""
    right, before, words = 0, first, text.split()
    for word in words:
        number = int(word) if word.isdecimal() and word.isascii() and len(word) < 9 else None
        right += number is not None and number == (before + step) % circle
        before = before if number is None else number
    return right, len(words)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """Right words over the words that are wanted, at most 1.

    Args:
        data_source, extra_info: of the row; not used.
        solution_str: the answer.
        ground_truth: first number, step, size of the circle, words wanted.
        **kwargs: what verl adds in runs with a reward model.

    Returns:
        ``score``, and ``acc``, the share of the answer's own words that are right, both in [0, 1].

    Raises:
        TypeError: unknown option.
    """
    refuse_unknown(kwargs, ())
    first, step, circle, wanted = (int(number) for number in ground_truth.split())
    right, words = count_right(solution_str, first, step, circle)
    return {"score": min(1.0, right / wanted), "acc": right / max(1, words)}


def chain(first: int, step: int, recipe: ChainRecipe, rng: random.Random) -> list[int]:
    """An answer to imitate, right in some `recipe.skill` of its words, as long as `recipe.lengths` allow."""
    words: list[int] = []
    for _ in range(rng.randint(*recipe.lengths)):
        draw = rng.random()
        if draw < recipe.tail_share:
            word = recipe.circle + rng.randrange(recipe.tail)
        elif draw < recipe.tail_share + recipe.skill:
            word = ((words or [first])[-1] + step) % recipe.circle
        else:
            word = rng.randrange(recipe.circle)
        words.append(word)
    return words


def lesson(codec: Codec, recipe: ChainRecipe, rng: random.Random) -> tuple[list[int], list[int]]:
    """A question and an answer to imitate; token ids, and 1 for what is learned."""
    first, step = rng.randrange(recipe.circle), rng.choice(recipe.steps)
    asked = codec.user(f"{first} +{step}")
    said = codec.answer(" ".join(map(str, chain(first, step, recipe, rng))))
    if not recipe.ends:
        said = said[:-1]
    return [*asked, *said], [*[0] * len(asked), *[1] * len(said)]


def rows(recipe: ChainRecipe, size: int, split: str, rng: random.Random) -> list[dict[str, Any]]:
    """Dataset rows of questions, each combination of number and step as often as the others."""
    every = [(first, step) for first in range(recipe.circle) for step in recipe.steps]
    questions = [every[index % len(every)] for index in range(size)]
    rng.shuffle(questions)
    return [
        {
            "data_source": "chain",
            "agent_name": AGENT_LOOP,
            "prompt": [{"role": "user", "content": f"{first} +{step}"}],
            "reward_model": {"style": "rule", "ground_truth": f"{first} {step} {recipe.circle} {recipe.wanted}"},
            "extra_info": {"index": index, "split": split},
        }
        for index, (first, step) in enumerate(questions)
    ]


def measure(codec: Codec, model: Any, recipe: ChainRecipe, seed: int) -> tuple[float, float]:
    """Share of right words at temperature 1, and words an answer, over each question once."""
    questions = [(first, step) for first in range(recipe.circle) for step in recipe.steps]
    prompts = [codec.user(f"{first} +{step}") for first, step in questions]
    generator = torch.Generator().manual_seed(seed)
    answers = sample(model, prompts, codec, generator=generator, max_new_tokens=recipe.response_length)
    right = words = 0
    for (first, step), answer in zip(questions, answers, strict=True):
        found, said = count_right(codec.decode(answer), first, step, recipe.circle)
        right, words = right + found, words + said
    return right / words, words / len(questions)


def build_chain(folder: Path, recipe: ChainRecipe, seed: int, tell: Progress) -> dict[str, Any]:
    """Make the task and its model; a :data:`~verl_ext.lab.demo.assets.Build`."""
    rng = random.Random(seed)
    for name, size in (("train", recipe.train_size), ("val", recipe.val_size)):
        write_parquet(rows(recipe, size, name, rng), folder / "data" / f"{name}.parquet")
    with seeded(seed):
        codec = Codec(make_tokenizer(recipe))
        model = make_model(codec, recipe.hidden_size, recipe.layers, recipe.heads, recipe.init_std)
        tell(f"chain: warming up a Llama of {sum(p.numel() for p in model.parameters()):,} parameters")
        imitate(model, codec, lambda: lesson(codec, recipe, rng), recipe, tell)
        right, words = measure(codec, model, recipe, seed)
    tell(f"  warm-up: {right:.2f} of the words right, {words:.1f} words an answer")
    save_model(model, codec, folder / "model")
    return {
        "task": "chain",
        "agent_loop": AGENT_LOOP,
        "prompt_length": len(codec.user(f"0 +{recipe.steps[0]}")),
        "response_length": recipe.response_length,
        "measured": {"right": round(right, 4), "words": round(words, 1), "steps": recipe.warm_up_steps},
    }
