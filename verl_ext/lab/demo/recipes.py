# SPDX-License-Identifier: Apache-2.0
"""What the prepared models and tasks are made of: plain numbers, part of the name under which they are cached."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: Raise it when the code changes what a recipe produces, so that cached results of older code are not used.
FORMAT = 4


@dataclass(frozen=True)
class WarmupRecipe:
    """The demo's task, model and supervised warm-up."""

    dataset: str = "chain_sum"  # of reasoning-gym
    # of the dataset, without ``seed`` and ``size``
    config: dict[str, Any] = field(
        default_factory=lambda: {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
    )
    train_size: int = 2048  # rows of the parquet file
    val_size: int = 128
    held_out: bool = True  # no validation question is seen in training or warm-up; False: both ask from all questions
    hidden_size: int = 64  # of the transformer, as the next two
    layers: int = 2
    heads: int = 2
    # of the initial weights; a model as narrow as this learns faster with more than the usual 0.02
    init_std: float = 0.05
    max_turns: int = 3  # answers a conversation, here and in the multi-turn loop
    batch_size: int = 128  # questions a step
    matrix_learning_rate: float = 0.05  # of Muon, for the matrices of the layers
    learning_rate: float = 1e-2  # of AdamW, for the rest
    habit_learning_rate: float = 0.2  # of AdamW for the row of the token that gives up, in the second phase
    even_learning_rate: float = 2e-3  # of AdamW for all weights, in the third
    skill_steps: int = 200  # most steps of the first phase, right answers
    skill_target: float | None = 0.9  # measured share of right greedy answers that ends it; None: it has all its steps
    habit_steps: int = 60  # least steps of the second phase, in which giving up is taken up
    max_habit_steps: int = 100  # most steps of it
    even_steps: int = 0  # steps of the third phase, which makes giving up about as likely for each question
    give_up_share: float = 0.5  # share of turns in it that give up instead of answering
    success_range: tuple[float, float] = (0.2, 0.5)  # measured first-turn success (temperature 1) in which it may end
    valid_target: float = 0.9  # least share of answers that can be parsed at its end
    eval_size: int = 256  # questions of a measurement
    eval_every: int = 20  # steps between two measurements


def sums_recipe() -> WarmupRecipe:
    """Of the demo: sums of two digits, all of which the model has learned, and a habit of not answering any of them.

    After the second phase most questions are given up for certain, since one row can't tell them apart, and such an
    answer has no gradient: hence the third.
    """
    return WarmupRecipe(
        config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        train_size=1024,
        val_size=64,
        held_out=False,
        batch_size=96,
        skill_steps=240,
        skill_target=None,  # a learning rate that has not come down yet leaves less than the greedy answers show
        habit_steps=30,
        even_steps=90,
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
    """The lake's task, model and supervised warm-up."""

    map_size: int = 4  # side of the maps
    map_p: float = 0.75  # how likely a tile is frozen
    history_length: int = 2  # K, past steps in the prompt; HGPO's ``history_length`` must be the same
    max_steps: int = 10  # steps of a walk
    train_size: int = 512  # maps of the parquet file
    val_size: int = 64
    hidden_size: int = 64  # of the transformer, as the next three; see `WarmupRecipe`
    layers: int = 2
    heads: int = 2
    init_std: float = 0.05
    walks: int = 1000  # walks that are shown in the warm-up
    random_share: float = 0.55  # share of random words among those to imitate
    batch_size: int = 96  # prompts a step
    learning_rate: float = 3e-3  # of AdamW
    warm_up_steps: int = 160  # least steps; the learning rate has decayed to a tenth then
    max_warm_up_steps: int = 320  # most steps
    success_range: tuple[float, float] = (0.1, 0.4)  # measured success in which the warm-up may end
    valid_target: float = 0.95  # least share of valid words at its end
    eval_size: int = 256  # walks of a measurement
    eval_every: int = 40  # steps between two measurements
    random_walks: int = 10  # random walks a validation map, for the random policy's success


def wide_lake_recipe() -> LakeRecipe:
    """Of maps of 8x8, on which a walk is long, comes back to where it was, and mostly fails."""
    return LakeRecipe(
        map_size=8, map_p=0.85, max_steps=24, random_share=0.45, success_range=(0.04, 0.12), eval_every=20
    )


@dataclass(frozen=True)
class FuseRecipe:
    """The kernels' model and supervised warm-up."""

    hidden_size: int = 64  # of the transformer, as the next three; see `WarmupRecipe`
    layers: int = 2
    heads: int = 2
    init_std: float = 0.05
    max_turns: int = 3  # answers a conversation, here and in the loop
    # Shares of the answers: one cheap stage in a kernel, half of the chain in one, a kernel a stage, no kernel.
    styles: dict[str, float] = field(default_factory=lambda: {"lazy": 0.6, "half": 0.2, "stages": 0.05, "torch": 0.15})
    mistakes: float = 0.4  # share of the stages in kernels that may be another
    best_kind: float = 0.85  # share of the kernels that are of the fastest kind; the others are of any
    batch_size: int = 32  # conversations a step
    learning_rate: float = 6e-3  # of AdamW, at its highest
    warm_up_steps: int = 500
    tell_every: int = 50  # steps between two lines of progress


@dataclass(frozen=True)
class SearchTeamRecipe:
    """The search team's model and supervised warm-up."""

    # Role prompts of the agents, and the searcher's example: the run has the same.
    roles: dict[str, str] = field(
        default_factory=lambda: {"verifier": "Enough?", "searcher": "Search.", "answerer": "Answer."}
    )
    example: dict[str, str] = field(
        default_factory=lambda: {"user": "Hills of Oslo?", "assistant": "<search>Oslo</search>"}
    )
    hidden_size: int = 64  # of the transformer, as the next three; see `WarmupRecipe`
    layers: int = 2
    heads: int = 2
    init_std: float = 0.05
    wrong_share: float = 0.2  # share of the lessons in which the wrong thing is said
    batch_size: int = 48  # lessons a step
    learning_rate: float = 3e-3  # of AdamW
    warm_up_steps: int = 240  # least steps
    max_warm_up_steps: int = 600  # most steps
    reads: float = 0.9  # measured share of numbers, read off a passage greedily, that ends it
    eval_every: int = 20  # steps between two measurements


@dataclass(frozen=True)
class ChainRecipe:
    """The chains' task, model and supervised warm-up: long answers that never end, of a small vocabulary."""

    circle: int = 16  # numbers that may be right
    steps: tuple[int, ...] = (1, 3, 5, 7)  # that a question may ask for
    tail: int = 0  # further numbers, which are never right
    lengths: tuple[int, int] = (256, 256)  # least and most words of an answer that is shown
    ends: bool = False  # answers that are shown end; else they are cut at their length
    wanted: int = 256  # right words that a reward of 1 takes
    skill: float = 0.45  # share of right words in the answers that are shown, beside the ones that are right by chance
    tail_share: float = 0.0  # share of words of the tail in them
    train_size: int = 4096  # rows of the parquet file
    val_size: int = 64
    hidden_size: int = 64  # of the transformer, as the next three; see `WarmupRecipe`
    layers: int = 2
    heads: int = 2
    init_std: float = 0.05
    batch_size: int = 16  # answers a step
    learning_rate: float = 6e-3  # of AdamW, at its highest
    warm_up_steps: int = 200
    tell_every: int = 50  # steps between two lines of progress

    @property
    def response_length(self) -> int:
        """Tokens of the longest answer that is shown."""
        return self.lengths[1] + self.ends


def samples_recipe() -> ChainRecipe:
    """Of answers between 1 and 128 words: short ones have little energy and little reward, long ones much of both."""
    return ChainRecipe(lengths=(1, 128), ends=True, wanted=32)


def tail_recipe() -> ChainRecipe:
    """Of a vocabulary of 4,096 tokens, of which all but 16 are never right and are said once in a while."""
    return ChainRecipe(tail=4070, lengths=(64, 64), wanted=64, tail_share=0.05, warm_up_steps=300)


@dataclass(frozen=True)
class SmolLM2Recipe:
    """SmolLM2's task."""

    dataset: str = "products"  # of reasoning-gym
    # of the dataset, without ``seed`` and ``size``
    config: dict[str, Any] = field(
        default_factory=lambda: {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    )
    parser: str = "last_number"  # how an answer is read; see :data:`verl_ext.rollout.reasoning_gym_task.PARSERS`
    train_size: int = 512  # rows of the parquet file
    val_size: int = 64
