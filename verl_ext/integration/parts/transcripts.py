# SPDX-License-Identifier: Apache-2.0
"""Readable transcripts of the rollouts, ``verl_ext.rollouts_dir``: written in a thread, beside the training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from verl_ext.integration.columns import ActiveBatch, is_real
from verl_ext.integration.metrics import row_advantages
from verl_ext.integration.options import OptionError, select
from verl_ext.integration.parts.base import Part
from verl_ext.integration.parts.columns import fetch


class Transcripts(Part):
    """Hands the texts of every ``verl_ext.rollouts_freq``-th step to the transcripts' thread."""

    _writer: Any = None
    _batch: Any = None

    @classmethod
    def wanted(cls, config: Any) -> bool:
        return bool(select(config.get("verl_ext"), "rollouts_dir"))

    @classmethod
    def check(cls, config: Any) -> list[str]:
        value = select(config.get("verl_ext"), "rollouts_freq", 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(
                f"verl_ext.rollouts_freq is {value!r}; give the training steps from one set of transcripts to the "
                "next, a whole number of at least 1."
            )
        return []

    @contextmanager
    def around_fit(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._writer is not None:
                self._writer.close()

    def on_batch(self, batch: Any, active: ActiveBatch, metrics: dict[str, Any]) -> Any:
        self._batch = batch
        return batch

    def after_advantage(self, data: Any, keys: Sequence[str], active: ActiveBatch) -> None:
        node, step = self.config.get("verl_ext"), int(self.trainer.global_steps)
        if (step - 1) % int(select(node, "rollouts_freq", 1)):
            return
        from verl_ext.transcripts.write import TranscriptWriter, trajectories

        if self._writer is None:
            self._writer = TranscriptWriter(select(node, "rollouts_dir"), self.trainer.tokenizer.batch_decode)
        records = trajectories(
            step,
            keys,
            active.columns,
            active.extra_fields,
            score=data.batch["token_level_rewards"].double().sum(-1).numpy(),
            advantage=row_advantages(data.batch["advantages"], data.batch["response_mask"]),
            padding=[not is_real(tag) for tag in self._batch.tags],
        )
        texts = fetch(self._batch, ["prompts", "responses"])
        first = self.trainer.local_trigger_step == 0
        self._writer.add(records, texts["prompts"].unbind(), texts["responses"].unbind(), start=first)
