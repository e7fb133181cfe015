"""Step rules: the distribution of the next latents, given the model's velocity, and its log-probability.

A step goes from noise level sigma to sigma' < sigma; dt = sigma' - sigma. With x = (1 - sigma) x0 + sigma eps
the velocity is v = eps - x0. Rules are pure and compute in fp32; sigmas are per sample: training mixes steps.

As in Flow-GRPO, log-probabilities are the *mean* over a sample's dimensions, not the sum. So the meaning of a
clip range depends on the resolution: 1e-5 is 0.66 nats of the joint density of 65,536 latents (an image of
512 x 512), and 4.1 nats of 409,600 (1280 x 1280).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Transition:
    """x' ~ N(mean, std^2): `mean_BLC`, and one standard deviation per sample, `std_B`."""

    mean_BLC: torch.Tensor
    std_B: torch.Tensor

    def sample(self, noise_BLC: torch.Tensor) -> torch.Tensor:
        """x' = mean + std noise."""
        return self.mean_BLC + _per_sample(self.std_B) * noise_BLC

    def first(self, count: int) -> Transition:
        """That of the first samples."""
        return Transition(self.mean_BLC[:count], self.std_B[:count])


class StepRule(Protocol):
    """How one denoising step is taken."""

    def transition(
        self,
        x_BLC: torch.Tensor,
        v_BLC: torch.Tensor,
        sigma_B: torch.Tensor,
        sigma_next_B: torch.Tensor,
        guard: float,
    ) -> Transition:
        """Distribution of the next latents. `guard` is the schedule's second noise level."""

    def log_prob(self, x_next_BLC: torch.Tensor, transition: Transition) -> torch.Tensor:
        """Mean log-density of x' over its dimensions, [B]; x' takes no gradient.

        Raises:
            ValueError: the step is deterministic, so there is no density.
        """


@dataclass(frozen=True)
class _SDE:
    """What the SDEs share: any noise level from 0, which is the ODE, and the log-density of a normal distribution."""

    noise_level: float

    def __post_init__(self) -> None:
        if not 0 <= self.noise_level < math.inf:
            name = type(self).__name__
            raise ValueError(f"{name}.noise_level must be finite and not negative, got {self.noise_level}")

    def log_prob(self, x_next_BLC: torch.Tensor, transition: Transition) -> torch.Tensor:
        """mean_d [-(x' - mean)^2 / (2 std^2)] - log std - log(2 pi) / 2."""
        _refuse_deterministic(self, self.noise_level)
        squared_B = _mean_square(x_next_BLC.detach().float() - transition.mean_BLC)
        std_B = transition.std_B
        return -squared_B / (2 * std_B**2) - torch.log(std_B) - math.log(2 * math.pi) / 2


@dataclass(frozen=True)
class FlowSDE(_SDE):
    """Flow-GRPO's SDE with the marginals of the probability-flow ODE (arXiv 2505.05470).

    sigma_t = a sqrt(sigma / (1 - s)), s = sigma, but the schedule's second noise level where sigma = 1;
    mean = x (1 + sigma_t^2 dt / (2 sigma)) + v (1 + sigma_t^2 (1 - sigma) / (2 sigma)) dt;
    std = sigma_t sqrt(-dt).

    Args:
        noise_level: a >= 0; 0 is the ODE.
    """

    def transition(
        self,
        x_BLC: torch.Tensor,
        v_BLC: torch.Tensor,
        sigma_B: torch.Tensor,
        sigma_next_B: torch.Tensor,
        guard: float,
    ) -> Transition:
        dt_B = sigma_next_B - sigma_B
        safe_B = torch.where(sigma_B == 1, torch.full_like(sigma_B, guard), sigma_B)
        diffusion_B = self.noise_level * torch.sqrt(sigma_B / (1 - safe_B))
        drift_B = diffusion_B**2 / (2 * sigma_B)
        x_weight_B = 1 + drift_B * dt_B
        v_weight_B = (1 + drift_B * (1 - sigma_B)) * dt_B
        mean_BLC = x_BLC.float() * _per_sample(x_weight_B) + v_BLC.float() * _per_sample(v_weight_B)
        return Transition(mean_BLC, diffusion_B * torch.sqrt(-dt_B))


@dataclass(frozen=True)
class DanceSDE(_SDE):
    """DanceGRPO's SDE, with equal diffusion at all noise levels (arXiv 2505.07818).

    x0 = x - sigma v;  std = eta sqrt(-dt);  mean = x + v dt + eta^2 (x - (1 - sigma) x0) / (2 sigma^2) dt.

    Args:
        noise_level: eta >= 0; 0 is the ODE.
    """

    def transition(
        self,
        x_BLC: torch.Tensor,
        v_BLC: torch.Tensor,
        sigma_B: torch.Tensor,
        sigma_next_B: torch.Tensor,
        guard: float,
    ) -> Transition:
        dt_B = sigma_next_B - sigma_B
        x, v = x_BLC.float(), v_BLC.float()
        noise_BLC = x - _per_sample(1 - sigma_B) * (x - _per_sample(sigma_B) * v)
        drift_BLC = v + _per_sample(self.noise_level**2 / (2 * sigma_B**2)) * noise_BLC
        return Transition(x + _per_sample(dt_B) * drift_BLC, self.noise_level * torch.sqrt(-dt_B))


@dataclass(frozen=True)
class CPS:
    """Coefficients-preserving sampling (FlowCPS, arXiv 2509.05952): the noise added was first taken out.

    x0 = x - sigma v;  x1 = x + (1 - sigma) v;  std = sigma' sin(a pi / 2);
    mean = (1 - sigma') x0 + sqrt(sigma'^2 - std^2) x1.

    Args:
        noise_level: a in [0, 1]; 0 is the ODE, 1 draws all noise anew.
    """

    noise_level: float

    def __post_init__(self) -> None:
        if not 0 <= self.noise_level <= 1:
            raise ValueError(f"CPS.noise_level must lie in [0, 1], got {self.noise_level}")

    def transition(
        self,
        x_BLC: torch.Tensor,
        v_BLC: torch.Tensor,
        sigma_B: torch.Tensor,
        sigma_next_B: torch.Tensor,
        guard: float,
    ) -> Transition:
        angle = self.noise_level * math.pi / 2
        x, v = x_BLC.float(), v_BLC.float()
        image_BLC = x - _per_sample(sigma_B) * v
        noise_BLC = x + _per_sample(1 - sigma_B) * v
        # sqrt(sigma'^2 - std^2) = sigma' cos(a pi / 2), without the cancellation.
        kept_B = sigma_next_B * math.cos(angle)
        mean_BLC = _per_sample(1 - sigma_next_B) * image_BLC + _per_sample(kept_B) * noise_BLC
        return Transition(mean_BLC, sigma_next_B * math.sin(angle))

    def log_prob(self, x_next_BLC: torch.Tensor, transition: Transition) -> torch.Tensor:
        """mean_d [-(x' - mean)^2].

        FlowCPS drops scale and constants, so it stays finite where std = 0, in the step to sigma' = 0; clip
        ranges of Flow-SDE do not carry over.
        """
        _refuse_deterministic(self, self.noise_level)
        return -_mean_square(x_next_BLC.detach().float() - transition.mean_BLC)


@dataclass(frozen=True)
class ODE:
    """Euler step of the probability-flow ODE: mean = x + v dt, std = 0."""

    def transition(
        self,
        x_BLC: torch.Tensor,
        v_BLC: torch.Tensor,
        sigma_B: torch.Tensor,
        sigma_next_B: torch.Tensor,
        guard: float,
    ) -> Transition:
        dt_B = sigma_next_B - sigma_B
        return Transition(x_BLC.float() + v_BLC.float() * _per_sample(dt_B), torch.zeros_like(dt_B))

    def log_prob(self, x_next_BLC: torch.Tensor, transition: Transition) -> torch.Tensor:
        raise ValueError("an ODE step has no log-probability: give a stochastic step rule, or no stochastic steps")


def gaussian_kl(transition: Transition, reference_mean_BLC: torch.Tensor) -> torch.Tensor:
    """KL between steps of equal std from the same latents, mean over dimensions: [B].

    mean_d (mean - mean_ref)^2 / (2 std^2). The std holds the factor sqrt(-dt), so this is the KL of the step;
    Flow-GRPO divides by 2 sigma_t^2 instead, which gives this times -dt.
    """
    return _mean_square(transition.mean_BLC - reference_mean_BLC) / (2 * transition.std_B**2)


def mean_shift(mean_BLC: torch.Tensor, old_mean_BLC: torch.Tensor) -> torch.Tensor:
    """mean_d (mean - mean_old)^2 of two policies' steps from the same latents: [B]."""
    return _mean_square(mean_BLC - old_mean_BLC)


def _per_sample(values_B: torch.Tensor) -> torch.Tensor:
    return values_B[:, None, None]


def _mean_square(values_BLC: torch.Tensor) -> torch.Tensor:
    return (values_BLC**2).flatten(1).mean(dim=1)


def _refuse_deterministic(rule: object, noise_level: float) -> None:
    if noise_level == 0:
        raise ValueError(f"{rule} is deterministic: a step without noise has no log-probability")
