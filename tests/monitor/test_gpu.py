"""GPU metrics with a fake NVML, which has the names and signatures of the real pynvml.

pytest tests/monitor/test_gpu.py
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.monitor.fake_nvml import GIB, FakeGpu, FakeNvml
from tests.train.fakes import FakeClock
from toolkit.monitor.system import gpu as gpu_module
from toolkit.monitor.system import gpu_metrics
from toolkit.monitor.system.gpu import NodeGpus, XidEvents, find_gpus, open_gpus
from toolkit.monitor.system.gpu_codes import HARMFUL, REASONS, XIDS, is_harmful, throttle_reasons, xid_info

HOPPER = {
    "name": "NVIDIA H100 80GB HBM3",
    "uuid": "GPU-00000000-0000-0000-0000-000000000000",
    "utilization_percent": 97,
    "memory_used_bytes": 60 * GIB,
    "memory_total_bytes": 80 * GIB,
    "power_watts": 612.5,
    "power_limit_watts": 700.0,
    "temperature_celsius": 64,
    "memory_temperature_celsius": 71,
    "sm_clock_mhz": 1755,
    "sm_clock_max_mhz": 1980,
    "sm_clock_ratio": 0.886,
    "memory_clock_mhz": 2619,
    "memory_clock_max_mhz": 2619,
    "throttle_reasons": "power-cap",
    "throttled": 0,
    "throttled_percent": 0.0,
    "ecc_corrected_errors": 2,
    "ecc_uncorrected_errors": 0,
    "remapped_rows_corrected": 1,
    "remapped_rows_uncorrected": 0,
    "row_remap_pending": 0,
    "row_remap_failed": 0,
    "sm_active_percent": 88.25,
    "sm_occupancy_percent": 30.0,
    "tensor_active_percent": 41.5,
    "dram_active_percent": 35.0,
    "pcie_tx_bytes_per_second": 100 * 2**20,
    "pcie_rx_bytes_per_second": 200 * 2**20,
    "nvlink_tx_bytes_per_second": 5000 * 2**20,
    "nvlink_rx_bytes_per_second": 5001 * 2**20,
    "nvlink_crc_errors": 0,
    "nvlink_replay_errors": 3,
    "nvlink_recovery_errors": 0,
}


def opened(nvml: FakeNvml, count: int = 8, selection: str | None = None) -> NodeGpus:
    nvml.nvmlInit()
    return NodeGpus(nvml, find_gpus(nvml, selection)[:count], FakeClock())


def second_reading(gpus: NodeGpus, *, after: float = 10.0) -> dict[str, Any]:
    gpus.read()
    gpus._clock.now += after  # type: ignore[attr-defined]
    return gpus.read()


def of(row: dict[str, Any], index: int) -> dict[str, Any]:
    return {
        name.removeprefix(f"gpu/{index}/"): value
        for name, value in row.items()
        if name.startswith(f"gpu/{index}/")
    }


def test_hopper_gpu_has_all_metrics() -> None:
    row = second_reading(opened(FakeNvml([FakeGpu()])))
    assert of(row, 0) == HOPPER
    assert {name: value for name, value in row.items() if name.count("/") == 1} == {
        "gpu/count": 1,
        "gpu/utilization_percent_mean": 97,
        "gpu/tensor_active_percent_mean": 41.5,
        "gpu/sm_clock_ratio_min": 0.886,
        "gpu/temperature_celsius_max": 64,
        "gpu/power_watts_sum": 612.5,
        "gpu/memory_used_bytes_max": 60 * GIB,
        "gpu/throttled_sum": 0,
    }


def test_rates_need_two_readings() -> None:
    first = of(opened(FakeNvml([FakeGpu()])).read(), 0)
    assert HOPPER.keys() - first.keys() == {
        "throttled_percent",
        "sm_active_percent",
        "sm_occupancy_percent",
        "tensor_active_percent",
        "dram_active_percent",
        "pcie_tx_bytes_per_second",
        "pcie_rx_bytes_per_second",
        "nvlink_tx_bytes_per_second",
        "nvlink_rx_bytes_per_second",
    }


def test_older_gpu_and_driver_omit_unsupported_metrics(caplog: pytest.LogCaptureFixture) -> None:
    """A V100 with a driver of 2021: older functions, link counters, no row remapping, no GPM."""
    tx, rx = (
        (kind, gpu_metrics.ALL_LINKS)
        for kind in (
            pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
            pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
        )
    )
    old = FakeGpu(
        name="Tesla V100",
        gpm={},
        fields={tx: 1000, rx: 0},
        lacks={
            "nvmlDeviceGetTemperatureV": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            "nvmlDeviceGetCurrentClocksEventReasons": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            "nvmlDeviceGetRemappedRows": pynvml.NVML_ERROR_NOT_SUPPORTED,
            "nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_NOT_SUPPORTED,
        },
    )
    nvml = FakeNvml([old])
    gpus = opened(nvml)
    with caplog.at_level("DEBUG", logger="toolkit.monitor.system.gpu"):
        gpus.read()
        old.fields[tx] = 1000 + 2000  # KiB
        gpus._clock.now += 10  # type: ignore[attr-defined]
        row = of(gpus.read(), 0)
        gpus.read()
    assert row["temperature_celsius"] == 64
    assert row["throttle_reasons"] == "power-cap"
    assert row["nvlink_tx_bytes_per_second"] == 204_800
    assert row["nvlink_rx_bytes_per_second"] == 0
    assert (row["pcie_tx_bytes_per_second"], row["pcie_rx_bytes_per_second"]) == (1_500_000, 2_500_000)
    gone = {
        "power_watts",
        "remapped_rows_corrected",
        "tensor_active_percent",
        "memory_temperature_celsius",
        "nvlink_crc_errors",
    }
    assert not gone & row.keys()
    messages = [record.getMessage().removeprefix("GPU 0 has no ") for record in caplog.records]
    assert messages == [f"{what}: Not Supported" for what in ("power", "remapped_rows", "performance")]
    assert nvml.calls.count("nvmlDeviceGetPowerUsage") == 1, "what a GPU lacks is not asked for again"


def test_hopper_link_errors_are_summed_over_links() -> None:
    kinds = (pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC, pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY)
    fields: dict[int | tuple[int, int], float] = {
        (kind, link): kind + link for kind in kinds for link in range(3)
    }
    row = of(
        opened(FakeNvml([FakeGpu(fields={**fields, pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT: 3})])).read(), 0
    )
    assert row["nvlink_crc_errors"] == 3 * kinds[0] + 3
    assert row["nvlink_replay_errors"] == 3 * kinds[1] + 3
    assert "nvlink_recovery_errors" not in row


def test_throttled_time_between_samples_is_measured() -> None:
    gpu = FakeGpu()
    gpus = opened(FakeNvml([gpu]))
    gpus.read()
    gpu.fields[pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN] = 2.5e9
    gpus._clock.now += 10  # type: ignore[attr-defined]
    row = of(gpus.read(), 0)
    assert row["throttled_percent"] == 25.0
    assert row["throttled"] == 0  # at this moment


def test_transient_error_omits_one_metric_of_one_sample() -> None:
    gpu = FakeGpu(lacks={"nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_UNKNOWN})
    gpus = opened(FakeNvml([gpu]))
    assert "power_watts" not in of(gpus.read(), 0)
    gpu.lacks.clear()
    assert of(gpus.read(), 0)["power_watts"] == 612.5


def test_unexpected_result_omits_one_metric_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    gpus = opened(FakeNvml([FakeGpu(remapped=(1, 0, 0))]))  # type: ignore[arg-type]
    gpus.read()
    row = of(second_reading(gpus), 0)
    assert HOPPER.keys() - row.keys() == {
        "remapped_rows_corrected",
        "remapped_rows_uncorrected",
        "row_remap_pending",
        "row_remap_failed",
    }
    assert [record.getMessage() for record in caplog.records] == [
        "GPU 0: no remapped_rows: ValueError: not enough values to unpack (expected 4, got 3)"
    ]


def test_lost_gpu_is_reported_and_not_queried_again() -> None:
    nvml = FakeNvml([FakeGpu(), FakeGpu()])
    gpus = opened(nvml)
    gpus.read()
    nvml.gpus[1].lost = True
    row = gpus.read()
    assert of(row, 1) == {"lost": 1}
    assert of(row, 0)["utilization_percent"] == 97
    assert row["gpu/power_watts_sum"] == 612.5
    before = len(nvml.calls)
    nvml.gpus[1].lost = False
    assert of(gpus.read(), 1) == {"lost": 1}, "a GPU that was lost needs a reset and a new process"
    assert len(nvml.calls) - before < 30
    gpus.close()
    assert nvml.started == 0


def many() -> FakeNvml:
    gpus = [FakeGpu() for _ in range(4)]
    gpus[2].slices = [("MIG-aaaa", 10 * GIB), ("MIG-bbbb", 20 * GIB)]
    return FakeNvml(gpus)


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (None, ["GPU-00000000", "GPU-00000001", "MIG-aaaa", "GPU-00000003"]),
        ("", []),
        ("3,0", ["GPU-00000003", "GPU-00000000"]),
        ("1, 9, 0", ["GPU-00000001"]),  # up to the first unknown one
        ("GPU-00000003,GPU-00000001", ["GPU-00000003", "GPU-00000001"]),
        ("GPU-0", []),  # an ambiguous prefix
        ("MIG-bbbb", ["MIG-bbbb"]),
        ("MIG-cccc,0", []),
        ("2", ["MIG-aaaa"]),
    ],
)
def test_selection_matches_cuda_visible_devices(selection: str | None, expected: list[str]) -> None:
    nvml = many()
    nvml.nvmlInit()
    gpus = find_gpus(nvml, selection)
    assert [gpu.uuid[: len("GPU-00000000")] for gpu in gpus] == expected
    assert [gpu.index for gpu in gpus] == list(range(len(expected)))


def test_mig_slice_has_own_memory_and_clocks_of_the_board() -> None:
    row = of(second_reading(opened(many(), selection="MIG-bbbb")), 0)
    assert row["memory_total_bytes"] == 20 * GIB
    assert row["sm_clock_mhz"] == 1755
    assert row["tensor_active_percent"] == 41.5
    assert "utilization_percent" not in row  # not available for slices


def test_gpu_lost_before_the_start_is_not_counted() -> None:
    nvml = FakeNvml([FakeGpu(lost=True), FakeGpu()])
    assert [gpu.uuid[:12] for gpu in opened(nvml).gpus] == ["GPU-00000001"]


def test_only_one_gpu_per_rank_is_sampled() -> None:
    nvml = FakeNvml([FakeGpu() for _ in range(8)])
    gpus = open_gpus(nvml, 2, None)
    assert gpus is not None
    assert [gpu.index for gpu in gpus.gpus] == [0, 1]


def test_no_driver_or_no_gpu_opens_nothing() -> None:
    assert open_gpus(FakeNvml([FakeGpu()], driver=False), 1, None) is None
    nvml = FakeNvml([FakeGpu()])
    assert open_gpus(nvml, 1, "") is None
    assert nvml.started == 0


def test_xid_events_name_their_gpu() -> None:
    nvml = FakeNvml(
        [FakeGpu(), FakeGpu(), FakeGpu(lacks={"nvmlDeviceRegisterEvents": pynvml.NVML_ERROR_NOT_SUPPORTED})]
    )
    gpus = opened(nvml, selection="1,2")
    events = XidEvents(nvml, gpus.gpus)
    assert events.watched == 1
    assert events.wait(1) is None
    nvml.gpus[1].lost = True  # its UUID cannot be read any more
    nvml.happens(1, xid=79)
    nvml.happens(0, xid=31)
    assert events.wait(100) == (gpus.gpus[0], 79)
    assert events.wait(100) == (None, 31)
    events.close()
    gpus.close()
    assert nvml.started == 0


# ---- what numbers mean


def test_throttle_bits_match_pynvml() -> None:
    of_pynvml = {
        value
        for name, value in vars(pynvml).items()
        if name.startswith(("nvmlClocksEventReason", "nvmlClocksThrottleReason")) and isinstance(value, int)
    }
    single = {bit for bit in of_pynvml if bit and bit & (bit - 1) == 0}
    assert single <= REASONS.keys()
    hw = (
        pynvml.nvmlClocksEventReasonHwSlowdown,
        pynvml.nvmlClocksEventReasonHwThermalSlowdown,
        pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
        pynvml.nvmlClocksEventReasonSwThermalSlowdown,
    )
    assert {REASONS[bit].name for bit in hw} == HARMFUL


@pytest.mark.parametrize(
    ("bits", "names", "harmful"),
    [
        (0, (), False),
        (1, ("idle",), False),
        (0x44, ("power-cap", "hardware-thermal"), True),
        (0x80, ("power-brake",), True),
        (0x2004, ("power-cap", "bit-13"), False),
        (0x202, ("application-clocks", "board-limit"), False),
    ],
)
def test_throttle_bits_have_names(bits: int, names: tuple[str, ...], harmful: bool) -> None:
    assert throttle_reasons(bits) == names
    assert is_harmful(names) is harmful


def test_common_xids_are_explained() -> None:
    assert {13, 31, 43, 45, 48, 63, 64, 74, 79, 92, 94, 95, 119, 120} <= XIDS.keys()
    assert all(one.meaning and one.next_step for one in XIDS.values())
    assert "not in this toolkit's table" in xid_info(9999).meaning


# ---- the fake and the real


def used_names(path: str) -> tuple[set[str], list[tuple[str, int]]]:
    """Attributes of ``nvml`` (or ``self._nvml``) in a file, and its calls with their numbers of arguments."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))

    def of_nvml(node: ast.AST) -> str | None:
        if not isinstance(node, ast.Attribute):
            return None
        owner = node.value
        named = (isinstance(owner, ast.Name) and owner.id == "nvml") or (
            isinstance(owner, ast.Attribute) and owner.attr == "_nvml"
        )
        return node.attr if named else None

    names = {name for node in ast.walk(tree) if (name := of_nvml(node)) is not None}
    calls = [
        (name, len(node.args))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (name := of_nvml(node.func)) is not None
    ]
    return names, calls


USED = [used_names(str(module.__file__)) for module in (gpu_module, gpu_metrics)]


def test_pynvml_has_all_used_names_and_signatures() -> None:
    names, calls = set().union(*(names for names, _ in USED)), [call for _, calls in USED for call in calls]
    assert len(names) > 60
    assert {"nvmlDeviceGetUtilizationRates", "NVML_FI_DEV_MEMORY_TEMP", "nvmlEventSetWait_v2"} <= names, (
        "the search finds them"
    )
    assert [name for name in sorted(names) if not hasattr(pynvml, name)] == []
    for name, count in calls:
        if name.startswith("nvml"):
            inspect.signature(getattr(pynvml, name)).bind(*range(count))
    assert not hasattr(pynvml, "nvmlDeviceGetNoSuchThing")


def test_fake_nvml_has_the_signatures_of_pynvml() -> None:
    faked = [name for name in vars(FakeNvml) if name.startswith("nvml")]
    used = {
        name
        for names, _ in USED
        for name in names
        if name.startswith("nvml") and callable(getattr(pynvml, name))
    }
    assert used <= set(faked)
    for name in faked:
        ours, theirs = (
            list(inspect.signature(function).parameters)
            for function in (getattr(FakeNvml, name), getattr(pynvml, name))
        )
        assert ours[1:] == theirs, name
    with pytest.raises(AttributeError):
        _ = FakeNvml([]).nvmlDeviceGetSerial
