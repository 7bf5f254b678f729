# SPDX-License-Identifier: Apache-2.0
"""Environments for the tests: a small world, and worlds that break in every way."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from verl_ext.rollout.environments import Observation


class Corridor:
    """Walk forward to the end; where the walk begins follows from the seed."""

    def __init__(self, length: int = 3, walls: int = 0) -> None:
        self.length, self.walls, self.place = length, walls, 0

    def observe(self) -> Observation:
        return Observation(
            f"place {self.place}" + " and a wall" * self.walls, actions=("forward", "back"), task="Reach the end."
        )

    def reset(self, seed: int) -> Observation:
        self.place = seed % 2
        return self.observe()

    def step(self, action: str) -> Any:
        self.place += 1 if action == "forward" else -1
        return self.observe(), float(self.place == self.length), self.place == self.length, {"pid": os.getpid()}


class Importing(Corridor):
    """Tells what it imports from."""

    def observe(self) -> Observation:
        return Observation(json.dumps(sys.path), task="Look.")


class Reused(Corridor):
    """A corridor whose process serves one trajectory after the other."""

    reuse = True
    invalid_action = "noop"


class Gymnastic(Corridor):
    """Returns what Gymnasium's environments return."""

    def reset(self, seed: int) -> Any:
        return super().reset(seed), {}

    def step(self, action: str) -> Any:
        observation, reward, done, info = super().step(action)
        return observation.text, reward, done, self.place < 0, info


class Broken(Corridor):
    """Breaks as `how` says, in `when` ("make", "reset" or "step") of the seeds that are a multiple of `every`."""

    def __init__(self, how: str = "raise", when: str = "step", every: int = 1, length: int = 3) -> None:
        super().__init__(length)
        self.how, self.when, self.every, self.bad = how, when, every, False
        if when == "make":
            self.misbehave()

    def misbehave(self) -> Any:
        if self.how == "raise":
            raise ZeroDivisionError("the world is gone")
        if self.how == "exit":
            raise SystemExit("the world ends itself")
        if self.how == "hang":
            time.sleep(3600)
        if self.how == "die":
            os._exit(3)
        odd = {
            "nan": ("x", float("nan"), False, {}),
            "square": ("x", -1e60, False, {}),
            "text": ({"x": 1}, 0.0, False, {}),
            "reward": ("x", "a lot", False, {}),
            "done": ("x", 0.0, "no", {}),
            "info": ("x", 0.0, False, {"f": os.getpid}),
            "short": ("x", 0.0),
            "none": None,
            "actions": (Observation("x", actions=("a", 3)), 0.0, False, {}),  # type: ignore[arg-type]
            "anchor": (Observation("x", anchor=object()), 0.0, False, {}),
            "noop": (Observation("x", noop_reward=float("nan")), 0.0, False, {}),
            "huge": ("x" * (17 << 20), 0.0, False, {}),
        }
        return odd[self.how]

    def reset(self, seed: int) -> Any:
        self.bad = seed % self.every == 0
        return self.misbehave() if self.bad and self.when == "reset" else super().reset(seed)

    def step(self, action: str) -> Any:
        if self.bad and self.when == "step" and self.place >= 1:
            return self.misbehave()
        return super().step(action)


class Vandal(Corridor):
    """Does to its process, in its second step, what an environment should not."""

    def __init__(self, how: str = "", length: int = 3) -> None:
        super().__init__(length)
        self.how = how

    def step(self, action: str) -> Any:
        if self.place >= 1 and self.how:
            getattr(self, self.how)()
        if self.place >= 1 and self.how == "surrogate":
            return "\ud800", 0.0, False, {}
        return super().step(action)

    def surrogate(self) -> None:
        pass

    def chat(self) -> None:
        for _ in range(200):
            print("noise " * 10_000, flush=True)

    def send(self, data: bytes) -> None:
        """To the agent loop, past the protocol."""
        for name in os.listdir("/proc/self/fd"):
            descriptor = int(name)
            if descriptor > 2 and Path(f"/proc/self/fd/{name}").is_socket():
                os.write(descriptor, data)
                return

    def flood(self) -> None:
        while True:
            self.send(b"\xff" * (1 << 20))

    def mumble(self) -> None:
        self.send(b"\0\0\0\2{]")

    def talk_twice(self) -> None:
        answer = {"value": {"text": "x", "actions": None, "task": "", "anchor": None, "reward": 9.0, "done": True}}
        body = json.dumps({**answer, "call": 1}).encode()
        self.send(len(body).to_bytes(4, "big") + body)

    def forge(self) -> None:
        body = json.dumps({"value": {"text": 3, "actions": 7}, "call": 3}).encode()
        self.send(len(body).to_bytes(4, "big") + body)

    def nest(self) -> None:
        body = b"[" * 200_000
        self.send(len(body).to_bytes(4, "big") + body)

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def spawn(self) -> None:
        left = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
        Path(os.environ["VERL_EXT_TEST_PIDS"]).write_text(str(left.pid))
        os.kill(os.getpid(), signal.SIGKILL)


class Scribe(Corridor):
    """Says where it is and what is there, and leaves a file named after the action."""

    def __init__(self) -> None:
        super().__init__()
        self.made_in = os.getcwd()

    def step(self, action: str) -> Any:
        info = {"made_in": self.made_in, "folder": os.getcwd(), "files": os.listdir(), "pid": os.getpid()}
        Path(action).touch()
        if action == "die":
            os._exit(3)
        return self.observe(), 0.0, False, info


class ReusedScribe(Scribe):
    """One process for several episodes."""

    reuse = True


class Stubborn(Corridor):
    """Will not be closed."""

    def close(self) -> None:
        time.sleep(3600)


class Async:
    """A corridor with coroutines."""

    def __init__(self, how: str = "") -> None:
        self.corridor, self.how = Corridor(), how

    async def reset(self, seed: int) -> Observation:
        return self.corridor.reset(seed)

    async def step(self, action: str) -> Any:
        if self.how == "hang":
            await asyncio.sleep(3600)
        if self.how == "raise":
            raise ZeroDivisionError("the world is gone")
        if self.how == "exit":
            raise SystemExit("the world ends itself")
        if self.how == "cancel":
            raise asyncio.CancelledError
        if self.how == "nan":
            return "x", float("nan"), False, {}
        await asyncio.sleep(0)
        return self.corridor.step(action)


class Paying(Corridor):
    """Gives 1, takes a half, breaks; where a file is named, it is there from then on and nothing begins again."""

    def __init__(self, mark: str = "") -> None:
        super().__init__()
        self.mark = Path(mark) if mark else None

    def reset(self, seed: int) -> Observation:
        if self.mark and self.mark.exists():
            raise FileNotFoundError("the world has gone")
        return super().reset(0)

    def step(self, action: str) -> Any:
        self.place += 1
        if self.place == 3:
            if self.mark:
                self.mark.touch()
            raise ZeroDivisionError("no third step")
        return self.observe(), (1.0, -0.5)[self.place - 1], False, {}


class Half:
    """No environment: it cannot be reset."""

    def step(self, action: str) -> None:
        return None


class Unpreparable(Corridor):
    """Its shared part cannot be loaded."""

    @classmethod
    def preload(cls, **kwargs: Any) -> None:
        raise FileNotFoundError("no games here")


class Needy(Corridor):
    """Needs a package that nobody has."""

    requires = {"no_such_package_anywhere": "pip install it"}
