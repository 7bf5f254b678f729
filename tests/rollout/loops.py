# SPDX-License-Identifier: Apache-2.0
"""Agent loops made as verl makes them."""

from __future__ import annotations

from typing import Any

import hydra
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, _agent_loop_registry
from verl.utils.dataset.rl_dataset import RLHFDataset


def make_loop(name: str, config: Any, server: Any, tokenizer: Any) -> Any:
    """The agent loop registered as `name`, for one trajectory.

    Args:
        name: the data column ``agent_name``.
        config: verl's config as far as the loop reads it.
        server: stands for the rollout engine.
        tokenizer: of the model.
    """
    return hydra.utils.instantiate(
        config=_agent_loop_registry[name],
        trainer_config=DictConfigWrap(config),
        server_manager=server,
        tokenizer=tokenizer,
        processor=None,
        hf_model_type="llama",
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(config.data),
    )
