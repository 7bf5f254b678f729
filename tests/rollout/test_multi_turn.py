# SPDX-License-Identifier: Apache-2.0
"""The multi-turn loop, its verifier and tokenizer real, the engine's answers scripted."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from loops import make_loop
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.tools.function_tool import function_tool
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.rollout.replica import TokenOutput

from verl_ext.integration.settings.options import OptionError
from verl_ext.lab.demo.model import train_tokenizer
from verl_ext.rewards.judge import JudgeError
from verl_ext.rollout import multi_turn
from verl_ext.rollout.agent_loops import AgentLoops
from verl_ext.rollout.multi_turn import AGENT_NAME, MultiTurnOptions, MultiTurnVerifierLoop, turn_rewards
from verl_ext.rollout.reasoning_gym_task import FEEDBACK, Verdict
from verl_ext.rollout.shared.rows import HOPELESS, Fates

QUESTION = "State the final answer to the following arithmetic problem: 3 + 9 ="
CONFIG_JSON = json.dumps({"seed": 0, "size": 1})
ENTRY = {"question": QUESTION, "answer": "12", "metadata": {}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([QUESTION] * 64)


class ScriptedEngine:
    """Answers with the given texts in turn, as a server would, and keeps what it was asked."""

    def __init__(self, tokenizer: Any, texts: list[str], log_probs: Any = True, end: bool = True) -> None:
        self.tokenizer, self.texts, self.log_probs, self.end = tokenizer, list(texts), log_probs, end
        self.requests: list[dict[str, Any]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Any, **kwargs: Any) -> Any:
        text = self.texts[len(self.requests)]
        self.requests.append({"request_id": request_id, "prompt_ids": prompt_ids, **kwargs})
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        ids = [*ids, self.tokenizer.eos_token_id] if self.end else ids
        steps = {"global_steps": 7, "min_global_steps": 7, "max_global_steps": 7}
        return TokenOutput(
            token_ids=ids,
            log_probs=[-0.1 * (i + 1) for i in range(len(ids))] if self.log_probs is True else self.log_probs,
            extra_fields=steps,
        )


def play(
    tokenizer: Any,
    texts: list[str],
    *,
    options: dict[str, Any] | None = None,
    prompt_length: int = 128,
    response_length: int = 8,
    full_determinism: bool = False,
    row: dict[str, Any] | None = None,
    multi_turn: dict[str, Any] | None = None,
    **engine: Any,
) -> tuple[list[AgentLoopOutput], ScriptedEngine]:
    """One trajectory, the loop made as verl makes it."""
    rollout: dict[str, Any] = {
        "prompt_length": prompt_length,
        "response_length": response_length,
        "full_determinism": full_determinism,
        "multi_turn": multi_turn or {},
    }
    if options is not None:
        rollout["custom"] = {"multi_turn": options}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    server = ScriptedEngine(tokenizer, texts, **engine)
    columns = {
        "raw_prompt": [{"role": "user", "content": QUESTION}],
        "extra_info": {
            "dataset": "chain_sum",
            "config_json": CONFIG_JSON,
            "entry_json": json.dumps(ENTRY),
            "parser": "strict",
        },
        "index": 4,
        "session_id": 2,
        **(row or {}),
    }

    async def run() -> list[AgentLoopOutput]:
        loop = make_loop(AGENT_NAME, config, server, tokenizer)
        assert isinstance(loop, MultiTurnVerifierLoop)
        return await loop.run({"temperature": 1.0}, **columns)

    return asyncio.run(run()), server


def fields(rows: list[AgentLoopOutput], name: str) -> list[Any]:
    return [row.extra_fields[name] for row in rows]


def test_routed_experts_are_not_dropped_without_a_word(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ScriptedEngine.generate

    async def generate(self: Any, *args: Any, **kwargs: Any) -> TokenOutput:
        return (await plain(self, *args, **kwargs)).model_copy(update={"routed_experts": [[0]]})

    monkeypatch.setattr(ScriptedEngine, "generate", generate)
    with pytest.raises(RuntimeError, match="returned routed experts, which the agent loops of verl_ext do not hand on"):
        play(tokenizer, ["12"])


@pytest.mark.parametrize(
    ("texts", "rewards", "acc", "reason"),
    [
        (["12"], [1.0], 1.0, "solved"),
        (["11", "12"], [0.0, 1.0], 1.0, "solved"),
        (["11", "13", "12"], [0.0, 0.0, 1.0], 1.0, "solved"),
        (["11", "13", "10"], [0.0, 0.0, 0.0], 0.0, "max_turns"),
    ],
)
def test_stops_when_right(tokenizer: Any, texts: list[str], rewards: list[float], acc: float, reason: str) -> None:
    rows, server = play(tokenizer, texts)
    assert len(rows) == len(server.requests) == len(texts)
    assert fields(rows, "turn_reward") == rewards
    assert [row.reward_score for row in rows] == [acc] * len(rows)
    assert set(fields(rows, "stop_reason")) == {reason}
    assert [row.num_turns for row in rows] == [2 * (k + 1) for k in range(len(rows))]
    info = rows[-1].extra_fields["reward_extra_info"]
    assert info == {
        "acc": acc,
        "first_turn_acc": float(texts[0] == "12"),
        "turns": float(len(texts)),
        "valid_share": 1.0,
        "overlong": 0.0,
        **{f"judge_{reason}": 0.0 for reason in ("timeout", "memory", "crashed", "output", "error", "input")},
        **{f"sandbox_{cost}": 0.0 for cost in ("calls", "seconds")},  # this verifier only compares
        "control_tokens_split": 0.0,
    }
    assert all(type(value) is float for value in info.values())


def test_row_fields(tokenizer: Any) -> None:
    rows, _ = play(tokenizer, ["11", "x", "12"], options={"agent_id": "prover"})
    assert fields(rows, "agent_id") == ["prover"] * 3
    assert fields(rows, "is_action_valid") == [True, False, True]
    assert fields(rows, "anchor_obs") == [QUESTION, f"{QUESTION}\nToo low.", f"{QUESTION}\nNot a number."]
    assert fields(rows, "max_global_steps") == [7, 7, 7]
    assert rows[0].extra_fields["reward_extra_info"]["valid_share"] == pytest.approx(2 / 3)
    assert all(type(x) is float for x in fields(rows, "turn_reward"))
    assert all(type(x) is bool for x in fields(rows, "is_action_valid"))


def test_tokens_in_tokens_out(tokenizer: Any) -> None:
    rows, server = play(tokenizer, ["11", "13", "12"])
    for before, after in zip(rows, rows[1:], strict=False):
        so_far = before.prompt_ids + before.response_ids
        assert after.prompt_ids[: len(so_far)] == so_far
    for row, request in zip(rows, server.requests, strict=True):
        assert request["prompt_ids"] == row.prompt_ids
        assert row.response_mask == [1] * len(row.response_ids)
        assert row.response_logprobs == pytest.approx([-0.1 * (i + 1) for i in range(len(row.response_ids))])
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "11"},
        {"role": "user", "content": "Too low."},
        {"role": "assistant", "content": "13"},
        {"role": "user", "content": "Too high."},
    ]
    assert rows[-1].prompt_ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert len({request["request_id"] for request in server.requests}) == 1


def test_response_cut_before_its_end_is_closed_in_the_next_prompt(tokenizer: Any) -> None:
    rows, _ = play(tokenizer, ["1111", "12"], response_length=2, end=False, options={"max_turns": 2})
    assert tokenizer.decode(rows[0].response_ids) == "11"
    assert len(rows[0].response_logprobs or []) == 2
    added = rows[1].prompt_ids[len(rows[0].prompt_ids) + 2 :]
    assert tokenizer.decode(added) == "<|im_end|>\n<|im_start|>user\nToo low.<|im_end|>\n<|im_start|>assistant\n"


def test_the_rows_become_columns_as_verl_makes_them(tokenizer: Any) -> None:
    for log_probs in (True, None, []):  # the empty list is what verl's client of the asynchronous modes has for none
        rows, _ = play(tokenizer, ["11", "12"], log_probs=log_probs)
        columns = list_of_dict_to_tensordict([row.as_dict() for row in rows])
        assert ("rollout_log_probs" in columns) == (log_probs is True)
        scores = [column.tolist() for column in columns["rm_scores"].unbind()]
        assert [sum(score) for score in scores] == [1.0, 1.0]
        assert [score[-1] for score in scores] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "rewards", "outcome"),
    [("success", [0.0, 0.0, 1.0], 1.0), ("improvement", [2 / 3, 0.0, 1 / 3], 1.0), ("score", [2 / 3, 0.0, 1.0], 1.0)],
)
def test_turn_reward_kinds(tokenizer: Any, kind: str, rewards: list[float], outcome: float) -> None:
    # The verifier gives 2/3 to "112", which contains the answer.
    rows, _ = play(tokenizer, ["112", "x", "12"], options={"turn_reward": kind})
    assert fields(rows, "turn_reward") == pytest.approx(rewards)
    assert fields(rows, "turn_score") == pytest.approx([2 / 3, 0.0, 1.0])
    assert rows[-1].reward_score == pytest.approx(outcome)


def test_unsolved_outcomes() -> None:
    verdicts = [Verdict(0.6, False, "a", "Wrong."), None, Verdict(0.2, False, "b", "Wrong.")]
    assert turn_rewards(verdicts, "success") == [0.0, 0.0, 0.0]
    assert turn_rewards(verdicts, "improvement") == [0.6, 0.0, 0.0]
    assert turn_rewards(verdicts, "score") == [0.6, 0.0, 0.2]


def test_overlong_later_prompt_ends_the_trajectory(tokenizer: Any) -> None:
    (first, *_), _ = play(tokenizer, ["11", "13", "10"])
    limit = len(first.prompt_ids)
    rows, server = play(tokenizer, ["11", "12"], prompt_length=limit)
    assert len(rows) == len(server.requests) == 1
    assert rows[0].extra_fields["stop_reason"] == "overlong_prompt"
    assert f"> rollout.prompt_length={limit}" in rows[0].extra_fields["stop_detail"]
    assert rows[0].extra_fields["reward_extra_info"]["overlong"] == 1.0
    assert rows[0].reward_score == 0.0


def test_overlong_first_prompt_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"row index=4 has \d+ tokens, more than rollout.prompt_length=5"):
        play(tokenizer, ["12"], prompt_length=5)


def task_row(dataset: str, answer: str, **metadata: Any) -> dict[str, Any]:
    entry = {"question": QUESTION, "answer": answer, "metadata": metadata}
    config_json = json.dumps({"seed": 0, "size": 1})
    return {"extra_info": {"dataset": dataset, "config_json": config_json, "entry_json": json.dumps(entry)}}


def test_verifier_that_fails_on_every_answer_ends_its_trajectory(tokenizer: Any) -> None:
    with pytest.raises(JudgeError, match="fails on the reference answer too: error: KeyError"):
        play(tokenizer, ["1", "2"], row=task_row("n_queens", "1"))


@pytest.mark.seconds
def test_answer_that_keeps_the_verifier_busy_is_wrong(tokenizer: Any) -> None:
    row = task_row("polynomial_multiplication", "x**2")
    rows, _ = play(tokenizer, ["9**9**9", "x*x"], options={"verifier_timeout_s": 3.0}, row=row)
    assert fields(rows, "turn_reward") == [0.0, 1.0] and fields(rows, "stop_reason") == ["solved"] * 2
    assert fields(rows, "is_action_valid") == [True, True]
    info = rows[-1].extra_fields["reward_extra_info"]
    assert info["judge_timeout"] == 1.0 and info["judge_error"] == 0.0
    assert info["sandbox_calls"] >= 1.0 and info["sandbox_seconds"] > 0


def test_engine_that_returns_nothing(tokenizer: Any) -> None:
    with pytest.raises(RuntimeError, match="returned no token for row index=4"):
        play(tokenizer, [""], end=False)
    rows, _ = play(tokenizer, ["11", ""], end=False)
    assert len(rows) == 1 and rows[0].extra_fields["stop_reason"] == "empty_response"


def test_deterministic_request_ids(tokenizer: Any) -> None:
    _, server = play(tokenizer, ["11", "12"], full_determinism=True, row={"priority": 9})
    assert {request["request_id"] for request in server.requests} == {"det-9-2"}
    assert {request["priority"] for request in server.requests} == {9}


def test_row_without_a_task_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="extra_info lacks dataset"):
        play(tokenizer, ["12"], row={"extra_info": {}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_turn": 2},
            "actor_rollout_ref.rollout.custom.multi_turn.max_turn is not an option .*Did you mean 'max_turns'",
        ),
        ({"max_turns": 0}, "max_turns is 0; it must be at least 1"),
        ({"max_turns": True}, "max_turns is True; give a whole number"),
        ({"turn_reward": "mood"}, "turn_reward is 'mood'; choose one of 'success'"),
        ({"success_threshold": 0.0}, "success_threshold is 0.0; it must be greater than 0"),
        ({"success_threshold": 1.5}, r"success_threshold is 1.5; it must lie in \[0, 1\]"),
        ({"mcp": {"sums": {"url": "http://127.0.0.1:9/mcp"}}}, "multi_turn.mcp has servers, but tools names none"),
        (
            {"tools": ["add"]},
            r"multi_turn has the tool 'add', which is not there .* server in actor_.*\.mcp",
        ),
        ({"verifier_timeout_s": 0}, "verifier_timeout_s is 0; it must be greater than 0"),
    ],
)
def test_bad_options_are_named(tokenizer: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        play(tokenizer, ["12"], options=options)


# ---- tools ----

# ChatML that shows the tools, as the templates of models that were trained with tools do.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = {"prompt_length": 1024, "response_length": 96}


@pytest.fixture(scope="module")
def with_tools() -> Any:
    made = train_tokenizer([QUESTION] * 64)
    made.chat_template = TEMPLATE
    return made


def called(**arguments: int) -> str:
    return f"<tool_call>{json.dumps({'name': 'add', 'arguments': arguments})}</tool_call>"


@pytest.mark.seconds
def test_tools_of_an_mcp_server(with_tools: Any, sums: dict[str, Any]) -> None:
    """Shown, called, answered; a call is a row and no answer; what fails is read by the model and counted."""
    texts = ["11", called(a=3, b=9), called(a=7), "12"]
    options = {"max_turns": 2, "tools": ["add"], "mcp": sums, "tool_timeout_s": 600}
    rows, server = play(with_tools, texts, options=options, **TOOLS)
    assert len(rows) == len(server.requests) == 4
    assert fields(rows, "turn_reward") == fields(rows, "turn_score") == [0.0, 0.0, 0.0, 1.0]
    assert [row.reward_score for row in rows] == [1.0] * 4 and fields(rows, "is_action_valid") == [True] * 4
    assert set(fields(rows, "stop_reason")) == {"solved"}
    error = "Error: RuntimeError: Error executing tool add"
    assert fields(rows, "anchor_obs")[:3] == [QUESTION, f"{QUESTION}\nToo low.", f"{QUESTION}\n12"]
    assert fields(rows, "anchor_obs")[3].startswith(f"{QUESTION}\n{error}")
    info = rows[-1].extra_fields["reward_extra_info"]
    named = ("acc", "first_turn_acc", "turns", "valid_share", "tool_rounds", "failure_tool_error")
    assert [info[name] for name in named] == [1.0, 0.0, 2.0, 1.0, 2.0, 1.0]
    assert rows[1].metrics.tool_calls > 0 and rows[0].metrics.tool_calls == 0
    prompts = [with_tools.decode(row.prompt_ids) for row in rows]
    assert '"description": "Add two numbers."' in prompts[0]
    for before, after in zip(rows, rows[1:], strict=False):
        so_far = before.prompt_ids + before.response_ids
        assert after.prompt_ids[: len(so_far)] == so_far
    ends = "<|im_end|>\n<|im_start|>%s<|im_end|>\n<|im_start|>assistant\n"
    assert prompts[1].endswith("11" + ends % "user\nToo low.")
    assert prompts[2].endswith(texts[1] + ends % "tool\n12")
    assert f"<|im_start|>tool\n{error}" in prompts[3]


@pytest.mark.seconds
def test_rounds_and_time_of_tools_are_bounded(with_tools: Any, sums: dict[str, Any]) -> None:
    """A server that is slow is cut off; a call beyond the rounds is an answer, and a wrong one."""
    options = {"max_turns": 2, "tools": ["add"], "mcp": sums, "max_tool_rounds": 1, "tool_timeout_s": 1}
    rows, _ = play(
        with_tools, [called(a=11)] * 4, options=options, multi_turn={"max_tool_response_length": 12}, **TOOLS
    )
    assert fields(rows, "is_action_valid") == [True, False] * 2 and set(fields(rows, "stop_reason")) == {"max_turns"}
    info = rows[-1].extra_fields["reward_extra_info"]
    assert [info[name] for name in ("turns", "tool_rounds", "failure_tool_error")] == [2.0, 2.0, 2.0]
    assert fields(rows, "anchor_obs")[1] == f"{QUESTION}\nError:...(truncated)...rror: "


@pytest.mark.seconds
def test_a_trajectory_that_ends_in_a_tool_call(with_tools: Any, sums: dict[str, Any]) -> None:
    """It has the score of its last answer, and none without an answer."""
    options = {"tools": ["add"], "mcp": sums, "turn_reward": "score", "tool_timeout_s": 600}
    for texts, score in ((["112", called(a=3), ""], 2 / 3), ([called(a=3), ""], 0.0)):
        rows, _ = play(with_tools, texts, options=options, end=False, **TOOLS)
        assert set(fields(rows, "stop_reason")) == {"empty_response"}
        assert [row.reward_score for row in rows] == pytest.approx([score] * len(rows))
        assert rows[-1].extra_fields["reward_extra_info"]["acc"] == 0.0


@function_tool("test_multi_turn_add")
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one number.
        b: the other.
    """
    return a + b


def test_arguments_of_many_levels_lose_no_rollout(with_tools: Any) -> None:
    """They stay text, and the model reads the tool's error."""
    deep = f'<tool_call>{{"name": "test_multi_turn_add", "arguments": {"[" * 600}{"]" * 600}}}</tool_call>'
    sizes = {"prompt_length": 4096, "response_length": 2048}
    rows, _ = play(with_tools, [deep, "12"], options={"tools": ["test_multi_turn_add"]}, **sizes)
    assert fields(rows, "stop_reason") == ["solved"] * 2 and rows[-1].reward_score == 1.0
    assert rows[-1].extra_fields["reward_extra_info"]["failure_tool_error"] == 1.0


def test_calls_that_are_spelled_wrongly_are_one_line_of_the_log(
    with_tools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = '<tool_call>{"name": "test_multi_turn_add", "arguments": </tool_call>'
    play(with_tools, [wrong, f"{wrong} ", "12"], options={"tools": ["test_multi_turn_add"]}, **TOOLS)
    said = [one for one in caplog.records if "Failed to decode tool call" in one.getMessage()]
    assert len(said) <= 1 and {one.levelname for one in said} <= {"WARNING"}


def test_an_overlong_prompt_is_told_with_what_makes_it_so(with_tools: Any) -> None:
    options = {"tools": ["test_multi_turn_add"]}
    with pytest.raises(
        ValueError, match=r"name fewer tools, whose schemas are \d+ of them \(data.filter_overlong_prom"
    ):
        play(with_tools, ["12"], options=options, prompt_length=90)
    with pytest.raises(ValueError, match="or set data.filter_overlong_prompts=True"):
        play(with_tools, ["12"], options=options, prompt_length=8)


def test_an_answer_of_which_no_prompt_can_be_made_is_a_failed_sample(
    with_tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    picky = "{% for m in messages %}{% if m.content == '12' %}{{ 1 / 0 }}{% endif %}{% endfor %}"
    monkeypatch.setattr(with_tools, "chat_template", picky + TEMPLATE)
    asked = called(a=3, b=9).replace("add", "test_multi_turn_add")
    rows, _ = play(with_tools, ["11", asked, "12"], options={"tools": ["test_multi_turn_add"]}, **TOOLS)
    assert fields(rows, "stop_reason") == ["prompt_error"] * 2 and fields(rows, "failure") == ["", "prompt_error"]
    assert rows[-1].extra_fields["stop_detail"].startswith("ZeroDivisionError")
    assert [row.reward_score for row in rows] == [0.0] * 2 and set(rows[-1].response_mask) == {1}


def test_a_chat_template_that_refuses_everything_is_a_mistake(with_tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_turn, "_fates", Fates("test", logging.getLogger("test")))
    monkeypatch.setattr(with_tools, "chat_template", "{% if messages | length > 1 %}{{ 1 / 0 }}{% endif %}" + TEMPLATE)
    for _ in range(HOPELESS - 1):
        play(with_tools, ["1"], **TOOLS)
    with pytest.raises(RuntimeError, match="could be made in the first 20 trajectories .* last: ZeroDivisionError"):
        play(with_tools, ["1"], **TOOLS)


def test_servers_are_asked_before_a_run() -> None:
    rollout = {"custom": {"multi_turn": {"tools": ["add"], "mcp": {"one": {"command": ["/no/such/server"]}}}}}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "verl_ext": {}})
    with pytest.raises(OptionError, match=r"custom\.multi_turn\.mcp\.one: .*no/such/server"):
        AgentLoops.check(config)


def test_defaults_without_a_custom_section() -> None:
    for rollout in ({}, {"custom": None}, {"custom": {"other": 1}}):
        assert MultiTurnOptions.from_rollout_config(OmegaConf.create(rollout)) == MultiTurnOptions()


def test_every_feedback_can_be_appended(tokenizer: Any) -> None:
    # Feedback that the chat template can't append would end every trajectory with an error.
    for text in FEEDBACK:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
