"""Clusters: what people write, files, links that groups cross, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from plait.cluster.cluster import Device, Link
from plait.cluster.devices import DEVICES
from plait.cluster.files import read_cluster, write_cluster
from plait.cluster.instances import INSTANCES
from plait.cluster.parse import parse_cluster
from plait.cluster.presets import preset_called
from plait.errors import ClusterError


@pytest.mark.parametrize(
    ("text", "hosts", "per_host", "device"),
    [
        ("A100", 1, 1, "A100-80"),
        ("8xA100", 1, 8, "A100-80"),
        ("16xh100", 2, 8, "H100"),
        ("64x8xH100", 64, 8, "H100"),
        ("128x4xA100-40", 128, 4, "A100-40"),
        ("8xRTX4090", 2, 4, "RTX4090"),
        ("2xrtx-3090", 1, 2, "RTX3090"),
        ("RTX 6000", 1, 1, "RTX6000-Ada"),
        ("144xGB200", 2, 72, "GB200"),
        ("p4d.24xlarge", 1, 8, "A100-40"),
        ("4xa3-highgpu-8g", 4, 8, "H100"),
        ("16xND96isr", 16, 8, "H100"),
        ("2x4xP5.48xlarge", 2, 4, "H100"),
    ],
)
def test_text_names_a_cluster(text: str, hosts: int, per_host: int, device: str) -> None:
    found = parse_cluster(text)
    assert (found.hosts, found.devices_per_host, found.device.name) == (hosts, per_host, device)
    assert found.size == hosts * per_host


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("8xZ9", "no device 'Z9'"),
        ("x8", "no device"),
        ("8 A100", "not a cluster"),
        ("12xA100", "12 devices do not fill hosts of 8"),
        ("0x8xA100", "hosts=0"),
        ("0xp4d.24xlarge", "hosts=0"),
        ("2x16xp4d.24xlarge", "has 8 devices, not 16"),
        ("0xA100", "devices_per_host=0"),
        ("nowhere.yaml", "cannot be read"),
    ],
)
def test_bad_text_is_refused(text: str, what: str) -> None:
    with pytest.raises(ClusterError, match=what) as caught:
        parse_cluster(text)
    assert caught.value.fix


def test_this_machine_must_have_been_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ClusterError, match="not been measured"):
        parse_cluster("this")
    write_cluster(parse_cluster("2xcpu"), tmp_path / ".cache" / "plait" / "this.yaml")
    assert parse_cluster("this") == parse_cluster("2xcpu")


@pytest.mark.parametrize("name", DEVICES)
def test_file_returns_what_was_written(name: str, tmp_path: Path) -> None:
    cluster = replace(parse_cluster(f"2x8x{name}"), price_per_hour=2.5)
    cluster = replace(cluster, device=replace(cluster.device, timed={"mm": 1.5e-6}))
    write_cluster(cluster, tmp_path / "cluster.yaml", {"load": 0.1})
    assert read_cluster(tmp_path / "cluster.yaml") == cluster


def test_file_changes_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(
        "device: {preset: A100-80, memory: 70GiB}\nhosts: 4\nprice_per_hour: 1.5\nbetween: {bandwidth: 12.5e9}\n"
    )
    found, base = read_cluster(path), parse_cluster("4x8xA100")
    assert found.device.memory_bytes == 70 * 2**30
    assert found.device.peak_flops == base.device.peak_flops
    assert found.between == replace(base.between, bandwidth=12.5e9)
    assert (found.host, found.size, found.name, found.price_per_hour) == (base.host, 32, "ours", 1.5)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("hosts: 2", "`device` is missing"),
        ("device: A100\nhost: 5", "line 2: host=5: expected a table"),
        ("device: A100\nspeed: 5", "line 2: unknown key 'speed'"),
        ("device: A100\nhosts: two", "line 2: hosts='two': expected a whole number"),
        ("device: A100\nhosts: -1", "hosts=-1"),
        ("device: {preset: A100, memory: much}", "much"),
        ("device: {name: x, memory: 1GiB}", "no peak_flops, memory_bandwidth"),
        ("device: {preset: A100, peak_flops: {int4: 1}}", "rate for int4"),
        (
            "device: {preset: A100, peak_flops: {float32: fast}}",
            "peak_flops.float32='fast': expected a number",
        ),
        ("device: {preset: A100, peak_flops: {float32: 0}}", "float32=0"),
        ("device: A100\nbetween: {bandwidth: -1}", "bandwidth=-1"),
        ("device: A100\nbetween: {latency_s: .nan}", "line 2: .nan is not a finite number"),
        ("device: A100\nbetween: {shared: maybe}", "shared='maybe': expected true or false"),
        (
            "device: {name: x, memory: 1GiB, memory_bandwidth: 1e9, peak_flops: {float32: 1e9}}",
            "no link `host`",
        ),
        ("device: [", "line 1: it is not YAML|line 2: it is not YAML"),
        ("- 1", "expected a cluster, a table; it holds a list"),
    ],
)
def test_bad_files_are_refused(text: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ClusterError, match=what) as caught:
        read_cluster(path)
    assert str(path) in caught.value.what and caught.value.fix


def test_groups_cross_the_links_that_they_must() -> None:
    cluster = parse_cluster("4x8xH100")
    inside = cluster.link_of(1, 8)
    assert (inside.size, inside.per_host, inside.hosts, inside.inner) == (8, 8, 1, cluster.host)
    across = cluster.link_of(8, 4)
    assert (across.per_host, across.hosts, across.outer, across.at_once) == (1, 4, cluster.between, 8)
    mixed = cluster.link_of(4, 8)
    assert (mixed.per_host, mixed.hosts, mixed.at_once) == (2, 4, 4)
    for stride, count in ((1, 8), (8, 4), (4, 8), (1, 32), (2, 4)):
        by_stride = cluster.link_of(stride, count)
        assert by_stride == cluster.link_among([stride * i for i in range(count)])


def test_neighbours_use_their_own_link() -> None:
    cluster = parse_cluster("8xK80")
    assert cluster.link_of(1, 2).inner == cluster.pair == cluster.link_among((2, 3)).inner
    assert cluster.link_among((1, 2)).inner == cluster.host == cluster.link_of(2, 2).inner


def test_rate_falls_back_to_what_the_device_can() -> None:
    assert DEVICES["V100"].device.rate("bfloat16") == 15.7e12
    assert DEVICES["A100-80"].device.rate("float8") == 312e12
    only = Device(name="x", memory_bytes=1, peak_flops={"float32": 5.0}, memory_bandwidth=1.0)
    assert only.rate("float64") == only.rate("tf32") == 5.0


def test_links_need_a_bandwidth() -> None:
    with pytest.raises(ClusterError, match="bandwidth=0"):
        Link(latency_s=1e-6, bandwidth=0.0)


def test_every_preset_can_be_planned_for_and_names_its_source() -> None:
    for name, preset in {**DEVICES, **INSTANCES}.items():
        device = preset.device
        assert preset.source and preset.devices_per_host >= 1, name
        rates = [
            device.peak_flops[dtype]
            for dtype in ("float32", "tf32", "float16", "float8")
            if dtype in device.peak_flops
        ]
        assert rates == sorted(rates), f"{name}: a narrower type is not slower"
        assert device.rate("bfloat16") > 0 and device.memory_bandwidth < 1e13


def test_the_cloud_s_network_is_shared_by_the_devices_of_a_host() -> None:
    whole, alone = parse_cluster("2xp5.48xlarge"), parse_cluster("2xp5.4xlarge")
    assert whole.between.bandwidth == pytest.approx(50e9)
    assert alone.between.bandwidth == pytest.approx(12.5e9)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100 80GB PCIe", "A100-80"),
        ("Tesla V100-SXM2-16GB", "V100-16"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000-Ada"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla T4", "T4"),
        ("Tesla K80", "K80"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA Quadro P400", None),
    ],
)
def test_what_a_driver_says_is_found(driver: str, name: str | None) -> None:
    found = preset_called(driver)
    assert (None if found is None else found.device.name) == name


def test_the_machine_itself_is_called_so_in_sentences() -> None:
    here = parse_cluster("2xA100")
    assert (here.title, replace(here, name="this").title) == ("2xA100", "this machine")
