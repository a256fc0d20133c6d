"""What people write and read: bytes, counts, FLOPs, seconds."""

import pytest

from plait.units import (
    format_bytes,
    format_count,
    format_flops,
    format_seconds,
    parse_bytes,
    parse_rate,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("0", 0),
        ("70GiB", 70 * 2**30),
        ("512 MB", 512 * 10**6),
        ("1.5g", 1_500_000_000),
        (" 2 kib ", 2048),
        ("3B", 3),
        ("1TiB", 2**40),
        ("0.5ki", 512),
    ],
)
def test_bytes_are_parsed(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "says"), [("much", "70GiB"), ("", "70GiB"), ("-5", "70GiB"), ("5 XB", "unknown unit 'XB'")]
)
def test_what_is_no_amount_is_refused_with_an_example(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (200 * 2**20, "200 MiB"),
        (2**70, "1048576 PiB"),
    ],
)
def test_bytes_are_printed_in_binary_units(value: float, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (999, "999"), (124_439_808, "124M"), (7_100_000, "7.1M"), (175e9, "175B")]
)
def test_counts_are_printed_with_a_suffix(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(("value", "text"), [(12, "12 FLOP"), (3.14e12, "3.1 TFLOP"), (3.14e23, "314 ZFLOP")])
def test_flops_are_printed_in_decimal_units(value: float, text: str) -> None:
    assert format_flops(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (7200.0, "2 h 0 min"),
        (250.0, "4 min 10 s"),
        (59.0, "59 s"),
        (1.0, "1 s"),
        (0.0123, "12.3 ms"),
        (5e-6, "5 us"),
        (2e-9, "2 ns"),
        (0.0, "0 ns"),
    ],
)
def test_seconds_are_printed_from_nanoseconds_to_hours(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "rate"), [("1Gbit", 125e6), ("100 Mbit", 12.5e6), ("10MB", 1e7), ("0.5kB", 500.0)]
)
def test_bandwidths_are_read(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "1", "0Gbit", "1.2.3GB", ".GB", "-1GB", "1Gb/s"])
def test_what_is_no_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no bandwidth"):
        parse_rate(text)


def test_times_are_read() -> None:
    assert [parse_seconds(text) for text in ("1ms", "50us", "0.2s")] == pytest.approx([1e-3, 50e-6, 0.2])
    for text in ("", "1", "1.2.3s", ".s", "1min"):
        with pytest.raises(ValueError, match="is no time"):
            parse_seconds(text)
