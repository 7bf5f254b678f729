# SPDX-License-Identifier: Apache-2.0
"""Dynamic vocabulary pruning in a run (arXiv 2512.23087): the ``dvp`` node, and what follows from it on both sides.

``dvp.rho`` is the one key. The trainer's engine prunes with it (`verl_ext.integration.engines.engine`), and every
request to the rollout servers gets it as ``min_p`` (`guard`), so that sampler and trainer keep the same tokens: those
with at least ``rho`` times the largest probability, after the temperature. Everything else that shapes the sampler's
distribution has to be neutral, and `check` refuses a configuration in which the two sides differ.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from verl_ext.integration import store_notes
from verl_ext.integration.compat import verl_api
from verl_ext.integration.mix import component_names
from verl_ext.integration.settings.options import OptionError, bypass, option, read, require_fsdp, select

ROLLOUTS = ("vllm", "sglang", "embedded")
"""Rollout engines whose ``min_p`` is the rule of the trainer's safe set."""

UNNORMALISED = ("sglang",)
"""Rollout engines that report log-probabilities at the temperature, but of the full softmax even under ``min_p``."""

UNKNOWN_TO_TRAINER: dict[str, tuple[Any, ...]] = {
    "logit_bias": (None, {}),
    "allowed_token_ids": (None, []),
    "bad_words": (None, [], ""),
    "min_tokens": (None, 0),
}
"""Sampling parameters that change the set of tokens in a way the trainer cannot repeat, and their neutral values."""

PROBABILITY_EDGES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9)
"""Edges of the bins of the mismatch metrics, by the probability that the trainer gives the token."""

QUARTERS = 4


@dataclasses.dataclass(frozen=True)
class DvpOptions:
    """The top-level node ``dvp``.

    Attributes:
        rho: smallest probability that is kept, as a fraction of the largest one, in (0, 1]; null switches pruning off.
        prune_reference: prune the reference policy on its own safe set as well.
    """

    rho: float | None = None
    prune_reference: bool = True

    def __post_init__(self) -> None:
        if self.rho is not None and not 0.0 < self.rho <= 1.0:
            raise ValueError(
                f"rho is {self.rho:g}; it is a fraction of the largest probability, in (0, 1] (published: 6.144e-6). "
                "null switches pruning off"
            )


def options(config: Any) -> DvpOptions | None:
    """The ``dvp`` node of a whole config, or None where there is none or its ``rho`` is null. Raises OptionError:
    unknown key, wrong type or value out of range."""
    if select(config, "dvp") is None:
        return None
    found = read(config, "dvp", DvpOptions, where="dvp")
    return None if found.rho is None else found


def one_pass(config: Any) -> str:
    """``verl_ext.one_pass`` as ``auto``, ``on`` or ``off``. Raises OptionError: another value."""
    value = select(config.get("verl_ext"), "one_pass", "auto")
    named = {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value
    if named not in ("auto", "on", "off"):
        raise OptionError(f"verl_ext.one_pass is {value!r}; choose one of auto, true, false.")
    return str(named)


def ask_one_pass(config: Any) -> None:
    """Have all passes over the logits made by ours where ``verl_ext.one_pass`` leaves the choice: one of them needs it,
    and the ratio of an update to the old policy would measure what verl's rounds in another way."""
    from omegaconf import OmegaConf

    if one_pass(config) == "auto":
        OmegaConf.update(config, "verl_ext.one_pass", True, force_add=True)


def refuse_without_one_pass(config: Any, what: str) -> None:
    """Raises OptionError: `what` needs the pass over the logits, and ``verl_ext.one_pass=false``."""
    if one_pass(config) == "off":
        raise OptionError(f"{what} needs the pass over the logits, but verl_ext.one_pass=false. Leave one of them out.")


def mismatch_wanted(config: Any) -> bool:
    """``verl_ext.mismatch_metrics``; by default true with pruning and false without."""
    wanted = option(config, "mismatch_metrics", bool | None)
    return options(config) is not None if wanted is None else wanted


def check(config: Any) -> list[str]:
    """Check the ``dvp`` node against the rest of a composed configuration.

    Returns:
        Warnings.

    Raises:
        OptionError: a bad option, an engine that cannot prune, or a sampler that would not sample from the policy that
            is trained; the message names both values.
    """
    if one_pass(config) == "on":
        require_fsdp(config, "verl_ext.one_pass=true reads the logits once", ", or verl_ext.one_pass=auto")
        if config.actor_rollout_ref.model.get("use_fused_kernels", False):
            raise OptionError(
                "verl_ext.one_pass=true with actor_rollout_ref.model.use_fused_kernels=true, which never forms the "
                "logits. Set one of them to false."
            )
    if mismatch_wanted(config) and not config.actor_rollout_ref.rollout.get("calculate_log_probs", True):
        raise OptionError(
            "the mismatch metrics and dvp compare the trainer with the sampler, but "
            "actor_rollout_ref.rollout.calculate_log_probs=false. Set it to true (verl's default)."
        )
    found = options(config)
    if found is None:
        return []
    rho = float(found.rho or 0.0)
    refuse_without_one_pass(config, f"dvp.rho={rho:g}")
    _check_trainer(config, found)
    _check_sampler(config, rho)
    return _warnings(config)


def _check_trainer(config: Any, found: DvpOptions) -> None:
    from verl.trainer.ppo.utils import need_reference_policy

    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    engines = {"actor_rollout_ref.actor.strategy": actor.strategy}
    if need_reference_policy(config) and found.prune_reference:
        engines["actor_rollout_ref.ref.strategy"] = config.actor_rollout_ref.ref.strategy
    for key, strategy in engines.items():
        if strategy not in ("fsdp", "fsdp2"):
            raise OptionError(
                f"dvp prunes in verl's FSDP engine; {key}={strategy} has none of its code. Set {key} to fsdp or fsdp2"
                + ("." if "actor." in key else ", or dvp.prune_reference=false.")
            )
    if model.get("use_fused_kernels", False) or actor.get("use_fused_kernels", False):
        raise OptionError(
            "dvp needs the logits, which fused kernels never form. Set actor_rollout_ref.model.use_fused_kernels=false."
        )
    if select(config.get("distillation"), "enabled", False):
        raise OptionError(
            "dvp prunes the vocabulary, but distillation.enabled=true compares all of it. Switch one of them off."
        )


def _check_sampler(config: Any, rho: float) -> None:
    rollout = config.actor_rollout_ref.rollout
    name = rollout.name
    if name not in ROLLOUTS:
        raise OptionError(
            f"dvp.rho={rho:g} is the sampler's min_p as well; actor_rollout_ref.rollout.name={name} is not known to "
            f"have it. Choose one of {', '.join(ROLLOUTS)}."
        )
    if not float(rollout.temperature) > 0:
        raise OptionError(
            f"dvp trains the policy at the temperature of the sampler, but actor_rollout_ref.rollout.temperature="
            f"{rollout.temperature}. Give a number greater than 0."
        )
    for key, value, neutral in _sampler_settings(config, rho):
        if value not in neutral:
            raise OptionError(
                f"sampler and trainer differ: {key}={value}, but with dvp.rho={rho:g} the trained policy needs "
                f"{neutral[0]}. Leave {key} out, or run without dvp."
            )
    if select(rollout.get("mtp"), "enable", False) and select(rollout.get("mtp"), "enable_rollout", False):
        raise OptionError(
            "dvp samples with min_p, which speculative decoding leaves out, but "
            "actor_rollout_ref.rollout.mtp.enable_rollout=true. Set it to false."
        )
    if name in UNNORMALISED and bypass(config):
        raise OptionError(
            f"rollout.name={name} reports log-probabilities of the full softmax, while dvp.rho={rho:g} trains the "
            "renormalised policy; the pass that would tell them apart is skipped by "
            "algorithm.rollout_correction.bypass_mode=true. Set it to false."
        )


def _sampler_settings(config: Any, rho: float) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """What shapes the sampler's distribution: (key, its value, the values that agree with the trainer)."""
    rollout = config.actor_rollout_ref.rollout
    name, trained = rollout.name, float(rollout.temperature)
    where = "actor_rollout_ref.rollout"
    for node, prefix in ((rollout, where), (rollout.val_kwargs, f"{where}.val_kwargs")):
        yield f"{prefix}.top_p", node.top_p, (1.0,)
        yield f"{prefix}.top_k", node.top_k, (-1, 0)
        yield f"{prefix}.min_p", node.get("min_p"), (rho, None)
    yield f"{where}.repetition_penalty", float(rollout.get("repetition_penalty") or 1.0), (1.0,)
    # Greedy validation is the same on both sides: the most probable token is in every safe set.
    yield f"{where}.val_kwargs.temperature", float(rollout.val_kwargs.temperature), (trained, 0.0)
    if name != "sglang":  # it has one mode
        yield f"{where}.logprobs_mode", rollout.get("logprobs_mode"), ("processed_logprobs",)
    given = _mapping(select(rollout.get("engine_kwargs"), name), f"{where}.engine_kwargs.{name}")
    own = f"{where}.engine_kwargs.{name}"
    yield f"{own}.logprobs_mode", given.get("logprobs_mode"), ("processed_logprobs", None)
    yield f"{own}.min_p", given.get("min_p"), (rho, None)
    for key in ("speculative_config", "speculative_algorithm"):  # leaves min_p out
        yield f"{own}.{key}", given.get(key), (None,)
    agreeing = {"min_p": (rho,), "top_p": (1.0,), "top_k": (-1, 0), "temperature": (trained,), **UNKNOWN_TO_TRAINER}
    for node in ("override_generation_config", "preferred_sampling_params"):
        for key, value in _mapping(given.get(node), f"{own}.{node}").items():
            if key in agreeing:
                yield f"{own}.{node}.{key}", value, agreeing[key]
    if name == "sglang" and trained != 1.0:
        yield "SGLANG_RETURN_ORIGINAL_LOGPROB", os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB") or "0", ("0", "false")


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    """A config node, or the JSON text that an engine's command line takes in its place."""
    if value is None:
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise OptionError(f"{where} is {value!r}, which is not JSON: {error}") from error
    if not hasattr(value, "items"):
        raise OptionError(f"{where} is {value!r}; it holds keys and values.")
    return value


def _warnings(config: Any) -> list[str]:
    found = []
    if component_names(config.algorithm) == ["gae"]:
        found.append(
            "the recipe dvp leaves the advantage estimator to you, and verl's default, gae, needs a critic. Name one "
            "beside it, for example +recipe=[dvp,grpo]."
        )
    if select(config.algorithm.get("rollout_correction"), "rollout_is") is None and not bypass(config):
        found.append(
            "dvp without importance weights: algorithm.rollout_correction.rollout_is=null. The pruned policies of "
            "sampler and trainer still differ a little; +recipe=dvp sets rollout_is=token with threshold 2."
        )
    return found


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What every request of the run samples with."""

    rho: float
    temperature: float
    validation_temperature: float

    def apply(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """`params` of one request with ``min_p``. Raises OptionError: an agent loop asks for another distribution than
        the one that is trained."""
        agreeing: dict[str, tuple[Any, ...]] = {
            "min_p": (self.rho, None),
            "top_p": (1.0, None),
            "top_k": (-1, 0, None),
            # 0: greedy, whose token is in every safe set
            "temperature": (self.temperature, self.validation_temperature, 0.0),
            "repetition_penalty": (1.0, None),
            "presence_penalty": (0.0, None),
            "frequency_penalty": (0.0, None),
            **UNKNOWN_TO_TRAINER,
        }
        for key, allowed in agreeing.items():
            value = params.get(key, 1.0 if key == "temperature" else None)
            if value not in allowed:
                raise OptionError(
                    f"the agent loop asks the sampler for {key}={value}, but with dvp.rho={self.rho:g} the trained "
                    f"policy is sampled with {key}={allowed[0]}. Pass on the sampling_params that the loop was given."
                )
        return {**params, "min_p": self.rho}


class PrunedClientMixin:
    """Mixin over verl's client of the rollout servers, through which the requests of all agent loops go."""

    _verl_ext_sampler: Sampler

    async def generate(self, request_id: Any, *, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """verl's own, with ``min_p`` among the sampling parameters."""
        sampling_params = self._verl_ext_sampler.apply(sampling_params)
        await store_notes.guarded(self._verl_ext_sampler.rho)
        return await super().generate(request_id, sampling_params=sampling_params, **kwargs)  # type: ignore[misc]

    def __reduce__(self) -> Any:
        # The class is made at run time, so what travels to the agent loops is its base.
        return _rebuild, (type(self).__mro__[2], self.__dict__)


@functools.cache
def _pruned(client_class: type) -> type:
    return type(client_class.__name__, (PrunedClientMixin, client_class), {"__module__": __name__})


def _rebuild(client_class: type, state: dict[str, Any]) -> Any:
    client: Any = object.__new__(_pruned(client_class))
    client.__dict__.update(state)
    return client


def guard(client: Any, sampler: Sampler) -> Any:
    """The client with `sampler` on every request; the same object, so what else holds it is guarded too. Raises
    TypeError: the client is of a class whose instances cannot change their class."""
    if not isinstance(client, PrunedClientMixin):
        base: Any = type(client)
        verl_api.check_overrides(PrunedClientMixin, base)
        client.__class__ = _pruned(base)
    client._verl_ext_sampler = sampler
    return client


def set_metrics(
    in_set: torch.Tensor, kept_mass: torch.Tensor, set_size: torch.Tensor, mask: torch.Tensor
) -> dict[str, float]:
    """How much the trainer's safe set keeps, and how many sampled tokens it leaves out, in all and in each quarter of
    the turns' model tokens. All [B, T]: at each response token, `mask` 0/1 as the rollout wrote it."""
    chosen = mask.bool()
    total = int(chosen.sum())
    if not total:
        return {}
    outside = (in_set <= 0)[chosen].double()
    place = (chosen.cumsum(-1) - 1)[chosen]
    length = chosen.sum(-1, keepdim=True).expand_as(chosen)[chosen]
    quarter = (place * QUARTERS) // length
    mass, size = kept_mass[chosen].double(), set_size[chosen].double()
    out = {
        "dvp/out_of_set_fraction": float(outside.mean()),
        "dvp/set_size/mean": float(size.mean()),
        "dvp/set_size/max": float(size.max()),
        "dvp/kept_mass/mean": float(mass.mean()),
        "dvp/kept_mass/min": float(mass.min()),
    }
    for k in range(QUARTERS):
        part = outside[quarter == k]
        if part.numel():
            out[f"dvp/out_of_set_quarter_{k + 1}"] = float(part.mean())
    return out


def mismatch_metrics(
    trainer: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor, prefix: str = "mismatch"
) -> dict[str, float]:
    """|log p_trainer - log p_sampler| of the sampled tokens, by the probability that the trainer gives them.

    Args:
        trainer, sampler: [B, T] log-probabilities, float.
        mask: [B, T] 0/1, tokens that are compared.
        prefix: beginning of the names.

    Returns:
        ``<prefix>/{mean,max}`` over all tokens and, for each bin with tokens, ``<prefix>/p_<low>_<high>/
        {mean,max,count}``, low <= p < high (`PROBABILITY_EDGES`).
    """
    chosen = mask.bool() & torch.isfinite(trainer) & torch.isfinite(sampler)
    if not bool(chosen.any()):
        return {}
    ours, theirs = trainer[chosen].double().numpy(), sampler[chosen].double().numpy()
    difference = np.abs(ours - theirs)
    out = {f"{prefix}/mean": float(difference.mean()), f"{prefix}/max": float(difference.max())}
    edges = (0.0, *PROBABILITY_EDGES, 1.0)
    bins = np.digitize(ours, [math.log(edge) for edge in PROBABILITY_EDGES])
    for k in np.unique(bins):
        part = difference[bins == k]
        name = f"{prefix}/p_{edges[k]:g}_{edges[k + 1]:g}"
        out[f"{name}/mean"] = float(part.mean())
        out[f"{name}/max"] = float(part.max())
        out[f"{name}/count"] = float(part.size)
    return out
