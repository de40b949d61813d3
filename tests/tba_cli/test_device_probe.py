"""The device probe: kvikio's answers, and a device that cannot be measured."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest.mock import Mock, PropertyMock

import pytest
import torch

from tba.cli._doctor import device_probe
from tba.cli._doctor.device_probe import DeviceFacts, KvikioFacts, probe_devices, probe_kvikio


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """What makes kvikio's stores, which is installed."""
    monkeypatch.setitem(sys.modules, "kvikio", SimpleNamespace(__version__="26.10.00"))
    made = Mock()
    monkeypatch.setattr(device_probe, "KvikioStore", made)
    return made


@pytest.mark.parametrize("mode", ["compat", "gds"])
def test_kvikio_is_asked_for_its_mode(mode: str, store: Mock) -> None:
    store.return_value.mode = mode
    assert probe_kvikio("/disk") == KvikioFacts(version="26.10.00", mode=mode)
    assert probe_kvikio(None) == KvikioFacts(version="26.10.00")
    store.assert_called_once_with("/disk")
    store.return_value.close.assert_called_once()


def test_a_kvikio_that_cannot_open_a_file_says_why(store: Mock) -> None:
    type(store.return_value).mode = PropertyMock(side_effect=OSError("libcuda.so.1: cannot open\nmore"))
    assert probe_kvikio("/disk") == KvikioFacts(
        version="26.10.00", error="the NVIDIA driver (libcuda.so.1) is not installed"
    )
    store.return_value.close.assert_called_once()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'kvikio'", name="kvikio"), "not installed"),
        (ModuleNotFoundError("No module named 'cupy'", name="cupy"), "cupy is not installed"),
        (ImportError("libcufile.so.0: cannot open\nmore"), "it cannot be used: libcufile.so.0: cannot open"),
        (RuntimeError("Failure finding cuda"), "it cannot be used: Failure finding cuda"),
    ],
)
def test_a_kvikio_that_does_not_load_says_why(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> object:
        raise error

    monkeypatch.setattr(device_probe, "importlib", SimpleNamespace(import_module=load))
    assert probe_kvikio("/disk") == KvikioFacts(error=said)


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="A GPU", total_memory=1000)
    monkeypatch.setattr(device_probe, "available", lambda: ("cuda", torch.cuda))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (600, 1000))


@pytest.mark.usefixtures("one_device")
def test_a_device_is_told_with_its_memory() -> None:
    assert probe_devices() == (DeviceFacts(index=0, name="A GPU", total_bytes=1000, free_bytes=600),)


@pytest.mark.usefixtures("one_device")
def test_a_device_that_cannot_be_used_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int) -> tuple[int, int]:
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    (device,) = probe_devices()
    assert (device.error, device.total_bytes) == ("CUDA error: out of memory", 1000)


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_probe, "available", lambda: None)
    assert probe_devices() == ()
    monkeypatch.setattr(device_probe, "available", lambda: ("mps", torch.mps))  # it has no streams
    assert probe_devices() == ()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_real_devices_are_told() -> None:
    for device in probe_devices():
        assert device.error is None
        assert 0 < device.free_bytes <= device.total_bytes
