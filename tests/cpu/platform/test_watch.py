# SPDX-License-Identifier: Apache-2.0
"""The watched end of a weight transfer, over real sockets."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from verl_ext.cpu.platform.watch import TIMEOUT, Receiver, WatchedSocket, WeightSyncError, timeout_s


@pytest.fixture
def address(tmp_path: object) -> str:
    return f"ipc://{tmp_path}/watch.sock"


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as made:
        yield made


def sender(
    context: zmq.Context, address: str, call: concurrent.futures.Future | None, limit_s: float = 30, ask: Any = None
) -> WatchedSocket:
    receiver = Receiver(call, ask, every_s=0.1)
    socket = WatchedSocket(context.socket(zmq.REQ), receiver, limit_s, poll_s=0.05)
    socket.bind(address)
    return socket


def answer(context: zmq.Context, address: str, times: int, pause: float = 0.0) -> threading.Thread:
    """A receiver that answers the first `times` messages and then goes."""

    def run() -> None:
        socket = context.socket(zmq.REP)
        socket.connect(address)
        for _ in range(times):
            message = socket.recv_pyobj()
            time.sleep(pause)
            socket.send(repr(message).encode())
        socket.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_messages_pass(context: zmq.Context, address: str) -> None:
    receiver: concurrent.futures.Future = concurrent.futures.Future()
    socket = sender(context, address, receiver)
    thread = answer(context, address, 2, pause=0.2)
    for number in (1, 2):
        socket.send_pyobj({"bucket": number})
        assert socket.recv() == repr({"bucket": number}).encode()
    thread.join()
    socket.close()


@pytest.mark.parametrize("times", [0, 1])
def test_failed_receiver_is_named(context: zmq.Context, address: str, times: int) -> None:
    """Before the first message, when nobody has connected, and between two messages."""
    receiver: concurrent.futures.Future = concurrent.futures.Future()
    socket = sender(context, address, receiver)
    thread = answer(context, address, times)
    for _ in range(times):
        socket.send_pyobj("bucket")
        socket.recv()
    thread.join()
    cause = RuntimeError("the engine core is dead")
    threading.Timer(0.2, receiver.set_exception, [cause]).start()
    with pytest.raises(WeightSyncError, match="RuntimeError: the engine core is dead") as caught:
        socket.send_pyobj("next")
        socket.recv()
    assert caught.value.__cause__ is cause
    socket.close()


class Deserted(zmq.Socket):
    """Its peer goes as soon as it was seen."""

    def poll(self, *given: Any) -> int:
        seen = super().poll(*given)
        if seen:
            peers.pop().close(linger=0)
            while super().poll(0, zmq.POLLOUT):
                time.sleep(0.01)
        return seen


peers: list[zmq.Socket] = []


def test_a_receiver_that_goes_between_a_look_and_the_message(context: zmq.Context, address: str) -> None:
    peers.append(context.socket(zmq.REP))
    socket = WatchedSocket(Deserted(context, zmq.REQ), Receiver(None, None), limit_s=1.0, poll_s=0.05)
    socket.bind(address)
    peers[0].connect(address)
    with pytest.raises(WeightSyncError, match="has not answered for 1 s"):
        socket.send_pyobj("bucket")
    assert not peers
    socket.close()


def test_receiver_that_ended_early(context: zmq.Context, address: str) -> None:
    receiver: concurrent.futures.Future = concurrent.futures.Future()
    receiver.set_result(None)
    socket = sender(context, address, receiver)
    with pytest.raises(WeightSyncError, match="ended early"):
        socket.send_pyobj("bucket")
    socket.close()


def test_last_answer_counts_though_the_call_has_ended(context: zmq.Context, address: str) -> None:
    receiver: concurrent.futures.Future = concurrent.futures.Future()
    socket = sender(context, address, receiver)
    thread = answer(context, address, 1)
    socket.send_pyobj("bucket")
    thread.join()
    receiver.set_result(None)
    assert socket.recv() == b"'bucket'"
    socket.close()


@pytest.mark.parametrize("dead", [True, RuntimeError("the server is gone")])
def test_engine_that_died_though_the_call_is_not_answered(context: zmq.Context, address: str, dead: Any) -> None:
    """The first question finds the engine alive."""
    outcomes = [False, dead]

    def ask() -> concurrent.futures.Future:
        outcome: concurrent.futures.Future = concurrent.futures.Future()
        found = outcomes.pop(0)
        outcome.set_exception(found) if isinstance(found, Exception) else outcome.set_result(found)
        return outcome

    socket = sender(context, address, concurrent.futures.Future(), ask=ask)
    with pytest.raises(WeightSyncError, match="died while|the server is gone"):
        socket.send_pyobj("bucket")
    assert not outcomes
    socket.close()


def test_silence_ends(context: zmq.Context, address: str) -> None:
    socket = sender(context, address, None, limit_s=0.3)
    with pytest.raises(WeightSyncError, match=f"not answered for 0.3 s.*{TIMEOUT}"):
        socket.send_pyobj("bucket")
    socket.close()


def test_limit_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TIMEOUT, raising=False)
    assert timeout_s() == 300
    monkeypatch.setenv(TIMEOUT, "12.5")
    assert timeout_s() == 12.5
    for wrong in ("soon", "0", "-1", "inf", "nan"):
        monkeypatch.setenv(TIMEOUT, wrong)
        with pytest.raises(ValueError, match=f"{TIMEOUT}='{wrong}'"):
            timeout_s()
