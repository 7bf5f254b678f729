# SPDX-License-Identifier: Apache-2.0
"""What would end a worker ends a call."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_ext.rollout.shared.contain import Contained, contained, contained_reward_function

ENDS = [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit, BaseException]


@pytest.mark.parametrize("end", ENDS)
def test_what_would_end_more_is_an_ordinary_error(end: type[BaseException]) -> None:
    with pytest.raises(Contained, match=f"^it raised {end.__name__}: x$"), contained("it"):
        raise end("x")

    async def in_a_task_of_its_own() -> None:
        with contained("it"):
            await asyncio.sleep(0)
            raise end("x")

    async def waits() -> str:
        with pytest.raises(Contained, match=f"it raised {end.__name__}"):
            await asyncio.wait_for(in_a_task_of_its_own(), 120)
        return "goes on"

    assert asyncio.run(waits()) == "goes on"


def test_what_is_ordinary_or_comes_from_outside_stays_as_it_is() -> None:
    with pytest.raises(KeyError), contained("it"):
        raise KeyError

    async def works() -> None:
        with contained("it"):
            await asyncio.sleep(60)

    async def cancels() -> None:
        task = asyncio.create_task(works())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancels())
    thrown_away = works()

    async def begins() -> None:
        thrown_away.send(None)
        await asyncio.sleep(0)

    asyncio.run(begins())
    thrown_away.close()  # raises GeneratorExit in it, and complains of any other exception


FUNCTIONS = """
import sys
def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    if solution_str == "exit":
        sys.exit(3)
    return scale
async def compute_score_async(*args, **kwargs):
    return compute_score(*args, **kwargs)
"""


@pytest.mark.parametrize("name", ["compute_score", "compute_score_async"])
def test_a_reward_function_ends_its_rollout_alone(name: str, tmp_path: Path) -> None:
    """As verl's reward manager calls it: in a thread or, a coroutine function, in the event loop."""
    import inspect

    from verl.trainer.ppo import reward

    (tmp_path / "reward.py").write_text(FUNCTIONS)
    custom = {"path": str(tmp_path / "reward.py"), "name": name, "reward_kwargs": {"scale": 0.5}}
    function = contained_reward_function(reward.get_custom_reward_fn)(
        OmegaConf.create({"reward": {"custom_reward_function": custom}})
    )
    none = OmegaConf.create({"reward": {"custom_reward_function": {"path": None}}})
    assert contained_reward_function(reward.get_custom_reward_fn)(none) is None
    assert inspect.iscoroutinefunction(function) == name.endswith("async")

    async def score(text: str) -> Any:
        if inspect.iscoroutinefunction(function):
            return await asyncio.wait_for(function("toy", text, ""), 120)
        return await asyncio.get_running_loop().run_in_executor(None, lambda: function("toy", text, ""))

    async def both() -> list[Any]:
        return await asyncio.gather(score("fine"), score("exit"), score("fine"), return_exceptions=True)

    good, bad, after = asyncio.run(both())
    assert good == after == 0.5
    assert isinstance(bad, Contained) and str(bad) == "the reward function raised SystemExit: 3"
