# SPDX-License-Identifier: Apache-2.0
"""Order of the tests: quick ones first, those that build or start processes, vLLM, SGLang, runs of the real trainer.

The last are single runs in a Ray that stands, which are short: so the processes with tests end at about the same time.

And what keeps several processes with tests apart, on a machine where others use Ray as well; and verl's configuration.
"""

from __future__ import annotations

import functools
import gc
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

LATE = ("slow", "vllm", "sglang", "e2e", "quick")
# Of the runs in a Ray that stands these come first: the longest.
LONG = ("test_models_runs", "test_faults", "test_updates_runs", "test_merged_runs")
# Looks into shared memory, where engines of vLLM leave semaphores, as test_faults does: both are far behind vLLM's.
AFTER_VLLM = "test_main_job"


gc.disable()  # a sixth of the time of imports goes into collections, which find nothing

# A busy machine may take seconds for an example.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> tuple[int, bool, int, bool]:
        late = max((place for place, name in enumerate(LATE, start=1) if item.get_closest_marker(name)), default=0)
        standing, stem = "standing_lab" in getattr(item, "fixturenames", ()), item.path.stem
        place = LONG.index(stem) if stem in LONG else len(LONG)
        return late, standing, place, stem == AFTER_VLLM

    items.sort(key=rank)  # stable: the order of files is kept within a rank


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    # Ray looks in its folder for a cluster that runs already; a test must not come to another one's.
    os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray-")
    # Two runs at once: threads of one that wait for the other's by spinning took an eighth of the processors' time.
    os.environ.setdefault("VERL_EXT_TRAINING_THREADS", "1")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def parsed_once() -> Iterator[None]:
    """The YAML files of verl and of our recipes, what a list of them gives, and interpolations are made once a process:
    most of the time that Hydra composes and that a configuration is resolved."""
    import omegaconf.base
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from omegaconf import OmegaConf

    from verl_ext.recipes import recipe_root, verl_config_dir

    load, compose = OmegaConf.load, ConfigLoaderImpl._compose_config_from_defaults_list
    parsed: dict[str, bytes] = {}
    folders = str(verl_config_dir()), str(recipe_root() / "recipe")

    def once(key: str, make: Callable[[], Any]) -> Any:
        if key not in parsed:
            parsed[key] = pickle.dumps(make())
        return pickle.loads(parsed[key])  # a sixth of the time of a deep copy

    def load_once(file: Any) -> Any:
        name = str(getattr(file, "name", ""))
        return once(name, lambda: load(file)) if name.startswith(folders) else load(file)

    def compose_once(self: Any, defaults: Any, repo: Any) -> Any:
        sources = [(source.scheme(), source.path) for source in repo.get_sources()]
        if any(scheme == "file" and path != str(recipe_root()) for scheme, path in sources):
            return compose(self, defaults, repo)  # of a test's own folder
        return once(repr((sources, [vars(default) for default in defaults])), lambda: compose(self, defaults, repo))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", load_once)
        patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", compose_once)
        patch.setattr(omegaconf.base, "parse", functools.lru_cache(maxsize=None)(omegaconf.base.parse))
        yield


@pytest.fixture
def verl_configuration() -> Iterator[None]:
    """Hydra with verl's configuration; afterwards Hydra and the environment are as they were."""
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    saved = dict(os.environ)
    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        yield
    os.environ.clear()
    os.environ.update(saved)


RUNS = ("tests/e2e/", "tests/vllm_cpu/", "tests/sglang_cpu/")
TOGETHER = ("tests/vllm_cpu/", "tests/sglang_cpu/")  # their runs share one import of vLLM or SGLang
PATIENT = "tests/e2e/test_methods.py"  # in these runs nothing has a time limit


class _Scheduler(LoadFileScheduling):
    """A file stays with one worker, for the sake of its fixtures; runs of the trainer go to whoever is free.

    A run often waits, for its processes to start or for a time limit, and Ray's workers let others go first. So workers
    beyond the number of processors take runs alone, patient ones as long as there are files. And nobody holds more than
    the next run back.
    """

    def _split_scope(self, nodeid: str) -> str:
        alone = nodeid.startswith(RUNS) and not nodeid.startswith(TOGETHER)
        return nodeid if alone else super()._split_scope(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        late = self.nodes.index(node) >= len(os.sched_getaffinity(0))
        files_are_left = not next(iter(self.workqueue)).startswith(RUNS)
        if (late or not files_are_left) and self._pending_of(self.assigned_work[node]) > 1:
            return
        if late and files_are_left:
            patient = next((unit for unit in self.workqueue if unit.startswith(PATIENT)), None)
            if patient is None:
                return
            self.workqueue.move_to_end(patient, last=False)
        super()._assign_work_unit(node)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        super().mark_test_complete(node, item_index, duration)
        for idle in self.nodes * 2:  # a worker begins when it knows of two tests
            if self._pending_of(self.assigned_work[idle]) < 2:
                self._reschedule(idle)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Scheduler:
    return _Scheduler(config, log)
