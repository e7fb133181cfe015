import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from src.models.load import load_adapter
from src.models.noise import initial_noise_for
from src.models.qwen_image import QwenImageAdapter, VelocityPrediction
from src.models.tiny import PixelDecoder, TokenEncoder, build_tiny, save_pretrained
from tests.models.lively import lively_adapter


def test_the_default_size() -> None:
    adapter = build_tiny(vocabulary="0123", max_tokens=4, height=16, width=32, channels=1)
    assert adapter.latent_shape == (32, 16)
    assert sum(p.numel() for p in adapter.transformer.parameters()) == 1_290_896


def test_a_fresh_model_predicts_a_grey_image_and_depends_on_the_seed_alone() -> None:
    def fresh(seed: int) -> QwenImageAdapter:
        return build_tiny(vocabulary="ab", max_tokens=2, height=8, width=8, channels=3, layers=1, heads=2, seed=seed)

    state = torch.random.get_rng_state()
    adapter = fresh(3)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert adapter.checksum() == fresh(3).checksum() != fresh(4).checksum()
    latents = initial_noise_for([0], adapter.latent_shape)
    velocity = adapter.velocity(latents, torch.tensor([0.5]), adapter.encode(["ab"]))
    torch.testing.assert_close(velocity, latents / 0.5)


@pytest.mark.parametrize(("channels", "patch"), [(1, 4), (3, 4), (3, 6)])
def test_unpacking_is_the_inverse_of_packing(channels: int, patch: int) -> None:
    decoder = PixelDecoder(channels=channels, patch=patch)
    images = np.random.default_rng(0).integers(0, 256, (5, 2 * patch, 3 * patch, channels), dtype=np.uint8)
    latents = decoder.pack(images)
    assert latents.shape == (5, 6, channels * patch * patch)
    assert latents.min() >= -1
    assert latents.max() <= 1
    assert np.array_equal(decoder.decode(latents, height=2 * patch, width=3 * patch), images)


def test_pixels_go_to_the_right_place_and_are_clamped() -> None:
    decoder = PixelDecoder(channels=1, patch=2)
    image = np.arange(16, dtype=np.uint8).reshape(1, 4, 4, 1)
    tokens = (decoder.pack(image) + 1) * 127.5
    assert tokens[0].round().int().tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    wild = torch.tensor([[[-7.0, 7.0, 0.0, 0.5]]])
    assert decoder.decode(wild, height=2, width=2).ravel().tolist() == [0, 255, 128, 191]


def test_tokens_are_characters_or_words() -> None:
    characters = TokenEncoder(vocabulary="abc", max_tokens=3, width=8)
    words = TokenEncoder(vocabulary=["red", "a", "square"], max_tokens=3, width=8)
    cond = characters.encode(["ca", "abc", ""])
    assert cond.mask_BS.tolist() == [[True, True, False], [True, True, True], [False, False, False]]
    assert torch.equal(cond.embeds_BSD[0, :2], characters.table.weight[[2, 0]])
    assert torch.equal(cond.embeds_BSD[2], torch.zeros(3, 8))
    assert torch.equal(words.encode(["a red square"]).embeds_BSD[0], words.table.weight[[1, 0, 2]])
    cond.embeds_BSD.sum().backward()
    assert characters.table.weight.grad is not None
    with pytest.raises(ValueError, match=r"prompt 'ax'.*unknown: \['x'\]"):
        characters.encode(["ax"])
    with pytest.raises(ValueError, match="prompt 'abca': 4 tokens, at most 3 fit"):
        characters.encode(["abca"])


def test_saving_and_loading(tmp_path: Path) -> None:
    adapter = lively_adapter()
    save_pretrained(adapter, tmp_path / "model")
    loaded = load_adapter(tmp_path / "model")
    assert loaded.checksum() == adapter.checksum()
    assert loaded.image_size == adapter.image_size
    latents, sigmas = initial_noise_for([1, 2], adapter.latent_shape), torch.tensor([1.0, 0.01])
    expected = adapter.velocity(latents, sigmas, adapter.encode(["ab", "d"]))
    assert torch.equal(loaded.velocity(latents, sigmas, loaded.encode(["ab", "d"])), expected)
    assert np.array_equal(loaded.decode(latents), adapter.decode(latents))
    assert isinstance(loaded.prompt_encoder, TokenEncoder)
    assert not any(p.requires_grad for p in loaded.prompt_encoder.parameters())
    assert all(p.requires_grad for p in loaded.transformer.parameters())


def test_a_loaded_model_saves_again(tmp_path: Path) -> None:
    save_pretrained(lively_adapter(), tmp_path / "a")
    loaded = load_adapter(tmp_path / "a")
    loaded.encode(["ab"])
    assert isinstance(loaded, QwenImageAdapter)
    save_pretrained(loaded, tmp_path / "b")
    weights = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.safetensors"))
    assert len(weights) == 2
    for file in weights:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert load_adapter(tmp_path / "b").checksum() == loaded.checksum()


def test_only_tiny_models_are_saved(tmp_path: Path) -> None:
    adapter = lively_adapter()
    adapter.prediction = VelocityPrediction()
    with pytest.raises(TypeError, match="SamplePrediction, not VelocityPrediction"):
        save_pretrained(adapter, tmp_path)


def remove_weights(folder: Path) -> None:
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()


def truncate_weights(folder: Path) -> None:
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def remove_encoder(folder: Path) -> None:
    (folder / "text_encoder" / "model.safetensors").unlink()


def break_index(folder: Path) -> None:
    (folder / "model_index.json").write_text("{")


def rename_pipeline(folder: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "Other"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_weights, "incomplete or damaged"),
        (truncate_weights, "incomplete or damaged"),
        (remove_encoder, "incomplete or damaged"),
        (break_index, "damaged"),
        (rename_pipeline, "no adapter for pipeline 'Other'"),
    ],
)
def test_a_bad_folder_is_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    folder = tmp_path / "model"
    save_pretrained(lively_adapter(), folder)
    damage(folder)
    with pytest.raises(ValueError, match=message) as error:
        load_adapter(folder)
    assert str(folder) in str(error.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere is not a model folder: it has no model_index\.json"):
        load_adapter(tmp_path / "nowhere")
