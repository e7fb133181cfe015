import pytest
import torch

from src.models.lora import LoRAOff, apply_lora
from src.models.noise import initial_noise_for
from src.models.qwen_image import QwenImageAdapter
from src.models.reference import FrozenCopy
from src.models.steps import Transition, gaussian_kl

TARGETS = ["attn.to_q", "attn.to_v", "img_mlp.net.0.proj"]


def velocity(adapter: QwenImageAdapter) -> torch.Tensor:
    latents = initial_noise_for([1, 2], adapter.latent_shape)
    return adapter.velocity(latents, torch.tensor([0.9, 0.3]), adapter.encode(["abcd", "ba"]))


def train_a_little(adapter: QwenImageAdapter) -> None:
    with torch.no_grad():
        for parameter in adapter.transformer.parameters():
            if parameter.requires_grad:
                parameter += 0.1


def test_a_new_adapter_changes_nothing(adapter: QwenImageAdapter) -> None:
    before = velocity(adapter)
    apply_lora(adapter.transformer, rank=4, alpha=8, target_modules=TARGETS)
    assert torch.equal(velocity(adapter), before)


def test_the_state_holds_the_adapter_alone(adapter: QwenImageAdapter) -> None:
    apply_lora(adapter.transformer, rank=4, alpha=8, target_modules=TARGETS)
    state = adapter.trainable_state()
    assert len(state) == 2 * len(TARGETS)
    assert all("lora_A" in name or "lora_B" in name for name in state)
    before = adapter.checksum()
    train_a_little(adapter)
    assert adapter.checksum() != before
    adapter.load_trainable_state(state)
    assert adapter.checksum() == before


@pytest.mark.parametrize("lora", [True, False])
def test_the_reference_is_the_base_policy_bit_for_bit(adapter: QwenImageAdapter, lora: bool) -> None:
    base = velocity(adapter)
    if lora:
        apply_lora(adapter.transformer, rank=4, alpha=8, target_modules=TARGETS)
    reference = LoRAOff() if lora else FrozenCopy(adapter.transformer)
    train_a_little(adapter)
    trained, state = velocity(adapter), adapter.checksum()
    assert not torch.allclose(trained, base)
    with reference.active(adapter):
        assert torch.equal(velocity(adapter), base)
    assert torch.equal(velocity(adapter), trained)
    assert adapter.checksum() == state


@pytest.mark.parametrize("lora", [True, False])
def test_the_kl_pulls_the_policy_back(adapter: QwenImageAdapter, lora: bool) -> None:
    """A gradient step on the KL alone lowers it: the policy's mean has a gradient, the reference has none."""
    if lora:
        apply_lora(adapter.transformer, rank=4, alpha=8, target_modules=TARGETS)
    reference = LoRAOff() if lora else FrozenCopy(adapter.transformer)
    train_a_little(adapter)
    trained = [p for p in adapter.transformer.parameters() if p.requires_grad]

    def kl() -> torch.Tensor:
        policy = velocity(adapter)
        with reference.active(adapter):
            base = velocity(adapter)
        assert not base.requires_grad
        return gaussian_kl(Transition(policy, torch.full((2,), 0.5)), base).mean()

    before = kl()
    before.backward()
    norm = torch.stack([p.grad.norm() for p in trained if p.grad is not None]).norm()
    with torch.no_grad():
        for parameter in trained:
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad / norm
    assert 0 < kl() < before


def test_an_error_inside_does_not_leave_the_reference_switched_on(adapter: QwenImageAdapter) -> None:
    apply_lora(adapter.transformer, rank=4, alpha=8, target_modules=TARGETS)
    train_a_little(adapter)
    trained = velocity(adapter)
    with pytest.raises(RuntimeError, match="stop"), LoRAOff().active(adapter):
        raise RuntimeError("stop")
    assert torch.equal(velocity(adapter), trained)
    assert adapter.trainable_state()


def test_bad_settings_are_refused(adapter: QwenImageAdapter) -> None:
    with pytest.raises(ValueError, match="lora rank must be at least 1, got 0"):
        apply_lora(adapter.transformer, rank=0, alpha=1, target_modules=TARGETS)
    with pytest.raises(ValueError, match="nothing_like_it"):
        apply_lora(adapter.transformer, rank=4, alpha=1, target_modules=["nothing_like_it"])
