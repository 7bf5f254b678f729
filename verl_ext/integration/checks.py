# SPDX-License-Identifier: Apache-2.0
"""What can be said about a run before it costs anything: the checks of its parts."""

from __future__ import annotations

import logging
from typing import Any

from verl_ext.integration.parts import all_parts
from verl_ext.integration.settings import model_options, paths
from verl_ext.integration.settings.options import OptionError, has_critic

logger = logging.getLogger(__name__)


def complete(config: Any) -> None:
    """Fill in, in place, the settings that follow from others. Doing it twice changes nothing."""
    paths.complete(config)
    for part in all_parts():
        part.complete(config)


def check(config: Any) -> list[str]:
    """Check a composed configuration of verl that uses verl_ext.

    Returns:
        Warnings, also logged: what will happen that the user may not want.

    Raises:
        OptionError: an unknown key, a value out of range, settings that do not go together, the legacy trainer.
    """
    if not config.trainer.get("use_v1", True):
        raise OptionError(
            "trainer.use_v1=false, but every recipe of verl_ext needs verl's V1 trainer, which carries the turns; on "
            "the legacy one their estimators, losses and settings would be left out or computed otherwise. Set "
            "trainer.use_v1=true (verl's default), or leave out the recipes."
        )
    warnings = [warning for part in all_parts() for warning in part.check(config)]
    for model in model_options.of(config):
        warnings += check_model(config, model)
    for warning in dict.fromkeys(warnings):
        logger.warning(warning)
    return warnings


def check_model(config: Any, model: model_options.Model) -> list[str]:
    """Check the whole config of a further model, as verl and the parts check that of a run of this model alone. Raises
    OptionError: names the model."""
    from hydra.errors import InstantiationException
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import validate_config

    where = f"{model_options.KEY}.{model.name}"
    own = model.config(config)
    complete(own)
    try:
        validate_config(own, use_reference_policy=need_reference_policy(own), use_critic=has_critic(own))
        warnings = [warning for part in all_parts() for warning in part.check(own)]
    except (AssertionError, ValueError, TypeError, InstantiationException) as error:
        raise OptionError(f"{where}: {error.__cause__ or error}") from error
    return [f"{where}: {warning}" for warning in warnings]
