"""Turns on a GPU (`turns`)."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from turns import once, turn


def test_one_that_is_alone_gets_its_turn_between_those_that_share(tmp_path: Path) -> None:
    said: list[str] = []
    inside = {name: threading.Event() for name in ("first", "alone", "second", "third")}
    leave = {name: threading.Event() for name in inside}

    def test(name: str, alone: bool) -> None:
        with turn(tmp_path, alone):
            said.append(name)
            inside[name].set()
            assert leave[name].wait(30)
            said.append(f"{name} ends")

    def start(name: str, alone: bool = False) -> threading.Thread:
        thread = threading.Thread(target=test, args=(name, alone))
        thread.start()
        return thread

    threads = [start("first")]
    assert inside["first"].wait(30)
    threads.append(start("alone", alone=True))
    assert not inside["alone"].wait(0.2)
    threads += [start("second"), start("third")]
    assert not inside["second"].wait(0.2) and not inside["third"].is_set()
    leave["first"].set()
    assert inside["alone"].wait(30)
    assert not inside["second"].wait(0.2) and not inside["third"].is_set()
    leave["alone"].set()
    assert inside["second"].wait(30) and inside["third"].wait(30)  # both at once
    leave["second"].set(), leave["third"].set()
    for thread in threads:
        thread.join(30)
    assert said[:4] == ["first", "first ends", "alone", "alone ends"]


def test_a_cache_is_filled_by_one_and_then_read_by_all(tmp_path: Path) -> None:
    said: list[str] = []
    filled, all_read = threading.Event(), threading.Barrier(3)

    def make() -> None:
        if not said:
            said.append("filled")
            assert filled.wait(30)
        else:
            said.append("read")
            all_read.wait(30)  # the three that come later do so beside each other

    threads = [threading.Thread(target=once, args=(tmp_path, make)) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    assert said == ["filled"]
    filled.set()
    for thread in threads:
        thread.join(30)
    assert said == ["filled", "read", "read", "read"]
