# SPDX-License-Identifier: Apache-2.0
"""The demo's lake: FrozenLake of which only the neighbouring tiles are seen, and a small model that half knows it.

The view does not say where on the map one is, so the right step depends on what was seen before: who has come from the
left must not go back there. The prompt shows the last K observations with the words said, HGPO compares turns that
share them. The model is warmed up on the words of a careful walker, half of them replaced by a random word.
"""

from __future__ import annotations

import importlib.util
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from verl_ext.lab.demo.assets import Progress
from verl_ext.lab.demo.model import Codec, make_model, sample, save_model, seeded, sequence_loss, train_tokenizer
from verl_ext.lab.demo.recipes import LakeRecipe
from verl_ext.rollout.environments.action import parse_action
from verl_ext.rollout.environments.data import AGENT_LOOP, build_rows, write_parquet
from verl_ext.rollout.environments.options import EnvironmentOptions
from verl_ext.rollout.environments.protocol import Observation
from verl_ext.rollout.environments.shipped.gymnasium_env import GymnasiumEnvironment
from verl_ext.rollout.environments.templates import load_template

TEMPLATE = "compact"
WORDS = ("left", "down", "right", "up")
_BACK = {"left": "right", "right": "left", "up": "down", "down": "up"}
_OPTIONS = EnvironmentOptions(action_tag=None, template=TEMPLATE)
#: Seeds of the maps: blocks of so many for each seed of the demo, divided among training, validation and warm-up.
_BLOCK = 1_000_000
_VAL, _WARM_UP, _PROBE = 400_000, 500_000, 900_000

#: What has been seen and said so far in an episode, oldest first.
Past = Sequence[tuple[str, str]]
Policy = Callable[[Observation, Past, random.Random], str]


def environment(recipe: LakeRecipe) -> dict[str, Any]:
    """Arguments of the Gymnasium adapter."""
    return {
        "id": "FrozenLake-v1",
        "map_size": recipe.map_size,
        "map_p": recipe.map_p,
        "is_slippery": False,
        "view": "local",
    }


def message(seen: Observation, past: Past, recipe: LakeRecipe) -> str:
    """The prompt of the next step, as the step-wise loop writes it."""
    first = max(0, len(past) - recipe.history_length)
    messages = load_template(TEMPLATE).messages(
        task=seen.task,
        prompt="",
        observation=seen.text,
        actions=seen.actions,
        history=[(number + 1, *past[number]) for number in range(first, len(past))],
        step=len(past) + 1,
        max_steps=recipe.max_steps,
    )
    return messages[-1]["content"]


def tiles(text: str) -> dict[str, str]:
    """What lies in each direction: S, F, H, G or edge."""
    return dict(part.split(": ") for part in text.partition("; ")[2].split(", "))


def careful(seen: Observation, past: Past, rng: random.Random) -> str:
    """Onto the goal if it is near, else right or down, never onto a hole, back only where nothing else is left."""
    around = tiles(seen.text)
    for word, tile in around.items():
        if tile == "G":
            return word
    safe = [word for word, tile in around.items() if tile in "SF"]
    back = _BACK.get(past[-1][1]) if past else None
    onward = [word for word in safe if word != back]
    best = [word for word in onward if word in ("right", "down")] or onward or safe
    return rng.choice(best or list(WORDS))


def uniform(seen: Observation, past: Past, rng: random.Random) -> str:
    """Any of the four words."""
    return rng.choice(WORDS)


@dataclass
class Walk:
    """One episode under way or over."""

    env: GymnasiumEnvironment
    seen: Observation
    past: list[tuple[str, str]]
    success: bool = False
    done: bool = False

    @classmethod
    def start(cls, seed: int, recipe: LakeRecipe) -> Walk:
        """Begin on the map of a seed."""
        env = GymnasiumEnvironment(**environment(recipe))
        return cls(env, env.reset(seed), [])

    def say(self, word: str, recipe: LakeRecipe) -> None:
        """Take a step; a word that is no action spends it."""
        before = self.seen.text
        if word in WORDS:
            self.seen, _, self.done, info = self.env.step(word)
            self.success = bool(info["success"])
        self.past.append((before, word))
        if self.done or len(self.past) >= recipe.max_steps:
            self.done = True
            self.env.close()


def success_rate(policy: Policy, seeds: Sequence[int], recipe: LakeRecipe, rng: random.Random) -> float:
    """Share of walks that reach the goal, one a seed."""
    reached = 0
    for seed in seeds:
        walk = Walk.start(seed, recipe)
        while not walk.done:
            walk.say(policy(walk.seen, walk.past, rng), recipe)
        reached += walk.success
    return reached / len(seeds)


def demonstrations(seeds: Sequence[int], recipe: LakeRecipe, rng: random.Random) -> list[tuple[str, str]]:
    """Prompts and the words to imitate.

    The walks go half at random, so that all sorts of places are met; the word to imitate is the careful one, or with
    probability ``recipe.random_share`` a random one.
    """
    pairs = []
    for seed in seeds:
        walk = Walk.start(seed, recipe)
        while not walk.done:
            word = careful(walk.seen, walk.past, rng)
            shown = rng.choice(WORDS) if rng.random() < recipe.random_share else word
            pairs.append((message(walk.seen, walk.past, recipe), shown))
            walk.say(rng.choice(WORDS) if rng.random() < 0.5 else word, recipe)
    return pairs


def measure(
    model: LlamaForCausalLM, codec: Codec, seeds: Sequence[int], recipe: LakeRecipe, seed: int
) -> tuple[float, float]:
    """Play the model at temperature 1, all walks side by side.

    Returns:
        Share of walks that reach the goal, share of valid words.
    """
    generator = torch.Generator().manual_seed(seed)
    walks = [Walk.start(one, recipe) for one in seeds]
    said = valid = 0
    while alive := [walk for walk in walks if not walk.done]:
        prompts = [codec.user(message(walk.seen, walk.past, recipe)) for walk in alive]
        answers = sample(model, prompts, codec, generator=generator, max_new_tokens=response_length(codec))
        for walk, answer in zip(alive, answers, strict=True):
            action = parse_action(codec.decode(answer), walk.seen.actions, _OPTIONS)
            said, valid = said + 1, valid + action.valid
            walk.say(action.text, recipe)
    return sum(walk.success for walk in walks) / len(walks), valid / said


def response_length(codec: Codec) -> int:
    """Tokens that a word and its end take, and one more for a model that rambles."""
    return max(len(codec.answer(word)) for word in WORDS) + 1


def warm_up(
    model: LlamaForCausalLM,
    codec: Codec,
    pairs: Sequence[tuple[str, str]],
    probe: Sequence[int],
    recipe: LakeRecipe,
    seed: int,
    tell: Progress,
) -> dict[str, float | int]:
    """Imitate the demonstrations until the measured success is within ``recipe.success_range``.

    Args:
        model: trained in place.
        pairs: of :func:`demonstrations`.
        probe: seeds of the maps on which it is measured.
        tell: called with a line at each measurement.

    Returns:
        Success and share of valid words at temperature 1, steps.

    Raises:
        RuntimeError: the range was not reached within ``recipe.max_warm_up_steps``.
    """
    rng = random.Random(seed)
    low, high = recipe.success_range
    success = valid = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(1, recipe.max_warm_up_steps + 1):
        rate = min(1.0, step / 10) * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / recipe.warm_up_steps))))
        batch = []
        for text, word in rng.choices(pairs, k=recipe.batch_size):
            prompt, answer = codec.user(text), codec.answer(word)
            batch.append(([*prompt, *answer], [*[0] * len(prompt), *[1] * len(answer)]))
        loss = sequence_loss(model, batch, codec.pad_id)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * rate
        optimizer.step()
        if step >= recipe.warm_up_steps and step % recipe.eval_every == 0:
            success, valid = measure(model, codec, probe, recipe, seed)
            tell(f"  warm-up: step {step}, loss {float(loss.detach()):.3f}, success {success:.2f}, valid {valid:.2f}")
            if low <= success <= high and valid >= recipe.valid_target:
                return {"success": round(success, 4), "valid_answers": round(valid, 4), "steps": step}
    raise RuntimeError(
        f"the warm-up ended with a success of {success:.2f} and {valid:.2f} valid words after "
        f"{recipe.max_warm_up_steps} steps; wanted {low} to {high} and at least {recipe.valid_target}. Another "
        "seed, or another random_share in the recipe, may reach it."
    )


def build_lake(folder: Path, recipe: LakeRecipe, seed: int, tell: Progress) -> dict[str, Any]:
    """Make the lake's task and model; a :data:`~verl_ext.lab.demo.assets.Build`. Raises ImportError: Gymnasium is
    missing; the message names the command. RuntimeError: see :func:`warm_up`.
    """
    if importlib.util.find_spec("gymnasium") is None:
        raise ImportError("the lake is an environment of Gymnasium: pip install 'verl-ext[gymnasium]'")
    tell("lake: writing the task (FrozenLake, one map a prompt)")
    base = _BLOCK * seed
    val = range(base + _VAL, base + _VAL + recipe.val_size)
    for split, seeds in (("train", range(base, base + recipe.train_size)), ("val", val)):
        write_parquet(build_rows("gymnasium", seeds, environment(recipe)), folder / "data" / f"{split}.parquet")
    rng = random.Random(seed)
    started = time.perf_counter()
    at_random = success_rate(uniform, [one for one in val for _ in range(recipe.random_walks)], recipe, rng)
    pairs = demonstrations(range(base + _WARM_UP, base + _WARM_UP + recipe.walks), recipe, rng)
    tell(
        f"lake: {len(pairs)} demonstrations in {time.perf_counter() - started:.1f} s; a random walk reaches the goal "
        f"with probability {at_random:.3f}"
    )

    with seeded(seed):
        texts = [text for text, _ in pairs[:512]]
        tokenizer = train_tokenizer([*texts, *[word for word in WORDS for _ in range(64)]])
        codec = Codec(tokenizer)
        model = make_model(codec, recipe.hidden_size, recipe.layers, recipe.heads, recipe.init_std)
        tell(f"lake: warming up a Llama of {sum(p.numel() for p in model.parameters()):,} parameters")
        probe = range(base + _PROBE, base + _PROBE + recipe.eval_size)
        measured = warm_up(model, codec, pairs, probe, recipe, seed, tell)
    save_model(model, codec, folder / "model")
    return {
        "task": "lake",
        "agent_loop": AGENT_LOOP,
        # A few tokens more than the longest: places that the demonstrations have not met.
        "prompt_length": max(len(codec.user(text)) for text, _ in pairs) + 4,
        "response_length": response_length(codec),
        "measured": {**measured, "random": round(at_random, 4)},
    }
