# SPDX-License-Identifier: Apache-2.0
"""Calls to models that somebody else serves (`verl_ext.integration.settings.endpoints`)."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from verl_ext.integration.settings.endpoints import Endpoint, EndpointFailed, EndpointRefused

LONGEST = 1 << 20
"""Characters of an answer that are read."""


class Answer(NamedTuple):
    """What an endpoint said: its text, how many tokens that was there, and whether it was cut at its longest length."""

    text: str
    tokens: int
    truncated: bool


class Client:
    """OpenAI's own client for one endpoint, in one event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        from openai import AsyncOpenAI

        self.endpoint = endpoint
        self.places = asyncio.Semaphore(endpoint.max_concurrent)
        self.client = AsyncOpenAI(
            base_url=endpoint.url, api_key=endpoint.key(), timeout=endpoint.timeout_s, max_retries=endpoint.retries
        )

    async def ask(self, messages: Sequence[Mapping[str, Any]], max_tokens: int) -> Answer:
        """The answer to chat messages.

        Args:
            messages: with ``role`` and ``content``.
            max_tokens: bound on the answer, unless the endpoint's ``request`` says otherwise.

        Raises:
            EndpointRefused: it answers 401, 403 or 404.
            EndpointFailed: it gave no answer, or none in OpenAI's form.
        """
        import openai

        request: dict[str, Any] = {"model": self.endpoint.model, "max_tokens": max_tokens, **self.endpoint.request}
        request = {key: value for key, value in request.items() if value is not None}
        known = {key: request.pop(key) for key in ("model", "max_tokens") if key in request}
        body: Any = [{"role": message["role"], "content": message["content"]} for message in messages]
        try:
            async with self.places:
                made = await self.client.chat.completions.create(messages=body, extra_body=request, **known)
            choice = made.choices[0]
            text = choice.message.content or ""
            tokens = made.usage.completion_tokens if made.usage else int(bool(text))
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            raise EndpointRefused(self._told(f"refuses {self.endpoint.model}: {error}")) from None
        except (openai.OpenAIError, ValueError, AttributeError, TypeError, IndexError) as error:
            raise EndpointFailed(self._told(f"{type(error).__name__}: {error}")) from None
        return Answer(str(text)[:LONGEST], int(tokens), choice.finish_reason == "length")

    def _told(self, problem: str) -> str:
        """A line about a problem, without the key, which some servers repeat."""
        told = f"{self.endpoint.url}: {problem}"
        return (told.replace(self.endpoint.key(), "...") if self.endpoint.api_key_env else told)[:500]


_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Client]] = weakref.WeakKeyDictionary()


def client(endpoint: Endpoint) -> Client:
    """The client of an endpoint in the running event loop. Raises EndpointRefused: there is no key."""
    kept = _clients.setdefault(asyncio.get_running_loop(), {})
    name = repr(endpoint)
    if name not in kept:
        kept[name] = Client(endpoint)
    return kept[name]
