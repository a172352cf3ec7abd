"""The attend-infer-repeat model of Pyro's tutorial, a peer in the benchmark `scene_step`.

For s = 1, 2, 3, where p_s gives a geometric distribution of their number and sizes are 1 / scale:

    z_s ~ Bernoulli(p_s z_(s-1))              # the first 0 ends the sequence
    w_s ~ Normal((3, 0, 0), (.2, 1, 1))       # scale, x, y
    c_s ~ Normal(0, 1)                        # a code of 50 numbers
    image ~ Normal(sum_s z_s decoder(c_s) moved to w_s, .3)

The guide is an LSTM, and presences have score-function gradients with a baseline from a second
LSTM, through `TraceGraph_ELBO`. Sizes and learning rates are from the tutorial's text.

References:
    Eslami et al. 2016 (arXiv 1603.08575); pyro.ai/examples/air.html, and examples/air of Pyro.
"""

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.optim import Adam  # type: ignore[attr-defined]
from torch import Tensor, nn
from torch.nn import functional as F

STEPS, CODE, HIDDEN, WINDOW = 3, 50, 256, 28
PRIOR = 0.01  # ratio of the probabilities of n + 1 and n objects


def network(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Return a network of two linear layers with a rectifier between them."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def warp_pictures(pictures: Tensor, scale: Tensor, shift: Tensor, size: int) -> Tensor:
    """Resample pictures (B, n, n) under the map u -> scale u + shift, to (B, size, size)."""
    linear = scale[:, None, None] * torch.eye(2, dtype=scale.dtype)
    theta = torch.cat([linear, shift[..., None]], -1)
    grid = F.affine_grid(theta, [len(pictures), 1, size, size], align_corners=False)
    return F.grid_sample(pictures[:, None], grid, align_corners=False)[:, 0]


class TutorialAir(nn.Module):
    """The model and the guide of this module's docstring, for images (B, 1, n, n)."""

    more: Tensor
    usual: Tensor

    def __init__(self, canvas: int = 50) -> None:
        super().__init__()
        self.canvas = canvas
        inputs = canvas**2 + 3 + CODE + 1
        self.decoder = network(CODE, 200, WINDOW**2)
        self.rnn, self.baseline_rnn = (nn.LSTMCell(inputs, HIDDEN) for _ in range(2))
        self.predict, self.baseline = network(HIDDEN, 200, 7), network(HIDDEN, 200, 1)
        self.encoder = network(WINDOW**2, 200, 2 * CODE)
        self.before = nn.Parameter(torch.zeros(3 + CODE))
        left = torch.tensor([PRIOR**n for n in range(STEPS + 1)]).flip(0).cumsum(0).flip(0)
        self.register_buffer("more", left[1:] / left[:-1])
        self.register_buffer("usual", torch.tensor([[3.0, 0.0, 0.0], [0.2, 1.0, 1.0]]))

    def model(self, images: Tensor) -> None:
        """Sample the objects one after the other, and the image around their sum."""
        pyro.module("air", self)
        with pyro.plate("images", len(images)):
            on, canvas = images.new_ones(len(images)), images.new_zeros(images[:, 0].shape)
            for step in range(STEPS):
                on = pyro.sample(f"on_{step}", dist.Bernoulli(self.more[step] * on))
                with poutine.mask(mask=on > 0):
                    where = pyro.sample(f"where_{step}", dist.Normal(*self.usual).to_event(1))
                    origin = images.new_zeros(CODE)
                    code = pyro.sample(f"code_{step}", dist.Normal(origin, 1.0).to_event(1))
                window = (self.decoder(code) - 2).sigmoid().unflatten(1, (WINDOW, WINDOW))
                moved = warp_pictures(window, where[:, 0], where[:, 1:], self.canvas)
                canvas = canvas + on[:, None, None] * moved
            pyro.sample("image", dist.Normal(canvas, 0.3).to_event(2), obs=images[:, 0])

    def guide(self, images: Tensor) -> Tensor:
        """Infer the objects one after the other, and return their number, (B,)."""
        pyro.module("air", self)
        flat, on = images.flatten(1), images.new_ones(len(images))
        state = baseline_state = None
        last, number = self.before.expand(len(images), -1), torch.zeros_like(on)
        with pyro.plate("images", len(images)):
            for step in range(STEPS):
                read = torch.cat([flat, last, on[:, None]], -1)
                state, baseline_state = (
                    self.rnn(read, state),
                    self.baseline_rnn(read.detach(), baseline_state),
                )
                stay, mean, scale = self.predict(state[0]).split([1, 3, 3], -1)
                expected = {"baseline_value": self.baseline(baseline_state[0])[:, 0] * on}
                chance = dist.Bernoulli(stay[:, 0].sigmoid() * on)
                on = pyro.sample(f"on_{step}", chance, infer={"baseline": expected})
                with poutine.mask(mask=on > 0):
                    center, spread = self.usual
                    distribution = dist.Normal(center + mean, spread * F.softplus(scale))
                    where = pyro.sample(f"where_{step}", distribution.to_event(1))
                    size = 1 / where[:, 0]
                    window = warp_pictures(
                        images[:, 0], size, -size[:, None] * where[:, 1:], WINDOW
                    )
                    mean, scale = self.encoder(window.flatten(1)).chunk(2, -1)
                    distribution = dist.Normal(mean, F.softplus(scale))
                    code = pyro.sample(f"code_{step}", distribution.to_event(1))
                last, number = torch.cat([where, code], -1), number + on
        return number

    def svi(self) -> SVI:
        """Return the trainer with the tutorial's learning rates; call `svi.step(images)`."""

        def rate(name: str) -> dict[str, float]:
            return {"lr": 0.1 if "baseline" in name else 1e-4}

        return SVI(self.model, self.guide, Adam(rate), TraceGraph_ELBO())
