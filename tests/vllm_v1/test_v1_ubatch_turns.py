"""Turns of micro-batches: their order under any delays, streams and events, hooks, and every way in which a step can end early."""

from __future__ import annotations

import contextvars
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vgraph_lab.errors import InputError, LifecycleError, UBatchError
from vgraph_lab.vllm_v1 import (
    ForwardContext,
    UBatchContext,
    dbo_current_ubatch_id,
    dbo_enabled,
    dbo_maybe_run_recv_hook,
    dbo_num_ubatches,
    dbo_register_recv_hook,
    dbo_switch_to_comm,
    dbo_switch_to_comm_sync,
    dbo_switch_to_compute,
    dbo_switch_to_compute_sync,
    dbo_yield,
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
    get_forward_context,
    make_ubatch_contexts,
    override_forward_context,
    ubatch_threads,
)
from vgraph_lab.vllm_v1.ubatch_threads import UBatchThreads
from vgraph_lab.vllm_v1.ubatching import dbo_get_previous_event

CPU = torch.device("cpu")
THREADS = {count: UBatchThreads(count, CPU) for count in (2, 3, 4)}


def contexts(count: int, timeout_s: float = 30.0, **streams: Any) -> list[UBatchContext]:
    forward = [ForwardContext(additional_kwargs={"ubatch": number}) for number in range(count)]
    return make_ubatch_contexts(
        count, streams.get("compute"), streams.get("comm"), forward, threading.Barrier(count + 1), timeout_s=timeout_s
    )


def run(calls: list[Callable[[], Any]], timeout_s: float = 30.0) -> list[Any]:
    """One step with a call per micro-batch."""
    names = [f"part {number}" for number in range(len(calls))]
    return THREADS[len(calls)].run(contexts(len(calls), timeout_s), calls, names)


# ----------------------------------------------------------------------------------------------------------------- order


@given(count=st.integers(2, 4), data=st.data())
@settings(max_examples=40)
def test_turns_go_round_whatever_threads_take(count: int, data: st.DataObject) -> None:
    """Each micro-batch yields as often as it likes and takes as long as it likes: the order of turns depends on the first alone."""
    yields = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    delays = [data.draw(st.lists(st.sampled_from([0, 0, 0.0005, 0.002]), min_size=n + 1, max_size=n + 1)) for n in yields]
    found: list[int] = []
    running: list[int] = []

    def part(number: int) -> list[int]:
        for turn, delay in enumerate(delays[number]):
            assert not running  # nobody else has the turn
            running.append(number)
            found.append(number)
            time.sleep(delay)
            running.remove(number)
            if turn < yields[number]:
                dbo_yield()
        return [number]

    assert run([lambda number=number: part(number) for number in range(count)]) == [[number] for number in range(count)]
    expected = [number for turn in range(max(yields) + 1) for number in range(count) if turn <= yields[number]]
    assert found == expected


def test_each_thread_keeps_its_forward_context() -> None:
    def part() -> list[Any]:
        seen = [get_forward_context().additional_kwargs["ubatch"]]
        dbo_yield()
        seen.append(get_forward_context().additional_kwargs["ubatch"])
        with override_forward_context(ForwardContext(num_tokens=dbo_current_ubatch_id() + 1)):
            dbo_yield()  # the others set theirs meanwhile
            seen.append(get_forward_context().num_tokens)
        dbo_yield()
        return [*seen, get_forward_context().additional_kwargs["ubatch"]]

    mine = ForwardContext(num_tokens=7)
    with override_forward_context(mine):
        assert run([part] * 3) == [[number, number, number + 1, number] for number in range(3)]
        assert get_forward_context() is mine


def test_what_a_model_can_ask() -> None:
    def part() -> tuple[bool, int, int]:
        return dbo_enabled(), dbo_current_ubatch_id(), dbo_num_ubatches()

    assert part() == (False, 0, 1)
    assert run([part] * 3) == [(True, number, 3) for number in range(3)]
    assert part() == (False, 0, 1)


def test_outside_of_micro_batches_nothing_happens() -> None:
    for call in (dbo_yield, dbo_yield_and_switch_from_compute_to_comm, dbo_switch_to_comm_sync, dbo_maybe_run_recv_hook):
        call()
    ran: list[str] = []
    dbo_register_recv_hook(lambda: ran.append("at once"))
    assert ran == ["at once"]
    assert dbo_get_previous_event(lambda: 1) is None


def test_the_conditions_of_the_caller_hold_in_the_threads() -> None:
    def part() -> tuple[Any, ...]:
        flags = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        return (*flags, torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled())

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert run([part] * 2) == [(False, False, True, torch.bfloat16, False)] * 2
    with torch.inference_mode():
        assert [found[:3] for found in run([part] * 2)] == [(False, True, False)] * 2
    assert [found[:3] for found in run([part] * 2)] == [(True, False, False)] * 2


# --------------------------------------------------------------------------------------------------------------- streams


class Stream:
    """Stands for a CUDA stream: notes what it is told to do."""

    device = CPU

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.recorded}")


class Event:
    """Stands for a CUDA event."""

    count = 0
    recorded = "nothing"

    def record(self, stream: Stream) -> None:
        Event.count += 1
        self.recorded = f"{stream.name}#{Event.count}"
        stream.log.append(f"record {self.recorded}")


@pytest.fixture
def device_log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Streams and events that only take notes; a stream is current per thread, as on a GPU."""
    log: list[str] = []
    current = threading.local()
    default = Stream("default", log)
    Event.count = 0

    def set_stream(stream: Stream) -> None:
        current.stream = stream
        log.append(f"{dbo_current_ubatch_id() if dbo_enabled() else '-'} on {stream.name}")

    def stream(within: Stream) -> Any:
        log.append(f"within {within.name}")
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: getattr(current, "stream", default))
    return log


def run_on_device(log: list[str], *calls: Callable[[], Any]) -> None:
    parts = contexts(len(calls), compute=Stream("compute", log), comm=Stream("comm", log))
    THREADS[len(calls)].run(parts, list(calls), ["", ""])


def test_communication_waits_for_its_own_computation_and_back(device_log: list[str]) -> None:
    def part() -> None:
        device_log.append(f"{dbo_current_ubatch_id()} computes")
        dbo_yield_and_switch_from_compute_to_comm()
        device_log.append(f"{dbo_current_ubatch_id()} sends")
        dbo_yield_and_switch_from_comm_to_compute()
        device_log.append(f"{dbo_current_ubatch_id()} goes on")

    run_on_device(device_log, part, part)
    assert device_log == [
        *("0 on compute", "0 computes", "record compute#1"),
        *("1 on compute", "1 computes", "record compute#2"),
        *("0 on comm", "comm waits for compute#1", "0 sends", "record comm#3"),
        *("1 on comm", "comm waits for compute#2", "1 sends", "record comm#4"),
        *("0 on compute", "compute waits for comm#3", "0 goes on", "record comm#5", "compute waits for comm#5", "- on default"),
        *("1 on compute", "compute waits for comm#4", "1 goes on", "record comm#6", "compute waits for comm#6", "- on default"),
    ]


def test_switches_without_a_hand_over(device_log: list[str]) -> None:
    def part() -> None:
        dbo_switch_to_comm_sync()
        dbo_switch_to_compute_sync()
        dbo_switch_to_comm()
        dbo_switch_to_compute()
        assert dbo_get_previous_event(lambda number: number + 1, 2) == 3

    run_on_device(device_log, part, lambda: None)
    assert device_log[:-2] == [
        "0 on compute",
        *("record compute#1", "0 on comm", "comm waits for compute#1"),
        *("record comm#2", "0 on compute", "compute waits for comm#2"),
        *("0 on comm", "0 on compute", "within compute"),
        *("record comm#3", "compute waits for comm#3", "- on default"),
    ]
    assert device_log[-2:] == ["1 on compute", "- on default"]  # it has sent nothing, so nothing is joined


def test_communication_is_joined_after_an_error_too(device_log: list[str]) -> None:
    def part() -> None:
        dbo_switch_to_comm_sync()
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        run_on_device(device_log, part, lambda: None)
    assert device_log == [
        *("0 on compute", "record compute#1", "0 on comm", "comm waits for compute#1"),
        *("record comm#2", "compute waits for comm#2", "- on default"),
    ]


@pytest.mark.parametrize("first", [dbo_yield_and_switch_from_comm_to_compute, dbo_switch_to_comm])
def test_switches_start_where_the_last_one_led(first: Callable[[], None]) -> None:
    def part() -> None:
        first()
        dbo_yield_and_switch_from_compute_to_comm()

    with pytest.raises(LifecycleError, match=r"micro-batch 0 is on the (comm|compute) stream and would switch from"):
        run([part] * 2)


# ----------------------------------------------------------------------------------------------------------------- hooks


def test_the_next_micro_batch_receives() -> None:
    log: list[str] = []

    def part() -> None:
        me = dbo_current_ubatch_id()
        dbo_register_recv_hook(lambda: log.append(f"{me}'s, by {dbo_current_ubatch_id()}"))
        dbo_yield()
        dbo_maybe_run_recv_hook()
        log.append(f"{me} done")

    run([part] * 3)
    assert log == ["2's, by 0", "0 done", "0's, by 1", "1 done", "1's, by 2", "2 done"]


def test_hooks_that_nobody_asks_for_run_at_the_end_and_none_is_lost() -> None:
    log: list[str] = []

    def first() -> None:
        dbo_register_recv_hook(lambda: log.append("a"))
        dbo_register_recv_hook(lambda: log.append("b"))

    def second() -> None:
        log.append("second")
        dbo_register_recv_hook(lambda: log.append("c"))  # the other one has ended: its own

    run([first, second])
    assert log == ["second", "a", "b", "c"]


def test_a_hook_that_fails_ends_the_step() -> None:
    def fail() -> None:
        raise ValueError("no answer")

    with pytest.raises(ValueError, match="no answer") as caught:
        run([lambda: dbo_register_recv_hook(fail), lambda: None])
    assert caught.value.__notes__ == ["raised in part 1; the other micro-batches have ended with it"]


# ---------------------------------------------------------------------------------------------------------------- errors


def fails_at(where: tuple[int, int], seen: dict[int, BaseException]) -> None:
    """Three turns; ``where`` is a micro-batch and its turn. What each thread ends with goes to ``seen``."""
    try:
        for turn in range(3):
            if (dbo_current_ubatch_id(), turn) == where:
                raise ValueError("a bad expert")
            dbo_yield()
    except BaseException as error:
        seen[dbo_current_ubatch_id()] = error
        raise


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_an_error_in_any_thread_at_any_turn_ends_all(count: int, turn: int) -> None:
    for failing in range(count):
        seen: dict[int, BaseException] = {}

        with pytest.raises(ValueError, match="a bad expert") as caught:
            run([partial(fails_at, (failing, turn), seen)] * count)
        assert caught.value.__notes__ == [f"raised in part {failing}; the other micro-batches have ended with it"]
        assert isinstance(seen.pop(failing), ValueError)
        for number, error in seen.items():  # those that had begun
            assert isinstance(error, UBatchError)
            assert error.ubatch == failing
            assert str(error) == f"micro-batch {failing} failed with ValueError: a bad expert; micro-batch {number} ends with it."
        assert run([lambda: 1] * count) == [1] * count  # the threads are as good as new


def test_a_swallowed_end_is_the_end_all_the_same() -> None:
    def stubborn() -> str:
        try:
            dbo_yield()
        except UBatchError:
            return "went on"
        raise AssertionError

    def failing() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        run([stubborn, failing])


@pytest.mark.parametrize("yields", [True, False])
def test_who_keeps_the_turn_is_named_with_its_line(yields: bool) -> None:
    released = threading.Event()
    went_on: list[str] = []

    def first() -> None:
        dbo_register_recv_hook(lambda: went_on.append("hook"))
        dbo_yield()

    def stuck() -> None:
        dbo_yield()
        released.wait(30)  # here
        if yields:
            dbo_yield()
            went_on.append("next turn")

    with pytest.raises(UBatchError, match=r"micro-batch 1, which has had its turn for 0\.1 s and neither yields nor ends") as caught:
        run([first, stuck], timeout_s=0.1)
    assert caught.value.ubatch == 1
    assert "released.wait(30)  # here" in str(caught.value)
    with pytest.raises(LifecycleError, match="micro-batch 1 of an earlier step, which was given up, is still running"):
        run([lambda: 1] * 2)
    released.set()
    for _ in range(1000):
        try:
            assert run([lambda: 1] * 2) == [1, 1]
            assert went_on == []  # what it had left to do belonged to the step
            return
        except LifecycleError:
            time.sleep(0.005)
    raise AssertionError("the thread did not end at its next hand-over")


def test_a_slow_step_is_no_stuck_one() -> None:
    def part() -> None:
        for _ in range(6):
            time.sleep(0.05)
            dbo_yield()

    run([part] * 2, timeout_s=0.3)  # the step takes twice that, no turn does


def test_who_does_not_come_is_named() -> None:
    parts = contexts(2, timeout_s=0.05)
    caught: list[BaseException] = []

    def enter() -> None:
        try:
            with parts[0]:
                raise AssertionError
        except UBatchError as error:
            caught.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    with pytest.raises(UBatchError, match=r"micro-batch 1 did not get ready within 0\.05 s"):
        parts[0].turns.start()
    thread.join(30)
    assert [str(error) for error in caught] == ["micro-batch 1 did not get ready within 0.05 s; all others wait for it."]


def test_the_caller_may_be_the_one_who_keeps_all_waiting() -> None:
    parts = contexts(2, timeout_s=0.05)
    caught: list[str] = []

    def enter(number: int) -> None:
        try:
            with parts[number]:
                raise AssertionError
        except UBatchError as error:
            caught.append(str(error))

    threads = [threading.Thread(target=enter, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    parts[0].turns.ready_barrier.wait(30)  # and no start()
    for thread in threads:
        thread.join(30)
    assert len(caught) == 2
    assert all("waits for the caller of the step, which has not given the first turn for 0.05 s" in text for text in caught)


@pytest.mark.parametrize("fails_too", [False, True])
def test_an_interrupted_caller_ends_the_step(monkeypatch: pytest.MonkeyPatch, fails_too: bool) -> None:
    ended: list[str] = []

    def part() -> None:
        try:
            for _ in range(10_000):
                time.sleep(0.001)
                dbo_yield()
                if fails_too:
                    raise ValueError("x")
        except UBatchError as error:
            ended.append(str(error))
            raise

    parts = contexts(2)
    wait = parts[0].turns.wait

    def interrupted(event: threading.Event, waiter: UBatchContext | None = None) -> None:
        if waiter is None:
            while fails_too and parts[0].turns.failure is None:
                time.sleep(0.001)
            raise KeyboardInterrupt
        wait(event, waiter)

    monkeypatch.setattr(parts[0].turns, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        THREADS[2].run(parts, [part] * 2, ["", ""])
    first = "micro-batch 0 failed with ValueError: x" if fails_too else "the caller of the step failed with KeyboardInterrupt"
    assert all(text.startswith(first) for text in ended)


def test_callers_take_turns_with_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_context, delays = contextvars.copy_context, iter([0, 0.05])

    def slowly() -> contextvars.Context:  # leaves room for other callers between one thread's work and the next one's
        time.sleep(next(delays, 0))
        return copy_context()

    monkeypatch.setattr(contextvars, "copy_context", slowly)

    def part() -> int:
        dbo_yield()
        return dbo_current_ubatch_id()

    found: list[list[int]] = []
    callers = [threading.Thread(target=lambda: found.append(run([part] * 2, 5.0))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30)
    assert found == [[0, 1]] * 4


def test_one_thread_runs_one_micro_batch() -> None:
    def part() -> None:
        with contexts(2)[0]:
            raise AssertionError

    with pytest.raises(LifecycleError, match="this thread runs a micro-batch already"):
        run([part] * 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((1, None, None, [ForwardContext()], threading.Barrier(2)), "1 micro-batches with 1 forward contexts"),
        ((2, None, None, [ForwardContext()], threading.Barrier(3)), "2 micro-batches with 1 forward contexts"),
        ((2, None, None, [ForwardContext()] * 2, threading.Barrier(2)), "a barrier for 2: there are two or more"),
        ((2, object(), None, [ForwardContext()] * 2, threading.Barrier(3)), "or, without a GPU, neither"),
    ],
)
def test_impossible_contexts_fail(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        make_ubatch_contexts(*arguments)


def test_threads_end_with_their_owner() -> None:
    threads = UBatchThreads(2, CPU)
    threads.run(contexts(2), [lambda: None] * 2, ["", ""])
    workers = list(threads._workers)
    threads.shutdown()
    threads.shutdown()
    for worker in workers:
        worker.join(30)
    assert not any(worker.is_alive() for worker in workers)
    assert threads.run(contexts(2), [lambda: 1] * 2, ["", ""]) == [1, 1]
    workers = list(threads._workers)
    del threads
    for worker in workers:
        worker.join(30)
    assert not any(worker.is_alive() for worker in workers)


def _step_in_a_fork(threads: UBatchThreads) -> None:
    os._exit(0 if threads.run(contexts(2), [dbo_current_ubatch_id] * 2, ["", ""]) == [0, 1] else 1)


def test_a_fork_makes_its_own_threads() -> None:
    threads = UBatchThreads(2, CPU)
    threads.run(contexts(2), [lambda: None] * 2, ["", ""])
    child = multiprocessing.get_context("fork").Process(target=_step_in_a_fork, args=(threads,))
    child.start()
    child.join(30)
    child.kill()
    assert child.exitcode == 0


def test_what_the_device_says_to_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_device(device: torch.device) -> None:
        raise RuntimeError(f"{device} is lost")

    monkeypatch.setattr(torch.cuda, "set_device", no_device)
    threads = UBatchThreads(2, torch.device("cuda:0"))
    with pytest.raises(RuntimeError, match="cuda:0 is lost"):
        threads.prepare()
    monkeypatch.setattr(ubatch_threads, "_READY_S", 0.01)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: time.sleep(0.2))
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 1)
    with pytest.raises(UBatchError, match=r"ubatch-0 and ubatch-1 did not get to cuda:0 within 0\.01 s"):
        threads.prepare()
