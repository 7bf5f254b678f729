# SPDX-License-Identifier: Apache-2.0
"""What verl's own rollout servers, of vLLM and of SGLang, have in common on the CPU: settings that follow from the
run's, filled in before Ray starts."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import OmegaConf, open_dict

from verl_ext.integration.settings import model_options


class ServerError(ValueError):
    """A rollout server cannot serve this run on the CPU. The message says what to set or install."""


def fill_in(config: Any, engine: str, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Set the arguments of the engine, a reward model's included, and the environment of the run's processes where the
    user has not, in place."""
    with open_dict(config):
        for rollout in rollouts(config, engine):
            given = OmegaConf.select(rollout, f"engine_kwargs.{engine}") or {}
            for key, value in arguments.items():
                if given.get(key) is None:
                    OmegaConf.update(rollout, f"engine_kwargs.{engine}.{key}", value, force_add=True)
        for name, value in environment.items():
            if OmegaConf.select(config, f"verl_ext.env.{name}") is None:
                OmegaConf.update(config, f"verl_ext.env.{name}", value, force_add=True)


def rollouts(config: Any, engine: str) -> list[Any]:
    """What configures the run's servers of this engine: the policy's node, and a reward model's."""
    reward = config.reward.reward_model
    nodes = [config.actor_rollout_ref.rollout, *([reward.rollout] if reward.get("enable") else [])]
    return [node for node in nodes if node.name == engine]


def check_torchvision(distribution: str) -> None:
    """Refuse a torchvision that does not fit torch: transformers imports it for every model where it is there. Raises
    ServerError: says how to remove it."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # a foreign build fails in many ways: OSError, RuntimeError, ImportError
        raise ServerError(
            f"torchvision is installed but cannot be imported ({type(error).__name__}: {error}), so transformers would "
            f"find no model. {distribution} asks for it without need: pip uninstall -y torchvision torchaudio "
            "torchcodec"
        ) from error


def models(config: Any, check: Callable[[Any, Any], None]) -> list[tuple[Any, Any, int]]:
    """The run's models whose Hugging Face config can be read here, each put through `check`, for `kv_cache_bytes`:
    (Hugging Face config, configuration of its run, how many models the run has)."""
    runs = [config, *(model_options.overlaid(config, one) for one in model_options.of(config))]
    if len(rollouts(config, config.actor_rollout_ref.rollout.name)) > 1:
        runs.append(_reward_model(config))
    found = [(model, run, len(runs)) for run in runs if (model := _model_config(run)) is not None]
    for model, run, _ in found:
        check(model, run)
    return found


def _reward_model(config: Any) -> Any:
    """The run's config as if its policy were its reward model."""
    reward = config.reward.reward_model
    model = {"path": reward.model_path, "hf_config_path": None, "tokenizer_path": None}
    whole = copy.deepcopy(config)
    with open_dict(whole):
        whole.merge_with({"actor_rollout_ref": {"model": model, "rollout": reward.rollout}})
    return whole


def _model_config(config: Any) -> Any | None:
    """The model's Hugging Face config, or None where it cannot be read here (a path that verl will fetch)."""
    from transformers import AutoConfig

    model = config.actor_rollout_ref.model
    path = model.get("hf_config_path") or model.path
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=bool(model.get("trust_remote_code", False)))
    except (OSError, ValueError):
        return None


def tokens(config: Any) -> int | None:
    """Number of tokens of the model's tokenizer, or None where it cannot be read here."""
    from transformers import AutoTokenizer

    model = config.actor_rollout_ref.model
    try:
        return len(
            AutoTokenizer.from_pretrained(
                model.get("tokenizer_path") or model.path, trust_remote_code=bool(model.get("trust_remote_code", False))
            )
        )
    except (OSError, ValueError):
        return None


def head_dim(model: Any) -> int:
    """Size of the attention heads of a (text) model's Hugging Face config."""
    return int(getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads)


def token_bytes(model: Any, config: Any) -> int:
    """Memory of one token's keys and values in bytes."""
    import torch

    text = model.get_text_config()
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    dtype = str(config.actor_rollout_ref.rollout.dtype)
    itemsize = {"float32": 4, "fp32": 4, "float": 4}.get(dtype, torch.float16.itemsize)
    return 2 * int(text.num_hidden_layers) * heads * head_dim(text) * itemsize


def kv_cache_bytes(model: Any, config: Any, models: int = 1) -> int:
    """Memory for a server's key-value cache in bytes.

    Room for ``max_num_seqs`` sequences of the run's longest prompt and response, in blocks of 128 tokens, but at most
    an eighth of the memory that is free now (shared by the replicas of all `models`), and always one sequence of
    ``max_model_len``.
    """
    import psutil

    rollout = config.actor_rollout_ref.rollout
    token = token_bytes(model, config)
    longest = int(rollout.get("max_model_len") or model.get_text_config().max_position_embeddings)
    usual = min(longest, int(rollout.prompt_length) + int(rollout.response_length))
    replicas = models * max(1, int(config.trainer.n_gpus_per_node) // int(rollout.tensor_model_parallel_size))
    wanted = _blocks(usual) * int(rollout.max_num_seqs) * token
    # One block more: vLLM keeps one for itself.
    least = (_blocks(longest) + 128) * token
    return max(least, min(wanted, psutil.virtual_memory().available // 8 // replicas))


def _blocks(count: int) -> int:
    return -(-count // 128) * 128
