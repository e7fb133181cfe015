"""conf/market/replay.yaml and conf/prices: what the command line sets reaches the constructors."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from src.spot.market import Market
from src.spot.prices import FixedPrices, PriceTable

ROOT = Path(__file__).parents[2]


@pytest.fixture
def composed(monkeypatch):
    monkeypatch.setenv("SPOTLIGHT_ROOT", str(ROOT))

    def composed(*overrides: str):
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            return compose("train", overrides=list(overrides))

    return composed


def test_a_market_is_replayed_as_the_overrides_say(composed):
    trace = ROOT / "data" / "traces" / "parcae_segment_hh_55_65.txt"
    config = composed(
        "market=replay",
        f"market.trace={trace}",
        "market.nodes=5",
        "market.seed=7",
        "market.time_scale=120",
        "market.grace_s=1.5",
    )
    market = instantiate(config.market.decider)
    assert isinstance(market, Market)
    assert len(market.nodes) == 5
    assert (
        market.nodes
        == instantiate(
            composed("market=replay", "seed=7", f"market.trace={trace}", "market.nodes=5").market.decider
        ).nodes
    )
    assert (config.market.reserved_usd_per_gpu_hour, config.market.spot_usd_per_gpu_hour) == (10.474, 2.66)


def test_every_prices_option_is_a_constructor(composed, tmp_path):
    own = tmp_path / "own.csv"
    own.write_text("zone,reserved_usd_per_gpu_hour,spot_usd_per_gpu_hour\nhere,3,4\n")
    around = composed("market.spot_usd_per_gpu_hour=9")
    made = {}
    for path in sorted((ROOT / "conf" / "prices").glob("*.yaml")):
        config = OmegaConf.merge({"market": around.market, "paths": around.paths}, {"prices": OmegaConf.load(path)})
        if OmegaConf.is_missing(config.prices, "path"):
            config.prices.path = str(own)
        made[path.stem] = instantiate(config.prices)
    assert made["fixed"] == FixedPrices(reserved_usd_per_gpu_hour=10.474, spot_usd_per_gpu_hour=9)
    assert isinstance(made["catalog"], PriceTable)
    assert made["table"].price_usd_per_gpu_hour("here", "spot", 0) == 4
    published = made["rlboost_h100"]
    assert 8 * published.reserved_usd_per_gpu_hour == 83.79
    assert 8 * published.spot_usd_per_gpu_hour == 21.28
    assert set(made) == {"fixed", "catalog", "table", "rlboost_h100"}
