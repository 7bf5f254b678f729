# SPDX-License-Identifier: Apache-2.0
"""The advantage: options of the estimators, the rewards they get, the turns they see, and what comes out.

verl's own estimators know nothing of ``valid_row``. They are called on the turns that are trained on alone, in a
mixture or by themselves, and their results go to those turns; ours take all turns and leave the others out themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl_ext.integration import columns, estimators
from verl_ext.integration.columns import ActiveBatch, BatchError, split_key
from verl_ext.integration.compat import verl_api
from verl_ext.integration.estimators import ESTIMATORS
from verl_ext.integration.metrics import at_limit, learning_signal, trajectory_metrics
from verl_ext.integration.mix import component_names
from verl_ext.integration.parts.advantage.columns import VERL_OTB
from verl_ext.integration.parts.base import Part
from verl_ext.integration.settings.options import OptionError, discount, has_critic, near, select

DISCOUNTED = ("trloo", "hgpo", "gigpo")
VERLS_LOOPS = ("single_turn_agent", "tool_agent")
OF_ROWS = ("rloo", "rloo_vectorized", "reinforce_plus_plus_baseline", "opo", "gpg", "grpo_passk", "grpo_vectorized")
"""Estimators of verl that compare the turns of a prompt."""
WEIGHTED = {"otb", *VERL_OTB}
"""Estimators whose sums weigh a sample by what the loss takes of it: rejected turns leave them."""
OF_ALL_AGENTS = ("dr_mas", "mix")
"""Estimators that see the prompts as they are where agents have a reward each: the level of dr_mas says whom it
compares, and each part of a mixture sees its own."""


class Methods(Part):
    """See the module's text."""

    @classmethod
    def check(cls, config: Any) -> list[str]:
        algorithm = config.algorithm
        discount(algorithm)
        names = component_names(algorithm)
        estimators.check(algorithm, names)
        _check_verls(config, names)
        used = [name for name in names if name in ESTIMATORS]
        if "dr_mas" in used:
            _agents_statistics(ESTIMATORS["dr_mas"].settings(algorithm))
        said = [
            warning
            for name in used
            for field in estimators.of_loops(name, algorithm)
            for warning in told(config, name, field)
        ]
        return [*_alone(config, used), *_gamma(config, used), *_rows(config, names), *said]

    def before_advantage(self, data: Any, keys: Sequence[str], active: ActiveBatch) -> None:
        complete(active, data)
        check_rewards(active.columns, data.batch["token_level_rewards"], keys)

    def after_advantage(self, data: Any, keys: Sequence[str], active: ActiveBatch) -> None:
        check_advantages(data.batch["advantages"], keys, str(select(self.config.algorithm, "adv_estimator")))
        self.metrics.update(active.metrics)
        self.metrics.update(trajectory_metrics(active.columns, active.earned))
        if limit := select(self.config.get("data"), "max_response_length"):
            self.metrics.update(at_limit(active.columns, data.batch["response_mask"], int(limit)))


class LearningSignal(Part):
    """What the update is made of, once all has had its say on the advantages."""

    def after_advantage(self, data: Any, keys: Sequence[str], active: ActiveBatch) -> None:
        self.metrics.update(learning_signal(active.columns, data.batch["advantages"], data.batch["response_mask"]))


NOT_ON_V1 = {
    "remax": "the rewards of greedy rollouts, which verl's V1 trainer does not make",
    "gdpo": "prompts and rewards by their kinds, which verl's V1 trainer does not fetch",
}
"""Estimators of verl that V1 cannot serve, and what they need: a KeyError after the first rollout."""


def _check_verls(config: Any, names: Sequence[str]) -> None:
    """Refuse estimators of verl without what they read. Raises OptionError: names the key and what to do."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    known, mixed = {*ESTIMATORS, *ADV_ESTIMATOR_REGISTRY}, select(config.algorithm, "adv_estimator") == "mix"
    for name in names:
        key = f"algorithm.mix.{name}" if mixed else f"algorithm.adv_estimator={name}"
        if name in NOT_ON_V1:
            raise OptionError(f"{key} needs {NOT_ON_V1[name]}. Leave it out.")
        if name not in known and not select(config.actor_rollout_ref.get("model"), "external_lib"):
            raise OptionError(f"{key} is no estimator that is registered.{near(name, known)}")
        if name == "grpo_passk" and int(config.actor_rollout_ref.rollout.n) < 2:
            raise OptionError(f"{key} compares the two best samples of a prompt. Set actor_rollout_ref.rollout.n to 2.")
        if name == "gae" and not has_critic(config):
            raise OptionError(f"{key} needs the values of a critic, and this run has none. Set critic.enable=true.")
    if select(config.algorithm, "use_pf_ppo"):
        raise OptionError(
            "algorithm.use_pf_ppo=true draws sequences anew after gae, and verl's V1 trainer stores what was drawn "
            "under the keys of those before (verl issue 7956); other estimators leave it out. Set it to false."
        )


def _agents_statistics(options: Mapping[str, Any]) -> None:
    if options["statistics"] != "both" and options["level"] != "agent":
        raise OptionError(
            f"algorithm.dr_mas.statistics={options['statistics']} with level={options['level']}, which takes no "
            "statistic of an agent. Set algorithm.dr_mas.level=agent, or statistics=both."
        )


def told(config: Any, who: str, field: str) -> list[str]:
    """Warnings about a turn field that verl's own agent loops say nothing of, as far as the data name no other loop.
    Raises OptionError: no turn can have it, since nothing but verl's loop of a single turn plays."""
    agent = select(select(config.actor_rollout_ref, "rollout"), "agent")
    loop = str(select(agent, "default_agent_loop"))
    if loop not in VERLS_LOOPS or select(agent, "agent_loop_config_path") or select(agent, "agent_loop_manager_class"):
        return []
    named = verl_api.loops_named(config)
    if named is not None and not named <= set(VERLS_LOOPS):
        return []
    ours = "verl_ext_step_wise" if field == "anchor_obs" else "verl_ext_orchestra or verl_ext_gateway"
    message = (
        f"{who} needs the turn field {field!r}, of which actor_rollout_ref.rollout.agent.default_agent_loop={loop} "
        f"says nothing. Set it to {ours}, or to a loop of your own that puts it in AgentLoopOutput.extra_fields"
    )
    if named == {"single_turn_agent"}:
        raise OptionError(f"{message}; or name such loops in the data's column `agent_name`.")
    return [f"{message}, unless the data's column `agent_name` or your tools see to it."]


def _alone(config: Any, names: list[str]) -> list[str]:
    """A group baseline needs company."""
    if not names or int(config.actor_rollout_ref.rollout.n) > 1:
        return []
    what = "leave-one-out baseline" if "trloo" in names else "group baseline"
    return [
        f"actor_rollout_ref.rollout.n=1: no {what} can be formed between samples of a prompt, so {', '.join(names)} "
        "mostly give the raw return (REINFORCE without a baseline) or nothing. Set actor_rollout_ref.rollout.n to 2 "
        "or more."
    ]


def _rows(config: Any, names: list[str]) -> list[str]:
    """verl 0.9.1 has one turn of a trajectory compared for ``grpo`` alone (trainer/ppo/v1/utils.py)."""
    taken = [name for name in names if name in OF_ROWS]
    loops = sorted(verl_api.agent_loops(config)) if verl_api.loops_named(config) else []
    if not taken or not loops:
        return []
    return [
        f"verl's {' and '.join(taken)} takes each turn for a sample: where a trajectory of {' or '.join(loops)} has "
        "several, it counts so often in the baseline of its prompt. grpo compares trajectories, and trloo their turns."
    ]


def _gamma(config: Any, names: list[str]) -> list[str]:
    """One key for all that have none of their own: recipes that publish different discounts share the last one's."""
    shared = [n for n in names if n in DISCOUNTED and select(select(config.algorithm, n), "gamma") is None]
    if len(shared) < 2 or "trloo" not in shared:
        return []
    return [
        f"{' and '.join(shared)} share algorithm.gamma={config.algorithm.gamma}, though they were published with "
        "different ones (trloo 1.0; hgpo, gigpo 0.95). The recipe named last, or algorithm.gamma=..., decides; "
        "algorithm.<method>.gamma sets one's own."
    ]


def estimate(
    verls: Callable[..., Any], data: Any, keys: list[str], name: Any, active: ActiveBatch, **settings: Any
) -> Any:
    """verl's ``compute_advantage_for_multi_trajectories`` with the turn fields at hand, and the parts of a mixture
    computed by verl too: `data` with ``advantages`` and ``returns`` [B, T]. Where agents have rewards each, the samples
    of a prompt are those of one agent."""

    def compute(data: Any, name: Any) -> Any:
        if getattr(name, "value", name) in OF_ALL_AGENTS:
            return weighted(data, name)
        prompts = data.non_tensor_batch["uid"]
        data.non_tensor_batch["uid"] = columns.of_agents(prompts, active.columns)
        data = weighted(data, name)
        data.non_tensor_batch["uid"] = prompts
        return data

    def weighted(data: Any, name: Any) -> Any:
        kept = active.columns.get("row_mask")
        if kept is None or getattr(name, "value", name) not in WEIGHTED:
            return of_samples(data, name)
        mask = data.batch["response_mask"]
        data.batch["response_mask"] = mask * torch.as_tensor(kept)[:, None].to(mask.dtype)
        data = of_samples(data, name)
        data.batch["response_mask"] = mask
        return data

    def of_samples(data: Any, name: Any) -> Any:
        plain = getattr(name, "value", name)
        rows = torch.as_tensor(active.columns["valid_row"]).nonzero().squeeze(-1)
        if plain in {*ESTIMATORS, "mix"}:
            return verls(data, batch_keys=keys, adv_estimator=name, **settings)
        if plain == "gae" and active.along:
            return over_gaps(verls, data, active, adv_estimator=name, **settings)
        if plain == "grpo":
            rows = _spoken(rows, data.batch["response_mask"], active.columns["traj_uid"])
        if len(rows) == len(keys):
            return verls(data, batch_keys=keys, adv_estimator=name, **settings)
        with columns.active(active.select(rows)):
            part = data.select_idxs(rows)
            part = verls(part, batch_keys=[keys[row] for row in rows.tolist()], adv_estimator=name, **settings)
        for column in ("advantages", "returns"):
            found = part.batch[column]
            data.batch[column] = found.new_zeros(len(keys), found.shape[1]).index_copy(0, rows, found)
        return data

    def component(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        # verl writes its results into the batch it is given; a shallow copy keeps `data` as it was.
        copy = type(data)(
            batch=data.batch.clone(recurse=False),
            non_tensor_batch=dict(data.non_tensor_batch),
            meta_info=dict(data.meta_info),
        )
        batch = compute(copy, name).batch
        return batch["advantages"], batch["returns"]

    active.component = component
    shared, own = active.columns["traj_uid"], columns.own_trajectories(active.columns)
    if own is not shared:
        keys = [f"{uid}_{split_key(key)[2]}" for uid, key in zip(own, keys, strict=True)]
    active.columns["traj_uid"] = own
    try:
        with columns.active(active):
            return compute(data, name)
    finally:
        active.columns["traj_uid"] = shared


def _spoken(rows: torch.Tensor, mask: torch.Tensor, trajectories: Sequence[Any]) -> torch.Tensor:
    """`rows` with a token in `mask`, where their trajectory has one: verl's grpo hands all turns of a trajectory what
    the first token of the last one gets, and a last call may be without a token."""
    spoken = mask.any(-1)
    some = {uid for uid, one in zip(trajectories, spoken.tolist(), strict=True) if one}
    return rows[[bool(spoken[row]) or trajectories[row] not in some for row in rows.tolist()]]


def over_gaps(verls: Callable[..., Any], data: Any, active: ActiveBatch, **settings: Any) -> Any:
    """verl's ``gae`` on the sequences: values and deltas run from turn to turn over what lies between, where a sequence
    a call ends an episode with each. Each turn's reward is on its last token, where it is known; otherwise the
    outcome is on the last turn's. `data` is of turns, as is what comes back."""
    from tensordict import TensorDict

    turns, batch = active.turns, data.batch
    mask, scores = batch["response_mask"], batch["token_level_scores"]
    kl = batch["token_level_rewards"] - scores
    own = scores.double().sum(-1)
    if "turn_reward" in active.columns:  # with the KL of its turn, which is on the tokens here
        own = torch.as_tensor(active.columns["turn_reward"]) - kl.double().sum(-1)
    elif turns.sequence is not None:
        own = own * torch.nn.functional.pad(turns.sequence.diff() != 0, (0, 1), value=True)
    last = mask.shape[1] - 1 - mask.flip(-1).argmax(-1)
    rewards = kl.index_put((torch.arange(len(mask)), last), own.to(kl.dtype), accumulate=True)
    whole = {"values": batch["values"], "token_level_rewards": rewards, "response_mask": mask}
    packed = TensorDict({name: turns.pack(column) for name, column in whole.items()}, batch_size=len(active.stored))
    rows = type(data)(batch=packed, non_tensor_batch={}, meta_info=dict(data.meta_info))
    found = verls(rows, batch_keys=list(active.stored), **settings).batch
    for name in ("advantages", "returns"):
        batch[name] = torch.where(mask.bool(), turns.unpack(found[name]), 0.0)
    return data


def complete(active: ActiveBatch, data: Any) -> None:
    """Add the token columns that verl already fetched, and settle the reward of each turn.

    A trajectory of one turn has the reward of its turn. Where agents have rewards each (``agent_reward``), a turn's is
    its agent's, and no longer the trajectory's, which is all that verl can store. KL-in-reward is part of
    `token_level_rewards` only, so its share is added to the rewards that came with the turns.
    """
    for name in columns.TOKEN_COLUMNS:
        if name in data.batch.keys():
            active.columns[name] = data.batch[name]
    if "agent_reward" in active.columns:
        change = torch.zeros_like(data.batch["token_level_scores"])
        for row, reward in enumerate(active.columns["agent_reward"]):
            if reward is not None:
                (tokens,) = data.batch["response_mask"][row].nonzero(as_tuple=True)
                change[row, tokens[-1] if len(tokens) else 0] = float(reward)
                change[row] -= data.batch["token_level_scores"][row]
        for name in ("token_level_scores", "token_level_rewards"):
            data.batch[name] = data.batch[name] + change
    scores = data.batch["token_level_scores"].double().sum(-1)
    rewards = data.batch["token_level_rewards"].double().sum(-1)
    valid = active.columns["valid_row"]
    active.columns["score"] = rewards.numpy()
    active.earned = {"valid_row": valid, **active.earned, "score": scores.numpy()}
    if "turn_reward" not in active.columns:
        said = [row.get("turn_reward") for row in active.extra_fields] or [None] * len(valid)
        lacking = np.array([reward is None for reward in said]) & valid
        if columns.one_row_each(active.columns["traj_uid"], valid, lacking):
            own = [
                score if reward is None else float(reward) for reward, score in zip(said, scores.tolist(), strict=True)
            ]
            active.columns["turn_reward"] = np.where(valid, np.array(own) + (rewards - scores).numpy(), 0.0)
            active.missing.pop("turn_reward", None)
    else:
        active.columns["turn_reward"] = active.columns["turn_reward"] + (rewards - scores).numpy()


def check_rewards(fields: Mapping[str, Any], token_level_rewards: torch.Tensor, keys: Sequence[str]) -> None:
    """Refuse a NaN or infinite reward, of tokens [B, T] or of a turn. Raises BatchError: names uid, trajectory
    and turn of the first bad turn."""
    bad = ~torch.isfinite(token_level_rewards).all(-1)
    if "turn_reward" in fields:
        bad |= ~torch.isfinite(torch.as_tensor(fields["turn_reward"]))
    bad &= torch.as_tensor(fields["valid_row"])
    if not bool(bad.any()):
        return
    row = int(bad.nonzero()[0, 0])
    uid, traj, turn = split_key(keys[row])
    reward = fields["turn_reward"][row] if "turn_reward" in fields else token_level_rewards[row].sum().item()
    raise BatchError(
        f"reward {reward} of {keys[row]}: prompt uid {uid}, trajectory {traj}, turn {turn} "
        f"({int(bad.sum())} such turns in the batch). A reward must be finite: mend the reward function or agent loop."
    )


def check_advantages(advantages: torch.Tensor, keys: Sequence[str], estimator: str) -> None:
    """Refuse a NaN or infinite advantage before it reaches the weights. Raises BatchError: names the estimator and the
    first bad turn."""
    bad = ~torch.isfinite(advantages).all(-1)
    if bool(bad.any()):
        uid, traj, turn = split_key(keys[int(bad.nonzero()[0, 0])])
        raise BatchError(
            f"estimator {estimator!r} gave an advantage that is not finite in {int(bad.sum())} turns, the first is "
            f"prompt uid {uid}, trajectory {traj}, turn {turn}."
        )
