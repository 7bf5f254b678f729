# SPDX-License-Identifier: Apache-2.0
"""What a loop of anybody's returns is checked and completed before verl stores it, and its turns are merged."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from verl_ext.rollout.shared import outputs, worker


def output(prompt: list[int], response: list[int], **changes: Any) -> AgentLoopOutput:
    made = {"response_mask": [1] * len(response), "metrics": AgentLoopMetrics(), "extra_fields": {}, **changes}
    return AgentLoopOutput(prompt_ids=prompt, response_ids=response, **made)


def config(mode: str = "sync", **node: Any) -> Any:
    return OmegaConf.create(
        {
            "trainer": {"v1": {"trainer_mode": mode}},
            "algorithm": {"adv_estimator": "trloo"},
            "actor_rollout_ref": {"actor": {"loss_agg_mode": "token-mean", "policy_loss": {"loss_mode": "vanilla"}}},
            "verl_ext": node,
        }
    )


def stored(run: Any, found: list[Any]) -> list[Any]:
    async def score(self: Any, outputs: list[Any], kwargs: Any) -> None:
        outputs[-1].reward_score = 1.0

    of = SimpleNamespace(config=run, tokenizer=None)
    asyncio.run(worker.merging_turns(score)(of, found, kwargs={"global_steps": 3}))
    return found


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([output([1], [2]), "text"], "output 1 of the agent loop is a str"),
        ([output([1], [])], "output 0 of the agent loop has no response_ids"),
        ([output([1], [2, 3], response_mask=[1])], "has 2 response_ids and a response_mask of 1"),
        ([output([1], [2, 3], response_logprobs=[0.0])], "has 2 response_ids and 1 response_logprobs"),
        ([output([1], [2], response_logprobs=[0.0]), output([1], [2])], "some outputs .* response_logprobs"),
    ],
)
def test_an_output_that_cannot_be_stored_is_named(found: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stored(config(), found)


def test_what_verl_reads_is_filled_in_or_named() -> None:
    (one,) = stored(config(), [output([1], [2])])
    assert one.extra_fields == {"reward_extra_info": {}, "min_global_steps": 2, "max_global_steps": 2}
    assert one.num_turns == 2 and "num_turns" in one.model_fields_set  # what is not set is not stored
    given = {"min_global_steps": 0, "max_global_steps": 1}
    (one,) = stored(config("separate_async"), [output([1], [2], extra_fields=dict(given))])
    assert one.extra_fields == {"reward_extra_info": {}, **given}
    with pytest.raises(ValueError, match=r"no min_global_steps and no max_global_steps.*\*\*answer.extra_fields"):
        stored(config("colocate_async"), [output([1], [2])])
    assert outputs.STEPS == ("min_global_steps", "max_global_steps")


def test_the_stored_outputs_are_the_sequences() -> None:
    turns = [output([1], [2]), output([1, 2, 3], [4])]
    (one,) = stored(config(), list(turns))
    assert one.response_ids == [2, 3, 4] and one.reward_score == 1.0
    assert len(stored(config(merge_turns=False), [output([1], [2]), output([1, 2, 3], [4])])) == 2
    (one,) = stored(config(), [output([1], [2, 3, 4], response_mask=[1, 0, 1])])
    assert one.extra_fields["turns"]["spans"] == [[0, 1], [2, 3]]
    assert [own["turn_reward"] for own in one.extra_fields["turns"]["own"]] == [0.0, 1.0]
    (one,) = stored(config(merge_turns=False), [output([1], [2, 3, 4], response_mask=[1, 0, 1])])
    assert "turns" not in one.extra_fields
