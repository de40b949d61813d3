"""The backend refuses what it cannot do, and needs nothing of a compiler that has another form."""

from __future__ import annotations

from typing import Any

import pytest

from tba import ConfigError, OffloadConfig, OffloadWarning, compile_backend
from tba._compiled import inductor


def test_this_torch_has_all_that_the_backend_needs_of_the_compiler() -> None:
    assert inductor.missing() == []


def test_what_a_compiler_lacks_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {"compile_fx": ("torch._inductor.compile_fx", ("other",)), "gone": ("torch._inductor.memory", ())}
    monkeypatch.setattr(inductor, "_NEEDED", {**needed, "away": ("torch._no_module", ())})
    monkeypatch.setattr(inductor, "_SETTINGS", {"torch._inductor.config": ("custom_partitioner_fn", "no_setting")})
    assert inductor.missing.__wrapped__() == [
        "torch._inductor.compile_fx.compile_fx",
        "torch._inductor.memory.gone",
        "torch._no_module.away",
        "torch._inductor.config.no_setting",
    ]


def test_a_compiler_of_another_form_compiles_as_ever_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(inductor, "missing", lambda: ["torch._inductor.gone"])
    monkeypatch.setattr(inductor, "take", lambda name: lambda *_, config_patches: asked.append(config_patches))
    backend = compile_backend("nvme")
    with pytest.warns(OffloadWarning, match=r"this torch lacks torch\._inductor\.gone"):
        backend(None, [])
    backend(None, [], options={"max_autotune": True})  # a second warning would be an error
    assert asked == [{}, {"max_autotune": True}]
    backend.close()


@pytest.mark.parametrize("settings", [{"compress": "exact"}, {"blocks": "Block"}, {"policy": "tba"}])
def test_a_setting_without_effect_in_a_graph_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"compile_backend: {next(iter(settings))}="):
        compile_backend(**settings)


def test_cuda_graphs_are_refused() -> None:
    backend = compile_backend("nvme")
    with pytest.raises(ConfigError, match="CUDA graphs"):
        backend(None, [], mode="reduce-overhead")
    backend.close()


def test_settings_come_from_a_config_and_the_arguments() -> None:
    backend = compile_backend("nvme", config=OffloadConfig(checksum=True), io_timeout=3)
    assert (backend.config.tier, backend.config.checksum, backend.config.io_timeout) == ("nvme", True, 3.0)
    backend.close()
