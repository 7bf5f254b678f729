# SPDX-License-Identifier: Apache-2.0
"""Vocabulary pruning on the trainer's side: what engine and sampler are told, and what the engine reports.

Options, checks and the sampler's side: `verl_ext.integration.dvp`. Without ``dvp.rho`` this part only asks for the one
pass over the logits, and for the mismatch metrics if they are wanted.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from verl_ext.integration import store_notes
from verl_ext.integration.columns import ActiveBatch
from verl_ext.integration.compat import data_plane
from verl_ext.integration.compat.wraps import STRICT
from verl_ext.integration.dvp import (
    UNNORMALISED,
    Sampler,
    check,
    guard,
    mismatch_metrics,
    mismatch_wanted,
    one_pass,
    options,
    set_metrics,
)
from verl_ext.integration.engines import engine
from verl_ext.integration.parts.base import Part
from verl_ext.integration.settings import model_options
from verl_ext.integration.settings.options import OptionError, bypass, not_extended
from verl_ext.integration.turns import Turns

NOT_PRUNED = "dvp: the training engine has not pruned"


@dataclasses.dataclass(frozen=True)
class Outside:
    """The model's tokens that pruning keeps out of the loss of a batch.

    Attributes:
        keys: storage keys of the turns.
        tokens: [B, T] bool, in the order of `keys`.
    """

    keys: list[str]
    tokens: torch.Tensor

    def rows(self, keys: Sequence[str], width: int) -> torch.Tensor:
        """The tokens of the turns `keys`, in that order, cut or padded to `width` columns, [len(keys), width] bool."""
        place = {key: row for row, key in enumerate(self.keys)}
        found = self.tokens[[place[key] for key in keys]]
        return torch.nn.functional.pad(found, (0, max(width - found.shape[1], 0)))[:, :width].clone()


class Pruning(Part):
    """See the module's text."""

    def __init__(self, config: Any, trainer: Any = None) -> None:
        super().__init__(config, trainer)
        self.options = options(config)
        self.one_pass = one_pass(config)
        self.mismatch = mismatch_wanted(config)
        self.outside: Outside | None = None
        self._guarded = False
        if self.rho is not None and os.environ.get(STRICT) != "1":
            raise OptionError(
                f"dvp.rho={self.rho:g} is set, but the engines of this run do not know it, since it was not started "
                "with a recipe. Use +recipe=dvp."
            )

    @classmethod
    def check(cls, config: Any) -> list[str]:
        if options(config) is not None:
            model_options.require_engines(config, "dvp", "the safe set")
        return check(config)

    @property
    def rho(self) -> float | None:
        """``dvp.rho``, or None without pruning."""
        return None if self.options is None else self.options.rho

    def client(self, client: Any) -> Any:
        """verl's client of the rollout servers and those of further models, with ``min_p`` on every request."""
        if self.rho is None:
            return client
        rollout = self.config.actor_rollout_ref.rollout
        sampler = Sampler(self.rho, float(rollout.temperature), float(rollout.val_kwargs.temperature))
        for further in getattr(client, "verl_ext_clients", {}).values():
            guard(further, sampler)
        return guard(client, sampler)

    def info(self, what: str) -> dict[str, Any]:
        """What the engine is told with a batch for ``old`` log-probabilities, the ``reference`` or the ``update``."""
        if self.one_pass == "off":
            return {}
        prune = self.options is not None and (what != "reference" or self.options.prune_reference)
        return engine.engine_info(self.one_pass, self.rho if prune else None, prune and what == "old")

    def on_sample(self, batch: Any) -> Any:
        if self.rho is not None and not self._guarded:
            check_guarded(data_plane.tags(store_notes.GUARDED), self.rho)
            self._guarded = True
        return batch

    def before_old_log_prob(self, batch: Any) -> Any:
        batch.extra_info.update(self.info("old"))
        return batch

    def before_reference(self, batch: Any) -> Any:
        batch.extra_info.update(self.info("reference"))
        return batch

    def before_update(self, batch: Any) -> Any:
        batch.extra_info.update(self.info("update"))
        return batch

    def before_advantage(self, data: Any, keys: Sequence[str], active: ActiveBatch) -> None:
        self._shown = self.show_outside(data, active.stored, active.turns)

    def after_advantage(self, data: Any, keys: Sequence[str], active: ActiveBatch) -> None:
        hide_outside(data, self._shown)

    def after_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Report the safe set and the mismatch, and take the sampled tokens outside of the set out of the batch.

        Their ``response_mask`` becomes 0, so rollout correction, KL and loss leave them out; verl's ``loss_mask``,
        from which it takes the loss's denominators, stays.

        Returns:
            The batch, whose columns are up to date.

        Raises:
            RuntimeError: the engine has not pruned.
        """
        self.outside = None
        if bypass(self.config) or (self.rho is None and not self.mismatch):
            return batch
        from verl.workers.utils.padding import response_from_nested, response_to_nested

        of_set = [] if self.rho is None else [engine.IN_SET, engine.KEPT_MASS, engine.SET_SIZE]
        wanted = ["response_mask", "old_log_probs", "rollout_log_probs", *of_set]
        data = data_plane.fetch(batch, wanted)
        if any(name not in data for name in of_set):
            raise not_extended(f"{NOT_PRUNED}: it returned no {engine.IN_SET} with the old log-probabilities")
        mask = data["response_mask"]
        columns = {
            **{name: data[name] for name in ("response_mask", "old_log_probs", "rollout_log_probs") if name in data},
            **{name: response_from_nested(data[name], mask) for name in of_set},
        }
        padded = {name: column.to_padded_tensor(0) for name, column in columns.items()}
        changed = self._after(padded, list(batch.keys))
        if not changed:
            return batch
        fields = {name: response_to_nested(value, mask) for name, value in changed.items()}
        return data_plane.write(batch, fields)

    def _after(self, padded: Mapping[str, torch.Tensor], keys: list[str]) -> dict[str, torch.Tensor]:
        """The arithmetic of `after_old_log_prob` on [B, T] columns; returns the columns that change."""
        mask, old, sampled = (padded.get(n) for n in ("response_mask", "old_log_probs", "rollout_log_probs"))
        assert mask is not None and old is not None
        if self.rho is None:
            if sampled is not None:
                self.metrics.update(mismatch_metrics(old, sampled, mask))
            return {}
        in_set, kept_mass, set_size = (padded[n] for n in (engine.IN_SET, engine.KEPT_MASS, engine.SET_SIZE))
        self.metrics.update(set_metrics(in_set, kept_mass, set_size, mask))
        trained = torch.where(in_set > 0, mask, torch.zeros_like(mask))
        changed = {}
        if sampled is not None:
            log_kept = torch.where(mask.bool(), kept_mass, 1.0).log()
            pruned = sampled
            if self.config.actor_rollout_ref.rollout.name in UNNORMALISED:
                # The sampler's own kept mass is not reported; the trainer's differs from it by the tail's mismatch.
                pruned = changed["rollout_log_probs"] = sampled - log_kept
            if self.mismatch:
                self.metrics.update(mismatch_metrics(old, pruned, trained))
                self.metrics.update(mismatch_metrics(old + log_kept, sampled, mask, "mismatch_unpruned"))
        if not torch.equal(trained, mask):
            changed["response_mask"] = trained
            self.outside = Outside(keys, mask.bool() & ~trained.bool())
        return changed

    def show_outside(self, data: Any, stored: Sequence[str], turns: Turns | None = None) -> torch.Tensor | None:
        """Let the estimators see the turns as the model wrote them, with no gradient at the tokens outside the set.

        Estimators count tokens and sum rewards under ``response_mask``, and some of verl's begin a new return where it
        is 0. A token that is only kept out of the loss must not look like one that the model did not write: a turn
        whose last token, which carries the reward, is outside the set would lose its reward. Probability 1 and sum of
        squares 1 say that there is no gradient energy at the token.

        Returns:
            The mask of what is trained, [B, T], for `hide_outside`; None where nothing is outside.
        """
        if self.outside is None:
            return None
        trained = data.batch["response_mask"]
        turns = turns or Turns()
        outside = turns.unpack(self.outside.rows(stored, turns.shape[1] or trained.shape[1]))
        outside &= trained.bool().any(-1, keepdim=True)  # a turn that rollout correction rejected stays so
        data.batch["response_mask"] = torch.where(outside, torch.ones_like(trained), trained)
        for name, none in (("old_log_probs", 0.0), ("sum_pi_squared", 1.0)):
            if name in data.batch.keys():
                data.batch[name] = torch.where(outside, none, data.batch[name])
        return trained


class PrunedUpdates(Part):
    """Sees to it that an engine has pruned in each update."""

    @classmethod
    def wanted(cls, config: Any) -> bool:
        return options(config) is not None and not model_options.of(config)  # each of several models has its own

    def after_update(self, metrics: dict[str, Any]) -> None:
        if engine.OUT_OF_SET_METRIC not in metrics:
            raise not_extended(f"{NOT_PRUNED}: the update reported no {engine.OUT_OF_SET_METRIC}")


def check_guarded(noted: Mapping[str, Mapping[str, Any]], rho: float) -> None:
    """Refuse to train on rollouts whose requests did not go through the client that sends ``min_p``: none of the agent
    loops' processes has noted one. Raises RuntimeError."""
    if not any(note.get("rho") == rho for note in noted.values()):
        raise RuntimeError(
            f"dvp.rho={rho:g}: there are rollouts, but no agent loop has sent a request through verl's client with "
            "min_p, so they are not of the policy that is trained. Have the agent loop generate with its "
            "server_manager, not through a server's HTTP endpoint or a client of its own."
        )


def hide_outside(data: Any, trained: torch.Tensor | None) -> None:
    """Undo `Pruning.show_outside` after the estimators: tokens outside the set have mask 0 and advantage 0."""
    if trained is None:
        return
    inside, mask = trained.bool(), data.batch["response_mask"]
    data.batch["response_mask"] = torch.where(inside, mask, torch.zeros_like(mask))  # what was rejected stays so
    for name in ("advantages", "returns"):
        data.batch[name] = torch.where(inside, data.batch[name], 0.0)
