# SPDX-License-Identifier: Apache-2.0
"""The teacher of the loss ``hybrid_imitation``: who it is, what the engines are told, and what is not supported.

The teacher is verl's distillation teacher where ``distillation.enabled``, else verl's frozen reference, which is the
policy as the run began with it. The engine's side: `verl_ext.integration.engines.imitation`.
"""

from __future__ import annotations

from typing import Any

from omegaconf import open_dict

from verl_ext.integration import dvp
from verl_ext.integration.compat import registrations
from verl_ext.integration.engines import imitation
from verl_ext.integration.parts.base import Part
from verl_ext.integration.settings import model_options
from verl_ext.integration.settings.options import OptionError, select

LOSS = "actor_rollout_ref.actor.policy_loss"
OF_ALL = {"loss_mode": "vanilla", "kl_direction": "reverse", "teacher_topk": None}
"""Keys of `LOSS` that the engines of all models are told once, with their defaults."""
TEACHER_SERVERS = ("vllm",)
"""Engines that verl can ask for a teacher's log-probabilities (0.9.1 asks SGLang with an argument it has not)."""


class Imitation(Part):
    """See the module's text."""

    @classmethod
    def wanted(cls, config: Any) -> bool:
        return bool(config.actor_rollout_ref.actor.policy_loss.loss_mode == "hybrid_imitation")

    @classmethod
    def complete(cls, config: Any) -> None:
        """All log-probabilities come from one pass over the logits. verl's teacher is asked for its top tokens; verl's
        own loss from them counts nothing beside ours."""
        if cls.wanted(config):
            dvp.ask_one_pass(config)
        if cls.wanted(config) and _has_teacher(config):
            with open_dict(config):
                config.distillation.distillation_loss.update(
                    loss_mode="forward_kl_topk",
                    topk=select(config.actor_rollout_ref.actor.policy_loss, "teacher_topk"),
                    use_task_rewards=True,
                    use_policy_gradient=False,
                    distillation_loss_coef=0.0,
                )

    @classmethod
    def check(cls, config: Any) -> list[str]:
        _check_models(config)
        if not cls.wanted(config):
            return []
        dvp.refuse_without_one_pass(config, "hybrid_imitation")
        policy = config.actor_rollout_ref
        top_k = select(policy.actor.policy_loss, "teacher_topk")
        in_actor = select(policy.model, "lora_rank", 0) or select(policy.model, "lora_adapter_path") is not None
        refused = {
            f"actor_rollout_ref.actor.strategy={policy.actor.strategy} has none of its code. Set it to fsdp2.": (
                policy.actor.strategy not in ("fsdp", "fsdp2")
            ),
            "fused kernels never form the logits. Set actor_rollout_ref.model.use_fused_kernels=false.": (
                select(policy.model, "use_fused_kernels", False)
            ),
            "the logits of a sequence lie on one rank. Set actor_rollout_ref.actor.ulysses_sequence_parallel_size=1.": (
                select(policy.actor, "ulysses_sequence_parallel_size", 1) > 1
            ),
            "a pruned policy has no divergence from a teacher that is not. Leave out dvp.rho or the loss.": (
                select(config.get("dvp"), "rho") is not None
            ),
        }
        if _has_teacher(config):
            names = {str(node.inference.name) for node in config.distillation.teacher_models.values()}
            loop = str(select(policy.rollout.agent, "default_agent_loop"))
            refused |= {
                f"verl's teacher sends its top tokens alone. Set {LOSS}.teacher_topk to a number.": top_k is None,
                "verl's teacher needs vllm: SGLang 0.5.12 does not take what verl asks with (detokenize). Set "
                "distillation.teacher_models.*.inference.name=vllm, or distillation.enabled=false.": (
                    not names <= set(TEACHER_SERVERS)
                ),
                "verl asks its teacher for the last sequence of a trajectory alone, and actor_rollout_ref.rollout."
                f"agent.default_agent_loop={loop} makes several. Set it to single_turn_agent, or "
                "distillation.enabled=false: the reference is the teacher then.": loop in registrations.AGENT_LOOPS,
            }
        else:
            kl = policy.actor.use_kl_loss or select(config.algorithm, "use_kl_in_reward", False)
            apart = model_options.separate(config)
            refused |= {
                "the teacher is the frozen reference, which verl makes for a KL term alone. Set "
                "actor_rollout_ref.actor.use_kl_loss=true (kl_loss_coef=0 leaves the term out of the loss), or "
                "distillation.enabled=true for a teacher of its own.": not kl,
                "the whole vocabulary needs the reference beside the actor in one process, and with LoRA or "
                f"trainer.v1.trainer_mode=separate_async it is not there. Set {LOSS}.teacher_topk to a number.": (
                    top_k is None and bool(in_actor or apart)
                ),
            }
        for why, holds in refused.items():
            if holds:
                raise OptionError(f"hybrid_imitation: {why}")
        return []

    def before_reference(self, batch: Any) -> Any:
        if not _has_teacher(self.config):
            batch.extra_info[imitation.TOP_K] = self._top_k or 0
        return batch

    def before_update(self, batch: Any) -> Any:
        direction = select(self.config.actor_rollout_ref.actor.policy_loss, "kl_direction", "reverse")
        batch.extra_info |= {imitation.TOP_K: 0, imitation.DIRECTION: direction, imitation.FULL: self._top_k is None}
        return batch

    @property
    def _top_k(self) -> int | None:
        found = select(self.config.actor_rollout_ref.actor.policy_loss, "teacher_topk")
        return None if found is None else int(found)


def _check_models(config: Any) -> None:
    """Refuse models that differ in what the engines of all are told. Raises OptionError: one of them imitates, and
    another has something else in a key of `OF_ALL`."""
    of_run = {key: select(config.actor_rollout_ref.actor.policy_loss, key, value) for key, value in OF_ALL.items()}
    for model in model_options.of(config):
        said = {key: model.changes.get(f"{LOSS}.{key}", of_run[key]) for key in OF_ALL}
        own = {key: OF_ALL[key] if value is None else value for key, value in said.items()}
        if not model.trained or "hybrid_imitation" not in (own["loss_mode"], of_run["loss_mode"]):
            continue
        for key, value in own.items():
            if value != of_run[key]:
                shown = "null" if of_run[key] is None else of_run[key]
                raise OptionError(
                    f"hybrid_imitation: {model_options.KEY}.{model.name}.actor.policy_loss.{key} is "
                    f"{'null' if value is None else value} and {LOSS}.{key} is {shown}, but the engines of all models "
                    f"are told one value. Leave it out of the model, or set {LOSS}.{key} to what all shall have."
                )


def _has_teacher(config: Any) -> bool:
    return bool(select(config.get("distillation"), "enabled", False))
