from __future__ import annotations

from pathlib import Path

import pytest

from src.spot.prices import FixedPrices, PriceError, PriceTable, read_catalog, read_prices

CATALOG = Path(__file__).parents[2] / "data" / "prices" / "gcp_verda_gpu_prices.csv"


@pytest.fixture
def write(tmp_path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "prices.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_fixed_prices_hold_everywhere_and_always():
    prices = FixedPrices(reserved_usd_per_gpu_hour=10.0, spot_usd_per_gpu_hour=2.5)
    assert prices.price_usd_per_gpu_hour("anywhere", "reserved", 0) == 10.0
    assert prices.price_usd_per_gpu_hour("elsewhere", "spot", 1e6) == 2.5
    assert prices.usd_per_gpu("anywhere", "spot", 1800, 5400) == 2.5


def test_spot_may_be_dearer_but_no_price_is_negative():
    FixedPrices(reserved_usd_per_gpu_hour=1.0, spot_usd_per_gpu_hour=2.0)
    with pytest.raises(ValueError, match="spot_usd_per_gpu_hour must be finite and not negative, got -1"):
        FixedPrices(reserved_usd_per_gpu_hour=1.0, spot_usd_per_gpu_hour=-1)
    with pytest.raises(ValueError, match="role must be one of reserved, spot, got 'free'"):
        FixedPrices(reserved_usd_per_gpu_hour=1.0, spot_usd_per_gpu_hour=1).price_usd_per_gpu_hour("z", "free", 0)


def test_a_table_has_zones_and_times(write):
    prices = read_prices(
        write("zone,time_s,reserved_usd_per_gpu_hour,spot_usd_per_gpu_hour\na,100,4,1\nb,0,5,6\na,3700,4,2\n")
    )
    assert prices.zones == ("a", "b")
    at = [prices.price_usd_per_gpu_hour("a", "spot", time_s) for time_s in (0, 100, 3699, 3700, 1e9)]
    assert at == [1, 1, 1, 2, 2]
    assert prices.price_usd_per_gpu_hour("b", "spot", 0) == 6
    assert prices.usd_per_gpu("a", "spot", 1900, 5500) == pytest.approx(0.5 * 1 + 0.5 * 2)
    assert prices.usd_per_gpu("a", "reserved", 1900, 5500) == pytest.approx(4)
    assert prices.usd_per_gpu("a", "spot", 50, 50) == 0


def test_a_table_without_times_never_changes(write):
    prices = read_prices(write("zone,reserved_usd_per_gpu_hour,spot_usd_per_gpu_hour\na,4,1\n"))
    assert prices.usd_per_gpu("a", "spot", 0, 7200) == 2


def test_an_unknown_zone_is_an_error_that_lists_the_zones():
    prices = PriceTable({("a", "spot"): [(0.0, 1.0)]})
    for ask in (prices.price_usd_per_gpu_hour, lambda *key: prices.usd_per_gpu(*key, 1)):
        with pytest.raises(ValueError, match="no price for a spot GPU in zone=b; the table has zones a"):
            ask("b", "spot", 0)


HEAD = "zone,time_s,reserved_usd_per_gpu_hour,spot_usd_per_gpu_hour\n"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "the first line must name the columns"),
        ("zone,spot_usd_per_gpu_hour\na,1\n", 1, "no reserved_usd_per_gpu_hour"),
        (HEAD, 1, "the table has no rows"),
        (HEAD + "a,0,4,1\na,10,4\n", 3, "expected the 4 fields"),
        (HEAD + "a,0,4,1,7\n", 2, "expected the 4 fields"),
        (HEAD + ",0,4,1\n", 2, "expected the 4 fields"),
        (HEAD + "a,0,4,1\na,10,4,-1\n", 3, "spot_usd_per_gpu_hour must be a number of at least 0, got '-1'"),
        (HEAD + "a,0,nan,1\n", 2, "reserved_usd_per_gpu_hour must be a number of at least 0, got 'nan'"),
        (HEAD + "a,0,free,1\n", 2, "got 'free'"),
        (HEAD + "a,10,4,1\nb,0,4,1\na,10,4,1\n", 4, "time_s must increase within zone a, got 10"),
        (HEAD + 'a,0,4,"1', 2, "unexpected end of data"),
        (HEAD.encode() + b"\xff,0,4,1\n", 2, "codec can't decode"),
    ],
)
def test_a_damaged_table_is_one_error_that_names_file_and_line(write, text, line, message):
    path = write(text)
    with pytest.raises(PriceError, match=message) as raised:
        read_prices(path)
    assert str(raised.value).startswith(f"{path}:{line}: ")


def test_the_shipped_catalog_adds_the_host_and_divides_by_the_gpus():
    h100 = read_catalog(CATALOG, gpu="H100-80GB")
    assert h100.price_usd_per_gpu_hour("us-central1-a", "reserved", 0) == pytest.approx(4.20076 + 1.18251)
    assert h100.price_usd_per_gpu_hour("us-central1-a", "spot", 0) == pytest.approx(2.9926 + 0.36117)
    assert h100.price_usd_per_gpu_hour("FIN-02", "spot", 0) == 0.8015
    a100 = read_catalog(CATALOG, gpu="A100-80GB")
    assert a100.price_usd_per_gpu_hour("us-central1-a", "spot", 0) == pytest.approx(1.964 + 0.54978)
    assert read_catalog(CATALOG, gpu="B200").price_usd_per_gpu_hour("us-east4-b", "reserved", 0) == 64.44 / 8
    assert read_catalog(CATALOG, gpu="H200").zones == ("FIN-02",)


COLUMNS = "gpu,count,zone,on_demand_usd_h,spot_usd_h,what\n"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (COLUMNS + "A,1,z,1,1,whole VM\n", 2, "no row up to here prices gpu=X"),
        (COLUMNS + "X,1,z,1,1,accelerator only (add host row)\n", 2, "no row prices the host of 1xX in z"),
        (COLUMNS + "X,0,z,1,1,whole VM\n", 2, "count must be at least 1"),
        (COLUMNS + "X,1,z,1,1,whole VM\nX,2,z,1,1,whole VM\n", 3, "each zone may have one row for gpu=X"),
        (COLUMNS + "host h,1,z,1,bad,host VM for 1xX\nX,1,z,1,1,accelerator only (add host row)\n", 2, "got 'bad'"),
    ],
)
def test_a_damaged_catalog_is_one_error_that_names_file_and_line(write, text, line, message):
    path = write(text)
    with pytest.raises(PriceError, match=message) as raised:
        read_catalog(path, gpu="X")
    assert str(raised.value).startswith(f"{path}:{line}: ")
