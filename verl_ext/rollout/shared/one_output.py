# SPDX-License-Identifier: Apache-2.0
"""Turns of a loop that returns one output for a trajectory, such as verl's ``tool_agent``: the runs of 1 in its mask.

Between them stands what the environment said. What a turn has earned is the loop's own list ``turn_rewards`` of
``extra_fields``, or verl's ``turn_scores`` where it has an entry a turn, or its ``tool_rewards`` where each turn but
the last called one tool, with the outcome on the last turn; otherwise the outcome on the last turn, and 0 before. Where
an estimator needs them, ``anchor_obs`` is the text in front of a turn, and ``agent_id`` is `AGENT`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from verl_ext.integration.columns import row_lacks
from verl_ext.integration.turns import TURNS

if TYPE_CHECKING:  # whose import loads the plugin, which loads this
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

logger = logging.getLogger(__name__)
AGENT = "agent"
_told: set[str] = set()


def runs(mask: list[int]) -> list[list[int]]:
    """[start, end) of each run of ones in a mask."""
    edges = [place for place, (one, other) in enumerate(zip([0, *mask], [*mask, 0], strict=True)) if one != other]
    return [list(pair) for pair in zip(edges[::2], edges[1::2], strict=True)]


def lay_out(output: AgentLoopOutput, needed: Collection[str], tokenizer: Any) -> None:
    """Say in the output's ``extra_fields`` where its turns lie and what each has of its own.

    Args:
        output: the only one of a trajectory, scored.
        needed: fields to fill in where the loop left them out, of ``agent_id`` and ``anchor_obs``.
        tokenizer: of the model, for `anchor_obs`.

    Raises:
        ValueError: ``turn_rewards`` has not an entry a turn.
    """
    said, spans = output.extra_fields, runs(output.response_mask)
    if "agent_id" in needed and row_lacks(said, "agent_id"):
        said["agent_id"] = AGENT
    own: list[dict[str, Any]] = [{} for _ in range(len(spans) or 1)]  # a turn even without a token of the model
    if "anchor_obs" in needed and row_lacks(said, "anchor_obs"):
        before = [0, *(end for _, end in spans)]
        seen = [output.response_ids[end:start] for end, (start, _) in zip(before, spans, strict=False)]
        for one, ids in zip(own, [output.prompt_ids, *seen[1:]], strict=False):
            one["anchor_obs"] = str(tokenizer.decode(ids, skip_special_tokens=True))
    given = said.get("turn_rewards")
    if (given is None and len(spans) <= 1) or not (spans or given):  # a turn as it is
        said.update(*own)
        return
    for one, reward in zip(own, rewards(said, len(spans), float(output.reward_score or 0.0)), strict=True):
        one["turn_reward"] = reward
    said[TURNS] = {"spans": spans, "places": list(range(len(spans))), "own": own}


def rewards(said: Mapping[str, Any], turns: int, outcome: float) -> list[float]:
    """The reward of each of a sequence's turns; see the module's text."""
    given = said.get("turn_rewards")
    if given is not None:
        if len(given) != turns:
            raise ValueError(
                f"the agent loop gave turn_rewards of {len(given)} entries, but its response_mask has {turns} runs of "
                "1, which are its turns. Give one reward a turn."
            )
        return [float(one) for one in given]
    last = [0.0] * (turns - 1)
    if not row_lacks(said, "turn_reward"):
        return [*last, float(said["turn_reward"])]
    scores, tools = (list(said.get(name) or ()) for name in ("turn_scores", "tool_rewards"))
    if len(scores) == turns:
        return _say("turn_scores", [float(one) for one in scores])
    if tools and len(tools) in (turns - 1, turns):
        found = [*map(float, tools), 0.0][:turns]
        return _say("tool_rewards, and the outcome on the last turn", [*found[:-1], found[-1] + outcome])
    return _say("the outcome on the last turn", [*last, outcome])


def _say(what: str, found: list[float]) -> list[float]:
    if what not in _told:
        _told.add(what)
        logger.warning("the rewards of the turns of a trajectory with one output are %s", what)
    return found
