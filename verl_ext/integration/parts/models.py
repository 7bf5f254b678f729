# SPDX-License-Identifier: Apache-2.0
"""``verl_ext.models`` at launch; what happens in a step is in `verl_ext.integration.models`."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from verl_ext.integration.parts.base import Part
from verl_ext.integration.settings import model_options
from verl_ext.integration.settings.options import OptionError, select, updated


class Models(Part):
    """Completes and checks the further models of a run."""

    @classmethod
    def complete(cls, config: Any) -> None:
        model_options.complete(config)

    @classmethod
    def check(cls, config: Any) -> list[str]:
        _check_adapter(config)
        _check_async_save(config)
        return model_options.check(config)

    @classmethod
    def wanted(cls, config: Any) -> bool:
        return False


def _check_async_save(config: Any) -> None:
    """Refuse checkpoints of several models that are written while the run goes on: verl's Megatron manager notes the
    last one two folders above a model's, which is not where a run looks for it."""
    further = model_options.of(config)
    for section, node in updated(config).items() if further else ():
        key = f"{section}.checkpoint.async_save"
        own = {f"{model_options.KEY}.{one.name}": one.changes.get(key) for one in further if one.trained}
        asked = [f"{where}.{key.removeprefix('actor_rollout_ref.')}" for where, value in own.items() if value]
        asked += [key] * bool(select(node.get("checkpoint"), "async_save", False))
        if asked:
            raise OptionError(
                f"{' and '.join(asked)}=true with {model_options.KEY}: verl would note the last checkpoint in a folder "
                "of the models, where no run looks for it, and trainer.resume_mode=auto would start anew. Set it to "
                "false."
            )


def _check_adapter(config: Any) -> None:
    """Refuse adapters that verl 0.9.1 does not send to servers apart from training (`ActorRolloutRefWorker.
    update_weights`): these would answer with the bare base model."""
    model = config.actor_rollout_ref.model
    keys = {
        "lora_rank": int(model.get("lora_rank") or 0) > 0,
        "lora.rank": int(select(model.get("lora"), "rank", 0)) > 0,
        "lora_adapter_path": model.get("lora_adapter_path") is not None,
    }
    used = [f"model.{key}={OmegaConf.select(model, key)}" for key, holds in keys.items() if holds]
    if model_options.separate(config) and used and not select(model.get("lora"), "merge", False):
        raise OptionError(
            f"actor_rollout_ref.{' and '.join(used)} with trainer.v1.trainer_mode={model_options.SEPARATE}: verl sends "
            "the base weights without the adapter to rollout servers apart from training. Set "
            "actor_rollout_ref.model.lora.merge=true, or trainer_mode to sync or colocate_async."
        )
