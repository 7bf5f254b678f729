# SPDX-License-Identifier: Apache-2.0
"""What can be said about a run before it costs anything: the checks of its parts."""

from __future__ import annotations

import logging
from typing import Any

from verl_ext.integration.options import OptionError
from verl_ext.integration.parts import PARTS

logger = logging.getLogger(__name__)


def complete(config: Any) -> None:
    """Fill in, in place, the settings that follow from others. Doing it twice changes nothing."""
    for part in PARTS:
        part.complete(config)


def check(config: Any) -> list[str]:
    """Check a composed configuration of verl that uses verl_ext.

    Args:
        config: the whole config (DictConfig) as `main_ppo` gets it.

    Returns:
        Warnings, also logged: what will happen that the user may not want.

    Raises:
        OptionError: an unknown key, a value out of range, settings that do not go together, the legacy trainer.
    """
    if not config.trainer.get("use_v1", True):
        raise OptionError(
            "trainer.use_v1=false, but every recipe of verl_ext needs verl's V1 trainer, which carries the rows; on "
            "the legacy one their estimators, losses and settings would be left out or computed otherwise. Set "
            "trainer.use_v1=true (verl's default), or leave out the recipes."
        )
    warnings = [warning for part in PARTS for warning in part.check(config)]
    for warning in warnings:
        logger.warning(warning)
    return warnings
