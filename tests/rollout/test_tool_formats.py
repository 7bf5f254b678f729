# SPDX-License-Identifier: Apache-2.0
"""Calls of tools in every format that verl reads, whole and cut at every letter."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from families import tokenizer_of
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.tools.schemas import OpenAIFunctionToolSchema

from verl_ext.rollout.shared.tools import linear_parser, read_calls

pytestmark = pytest.mark.seconds

NUMBER = {"type": "integer"}
ADD = {
    "name": "add",
    "description": "adds",
    "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
}
SCHEMAS = [OpenAIFunctionToolSchema.model_validate({"type": "function", "function": ADD})]
JSON = '{"a": 3, "b": 9}'
DSML = "\uff5cDSML\uff5c"
CALLS = {
    "hermes": f'I add. <tool_call>\n{{"name": "add", "arguments": {JSON}}}\n</tool_call>',
    "gpt-oss": "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    f"<|constrain|>json<|message|>{JSON}<|call|>",
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n<parameter=b>\n9\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>9</arg_value>\n</tool_call>",
    "seed": "<seed:tool_call>\n<function=add>\n<parameter=a>3</parameter>\n<parameter=b>9</parameter>\n</function>\n"
    "</seed:tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">3</parameter>\n'
    '<parameter name="b">9</parameter>\n</invoke>\n</minimax:tool_call>',
    "kimi": f"<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{JSON}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v4": f'<{DSML}tool_calls>\n<{DSML}invoke name="add">\n<{DSML}parameter name="a" string="false">3'
    f'</{DSML}parameter>\n<{DSML}parameter name="b" string="false">9</{DSML}parameter>\n</{DSML}invoke>\n'
    f"</{DSML}tool_calls>",
    "gemma4": "<|tool_call>call:add{a:3,b:9}<tool_call|>",
}


def test_all_formats_are_here() -> None:
    verls = [name for name, parser in ToolParser._registry.items() if parser.__module__.startswith("verl.")]
    assert sorted(CALLS) == sorted(verls)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_was_cut_is_none(name: str) -> None:
    tokenizer = tokenizer_of("gptoss" if name == "gpt-oss" else "qwen2_5")
    parser = linear_parser(name, tokenizer)

    async def read() -> list[list[tuple[str, Any]]]:
        found = []
        for length in range(len(CALLS[name]) + 1):
            ids = tokenizer.encode(CALLS[name][:length], add_special_tokens=False)
            _, calls = await read_calls(parser, ids, SCHEMAS)
            found.append([(call.name, json.loads(call.arguments)) for call in calls])
        return found

    found = asyncio.run(read())
    whole = [("add", {"a": 3, "b": 9})]
    assert found[-1] == whole and [] in found
    assert all(calls in ([], whole) for calls in found)
