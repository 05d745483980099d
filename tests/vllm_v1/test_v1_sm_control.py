"""Shares of SMs: set on entry, restored on every way out, refused where they cannot be."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from vgraph_lab.errors import ConfigError
from vgraph_lab.vllm_v1 import SMControlContextManager, torch_compute_sms


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 132 SMs."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))


def noting(log: list[str], name: str, fails_at: int | None = None) -> Callable[[int], None]:
    def setter(sms: int) -> None:
        log.append(f"{name} {sms}")
        if sms == fails_at:
            raise RuntimeError(f"{name} cannot")

    return setter


@pytest.mark.usefixtures("gpu")
def test_the_share_lasts_for_the_block() -> None:
    log: list[str] = []
    control = SMControlContextManager(20, noting(log, "comm"), noting(log, "compute"))
    assert (control.total_sms, control.comm_sms, control.compute_sms, control.is_active) == (132, 20, 112, True)
    assert repr(control) == "SMControlContextManager(20 of 132 SMs)"
    for _ in range(2):
        log.clear()
        with control:
            assert log == ["comm 20", "compute 112"]
        assert sorted(log[2:]) == ["comm 132", "compute 132"]
    assert control.num_uses == 2


@pytest.mark.usefixtures("gpu")
def test_an_error_in_the_block_restores_it() -> None:
    log: list[str] = []
    with pytest.raises(ValueError, match="lost"), SMControlContextManager(20, noting(log, "comm"), noting(log, "compute")):
        raise ValueError("lost")
    assert sorted(log[2:]) == ["comm 132", "compute 132"]


@pytest.mark.usefixtures("gpu")
def test_a_setter_that_fails_leaves_no_share_behind() -> None:
    log: list[str] = []
    control = SMControlContextManager(20, noting(log, "comm"), noting(log, "compute", fails_at=112))
    with pytest.raises(RuntimeError, match="compute cannot"), control:
        raise AssertionError
    assert sorted(log[2:]) == ["comm 132", "compute 132"]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("failing", ["comm", "compute"])
def test_one_that_cannot_be_restored_does_not_keep_the_other_from_it(failing: str) -> None:
    log: list[str] = []
    setters = [noting(log, name, 132 if name == failing else None) for name in ("comm", "compute")]
    with pytest.raises(RuntimeError, match=f"{failing} cannot"), SMControlContextManager(20, *setters):
        pass
    assert sorted(log[2:]) == ["comm 132", "compute 132"]


def test_a_cpu_has_none_to_share() -> None:
    log: list[str] = []
    control = SMControlContextManager(20, noting(log, "comm"), noting(log, "compute"), device="cpu")
    with control:
        pass
    assert log == []
    assert control.num_uses == 1
    assert control.why_inactive == "cpu has no multiprocessors to share out"
    assert repr(control) == "SMControlContextManager(inactive: cpu has no multiprocessors to share out)"


@pytest.mark.usefixtures("gpu")
def test_other_reasons_for_doing_nothing() -> None:
    assert SMControlContextManager(0, print).why_inactive == "comm_sms is 0: communication has no share of its own"
    assert SMControlContextManager(20).why_inactive == "no library was named that could be told its share"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("sms", [-1, 132, 500])
def test_impossible_shares_fail(sms: int) -> None:
    with pytest.raises(ConfigError, match=rf"comm_sms: must be a number of SMs from 0 to 131: cuda has 132, .* got {sms}\."):
        SMControlContextManager(sms)


def test_a_negative_share_fails_on_a_cpu_too() -> None:
    with pytest.raises(ConfigError, match=r"comm_sms: must be a number of SMs from 0; got -1\."):
        SMControlContextManager(-1, device="cpu")


def test_torch_is_told_what_to_leave_out() -> None:
    before = torch._C._get_sm_carveout_experimental()
    setter = torch_compute_sms(132)
    try:
        setter(112)
        assert torch._C._get_sm_carveout_experimental() == 20
        setter(132)
        assert torch._C._get_sm_carveout_experimental() is None
    finally:
        torch._C._set_sm_carveout_experimental(before)
