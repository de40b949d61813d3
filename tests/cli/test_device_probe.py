"""The device probe: PCIe links from sysfs, kvikio's answers, and a device that cannot be measured."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tba import _device_probe
from tba._device_probe import (
    KvikioFacts,
    Link,
    locked_memory_limit_bytes,
    probe_devices,
    probe_kvikio,
    read_link,
)

BUS_ID = "0000:3b:00.0"


def sysfs(root: Path, width: str = "16", most_width: str = "16", speed: str = "16.0 GT/s PCIe") -> Path:
    (root / BUS_ID).mkdir()
    texts = {
        "current_link_width": width,
        "max_link_width": most_width,
        "current_link_speed": speed,
        "max_link_speed": "32.0 GT/s PCIe",
    }
    for name, text in texts.items():
        (root / BUS_ID / name).write_text(text + "\n")
    return root


def test_a_link_is_read(tmp_path: Path) -> None:
    assert read_link(BUS_ID, sysfs(tmp_path, width="8")) == Link(8, 16, 16.0, 32.0)


@pytest.mark.parametrize("speed", ["8 GT/s", "8.0 GT/s PCIe", "8.0 GT/s"])
def test_every_form_of_a_speed_is_read(speed: str, tmp_path: Path) -> None:
    link = read_link(BUS_ID, sysfs(tmp_path, speed=speed))
    assert link is not None
    assert link.speed_gt_s == 8.0


def test_a_link_the_system_does_not_show(tmp_path: Path) -> None:
    assert read_link(BUS_ID, tmp_path) is None
    sysfs(tmp_path)
    (tmp_path / BUS_ID / "current_link_speed").write_text("Unknown\n")
    assert read_link(BUS_ID, tmp_path) is None
    (tmp_path / BUS_ID / "current_link_speed").write_text("16.0 GT/s PCIe\n")
    (tmp_path / BUS_ID / "current_link_width").write_text("0\n")  # a virtual function
    assert read_link(BUS_ID, tmp_path) is None


@pytest.mark.parametrize(
    ("width", "speed", "gb_per_s"),
    [(1, 2.5, 0.25), (16, 5.0, 8.0), (16, 8.0, 15.75), (16, 16.0, 31.51), (16, 32.0, 63.02), (16, 64.0, 121.0)],
)
def test_what_a_link_carries(width: int, speed: float, gb_per_s: float) -> None:
    # The figures of the PCI Express specification for generations 1 to 6.
    assert Link(width, width, speed, speed).bytes_per_s / 1e9 == pytest.approx(gb_per_s, abs=0.01)


class FakeStore:
    def __init__(self, directory: str, mode: str = "", error: Exception | None = None) -> None:
        self.directory, self._mode, self._error = directory, mode, error
        self.closed = False

    @property
    def mode(self) -> str:
        if self._error is not None:
            raise self._error
        return self._mode

    def close(self) -> None:
        self.closed = True


def installed(name: str) -> object:
    return {"kvikio": SimpleNamespace(__version__="26.10.00")}[name]


@pytest.mark.parametrize("mode", ["compat", "gds"])
def test_kvikio_is_asked_for_its_mode(mode: str) -> None:
    stores: list[FakeStore] = []

    def make(directory: str) -> Any:
        stores.append(FakeStore(directory, mode))
        return stores[0]

    assert probe_kvikio("/disk", load=installed, make=make) == KvikioFacts(version="26.10.00", mode=mode)
    assert [(store.directory, store.closed) for store in stores] == [("/disk", True)]
    assert probe_kvikio(None, load=installed, make=make) == KvikioFacts(version="26.10.00")
    assert len(stores) == 1


def test_a_kvikio_that_cannot_open_a_file_says_why() -> None:
    store: Any = FakeStore("/disk", error=OSError("libcuda.so.1: cannot open\nmore"))
    facts = probe_kvikio("/disk", load=installed, make=lambda _: store)
    assert facts == KvikioFacts(version="26.10.00", error="OSError: libcuda.so.1: cannot open")
    assert store.closed


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'kvikio'", name="kvikio"), "kvikio is not installed"),
        (ModuleNotFoundError("No module named 'cupy'", name="cupy"), "No module named 'cupy'"),
        (ImportError("libcufile.so.0: cannot open\nmore"), "ImportError: libcufile.so.0: cannot open"),
        (RuntimeError("Failure finding cuda"), "RuntimeError: Failure finding cuda"),
    ],
)
def test_a_kvikio_that_does_not_load_says_why(error: Exception, said: str) -> None:
    def load(name: str) -> object:
        raise error

    assert probe_kvikio("/disk", load=load) == KvikioFacts(error=said)


def test_the_locked_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (4096, 8192) if kind == resource.RLIMIT_MEMLOCK else None)
    assert locked_memory_limit_bytes() == 4096
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert locked_memory_limit_bytes() is None


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="A GPU", total_memory=1000, pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (600, 1000))


@pytest.mark.usefixtures("one_device")
def test_a_device_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(_device_probe, "_copy_rates", lambda device: (asked.append(device), (2e10, 1e10))[1])
    monkeypatch.setattr(
        _device_probe, "read_link", lambda bus_id: Link(16, 16, 16.0, 16.0) if bus_id == BUS_ID else None
    )
    (device,) = probe_devices()
    assert asked == [torch.device("cuda", 0)]
    assert (device.index, device.name, device.total_bytes, device.free_bytes) == (0, "A GPU", 1000, 600)
    assert (device.to_device_bytes_per_s, device.to_host_bytes_per_s) == (2e10, 1e10)
    assert (device.bus_id, device.link, device.error) == (BUS_ID, Link(16, 16, 16.0, 16.0), None)


@pytest.mark.usefixtures("one_device")
def test_a_device_that_cannot_be_measured_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> tuple[float, float]:
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(_device_probe, "_copy_rates", refuse)
    (device,) = probe_devices()
    assert device.error == "CUDA error: out of memory"
    assert device.to_device_bytes_per_s is device.to_host_bytes_per_s is None
    assert device.free_bytes == 600


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert probe_devices() == ()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_real_devices_are_measured() -> None:
    for device in probe_devices():
        assert device.error is None
        assert device.to_device_bytes_per_s is not None
        assert device.to_host_bytes_per_s is not None
        assert min(device.to_device_bytes_per_s, device.to_host_bytes_per_s) > 0
        assert 0 < device.free_bytes <= device.total_bytes
