# SPDX-License-Identifier: Apache-2.0
"""``verl_ext.models`` at launch; what happens in a step is in `verl_ext.integration.models`."""

from __future__ import annotations

from typing import Any

from verl_ext.integration import model_options
from verl_ext.integration.parts.base import Part


class Models(Part):
    """Completes and checks the further models of a run."""

    @classmethod
    def complete(cls, config: Any) -> None:
        model_options.complete(config)

    @classmethod
    def check(cls, config: Any) -> list[str]:
        return model_options.check(config)

    @classmethod
    def wanted(cls, config: Any) -> bool:
        return False
