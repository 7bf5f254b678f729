# SPDX-License-Identifier: Apache-2.0
"""Merged turns are the turns they were: random trajectories there and back, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from verl_ext.integration.columns import row_fields
from verl_ext.integration.turns import Turns, lay_out
from verl_ext.rollout.shared.merge import merge

AGENTS = ("planner", "worker")


@st.composite
def trajectories(draw: st.DrawFn) -> list[AgentLoopOutput]:
    """Calls that continue the last one of their agent, an earlier one, or begin anew."""
    tokens = st.lists(st.integers(0, 3), max_size=3)  # few, so that prompts are prefixes by chance too
    with_log_probs = draw(st.booleans())
    outputs: list[AgentLoopOutput] = []
    for place in range(draw(st.integers(1, 7))):
        agent = draw(st.sampled_from(AGENTS))
        before = [one for one in outputs if one.extra_fields["agent_id"] == agent]
        prompt = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        if before and draw(st.integers(0, 3)):
            earlier = before[-1] if draw(st.booleans()) else draw(st.sampled_from(before))
            prompt = earlier.prompt_ids + earlier.response_ids + draw(tokens)
        response = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        valid = draw(st.booleans()) or draw(st.booleans())
        said: dict[str, Any] = {
            "agent_id": agent,
            "turn_reward": draw(st.floats(-1, 1, width=32)),
            "anchor_obs": f"room {draw(st.integers(0, 2))}",
            "valid_row": valid,
            "failure": "",
            "stop_reason": "said",
            "reward_extra_info": {"acc": 1.0},
            "min_global_steps": draw(st.integers(0, 1)),
            "max_global_steps": draw(st.integers(1, 2)),
        }
        if draw(st.booleans()):
            said["turn_index"] = place // 2
        outputs.append(
            AgentLoopOutput(
                prompt_ids=prompt,
                response_ids=response,
                response_mask=[int(valid)] * len(response),
                response_logprobs=[-0.1 * one for one in response] if with_log_probs else None,
                reward_score=draw(st.floats(-1, 1, width=32)),
                num_turns=2 * (place + 1),
                metrics=AgentLoopMetrics(generate_sequences=1.0),
                extra_fields=said,
            )
        )
    return outputs


def stored(trajectory: str, outputs: list[AgentLoopOutput]) -> tuple[list[str], list[dict[str, Any]], list[Any]]:
    """Keys, tags and fields as verl stores them."""
    fields = [{**one.as_dict()} for one in outputs]
    tags = [{"prompt_len": len(one.prompt_ids), "response_len": len(one.response_ids)} for one in outputs]
    return [f"{trajectory}_{number}" for number in range(len(outputs))], tags, fields


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@settings(max_examples=150, deadline=None)
@given(st.lists(trajectories(), min_size=1, max_size=3))
def test_merged_and_unpacked_is_a_row_a_call(batch: list[list[AgentLoopOutput]]) -> None:
    apart: list[Any] = [[], [], []]
    merged: list[Any] = [[], [], []]
    for number, outputs in enumerate(batch):
        for one in outputs[:-1]:
            one.reward_score = outputs[-1].reward_score  # as verl copies it
        sequences = merge(outputs)
        assert sum(map(len, ([one] for one in sequences))) <= len(outputs)
        for target, found in ((apart, outputs), (merged, sequences)):
            for column, more in zip(target, stored(f"p{number // 2}_{number}", found), strict=True):
                column += more
    keys, tags, rows = apart
    layout = lay_out(merged[0], merged[1], [one["extra_fields"] for one in merged[2]])
    order = [layout.keys.index(key) for key in keys]
    assert sorted(layout.keys) == sorted(keys)
    said = [layout.said[turn] for turn in order]
    assert said == [one["extra_fields"] for one in rows]
    whole, _ = row_fields(keys, tags, [one["extra_fields"] for one in rows])
    found, _ = row_fields([layout.keys[turn] for turn in order], [layout.tags[turn] for turn in order], said)
    for name, column in whole.items():
        assert np.array_equal(column, found[name]), name

    names = ["responses", "response_mask", "rm_scores", *["rollout_log_probs"] * ("rollout_log_probs" in rows[0])]
    for name in names:
        if any(name not in one for one in rows):
            continue
        before = padded([one[name] for one in rows])
        column = padded([one[name] for one in merged[2]])
        turns = layout.turns.rewards(column) if name == "rm_scores" else layout.turns.unpack(column)
        assert torch.equal(turns[order][:, : before.shape[1]], before), name
        assert not turns[:, before.shape[1] :].any()
        if name == "response_mask":
            assert torch.equal(layout.turns.pack(turns), column)
    asked, answered = layout.turns.texts(*([one[name] for one in merged[2]] for name in ("prompts", "responses")))
    assert all(torch.equal(asked[turn], one["prompts"]) for turn, one in zip(order, rows, strict=True))
    assert all(torch.equal(answered[turn], one["responses"]) for turn, one in zip(order, rows, strict=True))
    # Each token of the model is trained once, and no sequence is part of another.
    assert sum(int(one["response_mask"].sum()) for one in merged[2]) == sum(int(x["response_mask"].sum()) for x in rows)

    if layout.turns.sequence is not None:  # a loss finds the same turns, from the numbers of some of the sequences
        numbers = layout.turns.numbers()
        some = torch.arange(0, len(numbers), 2)
        again = Turns.of_numbers(numbers[some])
        kept = [turn for turn in range(len(layout.keys)) if int(layout.turns.sequence[turn]) % 2 == 0]
        column = padded([one["responses"] for one in merged[2]])
        both = again.unpack(column[some]), layout.turns.unpack(column)[kept]
        width = both[0].shape[1]
        assert torch.equal(both[0], both[1][:, :width]) and not both[1][:, width:].any()
        assert torch.equal(again.pack(both[0]), layout.turns.pack(layout.turns.unpack(column))[some])


def call(prompt: list[int], response: list[int], **said: Any) -> AgentLoopOutput:
    more = {name: said.pop(name) for name in ("multi_modal_data", "routed_experts") if name in said}
    return AgentLoopOutput(
        prompt_ids=prompt,
        response_ids=response,
        response_mask=[1] * len(response),
        response_logprobs=[-1.0] * len(response),
        reward_score=0.5,
        metrics=AgentLoopMetrics(generate_sequences=2.0, num_preempted=1),
        extra_fields={"reward_extra_info": {}, "min_global_steps": 3, "max_global_steps": 4, **said},
        **more,
    )


def test_a_chain_by_hand() -> None:
    calls = [call([1, 2], [3, 4], turn_reward=0.25), call([1, 2, 3, 4, 5], [6], turn_reward=0.75, max_global_steps=5)]
    (one,) = merge(calls)
    assert (one.prompt_ids, one.response_ids, one.response_mask) == ([1, 2], [3, 4, 5, 6], [1, 1, 0, 1])
    assert one.response_logprobs == [-1, -1, 0, -1] and one.metrics.generate_sequences == 4
    said = one.extra_fields
    assert said["turns"]["spans"] == [[0, 2], [3, 4]] and said["turns"]["places"] == [0, 1]
    assert said["min_global_steps"] == 3 and said["max_global_steps"] == 5
    assert [own["turn_reward"] for own in said["turns"]["own"]] == [0.25, 0.75]


def test_what_begins_a_new_sequence() -> None:
    first = call([1], [2])
    assert merge([first]) == [first] and "turns" not in first.extra_fields
    for second in (
        call([1, 9], [3]),  # rewritten
        call([1], [2]),  # asked again
        call([1, 2], [3], agent_id="other"),
        call([1, 2], [3], model="other"),
        call([1, 2], [3], multi_modal_data={"images": ["an image"]}),
        call([1, 2], [3], routed_experts=[[0]]),
    ):
        assert merge([first, second]) == [first, second]
    # Two branches of one beginning: the longest that fits goes on, and the sequence with the last turn is the last.
    calls = [call([1], [2]), call([1, 2, 5], [3]), call([1, 2, 6], [4]), call([1, 2, 5, 3, 7], [8])]
    found = merge(calls)
    assert [one.extra_fields["turns"]["places"] for one in found] == [[2], [0, 1, 3]]
    assert found[0].response_ids == [4] and found[1].response_ids == [2, 5, 3, 7, 8]


def test_the_sampler_s_distributions_go_with_the_tokens() -> None:
    calls = [
        call([1], [2, 3], sampler_log_probs=np.ones((2, 4))),
        call([1, 2, 3, 9], [4], sampler_log_probs=np.zeros((1, 4)), valid_row=False),
        call([1, 2, 3, 9, 4], [5], sampler_log_probs=np.full((1, 4), 2.0)),
    ]
    (one,) = merge(calls)
    assert one.response_mask == [1, 1, 0, 0, 1]
    assert one.extra_fields["sampler_log_probs"][:, 0].tolist() == [1, 1, 2]


@pytest.mark.parametrize("valid", [[True, False], [False, True], [False, False]])
def test_a_sequence_is_taken_out_where_all_of_its_turns_are(valid: list[bool]) -> None:
    (one,) = merge([call([1], [2], valid_row=valid[0]), call([1, 2], [3], valid_row=valid[1])])
    assert one.extra_fields["valid_row"] is any(valid) and one.response_mask == [int(turn) for turn in valid]
