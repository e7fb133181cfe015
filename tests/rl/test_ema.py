import pytest
import torch

from src.rl.ema import EMA


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2,), value, dtype=torch.bfloat16, requires_grad=True)}


def test_the_average_follows_the_formula_at_every_nth_update():
    ema = EMA(decay=0.5, every=2)
    ema.start(weights(1.0))
    expected = 1.0
    for number in range(1, 13):
        ema.update(weights(float(number)), number)
        if number % 2 == 0:
            decay = min(0.5, (1 + number) / (10 + number))
            expected = decay * expected + (1 - decay) * number
        assert ema.average["w"].tolist() == pytest.approx([expected] * 2, rel=1e-6)
    assert ema.average["w"].dtype is torch.float32
    assert not ema.average["w"].requires_grad


def test_it_copies_and_a_resumed_average_is_kept():
    first, ema = weights(1.0), EMA(decay=0.9, every=1)
    ema.start(first)
    with torch.no_grad():
        first["w"] += 1
    assert ema.average["w"].tolist() == [1.0, 1.0]
    ema.load({"w": torch.tensor([5.0, 6.0])})
    ema.start(first)
    assert ema.average["w"].tolist() == [5.0, 6.0]


@pytest.mark.parametrize(("field", "value"), [("decay", 1.0), ("decay", -0.1), ("every", 0)])
def test_settings_are_checked(field: str, value: float):
    with pytest.raises(ValueError, match=rf"EMA\.{field} must .*, got {value}"):
        EMA(**{"decay": 0.9, "every": 1, field: value})
