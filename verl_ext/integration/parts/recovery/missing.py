# SPDX-License-Identifier: Apache-2.0
"""Lost rollouts: counted against the prompts that were sampled, and too many of them end the run.

verl logs the traceback of a rollout whose agent loop raises and goes on with those that are left. Here the worker also
notes it in verl's store (`notes`), so that the trainer knows of each, also of a prompt that lost all. More than
``verl_ext.max_missing_share`` of a batch missing ends the training with the first traceback; in validation a lost
rollout is a sample with reward 0. A loop that returns nothing on purpose raises nothing and is not missing, and neither
is what a ``__rollout_n__`` of the data leaves out: what is due is what has ended, with sequences or with an error.

Where verl drops each prompt that lost a rollout and begins another (its asynchronous modes, and
``trainer.v1.sampler.sync_refill_failed_groups``), it would do so for ever if each prompt loses one, so that these
rollouts are counted before it begins another, too. Those of prompts that verl leaves out for another reason (DAPO's
filter, age) have ended like the others, and are due. Those that a checkpoint holds as lost, say with a node of the run
that wrote it, do not count in the run that goes on.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_ext.integration import store_notes
from verl_ext.integration.columns import is_real, split_key
from verl_ext.integration.compat import data_plane
from verl_ext.integration.parts.base import Part
from verl_ext.integration.settings.options import option, select
from verl_ext.methods.options import Discount

logger = logging.getLogger(__name__)

KEY = "verl_ext.max_missing_share"
DEFAULT = 0.05

SCORES = ("reward", "score", "acc", "success")
"""Validation values of which a lost rollout has 0; of the others it has none."""


class MissingRollouts(RuntimeError):
    """Too many rollouts of a batch raised."""


def max_missing_share(config: Any) -> float:
    """``verl_ext.max_missing_share``, the share of a batch's rollouts that may be lost; 1 for verl's way."""
    remedy = "give the share of a batch's rollouts that may be lost, from 0 to 1"
    return option(config, "max_missing_share", Discount, DEFAULT, remedy)


class Missing(Part):
    """See the module's text."""

    def __init__(self, config: Any, trainer: Any = None) -> None:
        super().__init__(config, trainer)
        self.share = max_missing_share(config)
        self._told: set[str] = set()
        self._dropped: dict[str, Any] = {}  # lost with their prompts, since the last batch
        self._left_out: set[str] = set()  # ended well, of prompts that verl left out since then
        self._validation: list[tuple[str, Any]] = []

    @classmethod
    def check(cls, config: Any) -> list[str]:
        max_missing_share(config)
        return []

    @contextmanager
    def around_fit(self) -> Iterator[None]:
        if before := self._lost("train"):  # no rollout has begun: they come from the checkpoint
            said = "%d rollouts of the checkpoint were lost in the run that wrote it; not counted. The first, %s:\n%s"
            logger.warning(said, len(before), min(before), before[min(before)]["traceback"])
        yield

    def replay_buffer(self, buffer: Any) -> Any:
        buffer.sample = functools.partial(self._sample, buffer, buffer.sample)
        if getattr(buffer, "refill_fn", None) is not None:
            buffer.refill_fn = functools.partial(self._refill, buffer.refill_fn)
        if hasattr(buffer, "_clear_groups"):  # a sampler of the user's own may leave out none
            buffer._clear_groups = functools.partial(self._clear, buffer, buffer._clear_groups)
        return buffer

    def _clear(self, buffer: Any, clear: Any, partition_id: str, uids: set[str]) -> Any:
        """verl's `_clear_groups`, which takes prompts out. What goes since another rollout was lost is not counted."""
        well = {split_key(key)[:2] for key in buffer.partitions[partition_id]}
        left = set(uids) - buffer.failure_keys[partition_id]
        self._left_out |= {session for uid, session in well if uid in left}
        return clear(partition_id, uids)

    def _refill(self, refill: Any, count: int) -> Any:
        """verl's `refill_fn`, which replaces prompts. Raises MissingRollouts: too many were lost for a batch."""
        self._dropped |= self._lost("train")
        batch = int(self.config.data.train_batch_size) * int(self.config.actor_rollout_ref.rollout.n)
        self._allow(self._dropped, batch + len(self._dropped) + len(self._left_out))
        return refill(count)

    def _lost(self, partition_id: str) -> dict[str, Any]:
        """`take_lost`, of which it is known that verl has been told."""
        lost = take_lost(partition_id)
        self._told.update(split_key(f"{key}_0")[0] for key in lost)
        return lost

    def _allow(self, lost: Mapping[str, Mapping[str, Any]], due: int) -> None:
        if len(lost) > self.share * due:
            raise MissingRollouts(self._message(lost, due))

    def _sample(self, buffer: Any, sample: Any, *args: Any, partition_id: str, **kwargs: Any) -> Any:
        """verl's `sample`, and then what was lost of what has ended. Raises MissingRollouts: too many, in training; or
        all of them."""
        try:
            batch, metrics = sample(*args, partition_id=partition_id, **kwargs)
        except RuntimeError as error:  # verl's word for a batch without any sequence, or ours of `_refill`
            if not isinstance(error, MissingRollouts) and (lost := take_lost(partition_id)):
                raise MissingRollouts(self._message(lost, len(lost))) from error
            raise
        lost = self._lost(partition_id)
        left_out: set[str] = set()
        if partition_id != "val":
            lost, self._dropped = self._dropped | lost, {}
            left_out, self._left_out = self._left_out, set()
        self._require_told(buffer, partition_id)
        ended = {split_key(key)[1] for key in [*getattr(buffer, "partitions", {}).get(partition_id, ()), *batch.keys]}
        due = len(ended | left_out) + len(lost)
        if lost and not batch.keys:
            raise MissingRollouts(self._message(lost, due))
        if partition_id == "val":
            self._validation += [(split_key(f"{key}_0")[0], tag["data_source"]) for key, tag in lost.items()]
        else:
            self._allow(lost, due)
            self.metrics["rollout/missing_trajectories"] = len(lost)
        return batch, metrics

    def _require_told(self, buffer: Any, partition_id: str) -> None:
        """verl marks a prompt of which a rollout raised; if nobody noted the rollout, the count would be wrong."""
        failed = set(getattr(buffer, "failure_keys", {}).get(partition_id, ())) - self._told
        if failed:
            raise RuntimeError(
                f"verl says that rollouts of {len(failed)} prompts raised (the first is {min(failed)}), but none of "
                "them was noted: the agent loop workers were not started with a recipe of verl_ext, or verl runs its "
                "agent loops in another place. Look for 'Error in _run_prompt' above."
            )

    def _message(self, lost: Mapping[str, Mapping[str, Any]], due: int) -> str:
        first = min(lost)
        return (
            f"{len(lost)} of {due} rollouts were lost, because their agent loop raised; {KEY}={self.share:g} allows "
            f"{int(self.share * due)}. Mend the loop, or set {KEY} if so many may fail. The first, {first}:\n"
            f"{lost[first]['traceback']}"
        )

    def on_sample(self, batch: Any) -> Any:
        real = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if is_real(tag)]
        self.metrics["rollout/trajectories"] = len({split_key(key)[1] for key in real})
        return batch

    def on_validation(
        self, data_sources: list[Any], uids: list[Any], values: dict[str, list[Any]], **more: Any
    ) -> None:
        """Each lost rollout becomes a sample with reward 0 of its prompt; what else the samples say, it does not.

        Beside verl's dump of the samples ``<step>.tasks.json`` says of each prompt, also one that lost all of its
        rollouts, its data source.
        """
        counts = "expected_acc_counts" in more  # such a verl fills up `acc` itself and leaves out None
        for uid, source in self._validation:
            uids.append(uid)
            data_sources.append(source)
            for name, column in values.items():
                if name in SCORES and not (name == "acc" and counts):
                    column.append(0.0)
                else:
                    text = any(isinstance(value, str) for value in column)
                    column.append(None if counts else "" if text else math.nan)
        self.metrics["val-aux/missing_rollouts"] = len(self._validation)
        self._validation.clear()
        if folder := select(self.config.get("trainer"), "validation_data_dir"):
            path = Path(folder) / f"{self.trainer.global_steps}.tasks.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            tasks = {str(uid): str(source) for uid, source in zip(uids, data_sources, strict=True)}
            path.write_text(json.dumps(tasks), encoding="utf-8")


def take_lost(partition_id: str) -> dict[str, dict[str, Any]]:
    """The rollouts of a partition (``train``, ``val``) that were noted as lost since the last call, by session key."""
    notes = data_plane.tags(store_notes.LOST)
    if lost := {key: tag for key, tag in notes.items() if tag.get("partition_id") == partition_id}:
        data_plane.clear(store_notes.LOST, list(lost))
    return lost
