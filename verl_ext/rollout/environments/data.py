# SPDX-License-Identifier: Apache-2.0
"""Parquet files of prompts for the step-wise loop, or a team that plays: one row a seed of an environment.

From a shell::

    python -m verl_ext.rollout.environments.data --environment gymnasium \\
        --kwargs '{"id": "FrozenLake-v1", "map_size": 4, "is_slippery": false}' --seeds 0:256 --out train.parquet
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_ext.rollout.environments.protocol import EnvironmentFault, EnvironmentUnavailable, plain
from verl_ext.rollout.environments.registry import target

#: The agent loops that play the rows.
AGENT_LOOP = "verl_ext_step_wise"
TEAM_LOOP = "verl_ext_orchestra"
INSTRUCTION = "Play the game."


def build_rows(
    environment: str,
    seeds: Sequence[int],
    kwargs: Mapping[str, Any] | None = None,
    *,
    instruction: str = INSTRUCTION,
    system: str = "",
    orchestra: str = "",
) -> list[dict[str, Any]]:
    """Dataset rows of an environment's seeds.

    Args:
        environment: name or import path.
        seeds: one row each; all rollouts of a row begin in the state of its seed.
        kwargs: arguments of the environment's class, plain data.
        instruction: the prompt's text: the task of an environment that says none, and ``{prompt}`` in a template.
        system: text of a system message, or empty.
        orchestra: the team that plays, such as ``textarena_game``; empty: the step-wise loop.

    Returns:
        Rows with ``data_source``, ``agent_name``, ``prompt`` (chat messages), ``ability``, ``reward_model`` and
        ``extra_info`` (``index``, ``env_seed``, ``environment``, ``environment_kwargs`` as JSON).

    Raises:
        EnvironmentUnavailable: the name is not known.
        EnvironmentFault: `kwargs` is not plain data.
        ValueError: no seed, or the same seed twice.
    """
    target(environment)
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError("give at least one seed, and each seed once")
    described = json.dumps(plain(dict(kwargs or {}), "kwargs"), sort_keys=True)
    played = {"environment": environment, "environment_kwargs": described}
    messages = [{"role": "system", "content": system}] if system else []
    return [
        {
            "data_source": f"environment/{environment}",
            **({"agent_name": TEAM_LOOP, "orchestra": orchestra} if orchestra else {"agent_name": AGENT_LOOP}),
            "prompt": [*messages, {"role": "user", "content": instruction}],
            "ability": "agent",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index, "env_seed": int(seed), **played},
        }
        for index, seed in enumerate(seeds)
    ]


def write_parquet(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows to a parquet file, making its folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)


def seed_range(text: str) -> range:
    """``10`` (seeds 0 to 9) or ``10:20`` (10 to 19). Raises ValueError: neither, or an empty range."""
    first, colon, last = text.partition(":")
    try:
        found = range(int(first), int(last)) if colon else range(int(first))
    except ValueError as error:
        raise ValueError(f"seeds {text!r}: give a number of seeds or first:last") from error
    if not found:
        raise ValueError(f"seeds {text!r} are none")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command of the module's text."""
    parser = argparse.ArgumentParser(description="Write prompts for the step-wise loop, one a seed of an environment.")
    parser.add_argument("--environment", required=True, help="name or import path module:Class")
    parser.add_argument("--kwargs", default="{}", help="arguments of the environment's class, a JSON object")
    parser.add_argument("--seeds", required=True, help="a number, or first:last")
    parser.add_argument("--instruction", default=INSTRUCTION, help="text of the prompt")
    parser.add_argument("--system", default="", help="text of a system message")
    parser.add_argument("--orchestra", default="", help="the team that plays; without it the step-wise loop does")
    parser.add_argument("--out", required=True, type=Path, help="the parquet file")
    given = parser.parse_args(arguments)
    try:
        kwargs = json.loads(given.kwargs)
        seeds = seed_range(given.seeds)
        told = {name: getattr(given, name) for name in ("instruction", "system", "orchestra")}
        rows = build_rows(given.environment, seeds, kwargs, **told)
    except (ValueError, TypeError, EnvironmentFault, EnvironmentUnavailable) as error:
        parser.error(str(error))
    write_parquet(rows, given.out)
    print(f"{len(rows)} prompts for {given.environment} in {given.out}")


if __name__ == "__main__":
    main()
