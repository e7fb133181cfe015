import shutil

import pytest
import torch

from src.models.compile import compile_blocks
from src.models.noise import initial_noise_for
from src.models.qwen_image import QwenImageAdapter


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")  # the compiler itself warns
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_blocks_compute_the_same(adapter: QwenImageAdapter) -> None:
    """Forward and gradient within rounding; with and without gradient bit-equal, as ratio 1 needs."""
    latents, sigmas = initial_noise_for([1, 2], adapter.latent_shape), torch.tensor([0.9, 0.3])
    cond = adapter.encode(["abcd", "ba"])

    def velocity_and_gradient() -> tuple[torch.Tensor, torch.Tensor]:
        adapter.transformer.zero_grad()
        velocity = adapter.velocity(latents, sigmas, cond)
        velocity.sum().backward()
        # The text half of the last block leads nowhere: no gradient when plain, zeros when compiled.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in adapter.transformer.parameters()]
        return velocity.detach(), torch.cat([g.flatten() for g in gradients])

    plain = velocity_and_gradient()
    compile_blocks(adapter.transformer)
    compiled = velocity_and_gradient()
    torch.testing.assert_close(compiled, plain, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(adapter.velocity(latents, sigmas, cond), compiled[0])
