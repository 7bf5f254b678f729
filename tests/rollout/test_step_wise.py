# SPDX-License-Identifier: Apache-2.0
"""The step-wise loop: environments and tokenizer real, the engine's answers scripted."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loops import make_loop
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.rollout.replica import TokenOutput

from verl_ext.integration.columns import BatchError, row_fields
from verl_ext.integration.parts.advantage.rollouts import require_a_row, rollout_metrics
from verl_ext.lab.demo.model import train_tokenizer
from verl_ext.rollout.environments import EnvironmentFault, EnvironmentUnavailable, runner
from verl_ext.rollout.environments.action import Action, parse_action
from verl_ext.rollout.environments.options import EnvironmentOptions
from verl_ext.rollout.shared.merge import merge
from verl_ext.rollout.step_wise import AGENT_NAME, StepWiseLoop

sys.path.insert(0, str(Path(__file__).parent))  # the hosts get this process's path
STEPS = {"global_steps": 7, "min_global_steps": 7, "max_global_steps": 7}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["<action>forward</action> place 1 Reach the end. Observation 1: back"] * 64)


@pytest.fixture(autouse=True, scope="module")
def _no_host_is_left() -> Iterator[None]:
    yield
    runner.end_all()


class ScriptedEngine:
    """Answers a trajectory's requests with the given texts in turn, as a server would; the last one again and again."""

    def __init__(self, tokenizer: Any, texts: Sequence[str], end: bool = True) -> None:
        self.tokenizer, self.texts, self.end = tokenizer, list(texts), end
        self.requests: list[dict[str, Any]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Any, **kwargs: Any) -> Any:
        told = sum(request["request_id"] == request_id for request in self.requests)
        self.requests.append({"request_id": request_id, "prompt_ids": prompt_ids, "params": sampling_params, **kwargs})
        ids = self.tokenizer.encode(self.texts[min(told, len(self.texts) - 1)], add_special_tokens=False)
        ids = [*ids, self.tokenizer.eos_token_id] if self.end else ids
        logprobs = [-0.1 * (i + 1) for i in range(len(ids))] if sampling_params.get("logprobs") else None
        return TokenOutput(token_ids=ids, log_probs=logprobs, extra_fields=dict(STEPS))

    def prompts(self) -> list[str]:
        return [self.tokenizer.decode(request["prompt_ids"]) for request in self.requests]


def act(action: str) -> str:
    return f"<action>{action}</action>"


def play_many(
    tokenizer: Any,
    texts: Sequence[str],
    rows: Sequence[dict[str, Any]],
    *,
    environment: dict[str, Any] | None = None,
    history_length: int = 2,
    prompt_length: int = 256,
    response_length: int = 32,
    logprobs: bool = True,
    end: bool = True,
) -> tuple[list[Any], ScriptedEngine]:
    """Several trajectories at the same time, the loops made as verl makes them; an exception in place of rows."""
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": {"prompt_length": prompt_length, "response_length": response_length}},
            "algorithm": {"adv_estimator": "mix", "mix": {"hgpo": 1.0}, "hgpo": {"history_length": history_length}},
            "data": {},
            "verl_ext": {
                "environment": {"name": "environment_zoo:Corridor", "template": "compact", **(environment or {})}
            },
        }
    )
    server = ScriptedEngine(tokenizer, texts, end=end)

    async def one(session: int, row: dict[str, Any]) -> list[AgentLoopOutput]:
        loop = make_loop(AGENT_NAME, config, server, tokenizer)
        assert isinstance(loop, StepWiseLoop)
        prompt = [{"role": "user", "content": "Play."}]
        given = {"raw_prompt": prompt, "session_id": session, "index": 0, "global_steps": 3, "uid": "u", **row}
        return await loop.run({"temperature": 1.0, "logprobs": logprobs}, **given)

    async def run() -> list[Any]:
        return await asyncio.gather(*[one(i, row) for i, row in enumerate(rows)], return_exceptions=True)

    return asyncio.run(run()), server


def play(tokenizer: Any, texts: Sequence[str], row: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    (result,), server = play_many(tokenizer, texts, [row or {}], **kwargs)
    if isinstance(result, BaseException):
        raise result
    return result, server


def fields(rows: list[AgentLoopOutput], name: str) -> list[Any]:
    return [row.extra_fields[name] for row in rows]


def info(rows: list[AgentLoopOutput]) -> dict[str, float]:
    return rows[-1].extra_fields["reward_extra_info"]


def test_an_episode_is_a_row_a_step(tokenizer: Any) -> None:
    rows, server = play(tokenizer, [act("forward"), act("FORWARD "), act("forward")])
    assert len(rows) == len(server.requests) == 3
    assert fields(rows, "turn_reward") == [0.0, 0.0, 1.0]
    assert fields(rows, "anchor_obs") == ["place 0", "place 1", "place 2"]
    assert fields(rows, "is_action_valid") == [True] * 3
    assert fields(rows, "action") == ["forward"] * 3
    assert fields(rows, "agent_id") == ["agent"] * 3
    assert fields(rows, "valid_row") == [True] * 3
    assert fields(rows, "failure") == [""] * 3
    assert fields(rows, "stop_reason") == ["done"] * 3
    assert fields(rows, "max_global_steps") == [7] * 3
    assert [row.reward_score for row in rows] == [1.0] * 3
    assert [row.num_turns for row in rows] == [2, 4, 6]
    expected = {"success": 1.0, "steps": 3.0, "valid_share": 1.0, "truncated_prompts": 0.0, "failed": 0.0}
    assert info(rows) == {**expected, "control_tokens_split": 0.0}
    for row, request in zip(rows, server.requests, strict=True):
        assert row.prompt_ids == request["prompt_ids"]
        assert row.response_mask == [1] * len(row.response_ids)
        assert row.response_logprobs == pytest.approx([-0.1 * (i + 1) for i in range(len(row.response_ids))])
    assert len({request["request_id"] for request in server.requests}) == 1


def test_the_rows_become_columns_as_verl_makes_them(tokenizer: Any) -> None:
    for logprobs in (True, False):
        rows, _ = play(tokenizer, [act("forward")], logprobs=logprobs)
        columns = list_of_dict_to_tensordict([row.as_dict() for row in rows])
        assert ("rollout_log_probs" in columns) == logprobs
        found, missing = row_fields(
            [f"u_0_{i}" for i in range(3)], [{}] * 3, [row.as_dict()["extra_fields"] for row in rows]
        )
        assert not missing and found["turn_reward"].tolist() == [0.0, 0.0, 1.0]


def test_the_prompt_shows_the_last_k_steps(tokenizer: Any) -> None:
    way = [act("forward"), act("back"), act("forward"), act("back"), act("forward")]
    for k, shown in ((0, []), (1, [3]), (2, [2, 3]), (9, [0, 1, 2, 3])):
        _, server = play(
            tokenizer, way, {"extra_info": {"env_seed": 1}}, history_length=k, environment={"max_steps": 5}
        )
        seen, done = [1, 2, 1, 2, 1], ["forward", "back", "forward", "back"]
        pairs = "".join(f"place {seen[i]}\n> {done[i]}\n" for i in shown)
        last = f"<|im_start|>user\n{pairs}place 1\nforward, back<|im_end|>\n<|im_start|>assistant\n"
        assert server.prompts()[4] == last


def test_an_episode_can_be_a_conversation_which_is_one_sequence(tokenizer: Any) -> None:
    way = [act("forward")] * 3
    for end in (True, False):
        outputs, server = play(tokenizer, way, environment={"history": "continue"}, end=end)
        prompts = server.prompts()
        assert len(outputs) == 3 and prompts[1].endswith(
            f"{way[0]}<|im_end|>\n<|im_start|>user\nplace 1\nforward, back<|im_end|>\n<|im_start|>assistant\n"
        )
        assert all(later.startswith(one) for one, later in itertools.pairwise(prompts))
        assert info(outputs)["rendered_anew"] == 0
        (merged,) = merge(outputs)
        assert [merged.response_ids[a:b] for a, b in merged.extra_fields["turns"]["spans"]] == [
            one.response_ids for one in outputs
        ]
    # A prompt that does not fit is rendered anew, with the last steps, and the conversation goes on from there.
    longest = len(server.requests[1]["prompt_ids"])
    outputs, server = play(tokenizer, way, environment={"history": "continue"}, prompt_length=longest, history_length=0)
    assert info(outputs)["rendered_anew"] == 1 and len(outputs) == 3 and len(merge(outputs)) == 2
    assert server.prompts()[2] == server.prompts()[0].replace("place 0", "place 2")


def test_every_prompt_is_fresh(tokenizer: Any) -> None:
    rows, _ = play(tokenizer, [act("back"), act("forward")] * 6, environment={"max_steps": 12})
    lengths = [len(row.prompt_ids) for row in rows]
    assert len(rows) == 12 and len(set(lengths[2::2])) == len(set(lengths[3::2])) == 1


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("<action>forward</action>", Action("forward", True)),
        ("I think.\n<Action> Go   North\n</ACTION> so", Action("go north", True)),
        ("<action>a</action><action>forward</action>", Action("a", False)),
        ("forward", Action("forward", False)),
        ("", Action("", False)),
        ("<action></action>", Action("", False)),
        ("<action>forward", Action("<action>forward", False)),
        ("x" * 100 + " " + "y" * 29, Action("y" * 29, False)),
        ("<action>search[red shoe]</action>", Action("search[red shoe]", True)),
        ("<action>search[]</action>", Action("search[]", False)),
        ("<action>jump</action>", Action("jump", False)),
    ],
)
def test_actions_are_read_from_tags(answer: str, action: Action) -> None:
    admissible = ("forward", "go north", "search[<query>]")
    assert parse_action(answer, admissible, EnvironmentOptions()) == action


def test_other_ways_to_read_an_action() -> None:
    whole = EnvironmentOptions(action_tag=None)
    assert parse_action(" forward\n", ("forward",), whole) == Action("forward", True)
    move = EnvironmentOptions(action_tag="move", required_tags=("think",))
    assert parse_action("<move>up</move>", ("up",), move) == Action("up", False)
    assert parse_action("<think>hm</think><move>up</move>", ("up",), move) == Action("up", True)
    for spelling in ("go  up", " wait ", "Open\tdoor"):
        assert parse_action(act(spelling.lower()), ("look", spelling), EnvironmentOptions()) == Action(spelling, True)
    free = EnvironmentOptions(check_admissible=False)
    assert parse_action(act("jump"), ("up",), free) == Action("jump", True)
    assert parse_action(act("jump"), None, EnvironmentOptions()) == Action("jump", True)


def test_an_invalid_action_is_passed_on_or_spent(tokenizer: Any) -> None:
    texts = ["nothing", act("forward")]
    # The corridor itself takes any other word for a step back.
    rows, _ = play(tokenizer, texts, {"index": 1}, environment={"max_steps": 3})
    assert fields(rows, "is_action_valid") == [False, True, True]
    assert fields(rows, "anchor_obs") == ["place 1", "place 0", "place 1"]
    assert fields(rows, "stop_reason") == ["max_steps"] * 3 and info(rows)["valid_share"] == pytest.approx(2 / 3)
    spent = {"max_steps": 3, "invalid_action": "noop"}
    rows, server = play(tokenizer, texts, {"index": 1}, environment=spent)
    assert fields(rows, "anchor_obs") == ["place 1", "place 1", "place 2"]
    assert "place 1\n> nothing\nplace 1" in server.prompts()[1]
    own, _ = play(tokenizer, texts, {"index": 1}, environment={"name": "environment_zoo:Reused", "max_steps": 3})
    assert fields(own, "anchor_obs") == fields(rows, "anchor_obs")


@pytest.mark.parametrize(
    ("kwargs", "cost"),
    [
        ({"id": "CliffWalking-v1"}, -1.0),
        ({"id": "Taxi-v4"}, -1.0),
        ({"id": "FrozenLake-v1"}, 0.0),
        ({"id": "FrozenLake-v1", "noop_reward": -0.25}, -0.25),
    ],
)
def test_a_step_that_is_spent_costs_what_the_environment_says(
    tokenizer: Any, kwargs: dict[str, Any], cost: float
) -> None:
    lost = {"name": "gymnasium", "kwargs": kwargs, "max_steps": 3, "reward_scale": 2.0}
    rows, _ = play(tokenizer, ["nothing"], environment=lost, prompt_length=1024)
    assert fields(rows, "turn_reward") == [2 * cost] * 3 and rows[0].reward_score == 6 * cost
    assert fields(rows, "is_action_valid") == [False] * 3 and info(rows)["success"] == 0.0


def test_rewards_can_be_scaled(tokenizer: Any) -> None:
    rows, _ = play(tokenizer, [act("forward")], environment={"reward_scale": 10.0, "agent_id": "walker"})
    assert fields(rows, "turn_reward") == [0.0, 0.0, 10.0] and rows[0].reward_score == 10.0
    assert fields(rows, "agent_id") == ["walker"] * 3


@pytest.mark.parametrize(("scale", "turns"), [(1e39, [0.0]), (3e38, [3e38, 0.0])])
def test_rewards_that_are_too_large_together_are_garbage(tokenizer: Any, scale: float, turns: list[float]) -> None:
    """verl could not store them: the rollout would be missing."""
    large = {"name": "environment_zoo:Paying", "reward_scale": scale, "failed_trajectories": "mask"}
    rows, _ = play(tokenizer, [act("forward")], environment=large)
    assert fields(rows, "failure")[-1] == "environment_garbage" and fields(rows, "turn_reward") == turns
    list_of_dict_to_tensordict([row.as_dict() for row in rows])


def test_rollouts_of_a_prompt_begin_in_the_same_state(tokenizer: Any) -> None:
    lake = {"name": "gymnasium", "kwargs": {"id": "FrozenLake-v1", "map_size": 4, "is_slippery": True}, "max_steps": 4}
    rows = [{"extra_info": {"index": prompt}} for prompt in (0, 0, 0, 1, 2, 3)]
    results, _ = play_many(tokenizer, [act("right")], rows, environment=lake)
    first = [rows[0].extra_fields["anchor_obs"] for rows in results]
    assert first[0] == first[1] == first[2] and len(set(first)) > 1
    # Also the dice fall alike: the same actions lead to the same states.
    assert fields(results[0], "anchor_obs") == fields(results[1], "anchor_obs") == fields(results[2], "anchor_obs")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "the world is gone"),
        ("exit", "Async.step raised SystemExit: the world ends itself"),
        ("cancel", "Async.step raised CancelledError"),
    ],
)
def test_a_row_chooses_its_environment(tokenizer: Any, how: str, said: str) -> None:
    extra = {"env_seed": 1, "environment": "environment_zoo:Async", "environment_kwargs": json.dumps({"how": how})}
    (row,), _ = play(tokenizer, [act("forward")], {"extra_info": extra})
    assert row.extra_fields["failure"] == "environment_error" and said in row.extra_fields["stop_detail"]
    with pytest.raises(EnvironmentFault, match=said):
        play(tokenizer, [act("forward")], {"extra_info": extra}, environment={"failed_trajectories": "raise"})


def test_a_system_message_of_the_data_stays(tokenizer: Any) -> None:
    prompt = [{"role": "system", "content": "Be brave."}, {"role": "user", "content": "Play."}]
    _, server = play(tokenizer, [act("forward")], {"raw_prompt": prompt})
    assert server.prompts()[0].startswith("<|im_start|>system\nBe brave.<|im_end|>\n<|im_start|>user\nplace 0")


def test_a_template_of_the_user_is_used(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("=== first\n{task}/{prompt}/{observation}/{step}\n")
    _, server = play(tokenizer, [act("forward")], environment={"template": str(path)})
    assert "user\nReach the end./Play./place 1/2<|im_end|>" in server.prompts()[1]


def test_long_prompts_lose_history_first_then_observation_then_actions(tokenizer: Any, tmp_path: Path) -> None:
    rows, server = play(tokenizer, [act("back"), act("forward")])
    lengths = [len(row.prompt_ids) for row in rows]
    full = lengths[2]
    rows, server = play(tokenizer, [act("back"), act("forward")], prompt_length=full - 1)
    assert fields(rows, "prompt_truncated") == [False, False, True, True, True]
    assert info(rows)["truncated_prompts"] == 3.0 and info(rows)["success"] == 1.0
    # place 0 -> -1 -> 0: of the two past steps the oldest is left out.
    assert "user\nplace -1\n> forward\nplace 0\nforward, back" in server.prompts()[2]

    walls = {"kwargs": {"walls": 40}}
    rows, server = play(tokenizer, [act("forward")], prompt_length=150, environment=walls)
    for step, prompt in enumerate(server.prompts()):
        assert prompt.startswith(f"<|im_start|>user\nplace {step} and a wall and a wall")
        assert " ...\nforward, back<|im_end|>" in prompt and "> forward" not in prompt
    assert all(130 <= len(row.prompt_ids) <= 150 for row in rows)
    assert fields(rows, "anchor_obs") == [f"place {i}" + " and a wall" * 40 for i in range(3)]  # groups by the whole

    path = tmp_path / "short.txt"
    path.write_text("=== first\n{actions}\n")
    bare = {"template": str(path)}
    whole, _ = play(tokenizer, [act("forward")], environment=bare)
    rows, server = play(tokenizer, [act("forward")], prompt_length=len(whole[0].prompt_ids) - 1, environment=bare)
    assert "user\n...<|im_end|>" in server.prompts()[0].replace("forward, ", "")
    assert fields(rows, "is_action_valid") == [True] * 3 and fields(rows, "prompt_truncated") == [True] * 3


def test_a_prompt_that_cannot_be_shortened_ends_the_trajectory(tokenizer: Any) -> None:
    rows, server = play(tokenizer, [act("forward")], prompt_length=5)
    assert not server.requests and len(rows) == 1
    assert fields(rows, "failure") == ["prompt_too_long"] and fields(rows, "valid_row") == [False]
    assert "rollout.prompt_length=5" in fields(rows, "stop_detail")[0]
    assert rows[0].response_mask == [0] and len(rows[0].prompt_ids) <= 5


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "environment_error"),
        ("exit", "environment_error"),
        ("hang", "environment_timeout"),
        ("die", "environment_died"),
        ("nan", "environment_garbage"),
        ("square", "environment_garbage"),
        ("none", "environment_garbage"),
        ("huge", "environment_garbage"),
    ],
)
@pytest.mark.parametrize("kept", ["raise", "keep"])
def test_an_environment_that_breaks_ends_its_own_trajectory(tokenizer: Any, how: str, reason: str, kept: str) -> None:
    broken = {
        "name": "environment_zoo:Broken",
        "kwargs": {"how": how, "every": 2},
        "step_timeout_s": 6.0 if how == "hang" else 60.0,
        "failed_trajectories": kept,
    }
    rows = [{"index": seed} for seed in (2, 3, 4, 5)]
    results, _ = play_many(tokenizer, [act("forward")], rows, environment=broken)
    for seed, result in zip((2, 3, 4, 5), results, strict=True):
        if kept == "raise" and seed % 2 == 0:
            assert isinstance(result, EnvironmentFault) and result.reason == reason
        elif seed % 2:
            assert len(result) == 2 and fields(result, "failure") == ["", ""] and info(result)["success"] == 1.0
        else:
            assert len(result) == 2 and fields(result, "failure") == ["", reason]
            assert fields(result, "turn_reward") == [0.0, 0.0] and fields(result, "stop_reason") == [reason] * 2
            assert fields(result, "valid_row") == [True] * 2 and info(result)["failed"] == 1.0


def test_breaking_the_environment_earns_nothing(tokenizer: Any) -> None:
    rows, _ = play(tokenizer, [act("forward")], environment={"name": "environment_zoo:Paying"})
    assert fields(rows, "turn_reward") == [0.0, -0.5, 0.0] and {row.reward_score for row in rows} == {-0.5}
    assert fields(rows, "valid_row") == [True] * 3 and fields(rows, "failure") == ["", "", "environment_error"]


@pytest.mark.parametrize(("least", "turns"), [(-0.25, [0.0, -0.5, 0.0]), (-2.0, [0.0, -0.5, -1.5])])
def test_breaking_the_environment_earns_no_more_than_what_is_said(
    tokenizer: Any, least: float, turns: list[float]
) -> None:
    broken = {"name": "environment_zoo:Paying", "failed_reward": least}
    rows, _ = play(tokenizer, [act("forward")], environment=broken)
    assert fields(rows, "turn_reward") == turns and {row.reward_score for row in rows} == {min(least, -0.5)}


@pytest.mark.parametrize("how", ["mark", "reset"])
def test_what_no_action_has_broken_is_missing(tokenizer: Any, how: str, tmp_path: Path) -> None:
    mark = tmp_path / "gone"
    if how == "reset":
        mark.touch()
    broken = {"name": "environment_zoo:Paying", "kwargs": {"mark": str(mark)}}
    said = "the world has gone" if how == "reset" else "no third step"
    with pytest.raises(EnvironmentFault, match=said):
        play(tokenizer, [act("forward")], environment=broken)


def test_failed_trajectories_can_be_masked(tokenizer: Any) -> None:
    broken = {"name": "environment_zoo:Broken", "failed_trajectories": "mask"}
    rows, _ = play(tokenizer, [act("forward")], environment=broken)
    assert fields(rows, "valid_row") == [False, False] and fields(rows, "failure") == ["", "environment_error"]
    assert all(set(row.response_mask) == {0} for row in rows)


@pytest.mark.parametrize("logprobs", [True, False])
def test_a_broken_beginning_is_a_placeholder_row(tokenizer: Any, logprobs: bool) -> None:
    broken = {"name": "environment_zoo:Broken", "kwargs": {"when": "reset"}, "failed_trajectories": "mask"}
    rows, server = play(tokenizer, [act("forward")], environment=broken, logprobs=logprobs)
    assert not server.requests and len(rows) == 1
    (row,) = rows
    assert row.response_ids == [tokenizer.eos_token_id] and row.response_mask == [0]
    assert row.response_logprobs == ([0.0] if logprobs else None)
    assert row.extra_fields["failure"] == "environment_error" and not row.extra_fields["valid_row"]
    assert row.extra_fields["min_global_steps"] == row.extra_fields["max_global_steps"] == 2
    assert row.reward_score == 0.0 and info(rows)["steps"] == 0.0
    list_of_dict_to_tensordict([row.as_dict()])


@pytest.mark.parametrize(
    "texts",
    [[""], ["no tags at all"], ["forward " * 400], ["<action>" * 50], ["\x00\ud7ff 漢字 <action>"]],
    ids=["empty", "no_tags", "ten_times_too_long", "only_openings", "odd_characters"],
)
def test_a_model_that_says_something_else(tokenizer: Any, texts: list[str]) -> None:
    stay = {"max_steps": 3, "invalid_action": "noop"}
    rows, _ = play(tokenizer, texts, environment=stay, response_length=16)
    assert len(rows) == 3 and fields(rows, "is_action_valid") == [False] * 3
    assert all(1 <= len(row.response_ids) <= 16 for row in rows)
    assert fields(rows, "failure") == [""] * 3 and info(rows)["success"] == 0.0


def test_an_engine_that_gives_no_token(tokenizer: Any) -> None:
    rows, _ = play(tokenizer, [""], end=False)
    assert len(rows) == 1 and fields(rows, "failure") == ["empty_response"] and rows[0].response_mask == [0]
    rows, _ = play(tokenizer, [act("forward"), ""], end=False)
    assert len(rows) == 1 and fields(rows, "failure") == ["empty_response"] and set(rows[0].response_mask) == {1}


def test_a_call_that_the_engine_cancels_is_an_error_and_ones_own_end_is_not(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancel(*args: Any, **kwargs: Any) -> Any:
        raise asyncio.CancelledError

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the engine cancelled the call"):
        patch.setattr(ScriptedEngine, "generate", cancel)
        play(tokenizer, [act("forward")])

    async def stop(*args: Any, **kwargs: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(60)

    with monkeypatch.context() as patch, pytest.raises(asyncio.CancelledError):
        patch.setattr(ScriptedEngine, "generate", stop)
        play(tokenizer, [act("forward")])


def test_what_no_trajectory_can_do_is_an_error(tokenizer: Any) -> None:
    for wrong, error in (
        ({"name": "environment_zoo:Unpreparable"}, EnvironmentUnavailable),
        ({"kwargs": {"width": 2}}, EnvironmentUnavailable),
        ({"name": None}, ValueError),
    ):
        with pytest.raises(error):
            play(tokenizer, [act("forward")], environment=wrong)
    with pytest.raises(Exception, match="verl_ext.environment.history_length=1 past steps are shown"):
        play(tokenizer, [act("forward")], environment={"history_length": 1})


def test_an_environment_in_which_everything_fails_is_an_error(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_ext.rollout import step_wise

    monkeypatch.setattr(step_wise, "_fates", {})
    broken = {"name": "environment_zoo:Broken", "kwargs": {"when": "reset"}, "failed_trajectories": "mask"}
    results, _ = play_many(tokenizer, [act("forward")], [{}] * 25, environment=broken)
    errors = [result for result in results if isinstance(result, BaseException)]
    assert len(errors) == 6 and all(type(error) is EnvironmentUnavailable for error in errors)
    # They end in any order; the twentieth to fail is the first to say so.
    said = "the first 20 trajectories in 'environment_zoo:Broken' has failed, the last one by environment_error: "
    assert any(said in str(error) for error in errors)
    (good,), _ = play_many(tokenizer, [act("forward")], [{"index": 1}], environment={**broken, "kwargs": {"every": 2}})
    assert info(good)["success"] == 1.0  # and from here on failures are of single trajectories
    results, _ = play_many(tokenizer, [act("forward")], [{}] * 25, environment=broken)
    assert not any(isinstance(result, BaseException) for result in results)


def test_verls_note_on_the_token_builder_does_not_come_back(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """verl makes a loop, and says which token builder it takes, for every trajectory; here once in a process."""
    said = "No model-specific Continuous Token builder"
    for _ in range(2):
        play(tokenizer, [act("forward")], {"index": 1})
    assert caplog.text.count(said) <= 1
    caplog.clear()
    play(tokenizer, [act("forward")], {"index": 1})
    assert said not in caplog.text


def metrics_of(results: Sequence[list[AgentLoopOutput]], padding: int = 0) -> dict[str, float]:
    keys = [f"u_{session}_{turn}" for session, rows in enumerate(results) for turn in range(len(rows))]
    extra = [row.extra_fields for rows in results for row in rows]
    keys += [f"pad{i}_0_0" for i in range(padding)]
    tags = [{"is_padding": i >= len(extra)} for i in range(len(keys))]
    extra = [*extra, *[extra[0]] * padding]
    order = np.random.default_rng(0).permutation(len(keys))
    keys, tags, extra = ([column[i] for i in order] for column in (keys, tags, extra))
    columns, _ = row_fields(keys, tags, extra)
    return rollout_metrics(columns, tags, extra)


def test_the_reasons_are_counted_in_metrics(tokenizer: Any) -> None:
    broken = {"name": "environment_zoo:Broken", "kwargs": {"every": 2}, "failed_trajectories": "mask"}
    rows = [{"index": seed} for seed in (1, 2, 3, 4, 5)]
    rows.append({"index": 0, "extra_info": {"environment_kwargs": json.dumps({"when": "reset", "how": "nan"})}})
    results, _ = play_many(tokenizer, [act("forward")], rows, environment=broken)
    metrics = metrics_of(results, padding=3)
    assert metrics["rollout/failed_trajectories"] == 3.0
    assert metrics["rollout/failures/environment_error"] == 2.0
    assert metrics["rollout/failures/environment_garbage"] == 1.0
    assert metrics["trajectory/success"] == pytest.approx(3 / 6)
    assert metrics["trajectory/steps"] == pytest.approx((2 * 5 + 0) / 6)
    assert metrics["trajectory/failed"] == pytest.approx(0.5)


def test_a_batch_of_failures_alone_is_refused(tokenizer: Any) -> None:
    broken = {"name": "environment_zoo:Broken", "kwargs": {"when": "reset"}, "failed_trajectories": "mask"}
    results, _ = play_many(tokenizer, [act("forward")], [{}, {}], environment=broken)
    columns, _ = row_fields(["u_0_0", "u_1_0"], [{}, {}], [rows[0].extra_fields for rows in results])
    with pytest.raises(BatchError, match=r"can be trained on \(failed trajectories: environment_error: 2\)"):
        require_a_row(columns, metrics_of(results))
    columns["valid_row"][1] = True
    require_a_row(columns, {})


def test_metrics_of_loops_that_report_nothing() -> None:
    columns, _ = row_fields(["u_0_0", "u_1_0"], [{}, {}], [{"reward_extra_info": {"acc": 1.0, "pred": "a"}}, {}])
    assert rollout_metrics(columns, [{}, {}], [{"reward_extra_info": {"acc": 1.0, "pred": "a"}}, {}]) == {
        "trajectory/acc": 1.0
    }
    assert rollout_metrics(columns, [{}, {}], [{}, {}]) == {}


def test_who_fails_before_he_is_judged_has_not_been_right() -> None:
    columns, _ = row_fields(["u_0_0", "u_1_0", "u_2_0"], [{}] * 3, [{}] * 3)
    judged = {"failure": "", "reward_extra_info": {"acc": 1.0, "f1": 0.5, "length": 8.0}}
    extra = [judged, {"failure": "time_limit", "reward_extra_info": {"length": 2.0}}, judged]
    metrics = rollout_metrics(columns, [{}] * 3, extra)
    assert metrics["trajectory/acc"] == pytest.approx(2 / 3) and metrics["trajectory/f1"] == pytest.approx(1 / 3)
    assert metrics["trajectory/length"] == 6.0 and metrics["rollout/failures/time_limit"] == 1.0
    columns["valid_row"][1] = False  # the machine's failure, or one that is left out: in no statistic
    assert rollout_metrics(columns, [{}] * 3, extra)["trajectory/acc"] == 1.0


def test_numbers_are_plain(tokenizer: Any) -> None:
    rows, _ = play(tokenizer, [act("forward")])
    assert all(type(value) is float for value in (*fields(rows, "turn_reward"), *info(rows).values()))
    assert all(type(value) is bool for value in fields(rows, "is_action_valid"))


@pytest.mark.slow
def test_it_plays_textworld(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_EXT_HOME", str(tmp_path))
    game = {
        "name": "textworld",
        "kwargs": {"rooms": 1, "objects": 2, "quest_length": 1},
        "max_steps": 3,
        "template": "default",
    }
    rows, server = play(tokenizer, [act("look"), act("dance"), act("inventory")], environment=game, prompt_length=2048)
    assert fields(rows, "is_action_valid") == [True, False, True]
    assert fields(rows, "anchor_obs")[0].startswith("-= ")
    assert "Admissible actions: " in server.prompts()[0] and "Action 2: dance]" in server.prompts()[2]
