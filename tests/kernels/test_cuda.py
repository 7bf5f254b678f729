# SPDX-License-Identifier: Apache-2.0
"""The back end `triton` with a processor in the GPU's place and Triton's interpreter: all but the calls of CUDA."""

from __future__ import annotations

import dataclasses
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from conftest import QUICK
from standin import StandInJudge
from triton_programs import GOES, TASK, TRITON, forward

from verl_ext.integration.settings.options import OptionError
from verl_ext.rollout.kernels.judge import Judge
from verl_ext.rollout.kernels.options import KernelOptions, check_kernels
from verl_ext.rollout.kernels.players.cuda import Cuda
from verl_ext.rollout.kernels.seat import Infrastructure
from verl_ext.sandbox import Limits, Sandbox, SandboxError

OPTIONS = dataclasses.replace(QUICK, backend="triton", language="triton", batch=2)


@pytest.fixture(scope="module")
def gpu() -> Iterator[Judge]:
    with StandInJudge(OPTIONS) as made:
        yield made


@pytest.mark.seconds
def test_a_right_kernel_is_paid_with_speed(gpu: Judge) -> None:
    verdict = gpu.evaluate(TASK, TRITON)
    assert verdict.correct and not verdict.decoy and verdict.pairs == 3, verdict
    assert 0 < verdict.low <= verdict.speedup <= verdict.high and verdict.worth == verdict.speedup
    assert verdict.candidate_us > 0 < verdict.reference_us
    assert 0 < verdict.coverage <= 1 and sum(verdict.profile.values()) == pytest.approx(1.0)
    assert list(verdict.profile)[0] == "fused" and verdict.reward() > 0.5


@pytest.mark.seconds
def test_time_outside_of_the_kernels_is_no_coverage_and_costs_speed(gpu: Judge) -> None:
    slow = gpu.evaluate(TASK, forward("time.sleep(0.2)", "return launch(x, a, b)"))
    assert slow.correct and slow.coverage < 0.5 and slow.candidate_us >= 200_000, slow


@pytest.mark.parametrize(
    "lines",
    [
        ("return in_torch(x, a, b)",),
        ("launch(x, a, b)", "return in_torch(x, a, b)"),
        ("return in_torch(x, a, b) + 0 * launch(x, a, b)",),
        ("return launch(x, a, b) if self.calls == 0 else in_torch(x, a, b)",),
    ],
    ids=["torch", "thrown_away", "times_zero", "never_launched"],
)
def test_a_decoy_is_not_paid(gpu: Judge, lines: tuple[str, ...]) -> None:
    verdict = gpu.evaluate(TASK, forward(*lines))
    assert verdict.correct and verdict.decoy and verdict.worth == verdict.coverage == verdict.reward() == 0.0, verdict


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (("return launch(x, a, a)",), "wrong"),
        (("y = launch(x, a, b)", "y[-1, -1] = float('nan')", "return y"), "wrong"),
        (("return launch(x, a, b) if self.calls < 6 else torch.zeros_like(x)",), "wrong"),
        (("self.y = launch(x, a, b) if self.calls == 1 else self.y", "return self.y"), "wrong"),
        (("raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 80 GiB')",), "memory"),
        (("raise ValueError('no')",), "error"),
        (("import os", "os._exit(0)"), "crashed"),
        (("import ctypes", "ctypes.string_at(8)"), "crashed"),
        (("while True: pass",), "timeout"),
    ],
)  # fmt: skip
def test_what_fails_is_named_and_the_next_verdict_is_right(gpu: Judge, lines: tuple[str, ...], status: str) -> None:
    verdict = gpu.evaluate(TASK, forward(*lines))
    assert verdict.status == status and verdict.error, verdict
    assert verdict.speedup == verdict.coverage == verdict.reward() == 0.0
    assert gpu._of(TASK).batch(*gpu._inputs())[1] > 0


def test_a_reference_that_is_slowed_down_later_pays_nothing(gpu: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that they share, a candidate could keep the reference waiting while both are alive."""
    honest = gpu._expected
    begun: list[bool] = []
    monkeypatch.setattr(gpu, "_looked", lambda *given: begun.append(True) or type(gpu)._looked(gpu, *given))
    monkeypatch.setattr(gpu, "_expected", lambda *given: (honest(*given)[0], 1e3 if begun else 1e-3))
    assert gpu.evaluate(TASK, TRITON).reference_us <= 1e3


def test_nothing_of_a_candidate_is_left_for_the_next(gpu: Judge) -> None:
    verdict = gpu.evaluate(TASK, forward("import os", "open(os.environ['TMPDIR'] + '/left', 'w')", GOES))
    assert verdict.correct, verdict
    assert gpu.scratch and not list(Path(gpu.scratch.name).iterdir())


def test_without_a_gpu_a_run_is_refused_with_key_value_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    options = KernelOptions(backend="triton", language="triton")
    assert options.backend == "triton"
    with pytest.raises(ValueError, match="backend triton takes the language triton, not fuse"):
        KernelOptions(backend="triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # on a machine with a GPU, too
    key = r"verl_ext\.kernels\.backend=triton"
    said = f"{key}: there is no CUDA device here.*Install.*{key}_interpret"
    with pytest.raises(OptionError, match=said):
        check_kernels({"verl_ext": {"kernels": {"backend": "triton", "language": "triton"}}})
    with pytest.raises(Infrastructure, match="no CUDA device"):
        Judge(OPTIONS)
    assert "no CUDA device" in Cuda().lacks()


def test_judges_need_gpus_beside_the_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cuda, "lacks", lambda self: "")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 9.0})
    kernels = {"backend": "triton", "language": "triton", "workers": 2}
    config = {"verl_ext": {"kernels": kernels}, "trainer": {"nnodes": 1, "n_gpus_per_node": 8}}
    with pytest.raises(OptionError, match=r"workers: 2 judges .* 8 of the trainer: the Ray cluster has 9 in all"):
        check_kernels(config)
    check_kernels(config | {"trainer": {"nnodes": 1, "n_gpus_per_node": 7}})


@pytest.mark.seconds
def test_a_kernel_without_an_end_is_ended_by_the_clock() -> None:
    """Whoever waits for it uses no processor time."""
    with StandInJudge(dataclasses.replace(OPTIONS, run_s=0.5)) as gpu:
        verdict = gpu.evaluate(TASK, forward("import time", "time.sleep(1e6)"))
    said = re.search(r"2\.0 s of processor time \(([\d.]+) s on the clock\)", verdict.error)
    assert verdict.status == "timeout" and said and float(said[1]) >= 4.0, verdict


def test_the_judge_on_a_gpu_takes_triton_alone(gpu: Judge) -> None:
    with pytest.raises(ValueError, match="takes the language triton, not fuse"):
        gpu.evaluate(TASK, "krve mul add relu", "fuse")


def test_the_wider_cage_compiles_in_its_folder_and_no_more(tmp_path: Path) -> None:
    other = tmp_path / "other"
    scratch = tmp_path / "scratch"
    for folder in (other, scratch):
        folder.mkdir()
    service = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    service.bind(f"{other}/socket")
    service.listen()
    with service, Sandbox(Limits(1, patience=20.0), "required", modules=["wider"], scratch=str(scratch)) as sandbox:
        found = sandbox.run("wider:tries", str(scratch), str(other), timeout_s=30.0)
    may = {"compiles": 42, "driver": "yes", "script": "yes", "thread": "yes"}
    shut = "elsewhere home socket kill connect listen datagrams parents_threads parents_score".split()
    assert found == may | dict.fromkeys(shut, "no")
    assert [path.name for path in other.iterdir()] == ["socket"]
    with Sandbox(Limits(workers=1, patience=20.0), "required", modules=["wider"]) as sandbox:
        with pytest.raises(SandboxError):
            sandbox.run("wider:tries", str(scratch), str(other), timeout_s=30.0)
