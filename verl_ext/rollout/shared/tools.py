# SPDX-License-Identifier: Apache-2.0
"""Tools that an agent calls by itself: found in its answer by verl's tool parser, run under a time limit."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import re2
import regex
from verl.utils.profiler import simple_timer

from verl_ext.common.log_filter import Once
from verl_ext.integration.settings.options import OptionError
from verl_ext.methods.options import Count, Positive
from verl_ext.rollout.shared import mcp_tools
from verl_ext.rollout.shared.contain import contained
from verl_ext.rollout.shared.rows import ModelCall
from verl_ext.rollout.shared.template import Chat
from verl_ext.rollout.shared.threads import HeldThreads, Threads

logger = logging.getLogger(__name__)

DEEPEST = 64
"""Levels of lists and objects that a tool call's arguments may have: what makes prompts of them recurses."""


@dataclasses.dataclass(frozen=True)
class ToolSettings:
    """What an agent loop says of tools.

    Attributes:
        mcp: servers whose tools may be named: ``{<server>: {command: [...]} | {url: ...}}``, see `mcp_tools`.
        max_tool_rounds: model calls that may follow from tool calls before one answer, beyond the first.
        tool_timeout_s: seconds for one call of a tool.
        tools_in_prompt: the prompts of the data or the agents' roles describe the tools themselves, so that the chat
            template is not given their schemas. Needed where the template does not show them.
        read_thinking: what a model thinks (``<think>...</think>``) is judged too, and tool calls there are calls.
            Otherwise only what comes after it counts.
    """

    mcp: dict[str, Any] = dataclasses.field(default_factory=dict)
    max_tool_rounds: Count = 4
    tool_timeout_s: Positive = 60.0
    tools_in_prompt: bool = False
    read_thinking: bool = False


class Tools:
    """The tools of one trajectory.

    Args:
        options: ``rollout.multi_turn``: ``format``, ``max_parallel_calls``, ``max_tool_response_length``,
            ``tool_response_truncate_side``.
        given: verl's tools for the agent loop.
        tokenizer: of the model.
        settings: of the agent loop.
        where: the key at which these stand, for messages.
        failed: called for a tool that failed.
        threads: for tools that are ordinary functions.
        chat: of the model, which tells its thinking; None: all that it writes is read.

    Raises:
        OptionError: an MCP server cannot be reached, see `mcp_tools.tools`.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        given: Any,
        tokenizer: Any,
        settings: ToolSettings,
        where: str,
        failed: Callable[[], None],
        threads: Threads,
        chat: Chat | None = None,
    ) -> None:
        self.threads, self.chat = threads, chat
        self.options, self.tokenizer, self.where, self.failed = options, tokenizer, where, failed
        self.timeout_s, self.read_thinking = settings.tool_timeout_s, settings.read_thinking
        self.calls = 0
        verls = getattr(given, "tools", given) or []
        self.given = {**{tool.name: tool for tool in verls}, **mcp_tools.tools(settings.mcp, f"{where}.mcp")}

        self.begin("", None, {})

    def begin(self, request: str, tools_kwargs: Mapping[str, Any] | None, session: dict[str, Any]) -> None:
        """Take what verl's tools are told of their trajectory.

        Args:
            request: its name at the engine.
            tools_kwargs: the data column, by tool: ``create_kwargs`` are for `BaseTool.create`.
            session: where tools may keep things until it ends, ``agent_data.extra_fields``.
        """
        self.request, self.tools_kwargs, self.session = request, dict(tools_kwargs or {}), session

    def _tool(self, who: str, name: str) -> Any:
        from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY

        known = {**FUNCTION_TOOL_REGISTRY, **self.given}
        if name not in known:
            raise OptionError(
                f"{who} has the tool {name!r}, which is not there (there are: {', '.join(known) or 'none'}"
                "). Name it in rollout.multi_turn.tool_config_path or function_tool_path, put verl's decorator "
                f"function_tool on a function of your module, or name its server in {self.where}.mcp."
            )
        return known[name]

    def schemas(self, who: str, names: Sequence[str]) -> list[dict[str, Any]]:
        """The schemas of the tools of `who`, for the chat template. Raises OptionError: one is not there."""
        return [self._tool(who, name).tool_schema.model_dump(exclude_unset=True, exclude_none=True) for name in names]

    async def use(
        self, who: str, names: Sequence[str], row: ModelCall, messages: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Run the tool calls in an answer. A tool that is unknown, raises or hangs answers with its error.

        Args:
            who: for messages.
            names: the tools that it has.
            row: its answer; the time that tools take is added to its metrics.
            messages: what it has answered.

        Returns:
            The model's message and the tools'; [] without any call.

        Raises:
            HeldThreads: too many calls hang for another to begin.
        """
        tools = {name: self._tool(who, name) for name in names}
        parser = linear_parser(self.options.get("format") or "hermes", self.tokenizer)
        ids = row.response_ids if self.read_thinking or self.chat is None else self.chat.spoken(row.response_ids)
        content, calls = await read_calls(parser, ids, [t.tool_schema for t in tools.values()])
        calls = calls[: int(self.options.get("max_parallel_calls") or 1)]
        if not calls:
            return []
        names_of_calls = [f"call{self.calls + place:05d}" for place in range(len(calls))]  # Mistral wants nine signs
        self.calls += len(calls)
        asked = [
            {"type": "function", "id": name, "function": {"name": c.name, "arguments": arguments_of(c.arguments)}}
            for name, c in zip(names_of_calls, calls, strict=True)
        ]
        said = {"role": "assistant", "content": content, "tool_calls": asked}
        data = self._agent_data([*messages, said], row, calls)
        timing: dict[str, float] = {}
        with simple_timer("tool_calls", timing):
            answers = await asyncio.gather(*(self._call(tools, call.name, call.arguments, data) for call in calls))
        row.metrics.tool_calls += timing["tool_calls"]
        heard = zip(asked, answers, strict=True)
        return [said, *({"role": "tool", "content": self._cut(one), "tool_call_id": c["id"]} for c, one in heard)]

    def _agent_data(self, messages: Sequence[Mapping[str, Any]], row: ModelCall, calls: list[Any]) -> Any:
        """What verl's own agent loop shows a tool of the conversation."""
        from verl.experimental.agent_loop.tool_agent_loop import AgentData

        data = AgentData(
            messages=[dict(message) for message in messages],
            image_data=None,
            video_data=None,
            audio_data=None,
            mm_processor_kwargs=None,
            metrics={},
            request_id=self.request,
            tools_kwargs=self.tools_kwargs,
        )
        data.prompt_ids, data.response_ids, data.tool_calls = list(row.prompt_ids), list(row.response_ids), calls
        data.extra_fields = self.session
        return data

    def _cut(self, text: str) -> str:
        """What the model reads of a tool's answer: verl cuts at this length, on this side, with this mark."""
        longest = int(self.options.get("max_tool_response_length") or 2**31)
        if len(text) <= longest:
            return text
        side = self.options.get("tool_response_truncate_side")
        if side == "left":
            return "(truncated)..." + text[-longest:]
        if side == "right":
            return text[:longest] + "...(truncated)"
        half = longest // 2
        return text[:half] + "...(truncated)..." + text[len(text) - half :]

    async def _call(self, tools: Mapping[str, Any], name: str, arguments: str, data: Any) -> str:
        from verl.tools.function_tool import FunctionTool, normalize_function_tool_return

        def run(tool: Any, given: Any) -> str:
            with contained(f"tool {name}"):
                return _text(normalize_function_tool_return(tool.fn(**given))[0])

        async def use(tool: Any, given: Any) -> str:
            with contained(f"tool {name}"):
                if isinstance(tool, FunctionTool):
                    return _text(normalize_function_tool_return(await tool.call(given))[0])
                of_row = self.tools_kwargs.get(name) or {}
                instance, _ = await tool.create(create_kwargs=of_row.get("create_kwargs") or {})
                try:
                    return _text((await tool.execute(instance, given, agent_data=data))[0])
                finally:
                    await tool.release(instance)

        try:
            if name not in tools:
                raise ValueError(f"there is no tool {name!r}; there are: {', '.join(tools)}")
            tool, given = tools[name], json.loads(arguments)
            if isinstance(tool, FunctionTool) and not tool.is_async:
                # Not verl's call: that takes a thread of the event loop, in which verl's parsers decode, and keeps it
                # if the function hangs. As with verl's, the function sees the context of its caller.
                context = contextvars.copy_context()
                return await self.threads.run(context.run, run, tool, given, timeout_s=self.timeout_s)
            return await asyncio.wait_for(use(tool, given), timeout=self.timeout_s)
        except HeldThreads:
            raise
        except Exception as error:
            self.failed()
            logger.warning("tool %s failed: %s: %s", name, type(error).__name__, error)
            return f"Error: {type(error).__name__}: {error}"


def _text(response: Any) -> str:
    """The text of a tool's answer. Raises ValueError: there is more in it."""
    if response.image or response.video:
        raise ValueError("the tool returned an image or a video; agents of verl_ext read text only")
    return response.text or ""


WHOLE, NEVER = ("tool_call_regex", "tool_call_function_regex"), r"[^\s\S]"


def linear_parser(name: str, tokenizer: Any) -> Any:
    """verl's tool parser of this format, with its patterns compiled by RE2.

    verl's take time quadratic in an answer that repeats an opening tag, in the event loop. What RE2 can't compile, or
    what the parser hands to the module ``regex`` (``gpt-oss``), stays as it is. A call that was cut is none: that of
    ``qwen3_coder`` would be made with the arguments so far (patterns in `WHOLE`, whose last alternative is the end of
    the answer).
    """
    from verl.experimental.agent_loop import tool_parser
    from verl.experimental.agent_loop.tool_parser import ToolParser

    _quieten(tool_parser.logger)
    parser = ToolParser.get_tool_parser(name, tokenizer)
    if name == "gpt-oss":
        return parser
    for field, pattern in vars(parser).items():
        if isinstance(pattern, regex.Pattern):
            flags = "(?s)" if pattern.flags & regex.DOTALL else ""
            source = pattern.pattern
            if field in WHOLE and "|" in source and source.endswith("$"):
                source = source[:-1] + NEVER  # its groups stay
            try:
                setattr(parser, field, re2.compile(flags + source))
            except re2.error:
                logger.debug("the pattern %s of the tool parser %s stays verl's", field, name)
    return parser


@functools.cache
def _quieten(log: logging.Logger) -> None:
    """A call that a model spells wrongly is an answer, not an error of the run: verl has a line in the log for each."""
    log.addFilter(Once("Failed to decode tool call"))


async def read_calls(parser: Any, ids: Sequence[int], schemas: Sequence[Any]) -> tuple[str, list[Any]]:
    """An answer's text without its tool calls and special tokens, and the calls. One on which verl's parser raises has
    none: what a model writes must not end its rollout as if the engine had failed."""
    try:
        content, calls = await parser.extract_tool_calls(list(ids), list(schemas))
        content = content or ""
        for token in parser.tokenizer.all_special_tokens:  # some parsers decode the turn's end with the text
            content = content.replace(token, "")
        return content, calls
    except Exception as error:
        logger.warning("no tool call can be read in an answer: %s: %s", type(error).__name__, error)
        return "", []


def arguments_of(text: str) -> Any:
    """The arguments of a tool call as an object, which chat templates expect; as they came if they are no JSON, or of
    more than `DEEPEST` levels."""
    try:
        made = json.loads(text)
    except (ValueError, TypeError, RecursionError):  # no JSON, or an integer of more digits than Python reads
        return text
    level = [made]
    for _ in range(DEEPEST):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [value for values in inner for value in values]
    return text if any(isinstance(one, dict | list) for one in level) else made
