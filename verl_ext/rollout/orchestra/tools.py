# SPDX-License-Identifier: Apache-2.0
"""Tools that an agent calls by itself: found in its answer by verl's tool parser, run under a time limit."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import re2
import regex
from verl.utils.profiler import simple_timer

from verl_ext.contain import contained
from verl_ext.integration.options import OptionError
from verl_ext.rollout.orchestra.agents import TOOL_ERROR, Agent
from verl_ext.rollout.orchestra.core import Completion

logger = logging.getLogger(__name__)


class Tools:
    """The tools of one trajectory.

    Args:
        options: ``rollout.multi_turn``: ``format``, ``max_parallel_calls``, ``max_tool_response_length``.
        given: verl's tools for the agent loop, and those of MCP servers.
        tokenizer: of the model.
        timeout_s: seconds for one call.
        count: takes a reason; called for a tool that failed.
    """

    def __init__(
        self, options: Mapping[str, Any], given: Any, tokenizer: Any, timeout_s: float, count: Callable[[str], None]
    ) -> None:
        self.options, self.tokenizer, self.timeout_s, self.count = options, tokenizer, timeout_s, count
        self.given = {tool.name: tool for tool in given}

    def tool(self, agent: Agent, name: str) -> Any:
        """One of an agent's tools. Raises OptionError: it is not there."""
        from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY

        known = {**FUNCTION_TOOL_REGISTRY, **self.given}
        if name not in known:
            raise OptionError(
                f"agent {agent.name} has the tool {name!r}, which is not there (there are: {', '.join(known) or 'none'}"
                "). Name it in rollout.multi_turn.tool_config_path or function_tool_path, put verl's decorator "
                "function_tool on a function of your module, or name its server in verl_ext.orchestra.mcp."
            )
        return known[name]

    def schemas(self, agent: Agent) -> list[dict[str, Any]]:
        """The schemas of an agent's tools, for the chat template."""
        return [
            self.tool(agent, name).tool_schema.model_dump(exclude_unset=True, exclude_none=True) for name in agent.tools
        ]

    async def use(self, agent: Agent, completion: Completion) -> list[dict[str, Any]]:
        """Run the tool calls in an answer. A tool that is unknown, raises or hangs answers with its error.

        Returns:
            The agent's message and the tools'; [] without any call.
        """
        tools = {name: self.tool(agent, name) for name in agent.tools}
        parser = linear_parser(self.options.get("format") or "hermes", self.tokenizer)
        content, calls = await parser.extract_tool_calls(
            completion.response_ids, [t.tool_schema for t in tools.values()]
        )
        calls = calls[: int(self.options.get("max_parallel_calls") or 1)]
        if not calls:
            return []
        timing: dict[str, float] = {}
        with simple_timer("tool_calls", timing):
            answers = await asyncio.gather(*(self._call(tools, call.name, call.arguments) for call in calls))
        completion.row.metrics.tool_calls += timing["tool_calls"]
        longest = int(self.options.get("max_tool_response_length") or 2**31)
        asked = [
            {"type": "function", "function": {"name": c.name, "arguments": arguments_of(c.arguments)}} for c in calls
        ]
        return [
            {"role": "assistant", "content": content or "", "tool_calls": asked},
            *({"role": "tool", "content": answer[:longest]} for answer in answers),
        ]

    async def _call(self, tools: Mapping[str, Any], name: str, arguments: str) -> str:
        from verl.tools.function_tool import FunctionTool

        async def use() -> str:
            with contained(f"tool {name}"):
                if name not in tools:
                    raise ValueError(f"there is no tool {name!r}; there are: {', '.join(tools)}")
                given = json.loads(arguments)
                tool = tools[name]
                if isinstance(tool, FunctionTool):
                    result = await tool.call(given)
                    return result if isinstance(result, str) else str(getattr(result, "text", result))
                instance, _ = await tool.create()
                try:
                    result, _, _ = await tool.execute(instance, given)
                    return result.text or ""
                finally:
                    await tool.release(instance)

        try:
            return await asyncio.wait_for(use(), timeout=self.timeout_s)
        except Exception as error:
            self.count(TOOL_ERROR)
            logger.warning("tool %s failed: %s: %s", name, type(error).__name__, error)
            return f"Error: {type(error).__name__}: {error}"


def linear_parser(name: str, tokenizer: Any) -> Any:
    """verl's tool parser of this format, with its patterns compiled by RE2.

    verl's take time quadratic in an answer that repeats an opening tag, in the event loop. What RE2 can't compile, or
    what the parser hands to the module ``regex`` (``gpt-oss``), stays as it is.
    """
    from verl.experimental.agent_loop.tool_parser import ToolParser

    parser = ToolParser.get_tool_parser(name, tokenizer)
    if name == "gpt-oss":
        return parser
    for field, pattern in vars(parser).items():
        if isinstance(pattern, regex.Pattern):
            flags = "(?s)" if pattern.flags & regex.DOTALL else ""
            try:
                setattr(parser, field, re2.compile(flags + pattern.pattern))
            except re2.error:
                logger.debug("the pattern %s of the tool parser %s stays verl's", field, name)
    return parser


def arguments_of(text: str) -> Any:
    """The arguments of a tool call as an object, which chat templates expect; as they came if they are no JSON."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, TypeError, RecursionError):
        return text
