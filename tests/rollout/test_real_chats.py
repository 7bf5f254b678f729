# SPDX-License-Identifier: Apache-2.0
"""Every agent loop with the tokenizers and chat templates of models that people train (``make tokenizers``).

What a loop makes of a conversation is held to the template's own rendering, in tokens: a next prompt is the tokens so
far and what the template writes after the answer, whether that was whole or cut.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, chat_of_family, tokenizer_of
from loops import config_of, make_loop
from verl.tools.function_tool import function_tool
from verl.utils.tokenizer.continuous_token_wiring import _MODEL_TYPE_TO_FAMILY
from verl.workers.rollout.replica import TokenOutput

from verl_ext.rollout import multi_turn, step_wise
from verl_ext.rollout.environments import runner
from verl_ext.rollout.orchestra import agent, loop, orchestra
from verl_ext.rollout.shared.probes import Refusal

pytestmark = [pytest.mark.seconds, pytest.mark.usefixtures("fresh_fates")]

RULES, QUESTION = "Answer with a number.", "What is three and nine?"
ENTRY = {"question": QUESTION, "answer": "12", "metadata": {}}
TASK = {
    "dataset": "chain_sum",
    "config_json": json.dumps({"seed": 0, "size": 1}),
    "entry_json": json.dumps(ENTRY),
    "parser": "strict",
}
SYSTEM, USER = {"role": "system", "content": RULES}, {"role": "user", "content": QUESTION}
CUT, WHOLE = "eleven because I think", "thirteen"


@function_tool("test_real_chats_add")
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one number.
        b: the other.
    """
    return a + b


class Engine:
    """Answers with the tokens of the given texts in turn, and keeps the prompts."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self.tokenizer, self.texts = tokenizer, texts
        self.prompts: list[list[int]] = []

    async def generate(self, *, prompt_ids: list[int], **_: Any) -> Any:
        ids = encode(self.tokenizer, self.texts[min(len(self.prompts), len(self.texts) - 1)])
        self.prompts.append(prompt_ids)
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), extra_fields={"global_steps": 1})


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def rendered(name: str, messages: list[dict[str, Any]], tools: Any = None) -> str:
    """The template's own text; what it can't take is written as it should reach it."""
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    if name == "gemma2" and messages[0]["role"] == "system":
        first = {"role": "user", "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
        messages = [first, *messages[2:]]
    return tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True, **family.kwargs
    )


def follows(name: str, before: list[int], answer: str, after: list[int], messages: Any, tools: Any = None) -> None:
    """Hold a next prompt to the rendering of `messages`, which are the conversation with `answer` and what followed."""
    tokenizer, family = tokenizer_of(name), FAMILIES[name]
    ids = before + encode(tokenizer, answer)
    assert after[: len(ids)] == ids
    tail = rendered(name, messages, tools).rpartition(answer.partition("<")[0])[2]
    closes = next((one for one in (f"{family.before_end}{family.ends}",) if answer.endswith(one)), "")
    if closes == "<|return|>":
        assert tail.startswith("<|end|>")
        tail = closes + tail.removeprefix("<|end|>")
    assert tail.startswith(closes)
    wanted = encode(tokenizer, tail.removeprefix(closes))
    if closes:  # where a text begins some tokenizers put a blank
        end = encode(tokenizer, closes)
        wanted = encode(tokenizer, tail)[len(end) :]
    assert after[len(ids) :] == wanted, (tokenizer.decode(after[len(ids) :]), tail)


def multi(name: str, texts: Sequence[str], row: Any = None, model_type: str | None = None, **options: Any) -> Any:
    tokenizer = tokenizer_of(name)
    lengths = {"prompt_length": 4096, "response_length": 256, "custom": {"multi_turn": {"max_turns": 4, **options}}}
    config = config_of(lengths, None, {})
    config.data.apply_chat_template_kwargs = FAMILIES[name].kwargs
    engine = Engine(tokenizer, texts)

    async def run() -> Any:
        kind = model_type or FAMILIES[name].model_type
        made = make_loop(multi_turn.AGENT_NAME, config, engine, tokenizer, hf_model_type=kind)
        return await made.run({}, raw_prompt=row or [SYSTEM, USER], extra_info=TASK)

    return asyncio.run(run()), engine.prompts


def said(name: str, text: str, whole: bool) -> str:
    return text + (FAMILIES[name].before_end + FAMILIES[name].ends if whole else "")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_multi_turn_loop(name: str) -> None:
    """A cut answer, a whole one, an empty one and again a cut one."""
    texts = [CUT, said(name, WHOLE, True), said(name, "", True), "and"]
    texts = [f"</think>{text}" if chat_of_family(name).opens_thinking else text for text in texts]
    rows, prompts = multi(name, texts)
    assert len(rows) == 4 and rows[-1].extra_fields["failure"] == ""
    assert prompts[0] == encode(tokenizer_of(name), rendered(name, [SYSTEM, USER]))
    bos = tokenizer_of(name).bos_token_id
    assert prompts[0].count(bos) <= 1
    task = multi_turn.ReasoningGymTask.from_extra_info(TASK, success_threshold=1.0)
    feedback = [task.judge(text).feedback for text in (CUT, WHOLE)]
    conversation = [SYSTEM, USER]
    for place in range(2):
        text = texts[place].removeprefix("</think>")
        plain = text.partition("<")[0]
        conversation += [{"role": "assistant", "content": plain}, {"role": "user", "content": feedback[place]}]
        before = prompts[place] + (encode(tokenizer_of(name), "</think>") if texts[place] != text else [])
        follows(name, before, text, prompts[place + 1], conversation)


def calling(a: int, b: int) -> str:
    return f'<tool_call>{{"name": "test_real_chats_add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


WITHOUT_TOOLS = ("llama3", "deepseekv3", "deepseek_r1", "gemma2", "gemma3", "cohere", "cohere2", "phi3")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in WITHOUT_TOOLS])
def test_a_tool_in_the_multi_turn_loop(name: str) -> None:
    """What the tool says follows a whole answer and one that was cut behind its call."""
    chat, tokenizer, family = chat_of_family(name), tokenizer_of(name), FAMILIES[name]
    end = family.calls_end or family.ends
    opening = "</think>" if chat.opens_thinking else ""
    texts = [opening + calling(3, 9) + end, opening + calling(4, 9), opening + "twelve"]
    rows, prompts = multi(name, texts, tools=["test_real_chats_add"], max_turns=1)
    assert len(rows) == 3 and rows[-1].extra_fields["failure"] == ""
    schema = {"type": "function", "function": json.loads(json.dumps(add_schema()))}
    assert prompts[0] == encode(tokenizer, rendered(name, [SYSTEM, USER], [schema]))
    conversation: list[dict[str, Any]] = [SYSTEM, USER]
    for place, (b, result) in enumerate(((3, "12"), (4, "13"))):
        form = chat.calls
        function = {"name": "test_real_chats_add", "arguments": form.arguments({"a": b, "b": 979})}
        called = {"role": "assistant", "content": form.content}
        called["tool_calls"] = [{"type": "function", "id": f"call{place:05d}", "function": function}]
        conversation += [called, {"role": "tool", "content": result, "tool_call_id": f"call{place:05d}"}]
        ids = prompts[place] + encode(tokenizer, texts[place])
        assert prompts[place + 1][: len(ids)] == ids
        tail = rendered(name, conversation, [schema]).rpartition("979")[2]
        assert tail.count(end) >= 1, tail
        at = tail.index(end)
        wanted = encode(tokenizer, tail[at:])
        if place == 0:
            wanted = wanted[1:]
        elif "</tool_call>" in tail and "</tool_call>" in tokenizer.get_added_vocab():
            wanted = encode(tokenizer, "</tool_call>" + tail.partition("</tool_call>")[2])[1:]
        assert prompts[place + 1][len(ids) :] == wanted, (tokenizer.decode(prompts[place + 1][len(ids) :]), tail)


def add_schema() -> dict[str, Any]:
    number = {"type": "integer", "description": ""}
    return {
        "name": "test_real_chats_add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {**number, "description": "one number."},
                "b": {**number, "description": "the other."},
            },
            "required": ["a", "b"],
        },
    }


@pytest.mark.parametrize("name", WITHOUT_TOOLS)
def test_tools_that_the_template_does_not_show(name: str) -> None:
    """They are refused by name, or the prompt describes them; then what they say is carried."""
    with pytest.raises(Refusal, match="does not show the model its tools: it leaves out .*tools_in_prompt=true"):
        multi(name, [calling(3, 9)], tools=["test_real_chats_add"])
    opening = "</think>" if chat_of_family(name).opens_thinking else ""
    texts = [opening + calling(3, 979), opening + "twelve"]
    rows, prompts = multi(name, texts, tools=["test_real_chats_add"], max_turns=1, tools_in_prompt=True)
    assert len(rows) == 2 and rows[-1].extra_fields["failure"] == ""
    said = tokenizer_of(name).decode(prompts[1][len(prompts[0]) :])
    assert said.count("982") == 1


@pytest.mark.parametrize("model_type", sorted(_MODEL_TYPE_TO_FAMILY))
def test_each_of_verls_token_builders(model_type: str) -> None:
    """Which builder verl picks makes no difference to what follows a whole or a cut answer; one that wants tokens which
    the tokenizer lacks, or a processor, is not needed."""
    texts = [CUT, said("qwen2_5", WHOLE, True), "and", "and"]
    _, prompts = multi("qwen2_5", texts, model_type=model_type)
    _, plain = multi("qwen2_5", texts, model_type="llama")
    assert prompts == plain and len(prompts) == 4


def step_by_step(name: str, row: Any, template: str = "compact") -> list[list[int]]:
    """Prompts of two steps in an environment."""
    tokenizer = tokenizer_of(name)
    rollout = {"prompt_length": 4096, "response_length": 64}
    node = {
        "environment": {"name": "environment_zoo:Corridor", "template": template, "history_length": 2, "max_steps": 3}
    }
    config = config_of(rollout, None, node)
    config.data.apply_chat_template_kwargs = FAMILIES[name].kwargs
    opening = "</think>" if chat_of_family(name).opens_thinking else ""
    engine = Engine(tokenizer, [opening + said(name, "<action>forward</action>", True), opening + CUT])

    async def run() -> Any:
        kind = FAMILIES[name].model_type
        made = make_loop(step_wise.AGENT_NAME, config, engine, tokenizer, hf_model_type=kind)
        return await made.run({}, raw_prompt=row, session_id=0, index=0)

    try:
        asyncio.run(run())
    finally:
        runner.end_all()
    return engine.prompts


@pytest.mark.parametrize("name", FAMILIES)
def test_the_step_wise_loop(name: str, tmp_path: Path) -> None:
    """Two system messages, the template's own and the data's, in parts, are one; where there is none, the user's."""
    file = tmp_path / "own.txt"
    file.write_text(
        "=== system\nWalk to the end.\n=== first\n{observation}\n=== later\n{history}\n{observation}\n"
        "=== pair\n{observation}: {action}\n"
    )
    parts = [{"type": "text", "text": RULES}]
    row = [{"role": "developer", "content": parts}, {"role": "user", "content": [{"type": "text", "text": "Play."}]}]
    prompts = step_by_step(name, row, str(file))
    assert len(prompts) >= 2
    for prompt, text in zip(prompts, ("place 0", "place 0: forward\nplace 1"), strict=False):
        asked = [{"role": "system", "content": f"{RULES}\n\nWalk to the end."}, {"role": "user", "content": text}]
        assert prompt == encode(tokenizer_of(name), rendered(name, asked)), tokenizer_of(name).decode(prompt)


@agent("thinker", role="You think.", tools=("test_real_chats_add",))
def thinker(text: str) -> str:
    """Think."""
    return text


@agent("teller", role="You tell.")
def teller(text: str) -> str:
    """Tell."""
    return text


@orchestra("test_real_chats")
async def team(task: Any, teller: Any, *, late: bool = False) -> str:
    """Two turns, with an answer between them."""
    first = await teller(task.messages)
    again = {"role": "system" if late else "user", "content": "Once more."}
    messages = [*task.messages, {"role": "assistant", "content": first.text}, again]
    return (await teller([*messages, *([{"role": "user", "content": "Now."}] if late else [])])).text


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("late", [False, True])
def test_a_team(name: str, late: bool, tmp_path: Path) -> None:
    """Role and rules are one system message; a late one stands where it was said, or is the user's."""
    tokenizer, chat = tokenizer_of(name), chat_of_family(name)
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(**kwargs):\n    return 1.0\n")
    rollout = {"prompt_length": 4096, "response_length": 64}
    config = config_of(rollout, str(reward), {"orchestra": {"name": "test_real_chats", "options": {"late": late}}})
    config.data.apply_chat_template_kwargs = FAMILIES[name].kwargs
    opening = "</think>" if chat.opens_thinking else ""
    engine = Engine(tokenizer, [opening + said(name, WHOLE, True), opening + CUT])

    async def run() -> Any:
        kind = FAMILIES[name].model_type
        made = make_loop(loop.AGENT_NAME, config, engine, tokenizer, hf_model_type=kind)
        return await made.run({}, raw_prompt=[SYSTEM, USER], reward_model={"ground_truth": "12"}, data_source="toy")

    rows = asyncio.run(run())
    assert rows[-1].extra_fields["failure"] == "", rows[-1].extra_fields["failure_detail"]
    system = {"role": "system", "content": f"You tell.\n\n{RULES}"}
    assert engine.prompts[0] == encode(tokenizer, rendered(name, [system, USER]))
    again = [{"role": "user", "content": "Once more."}]
    if late:
        again = [{"role": "system" if chat.late_system else "user", "content": "Once more."}]
        again += [{"role": "user", "content": "Now."}]
        if chat.alternates and not chat.late_system:
            again = [{"role": "user", "content": "Once more.\n\nNow."}]
    conversation = [system, USER, {"role": "assistant", "content": WHOLE}, *again]
    assert engine.prompts[1] == encode(tokenizer, rendered(name, conversation)), tokenizer.decode(engine.prompts[1])
