# SPDX-License-Identifier: Apache-2.0
"""What a model of the run reads and writes with: its own tokenizer, chat template, lengths and engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from verl_ext.integration.settings import model_options
from verl_ext.rollout.shared.per_config import once
from verl_ext.rollout.shared.template import Chat, builder_of, chat_of


@dataclass(frozen=True)
class Voice:
    """One model, with the names that `verl_ext.rollout.shared.rows` looks up on an agent loop.

    Attributes:
        config: of the whole run.
        rollout_config: the model's ``actor_rollout_ref.rollout``.
        tokenizer: of the model, with its chat template.
        continuous_token_builder: verl's, for chats.
        server_manager: client of the model's engine.
    """

    config: Any
    rollout_config: Any
    tokenizer: Any
    continuous_token_builder: Any
    server_manager: Any

    @property
    def chat(self) -> Chat:
        """What its chat template takes and writes."""
        return chat_of(self.tokenizer, self.continuous_token_builder)

    @property
    def prompt_length(self) -> int:
        """Tokens of a prompt that fit."""
        return int(self.rollout_config.prompt_length)

    @property
    def response_length(self) -> int:
        """Tokens of an answer that are kept."""
        return int(self.rollout_config.response_length)


def voices(loop: Any) -> dict[str, Voice]:
    """The voices of all models of the run by name, that of the agent loop `loop` as ``policy``."""
    policy = Voice(loop.config, loop.rollout_config, loop.tokenizer, loop.continuous_token_builder, loop.server_manager)
    clients: Mapping[str, Any] = getattr(loop.server_manager, "verl_ext_clients", {})
    if not clients:
        return {model_options.POLICY: policy}

    def load() -> dict[str, Voice]:
        return {model.name: _further(loop, model, clients[model.name]) for model in model_options.of(loop.config)}

    made = once(loop.config, "voices", load)
    return {
        model_options.POLICY: policy,
        **{name: replace(voice, server_manager=clients[name]) for name, voice in made.items()},
    }


def _further(loop: Any, model: model_options.Model, client: Any) -> Voice:
    from verl.utils.config import omega_conf_to_dataclass

    own = model.config(loop.config).actor_rollout_ref
    loaded = omega_conf_to_dataclass(own.model)
    if loaded.get("custom_chat_template", None) is not None:
        loaded.tokenizer.chat_template = loaded.custom_chat_template
    client.tokenizer = loaded.tokenizer  # verl's trace decodes with it
    builder = builder_of(
        loaded.tokenizer,
        getattr(loaded.hf_config, "model_type", None),
        chat_template_kwargs=loop.apply_chat_template_kwargs,
        mm_processor_kwargs=loop.mm_processor_kwargs,
        processor=loaded.processor,
    )
    return Voice(loop.config, own.rollout, loaded.tokenizer, builder, client)
