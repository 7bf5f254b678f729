# SPDX-License-Identifier: Apache-2.0
"""The name ``cpu`` among verl's platforms, where another plugin has it too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from verl.plugin.platform import platform_manager

from verl_ext.cpu.platform import cpu, hooks
from verl_ext.integration.settings.options import OptionError

PLATFORMS = platform_manager.PlatformRegistry._platforms


class Theirs(cpu.PlatformCPU):
    """Somebody else's platform for machines without an accelerator."""


def test_the_platform_of_another_plugin_stays_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was replaced as soon as we were installed, with its engines, in runs that name nothing of ours."""
    monkeypatch.setitem(PLATFORMS, cpu.NAME, Theirs)
    monkeypatch.setenv("VERL_PLATFORM", cpu.NAME)
    cpu.register()
    assert PLATFORMS[cpu.NAME] is Theirs
    registry = {("vllm", "async"): "theirs"}
    hooks._weight_sync(SimpleNamespace(_ROLLOUT_REGISTRY=registry))
    assert registry["vllm", "async"] == "theirs"
    with pytest.raises(OptionError, match=r"'cpu' is registered by .*test_platform_name, and \+recipe=cpu brings one"):
        cpu.activate()


def test_the_name_is_taken_where_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(PLATFORMS, cpu.NAME)
    monkeypatch.setenv("VERL_PLATFORM", "")
    cpu.register()
    assert PLATFORMS[cpu.NAME] is cpu.PlatformCPU and cpu.is_registered() and not hooks._on_cpu()
