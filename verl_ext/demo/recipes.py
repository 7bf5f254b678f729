# SPDX-License-Identifier: Apache-2.0
"""What the prepared models and tasks are made of: plain numbers, part of the name under which they are cached."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: Raise it when the code changes what a recipe produces, so that cached results of older code are not used.
FORMAT = 4


@dataclass(frozen=True)
class WarmupRecipe:
    """The demo's task, model and supervised warm-up.

    Attributes:
        dataset, config: reasoning-gym's dataset and its configuration (without ``seed`` and ``size``).
        train_size, val_size: rows of the parquet files.
        held_out: whether no validation question is seen in training or warm-up; else both ask from all questions.
        hidden_size, layers, heads: of the transformer.
        init_std: of the initial weights; a model as narrow as this learns faster with more than the usual 0.02.
        max_turns: answers a conversation, here and in the multi-turn loop.
        batch_size: questions a step.
        matrix_learning_rate: of Muon, for the matrices of the layers.
        learning_rate: of AdamW, for the rest.
        habit_learning_rate: of AdamW for the row of the token that gives up, in the second phase.
        skill_steps: most steps of the first phase, right answers.
        skill_target: measured share of right greedy answers that ends it.
        habit_steps: least steps of the second phase, in which giving up is taken up.
        max_habit_steps: most steps of it.
        give_up_share: share of turns in it that give up instead of answering.
        success_range: measured first-turn success (sampled at temperature 1) in which the warm-up may end.
        valid_target: least share of answers that can be parsed at its end.
        eval_size: questions of a measurement.
        eval_every: steps between two measurements.
    """

    dataset: str = "chain_sum"
    config: dict[str, Any] = field(
        default_factory=lambda: {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
    )
    train_size: int = 2048
    val_size: int = 128
    held_out: bool = True
    hidden_size: int = 64
    layers: int = 2
    heads: int = 2
    init_std: float = 0.05
    max_turns: int = 3
    batch_size: int = 128
    matrix_learning_rate: float = 0.05
    learning_rate: float = 1e-2
    habit_learning_rate: float = 0.2
    skill_steps: int = 200
    skill_target: float = 0.9
    habit_steps: int = 60
    max_habit_steps: int = 100
    give_up_share: float = 0.5
    success_range: tuple[float, float] = (0.2, 0.5)
    valid_target: float = 0.9
    eval_size: int = 256
    eval_every: int = 20


def sums_recipe() -> WarmupRecipe:
    """Of the demo: sums of two digits, all of which the model has learned, and a habit of not answering."""
    return WarmupRecipe(
        config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        train_size=1024,
        val_size=64,
        held_out=False,
        batch_size=96,
        skill_steps=200,
        skill_target=0.99,
        habit_steps=40,
        give_up_share=0.9,
        success_range=(0.03, 0.25),
        eval_size=128,
    )


def team_recipe() -> WarmupRecipe:
    """Of the two-agent demo: sums of two digits, which leave the second try something to learn, and two turns."""
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    return WarmupRecipe(config=config, max_turns=2, give_up_share=0.6, success_range=(0.2, 0.55))


@dataclass(frozen=True)
class LakeRecipe:
    """The lake's task, model and supervised warm-up.

    Attributes:
        map_size, map_p: side of the maps, and how likely a tile is frozen.
        history_length: K, past steps in the prompt; HGPO's ``history_length`` must be the same.
        max_steps: steps of a walk.
        train_size, val_size: maps of the parquet files.
        hidden_size, layers, heads, init_std: of the transformer, as in :class:`WarmupRecipe`.
        walks: walks that are shown in the warm-up.
        random_share: share of random words among those to imitate.
        batch_size: prompts a step.
        learning_rate: of AdamW.
        warm_up_steps: least steps; the learning rate has decayed to a tenth then.
        max_warm_up_steps: most steps.
        success_range: measured success in which the warm-up may end.
        valid_target: least share of valid words at its end.
        eval_size: walks of a measurement.
        eval_every: steps between two measurements.
        random_walks: random walks a validation map, for the random policy's success.
    """

    map_size: int = 4
    map_p: float = 0.75
    history_length: int = 2
    max_steps: int = 10
    train_size: int = 512
    val_size: int = 64
    hidden_size: int = 64
    layers: int = 2
    heads: int = 2
    init_std: float = 0.05
    walks: int = 1000
    random_share: float = 0.55
    batch_size: int = 96
    learning_rate: float = 3e-3
    warm_up_steps: int = 160
    max_warm_up_steps: int = 320
    success_range: tuple[float, float] = (0.1, 0.4)
    valid_target: float = 0.95
    eval_size: int = 256
    eval_every: int = 40
    random_walks: int = 10


@dataclass(frozen=True)
class SmolLM2Recipe:
    """SmolLM2's task.

    Attributes:
        dataset, config: reasoning-gym's dataset and its configuration (without ``seed`` and ``size``).
        parser: how an answer is read; see :data:`verl_ext.rollout.reasoning_gym_task.PARSERS`.
        train_size, val_size: rows of the parquet files.
    """

    dataset: str = "products"
    config: dict[str, Any] = field(
        default_factory=lambda: {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    )
    parser: str = "last_number"
    train_size: int = 512
    val_size: int = 64
