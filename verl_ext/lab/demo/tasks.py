# SPDX-License-Identifier: Apache-2.0
"""The demo's tasks, and which recipe shows itself on which of them. Imports nothing heavy."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl_ext.common.overrides import UsageError, hydra_value
from verl_ext.lab.demo.assets import DemoAssets
from verl_ext.lab.demo.prepare import (
    prepare_chain,
    prepare_demo,
    prepare_fuse,
    prepare_lake,
    prepare_search_team,
    prepare_sums,
    prepare_team,
)
from verl_ext.lab.demo.recipes import (
    ChainRecipe,
    LakeRecipe,
    SearchTeamRecipe,
    WarmupRecipe,
    samples_recipe,
    tail_recipe,
    wide_lake_recipe,
)

#: Turns of a conversation about a chain_sum question, in the warm-up and in the multi-turn loop.
TURNS = WarmupRecipe().max_turns


@dataclass(frozen=True)
class Settings:
    """What a task is trained with, beside the recipes."""

    steps: int = 60  # training steps, unless the caller says otherwise
    prompts: int = 16  # prompts a step
    samples: int = 4  # rollouts a prompt
    learning_rate: float = 3e-4  # of AdamW
    val_every: int = 10  # steps between two validations
    save_every: int = 10  # steps between two checkpoints


@dataclass(frozen=True)
class DemoTask:
    """A task of `verl-ext demo`."""

    name: str  # what ``--task`` says
    summary: str  # one line
    prepare: Callable[..., DemoAssets]  # makes model and data for a seed, or finds them in the cache
    chance: Callable[[DemoAssets], float]  # mean reward a trajectory of a policy that acts at random, without a model
    settings: Settings = Settings()  # of the training
    recipes: tuple[str, ...] = ()  # that take this task if none is named
    companions: tuple[str, ...] = ()  # recipes that the task needs beside those of the user
    overrides: tuple[str, ...] = ()  # further Hydra overrides
    files: tuple[tuple[str, str], ...] = ()  # keys whose values are files of the assets, by their paths in the folder
    agents: tuple[str, ...] = ()  # names of the agents of a team, in order


def guessing(assets: DemoAssets, *, turns: int = TURNS, worth: Callable[[int], float] = lambda turn: 1.0) -> float:
    """Mean reward of guessing: each turn says an answer to some other question of the task, until one is right.

    Args:
        assets: of a task whose answers are right if they are the same.
        turns: guesses a question.
        worth: reward of a right answer in a turn, from 0.
    """
    import pyarrow.parquet as pq

    train, val = (
        [row["ground_truth"] for row in pq.read_table(file, columns=["reward_model"]).column(0).to_pylist()]
        for file in (assets.train_file, assets.val_file)
    )
    rng = random.Random(0)
    total, plays = 0.0, 50
    for truth in val * plays:
        for turn in range(turns):
            if rng.choice(train) == truth:
                total += worth(turn)
                break
    return total / (plays * len(val))


def _quoted(texts: Mapping[str, str]) -> str:
    """A mapping as an override says it; its texts have no quotes."""
    return "{" + ",".join(f"{key}:'{text}'" for key, text in texts.items()) + "}"


CHAIN_SUM = DemoTask(
    name="chain_sum",
    summary="sums of two or three digits, three tries with feedback",
    prepare=prepare_demo,
    chance=guessing,
)
SUMS = DemoTask(
    name="sums",
    summary="sums of two digits by a model that knows them and mostly gives up, three tries with feedback",
    prepare=prepare_sums,
    chance=guessing,
    settings=Settings(steps=28, prompts=16, samples=4, learning_rate=5e-4, val_every=14, save_every=14),
)
LAKE = DemoTask(
    name="lake",
    summary="FrozenLake of which only the neighbouring tiles are seen, one turn a step",
    prepare=prepare_lake,
    chance=lambda assets: float(assets.measured["random"]),
    settings=Settings(steps=40, prompts=8, samples=8),
    recipes=("hgpo", "gigpo", "step_wise"),
    companions=("step_wise",),
    overrides=(
        "verl_ext.environment.template=compact",
        "verl_ext.environment.action_tag=null",
        f"verl_ext.environment.max_steps={LakeRecipe().max_steps}",
        "verl_ext.updates_per_batch=2",
    ),
)
SECOND_TRY = DemoTask(
    name="second_try",
    summary="sums of two digits by two agents: a solver, and a reviser whose success is worth a tenth",
    prepare=prepare_team,
    chance=lambda assets: guessing(assets, turns=2, worth=lambda turn: 1.0 if turn == 0 else 0.1),
    settings=Settings(steps=40, prompts=8, samples=8),
    recipes=("dr_mas",),
    overrides=(
        "+verl_ext.orchestra.name=second_try",
        "+verl_ext.orchestra.modules=[verl_ext.lab.demo.team]",
        "verl_ext.updates_per_batch=2",
        "verl_ext.agent_gradients=true",
    ),
    agents=("solver", "reviser"),
)
FUSE = DemoTask(
    name="fuse",
    summary="kernels for chains of row-wise stages, compiled, checked, timed and profiled here, three tries",
    prepare=prepare_fuse,
    chance=lambda assets: 0.0,
    settings=Settings(steps=40, prompts=4, samples=8, learning_rate=5e-4),
    recipes=("dr_kernel",),
    overrides=("verl_ext.kernels.pairs=3", "verl_ext.kernels.max_pairs=5", "verl_ext.kernels.looks=20"),
)
SEARCH_TEAM = DemoTask(
    name="search_team",
    summary="hills of cities by three agents: a verifier, a searcher who queries an index, and an answerer",
    prepare=prepare_search_team,
    chance=lambda assets: guessing(assets, turns=1),
    settings=Settings(steps=20, prompts=8, samples=8, learning_rate=3e-4, val_every=20, save_every=20),
    overrides=(
        "reward.custom_reward_function.path=pkg://verl_ext.rewards.qa",
        "reward.custom_reward_function.name=compute_score",
        "+verl_ext.orchestra.name=search",
        "+verl_ext.orchestra.retriever.kind=bm25",
        "+verl_ext.orchestra.options.max_steps=3",
        "+verl_ext.orchestra.options.top_k=1",
        *(f"+verl_ext.orchestra.agents.{name}.role='{role}'" for name, role in SearchTeamRecipe().roles.items()),
        f"+verl_ext.orchestra.agents.searcher.examples=[{_quoted(SearchTeamRecipe().example)}]",
        "++algorithm.dr_mas.invalid_action_penalty_coef=0.01",
        "verl_ext.updates_per_batch=2",
        "actor_rollout_ref.rollout.val_kwargs.n=8",
        "trainer.total_epochs=1000",
        # A batch is large enough that threads which wait for one another cost many times the step on a busy machine.
        "+verl_ext.env.VERL_EXT_TRAINING_THREADS=1",
    ),
    files=(("+verl_ext.orchestra.retriever.corpus", "data/corpus.jsonl"),),
    agents=tuple(SearchTeamRecipe().roles),
)
WIDE_LAKE = replace(
    LAKE,
    name="wide_lake",
    summary="the lake on maps of 8x8, where most walks fail at first",
    prepare=functools.partial(prepare_lake, recipe=wide_lake_recipe()),
    recipes=(),
    overrides=tuple(
        f"verl_ext.environment.max_steps={wide_lake_recipe().max_steps}" if "max_steps" in one else one
        for one in LAKE.overrides
    ),
)


def _chain(name: str, summary: str, recipe: ChainRecipe, settings: Settings) -> DemoTask:
    """A task of chains."""
    return DemoTask(
        name=name,
        summary=summary,
        prepare=functools.partial(prepare_chain, recipe=recipe),
        chance=lambda assets: 1 / (recipe.circle + recipe.tail),
        settings=settings,
        overrides=(
            "reward.custom_reward_function.path=pkg://verl_ext.lab.demo.chain",
            "reward.custom_reward_function.name=compute_score",
            "trainer.total_epochs=1000",
        ),
    )


CHAIN = _chain(
    "chain",
    "counting on for 256 words, a reward for each right one",
    ChainRecipe(),
    Settings(steps=20, prompts=8, samples=8, learning_rate=1e-3, val_every=20, save_every=20),
)
CHAIN_ENDS = _chain(
    "chain_ends",
    "counting on for as long as the model likes, 1 to 128 words; 32 right ones are enough",
    samples_recipe(),
    Settings(steps=20, prompts=16, samples=4, learning_rate=1e-3, val_every=20, save_every=20),
)
CHAIN_TAIL = _chain(
    "chain_tail",
    "counting on for 64 words with a vocabulary of 4,096, nearly none of which is ever right",
    tail_recipe(),
    Settings(steps=20, prompts=8, samples=8, learning_rate=1e-3, val_every=20, save_every=20),
)
TASKS = {
    task.name: task
    for task in (SUMS, CHAIN_SUM, LAKE, WIDE_LAKE, SECOND_TRY, SEARCH_TEAM, FUSE, CHAIN, CHAIN_ENDS, CHAIN_TAIL)
}


def choose(recipes: Sequence[str], name: str | None = None) -> DemoTask:
    """The task of a run.

    Args:
        recipes: names of the recipes.
        name: of the task; None: the one that the recipes are made for, else sums.

    Raises:
        UsageError: the recipes are made for different tasks.
    """
    if name is not None:
        return TASKS[name]
    own = {recipe: task for recipe in recipes for task in TASKS.values() if recipe in task.recipes}
    if len({task.name for task in own.values()}) > 1:
        said = ", ".join(f"{recipe} is shown on {task.name}" for recipe, task in own.items())
        raise UsageError(f"{said}; say which one with --task")
    return next(iter(own.values()), SUMS)


def recipe_list(task: DemoTask, recipes: Sequence[str]) -> list[str]:
    """The value of ``+recipe=``: the user's, the task's companions, and the CPU's at the end."""
    names = [name for name in recipes if name != "cpu"]
    return [*names, *[name for name in task.companions if name not in names], "cpu"]


def overrides(task: DemoTask, recipes: Sequence[str], assets: DemoAssets, out: Any, steps: int, seed: int) -> list[str]:
    """The Hydra overrides of a run, in the order in which a person would read them.

    Args:
        task: what is trained on.
        recipes: the user's, without the task's companions.
        assets: of the task.
        out: folder of the run.
        steps: training steps.
        seed: of the order of the data and of the sampling.
    """
    settings = task.settings
    return [
        f"+recipe=[{','.join(recipe_list(task, recipes))}]",
        f"data.train_files={hydra_value(assets.train_file)}",
        f"data.val_files={hydra_value(assets.val_file)}",
        f"actor_rollout_ref.model.path={hydra_value(assets.model_path)}",
        f"data.train_batch_size={settings.prompts}",
        f"data.seed={seed}",
        f"data.max_prompt_length={assets.prompt_length}",
        f"data.max_response_length={assets.response_length}",
        f"actor_rollout_ref.rollout.agent.default_agent_loop={assets.agent_loop}",
        f"actor_rollout_ref.rollout.n={settings.samples}",
        f"actor_rollout_ref.rollout.seed={seed}",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={settings.prompts}",
        f"actor_rollout_ref.actor.optim.lr={settings.learning_rate}",
        *task.overrides,
        *(f"{key}={hydra_value(Path(assets.folder) / name)}" for key, name in task.files),
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={settings.val_every}",
        f"trainer.save_freq={settings.save_every}",
        "trainer.max_actor_ckpt_to_keep=1",
        "trainer.project_name=verl_ext",
        f"trainer.experiment_name=demo_{'_'.join(name for name in recipes if name != 'cpu')}",
        f"trainer.default_local_dir={hydra_value(out / 'checkpoints')}",
        f"verl_ext.rollouts_dir={hydra_value(out / 'rollouts')}",
        f"verl_ext.rows_dir={hydra_value(out / 'rows')}",
        f"hydra.run.dir={hydra_value(out / 'hydra')}",
    ]
