"""The plain log density of sites is that of the trace, and names the site that has none."""

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine

from capsule_zoo.models.common.trace_density import log_density, plain_log_density, scored_sites

IMAGES = torch.zeros(4, 1, 2, 2)


def program(value=None):
    part_mask = torch.tensor([[True, False, True]] * 4)
    with pyro.plate("images", 4, dim=-2):
        pyro.sample("whole", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("parts", 3, dim=-1), poutine.mask(mask=part_mask):
            part = pyro.sample("part", dist.Normal(torch.arange(3.0), 2.0))
            pyro.sample("seen", dist.Normal(part, 1.0), obs=torch.ones(4, 3))
        with poutine.scale(scale=3.0):
            pyro.sample("share", dist.Uniform(0.0, 1.0), obs=value)


def test_it_is_the_log_density_of_the_trace():
    trace = poutine.trace(program).get_trace()
    density = plain_log_density(scored_sites(trace), IMAGES)
    torch.testing.assert_close(density, log_density(trace, IMAGES), rtol=1e-6, atol=1e-6)
    assert scored_sites(trace).keys() == {"whole", "part", "seen", "share"}
