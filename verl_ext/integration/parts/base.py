# SPDX-License-Identifier: Apache-2.0
"""A part: one feature of a training step, in a file of its own. `verl_ext.integration.parts` has the list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from verl_ext.integration.columns import ActiveBatch


class Part:
    """What a part may do. Subclass it, give the hooks that the feature needs, and add it to the list in `parts`.

    The trainer mixin calls the hooks of the active parts in the order of the list, each in the place of verl's step
    that its text names. A part touches verl through the hook's arguments, keeps its own state, and leaves its metrics
    in ``self.metrics``: they join those of the step after verl has reduced its own, by the rules of `reduction`.

    In the hooks ``batch`` is verl's KVBatchMeta (keys, tags, partition_id, extra_info), ``metrics`` verl's own metrics
    of this update so far, ``active`` the turn fields of the batch, and ``data`` verl's DataProto with columns [B, T].

    Attributes:
        config: verl's whole config.
        trainer: verl's trainer, for what no hook hands over (``global_steps``, worker groups, tokenizer).
        metrics: of this update, by name; the trainer collects and empties it.
        batch: of this update, for hooks that are not handed it; set by `on_batch`.
        key: name of the part's state in checkpoints. A part with a `state` must have one, and keep it: by another
            name a resumed run would start that state afresh.

    Raises:
        TypeError: a class with a `state` has no key; when it is defined.
    """

    key: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        if cls.state is not Part.state and not cls.key:
            raise TypeError(f"{cls.__name__} has a state and no `key`, its name in checkpoints")

    @classmethod
    def complete(cls, config: Any) -> None:
        """At launch, before any check: fill in settings that follow from others, in place."""

    @classmethod
    def check(cls, config: Any) -> list[str]:
        """At launch, of every part: warnings. Raises OptionError for what cannot be."""
        return []

    @classmethod
    def wanted(cls, config: Any) -> bool:
        """Whether a run that uses verl_ext has this part."""
        return True

    def __init__(self, config: Any, trainer: Any = None) -> None:
        self.config = config
        self.trainer = trainer
        self.metrics: dict[str, float] = {}
        self.batch: Any = None

    # ---- around the run ----

    def replay_buffer(self, buffer: Any) -> Any:
        """The buffer that verl samples rollouts from, right after it is made."""
        return buffer

    def client(self, client: Any) -> Any:
        """verl's client of the rollout servers, before the agent loops get it."""
        return client

    @contextmanager
    def around_fit(self) -> Iterator[None]:
        """Around the whole training; after it (also after a failure) comes what the end of a run needs."""
        yield

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold for this part: tensors, numbers, text, lists and dicts of them."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """What `state` returned when the checkpoint was written, after verl has loaded its own."""

    # ---- one update, in the order of verl's step ----

    def on_sample(self, batch: Any) -> Any:
        """The sequences of the sampled prompts, before padding and balancing."""
        return batch

    def row_multiple(self, multiple: int, ranks: int) -> int:
        """The number that verl pads the sequences to a multiple of."""
        return multiple

    def on_batch(self, batch: Any, active: ActiveBatch, metrics: dict[str, Any]) -> Any:
        """The batch with its padding, in the order of its mini-batches; kept for later hooks."""
        self.batch = batch
        return batch

    def before_old_log_prob(self, batch: Any) -> Any:
        """Before the actor's pass over the batch; not followed by one in bypass mode."""
        return batch

    def after_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """After it."""
        return batch

    def before_reference(self, batch: Any) -> Any:
        """Before the reference policy's pass."""
        return batch

    def before_advantage(self, data: Any, keys: Sequence[str], active: ActiveBatch) -> None:
        """After verl's KL in reward and rollout correction, right before its estimator; `data` may be changed."""

    def after_advantage(self, data: Any, keys: Sequence[str], active: ActiveBatch) -> None:
        """After the estimator, before verl stores ``advantages`` and ``returns``."""

    def before_update(self, batch: Any) -> Any:
        """Before the actor's update."""
        return batch

    @contextmanager
    def around_update(self, role: str, batch: Any) -> Iterator[None]:
        """Around verl's update of ``actor`` or ``critic``, sizes not yet set."""
        yield

    def after_update(self, metrics: dict[str, Any]) -> None:
        """After the actor's update, with verl's metrics of it."""

    # ---- validation ----

    def on_validation(
        self, data_sources: list[Any], uids: list[Any], values: dict[str, list[Any]], **more: Any
    ) -> None:
        """The validation samples, which may be changed, before verl makes its metrics of them.

        Args:
            data_sources, uids: [S] of each sample.
            values: [S] by name: ``reward`` and what the loops report; None where a sample has no such value.
            more: what else this verl passes on.
        """
