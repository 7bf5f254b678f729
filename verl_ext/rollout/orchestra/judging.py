# SPDX-License-Identifier: Apache-2.0
"""The run's reward function on a team's answer."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Mapping
from typing import Any

from verl_ext.integration.parts.advantage.rollouts import JUDGED
from verl_ext.integration.settings.options import select
from verl_ext.rollout.orchestra.agents import REWARD_ERROR, REWARD_TIMEOUT, OrchestraFailure
from verl_ext.rollout.orchestra.core import Task
from verl_ext.rollout.shared.contain import contained
from verl_ext.rollout.shared.per_config import once
from verl_ext.rollout.shared.threads import HeldThreads, threads


async def judge(config: Any, task: Task, answer: str, timeout_s: float) -> tuple[float, dict[str, float]]:
    """Score an answer with ``reward.custom_reward_function``, else verl's default for the data source.

    Args:
        config: verl's whole config.
        task: what was asked.
        answer: the team's.
        timeout_s: seconds for one judgement.

    Returns:
        The score, and further numbers.

    Raises:
        OrchestraFailure: the function raised, gave no number, or took longer.
        HeldThreads: nothing can be judged any more.
    """
    function = once(config, "reward function", lambda: _function(config))
    arguments = {
        "data_source": task.data_source,
        "solution_str": answer,
        "ground_truth": task.ground_truth,
        "extra_info": dict(task.extra_info),
    }
    try:
        if inspect.iscoroutinefunction(function):
            result = await asyncio.wait_for(_judgement(function, arguments), timeout=timeout_s)
        else:
            call = functools.partial(function, **arguments)
            result = await threads(config, "judging").run(call, timeout_s=timeout_s)
        score = float(result["score"] if isinstance(result, Mapping) else result)
    except asyncio.TimeoutError:
        detail = f"no score within {timeout_s} s for the answer {answer!r:.200}"
        raise OrchestraFailure(REWARD_TIMEOUT, detail) from None
    except HeldThreads:
        raise
    except Exception as error:
        raise OrchestraFailure(REWARD_ERROR, f"{type(error).__name__}: {error}") from error
    if not isinstance(result, Mapping):
        return score, {"acc": score}
    return score, {key: float(value) for key, value in result.items() if _is_number(value)}


def all_scores(config: Any, team: str, said: Mapping[str, float], failed: bool) -> dict[str, float]:
    """What is said of a trajectory; of one that failed before it was judged, with the least of each score.

    A score is a number of `JUDGED` or the one that DAPO's filter reads (``algorithm.filter_groups.metric``). Its least
    is what the team's trajectories of this process have had so far, 0 at most; of the filter's also where none has.

    Args:
        config: verl's whole config.
        team: the orchestra's name.
        said: numbers by name.
        failed: whether the trajectory did.
    """
    least: dict[str, float] = once(config, f"least scores of {team}", dict)
    filtered = select(select(config.get("algorithm"), "filter_groups"), "metric")
    own = {str(filtered)} - {"None", "reward"}  # reward: verl has it of every turn
    if failed:
        return {**dict.fromkeys(own, 0.0), **least, **said}
    least.update({name: min(least.get(name, 0.0), said[name]) for name in {*JUDGED, *own} & said.keys()})
    return dict(said)


def _function(config: Any) -> Any:
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.utils.reward_score import default_compute_score

    return get_custom_reward_fn(config) or default_compute_score


async def _judgement(function: Any, arguments: Mapping[str, Any]) -> Any:
    with contained("the reward function"):
        return await function(**arguments)


def _is_number(value: Any) -> bool:
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    return isinstance(value, bool | int | float)
