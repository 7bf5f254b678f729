# SPDX-License-Identifier: Apache-2.0
"""What the parts keep in a checkpoint: one file beside verl's, ``global_step_<N>/verl_ext.pt``."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_ext.integration.parts.base import Part

logger = logging.getLogger(__name__)

NAME = "verl_ext.pt"


def save(config: Any, step: int, parts: Sequence[Part]) -> None:
    """Write the parts' state, before verl says that the checkpoint of this step is whole."""
    import torch

    states = {part.key: part.state() for part in parts if part.key}
    if states:
        path = Path(config.trainer.default_local_dir) / f"global_step_{step}" / NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        torch.save(states, temporary)
        os.replace(temporary, path)


def load(config: Any, step: int, parts: Sequence[Part]) -> None:
    """Give the parts the state of the checkpoint that verl has loaded; `step` is 0 where there is none."""
    import torch

    keyed = [part for part in parts if part.key]
    if not step or not keyed:
        return
    folder = Path(config.trainer.default_local_dir) / f"global_step_{step}"
    if config.trainer.resume_mode == "resume_path":
        folder = Path(config.trainer.resume_from_path)
    if not (folder / NAME).exists():
        names = ", ".join(part.key for part in keyed)
        logger.warning("the checkpoint %s has no %s, so %s start afresh", folder, NAME, names)
        return
    states = torch.load(folder / NAME, weights_only=True)
    for part in keyed:
        if part.key in states:
            part.load_state(states.pop(part.key))
        else:
            logger.warning("the checkpoint %s has no state of %s, which starts afresh", folder, part.key)
    if states:
        logger.warning("the checkpoint %s has state that this run has no use for: %s", folder, ", ".join(states))
