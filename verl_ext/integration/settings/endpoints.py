# SPDX-License-Identifier: Apache-2.0
"""``verl_ext.models.<name>.endpoint``: a model that somebody else serves, over OpenAI's chat completions.

Agents of a team that have it are part of the game and not of the run: a strong judge, a simulated user. What they say
is text for the others; it makes no turn, is in no statistic and is not trained on.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig

from verl_ext.integration.settings.options import OptionError, read, select
from verl_ext.methods.options import AtLeastOne, Count, Positive

KEY = "verl_ext.models"


class EndpointRefused(RuntimeError):
    """The endpoint will not serve this run: a wrong key, model or address. No later call would do better."""


class EndpointFailed(RuntimeError):
    """One call came to nothing, after the further attempts."""


@dataclass(frozen=True)
class Endpoint:
    """A model behind an OpenAI-compatible address.

    Attributes:
        url: up to and with ``/v1``.
        model: its name there.
        api_key_env: environment variable that holds the key, on every node; null: no key is sent.
        request: further keys of each request, such as ``temperature``; null takes out a key of ours.
        timeout_s: seconds for one attempt.
        retries: further attempts after a lost connection, a time limit, or an answer with status 408, 409, 429 or 5xx.
        max_concurrent: requests under way at once in a process.
    """

    url: str = ""
    model: str = ""
    api_key_env: str | None = None
    request: dict[str, Any] = field(default_factory=dict)
    timeout_s: Positive = 120.0
    retries: Count = 4
    max_concurrent: AtLeastOne = 64

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {self.url!r}; it begins with http:// or https://")
        if not self.model:
            raise ValueError("model is empty; give the model's name there")

    def key(self) -> str:
        """The key. Raises EndpointRefused: its variable is not set in this process."""
        if self.api_key_env is None:
            return "none"
        if not os.environ.get(self.api_key_env):
            raise EndpointRefused(
                f"the environment variable {self.api_key_env} is empty or not set on {os.uname().nodename}; it holds "
                f"the key for {self.url}"
            )
        return os.environ[self.api_key_env]


def of(config: Any) -> dict[str, Endpoint]:
    """The endpoints of a run by their names in ``verl_ext.models``. Raises OptionError: a key or value that an endpoint
    does not take."""
    nodes = select(select(config, "verl_ext"), "models") or {}
    found = {}
    for name in nodes if isinstance(nodes, Mapping | DictConfig) else ():
        node = nodes[name]
        if isinstance(node, Mapping | DictConfig) and select(node, "endpoint") is not None:
            where = f"{KEY}.{name}"
            if further := sorted(set(node) - {"endpoint"}):
                raise OptionError(f"{where}.{further[0]}: a model with an endpoint is not served here; leave it out.")
            found[str(name)] = read(node, "endpoint", Endpoint, where=f"{where}.endpoint")
    return found


def check(config: Any) -> None:
    """Refuse endpoints that could not be asked. Raises OptionError: no key, or no client installed."""
    for name, endpoint in of(config).items():
        if importlib.util.find_spec("openai") is None:
            raise OptionError(f"{KEY}.{name}.endpoint needs OpenAI's client: pip install 'verl-ext[gateway]'.")
        try:
            endpoint.key()
        except EndpointRefused as error:
            raise OptionError(f"{KEY}.{name}.endpoint.api_key_env: {error}.") from None
