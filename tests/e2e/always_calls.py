# SPDX-License-Identifier: Apache-2.0
"""For verl's ``tool_agent`` with an untrained model: every answer is short and calls a tool."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool


@function_tool("lookup")
def lookup(what: str) -> str:
    """Look something up.

    Args:
        what: its name.
    """
    return f"nothing about {what}"


@ToolParser.register("always_calls")
class AlwaysCalls(ToolParser):
    @property
    def stop_token_ids(self) -> list[int]:
        return list(range(100, 259))

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        return "", [FunctionCall(name="lookup", arguments='{"what": "sevens"}')]


@ToolParser.register("letters_call")
class LettersCall(AlwaysCalls):
    """For a model that says letters."""

    @property
    def stop_token_ids(self) -> list[int]:
        return list(range(70, 90))
