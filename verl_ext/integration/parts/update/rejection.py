# SPDX-License-Identifier: Apache-2.0
"""Rejection rules: ``algorithm.rejection: {mrs: true, ...}`` leaves turns or tokens out of the loss, and of it alone.

The rules (`verl_ext.methods.rejection`) are decided after verl's own rollout correction and before the advantage, each
on the same mask; what one of them rejects is rejected. The estimators see the whole batch, so that a rejected turn
keeps its reward and its place in the statistics of its group; of the sums of the optimal token baselines it goes, since
they weigh samples by what the loss takes of them. Afterwards the rejected tokens leave ``response_mask``, which the
losses of actor and critic read, and once the update is done they are back for verl's metrics of the rollouts.

Options are at ``algorithm.<rule>.*``, read from the rule's signature. ``algorithm.rejection_normalise`` says what the
loss is divided by, and the engine skips an update without a kept token (`verl_ext.integration.engines.update_step`).
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch

from verl_ext.integration.columns import ActiveBatch, demand, of_agents, own_rewards
from verl_ext.integration.compat import data_plane
from verl_ext.integration.engines import token_kl
from verl_ext.integration.engines.update_step import NORMALISE, SKIPPED
from verl_ext.integration.parts.base import Part
from verl_ext.integration.parts.update.rejection_metrics import SAMPLER, log_ppl_gap, rule_metrics, share_of
from verl_ext.integration.settings import model_options
from verl_ext.integration.settings.options import (
    OptionError,
    coerce,
    dataclass_of,
    not_extended,
    read,
    require_fsdp,
    select,
)
from verl_ext.integration.turns import Turns
from verl_ext.methods import kernel_reward, rejection
from verl_ext.methods.groups import Column
from verl_ext.methods.options import AtLeastOne, NotNegative, Positive, parameters
from verl_ext.methods.rejection import ANSWER, CODE_BLOCK, Rejection

KEY = "algorithm.rejection"


def trm(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    token_kl: Column | None = None,
    max: NotNegative | None = 0.05,
    avg: NotNegative | None = 0.001,
    divergence: Literal["sampled", "top_k", "exact"] = "sampled",
    top_k: AtLeastOne = 20,
    memory_gib: Positive = 4.0,
) -> Rejection:
    """`verl_ext.methods.rejection.trm` of what the run knows of the divergence.

    Args:
        old_log_probs, rollout_log_probs, response_mask: [B, T].
        token_kl: [B, T] tensor, what the engine has compared (`verl_ext.integration.engines.token_kl`).
        max: bound of the largest divergence of a turn's tokens; None is off.
        avg: bound of their mean; None is off.
        divergence: "sampled": k2 = lr^2 / 2 for the largest, k3 = e^lr - 1 - lr for the mean. "exact", "top_k":
            `token_kl`, over the vocabulary, and of the sampler's most likely tokens, a lower bound.
        top_k: how many those are.
        memory_gib: a batch whose distributions take more GiB is refused at launch.
    """
    if divergence != "sampled":
        return rejection.trm(token_kl, response_mask, max=max, avg=avg)
    given = old_log_probs, rollout_log_probs, response_mask
    largest = rejection.trm(rejection.sampled_token_kl(*given, estimator="k2"), response_mask, max=max, avg=None)
    mean = rejection.trm(rejection.sampled_token_kl(*given, estimator="k3"), response_mask, max=None, avg=avg)
    if max is None:
        return mean
    if avg is None:
        return largest
    both = torch.stack([largest.statistic, mean.statistic], dim=-1)
    return Rejection(rejection.all_of(response_mask, [largest, mean]), largest.kept & mean.kept, both)


def simpletir(
    response_mask: torch.Tensor,
    *,
    turn_texts: Column | None = None,
    void: Column | None = None,
    traj_uid: Column | None = None,
    index: Column | None = None,
    code_block: str = CODE_BLOCK.pattern,
    answer: str = ANSWER,
) -> Rejection:
    """`verl_ext.methods.rejection.simpletir` by the text of the turns.

    Args:
        response_mask: [B, T].
        turn_texts: [B] the texts that the model wrote in each turn, one for each stretch of model tokens.
        void: [B] bool, whether the turn is void, where the agent loop says so; then the texts are not read.
        traj_uid, index: [B].
        code_block: regular expression of the opening of a code block.
        answer: what begins a final answer.
    """
    if void is None:
        opening = re.compile(code_block)
        texts = [()] * len(response_mask) if turn_texts is None else turn_texts
        void = np.array(
            [any(rejection.is_void_turn(text, opening, answer) for text in row) for row in texts], dtype=bool
        )
    return rejection.simpletir(response_mask, void=void, traj_uid=traj_uid, index=index)


RULES: dict[str, Callable[..., Rejection]] = {
    "mrs": rejection.mrs,
    "prs": kernel_reward.prs,
    "trm": trm,
    "ln_trm": rejection.ln_trm,
    "ser": rejection.ser,
    "simpletir": simpletir,
    "variance_filter": rejection.variance_filter,
}
"""Rules by the name of their switch and of their options' node."""


def wanted_rules(config: Any) -> list[str]:
    """The rules that ``algorithm.rejection`` switches on. Raises OptionError: an unknown rule, or a switch that is not
    true or false."""
    found = []
    for name, value in (select(config.algorithm, "rejection") or {}).items():
        if name not in RULES:
            raise OptionError(f"{KEY}.{name}: there is no such rule. Known: {', '.join(RULES)}.")
        if coerce(value, bool, f"{KEY}.{name}"):
            found.append(str(name))
    return found


def options(config: Any, name: str) -> dict[str, Any]:
    """The options of a rule at ``algorithm.<rule>``, tried on a turn of one token. Raises OptionError: one is unknown,
    missing, of a wrong type or out of range."""
    rule = RULES[name]
    found = dataclasses.asdict(read(config.algorithm, name, dataclass_of(rule)))
    for key, value in found.items():
        if value is inspect.Parameter.empty:
            raise OptionError(f"algorithm.{name}.{key} has no default; give a number, or use the recipe {name}.")
    token = torch.zeros(1, 1)
    tried = {key: np.zeros(1) for key in parameters(rule).row_fields if key not in ("turn_texts", "void")}
    if name == "trm":
        tried["token_kl"] = token.clone()
    try:
        rule(*(token.clone() if key in SAMPLER else token + 1 for key in positional(rule)), **tried, **found)
    except (ValueError, re.error) as error:
        raise OptionError(f"algorithm.{name}: {error}") from error
    return found


def positional(rule: Callable[..., Any]) -> list[str]:
    """The token columns that a rule takes, in order."""
    return [
        name
        for name, parameter in inspect.signature(rule).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]


class RejectionRules(Part):
    """See the module's text."""

    def __init__(self, config: Any, trainer: Any = None) -> None:
        super().__init__(config, trainer)
        self.options = {name: options(config, name) for name in wanted_rules(config)}
        self._batch: Any = None
        self._found: dict[str, Rejection] = {}
        self._rows = torch.empty(0, dtype=torch.int64)
        self._mask = self._kept = torch.empty(0)
        self._turns = Turns()

    @classmethod
    def wanted(cls, config: Any) -> bool:
        return bool(wanted_rules(config))

    @classmethod
    def check(cls, config: Any) -> list[str]:
        names = wanted_rules(config)
        if not names:
            return []
        normalise(config)
        found = {name: options(config, name) for name in names}
        if select(select(config.algorithm, "rollout_correction"), "bypass_mode", False):
            raise OptionError(
                f"{KEY} switches on {', '.join(names)}, but algorithm.rollout_correction.bypass_mode=true takes the "
                "sampler's log-probabilities for the trainer's, so that there is nothing to compare, and its loss "
                "refuses a micro-batch without tokens. Set bypass_mode=false."
            )
        compare = [name for name in names if "rollout_log_probs" in positional(RULES[name])]
        if compare and not config.actor_rollout_ref.rollout.calculate_log_probs:
            raise OptionError(
                f"{', '.join(compare)} compare trainer and sampler, but actor_rollout_ref.rollout.calculate_log_probs"
                "=false brings back no log-probabilities of the sampler. Set it to true."
            )
        require_fsdp(config, f"{KEY}: an update of which no token is kept is skipped")
        of_trm = found.get("trm", {"divergence": "sampled"})
        if of_trm["divergence"] == "sampled":
            return []
        return token_kl.check(config, of_trm["divergence"], _asked(of_trm), of_trm["memory_gib"])

    @classmethod
    def complete(cls, config: Any) -> None:
        if "trm" in wanted_rules(config) and options(config, "trm")["divergence"] != "sampled":
            token_kl.ask(config, _asked(options(config, "trm")))

    def on_batch(self, batch: Any, active: ActiveBatch, metrics: dict[str, Any]) -> Any:
        self._batch, self._turns = batch, active.turns
        self._said = active.said
        return batch

    @property
    def _token_kl(self) -> bool:
        return self.options.get("trm", {}).get("divergence", "sampled") != "sampled"

    def before_old_log_prob(self, batch: Any) -> Any:
        if self._token_kl:
            batch.extra_info[token_kl.WANTED] = True
        return batch

    def after_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self._token_kl:  # the later passes fetch all of a turn
            batch.extra_info.pop(token_kl.WANTED, None)
            forget(batch, self._said)
        return batch

    def before_advantage(self, data: Any, keys: Sequence[str], active: ActiveBatch) -> None:
        valid = np.asarray(active.columns["valid_row"], dtype=bool)
        self._rows = torch.from_numpy(np.flatnonzero(valid))
        self._mask = data.batch["response_mask"]
        mask = self._mask[self._rows]
        self._found = {name: self._apply(name, given, data, active) for name, given in self.options.items()}
        self._kept = self._mask.index_copy(0, self._rows, rejection.all_of(mask, list(self._found.values())))
        active.columns["row_mask"] = (self._kept.bool().any(-1) | ~self._mask.bool().any(-1)).numpy()

    def after_advantage(self, data: Any, keys: Sequence[str], active: ActiveBatch) -> None:
        data.batch["response_mask"] = self._kept
        store(self._batch, self._turns.pack(self._kept))
        tokens = {name: data.batch[name][self._rows] for name in SAMPLER if name in data.batch.keys()}
        mask, kept = self._mask[self._rows], self._kept[self._rows]
        advantages = data.batch["advantages"][self._rows]
        for name, found in self._found.items():
            self.metrics.update(rule_metrics(f"rejection/{name}", found, mask, advantages, tokens))
        share = kept.sum().double() / mask.sum().clamp(min=1)
        self.metrics["rejection/kept_tokens_share"] = float(share)
        self.metrics["rejection/kept_share"] = share_of(kept.bool().any(-1), mask.bool().any(-1))
        if len(tokens) == len(SAMPLER):
            self.metrics["rejection/log_ppl_gap/mean"] = log_ppl_gap(mask, tokens)

    @contextmanager
    def around_update(self, role: str, batch: Any) -> Iterator[None]:
        yield
        if role == "critic" and self.config.trainer.critic_warmup > self.trainer.global_steps:
            store(self._batch, self._turns.pack(self._mask))  # no actor's update follows

    def after_update(self, metrics: dict[str, Any]) -> None:
        store(self._batch, self._turns.pack(self._mask))

    def _apply(self, name: str, given: Mapping[str, Any], data: Any, active: ActiveBatch) -> Rejection:
        """A rule's decision on the real turns."""
        rule, rows = RULES[name], self._rows
        tokens = [data.batch[column][rows] for column in positional(rule)]
        fields = {}
        row_fields = parameters(rule).row_fields
        for column, parameter in row_fields.items():
            value = self._column(column, data, active)
            if column in ("index", "traj_uid") and "rewards" in row_fields:
                value = of_agents(value, active.columns)
            if value is not None:
                fields[column] = value[rows.numpy()]
            elif parameter.default is inspect.Parameter.empty:
                raise demand("prompt_index" if column == "draw" else column, name)
        return rule(*tokens, **fields, **given)

    def _column(self, name: str, data: Any, active: ActiveBatch) -> Any:
        if name == "index":
            return data.non_tensor_batch["uid"]
        if name == "rewards":
            return own_rewards(data.batch["token_level_scores"].double().sum(-1).numpy(), active.columns)
        if name == "token_kl":
            return self._divergence() if self._token_kl else None
        if name == "draw":
            return self._draws(active)
        if name == "turn_texts":
            return None if active.column("void") is not None else self._turn_texts(active)
        return active.column(name)

    def _draws(self, active: ActiveBatch) -> np.ndarray | None:
        """[B] names of the turns' random numbers: step, place in the data, rollout and turn, alike after a resume."""
        prompts, step = active.column("prompt_index"), self.trainer.global_steps
        if prompts is None:
            return None
        rollouts = [str(uid).rpartition("_")[2] for uid in active.columns["traj_uid"]]
        named = zip(prompts, rollouts, active.columns["turn_index"], strict=True)
        return np.array([f"{step}/{prompt}/{rollout}/{turn}" for prompt, rollout, turn in named], dtype=object)

    def _divergence(self) -> torch.Tensor:
        """``token_kl`` [B, T] of the engine."""
        from verl.workers.utils.padding import response_from_nested

        found = data_plane.fetch(self._batch, [token_kl.COLUMN, "response_mask"])
        if token_kl.COLUMN not in found:
            raise not_extended(f"{token_kl.KEY}: the training engine has compared no distributions")
        nested = response_from_nested(found[token_kl.COLUMN], found["response_mask"])
        return self._turns.unpack(nested.to_padded_tensor(0.0))

    def _turn_texts(self, active: ActiveBatch) -> np.ndarray:
        """[B] of what the model wrote in each turn, also of what is kept out of the loss: a text for each stretch."""
        found = data_plane.fetch(self._batch, ["responses", "loss_mask"])
        _, responses = self._turns.texts(found["responses"].unbind(), found["responses"].unbind())
        _, masks = self._turns.texts(found["loss_mask"].unbind(), found["loss_mask"].unbind())
        texts, tokenizers = np.empty(len(responses), dtype=object), self.trainer.tokenizers()
        for row, (ids, mask, said) in enumerate(zip(responses, masks, active.extra_fields, strict=True)):
            tokenizer = tokenizers.get(said.get("model"), self.trainer.tokenizer)
            texts[row] = [tokenizer.decode(ids[start:end]) for start, end in stretches(mask[: len(ids)])]
        return texts


class SkippedUpdates(Part):
    """Tells an engine what a loss with rejected tokens is divided by, and counts the updates that it skipped."""

    _updates = 0

    @classmethod
    def wanted(cls, config: Any) -> bool:
        return RejectionRules.wanted(config) and not model_options.of(config)  # each of several models has its own

    @contextmanager
    def around_update(self, role: str, batch: Any) -> Iterator[None]:
        batch.extra_info[NORMALISE] = normalise(self.config)
        yield
        if role == "actor":
            told = batch.extra_info
            self._updates = len(batch) // int(told["mini_batch_size"]) * int(told["epochs"])

    def after_update(self, metrics: dict[str, Any]) -> None:
        if f"actor/{SKIPPED}" not in metrics:
            raise not_extended(f"{KEY}: the training engine has not said whether it skipped an update")
        self.metrics["rejection/skipped_updates/count"] = float(round(metrics.pop(f"actor/{SKIPPED}") * self._updates))


def normalise(config: Any) -> str:
    """``algorithm.rejection_normalise``: ``all`` or ``kept``."""
    value = select(config.algorithm, "rejection_normalise", "all")
    return str(coerce(value, Literal["all", "kept"], "algorithm.rejection_normalise"))


def store(batch: Any, mask: torch.Tensor) -> None:
    """Put a padded ``response_mask`` [B, T] of the batch into verl's store."""
    from verl.workers.utils.padding import response_to_nested

    nested = response_to_nested(mask, data_plane.fetch(batch, ["response_mask"])["response_mask"])
    data_plane.write(batch, {"response_mask": nested})


def forget(batch: Any, said: Sequence[Any]) -> None:
    """Take the sampler's distributions out of the ``extra_fields``, here and in verl's store."""
    from tensordict import NonTensorData, NonTensorStack

    for row in said:
        for name in (token_kl.LOG_PROBS, token_kl.IDS):
            row.pop(name, None)
    data_plane.write(batch, {"extra_fields": NonTensorStack(*map(NonTensorData, said))})


def _asked(of_trm: Mapping[str, Any]) -> int:
    """How many log-probabilities a token the sampler is asked for; -1: all."""
    return -1 if of_trm["divergence"] == "exact" else int(of_trm["top_k"])


def stretches(mask: torch.Tensor) -> list[tuple[int, int]]:
    """Beginning and end of each run of ones in a mask [T]."""
    edges = torch.nn.functional.pad(mask.long(), (1, 1)).diff()
    return list(zip((edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist(), strict=True))
