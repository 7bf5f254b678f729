# SPDX-License-Identifier: Apache-2.0
"""Readable transcripts of the rollouts, ``verl_ext.rollouts_dir``: written in a thread, beside the training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from verl_ext.integration.columns import ActiveBatch, is_real
from verl_ext.integration.compat.data_plane import fetch
from verl_ext.integration.metrics import row_advantages
from verl_ext.integration.parts.base import Part
from verl_ext.integration.settings.model_options import POLICY
from verl_ext.integration.settings.options import option, select
from verl_ext.methods.options import AtLeastOne


class Transcripts(Part):
    """Hands the texts of every ``verl_ext.rollouts_freq``-th step to the transcripts' thread."""

    _writer: Any = None

    @classmethod
    def wanted(cls, config: Any) -> bool:
        return bool(select(config.get("verl_ext"), "rollouts_dir"))

    @classmethod
    def check(cls, config: Any) -> list[str]:
        remedy = "give the training steps from one set of transcripts to the next, a whole number of at least 1"
        option(config, "rollouts_freq", AtLeastOne, 1, remedy)
        return []

    @contextmanager
    def around_fit(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._writer is not None:
                self._writer.close()

    def after_advantage(self, data: Any, keys: Sequence[str], active: ActiveBatch) -> None:
        node, step = self.config.get("verl_ext"), int(self.trainer.global_steps)
        if (step - 1) % int(select(node, "rollouts_freq", 1)):
            return
        from verl_ext.common.transcripts import TranscriptWriter, trajectories

        if self._writer is None:
            decoders = {name: tokenizer.batch_decode for name, tokenizer in self.trainer.tokenizers().items()}
            self._writer = TranscriptWriter(select(node, "rollouts_dir"), decoders[POLICY], decoders)
        records = trajectories(
            step,
            keys,
            active.columns,
            active.extra_fields,
            score=data.batch["token_level_rewards"].double().sum(-1).numpy(),
            advantage=row_advantages(data.batch["advantages"], data.batch["response_mask"]),
            padding=[not is_real(tag) for tag in active.tags],
        )
        texts = fetch(self.batch, ["prompts", "responses"])
        first = self.trainer.local_trigger_step == 0
        models = [str(said.get("model") or POLICY) for said in active.extra_fields]
        asked, answered = active.turns.texts(texts["prompts"].unbind(), texts["responses"].unbind())
        self._writer.add(records, asked, answered, first, models)
