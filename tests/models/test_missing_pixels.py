"""Only observed pixels are scored, as checked by sums by hand in float64 and in every entry."""

import copy
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from variants import create, list_models, small_settings, takes_images

from capsule_zoo.data import hide
from capsule_zoo.guides import PartWholeGuide
from capsule_zoo.inference import Checks, SemiAmortized, check_pair, evaluate, fit
from capsule_zoo.models import Model, PartWholeCapsules, VariationalAutoencoder
from capsule_zoo.models.common.missing_pixels import log_prob_of_pixels
from capsule_zoo.models.parts.painted_parts import Painting
from capsule_zoo.models.parts.pixel_mixture import PixelMixture
from capsule_zoo.registry import Entry
from capsule_zoo.settings import configure

BATCH = 3


def made(name: str) -> Entry:
    pyro.set_rng_seed(0)
    return create(name, **small_settings(name))


def is_open(model: Model) -> bool:
    """Return True if the model has a density of single pixels."""
    return model.normalized and not model.supervised


WITH_IMAGES = [name for name in list_models() if takes_images(name)]
NAMES = [name for name in WITH_IMAGES if is_open(made(name).model)]
CLOSED = [name for name in WITH_IMAGES if name not in NAMES]
PAIRS = [(name, guide) for name in NAMES for guide in made(name).guides]


def random_images(model: Model, number: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images, and masks of single pixels and channels."""
    generator = torch.Generator().manual_seed(1)
    low, high = model.pixel_range
    uniform = torch.rand(number, *model.image_shape, generator=generator)
    observed = torch.rand(uniform.shape, generator=generator) < 0.5
    return low + (high - low) * uniform, observed


def log_prob_of_image(model: Model, images: torch.Tensor, draws: poutine.Trace) -> torch.Tensor:
    """Compute log p(image | draws), (B,)."""
    trace = poutine.trace(poutine.replay(model, trace=draws)).get_trace(images)
    trace.compute_log_prob()
    return trace.nodes["image"]["log_prob"].reshape(len(images))


@pytest.mark.parametrize(
    "distribution",
    [
        dist.Normal(torch.rand(BATCH, 2, 4, 5).double(), 0.3),
        dist.Bernoulli(torch.rand(BATCH, 2, 4, 5).double(), validate_args=False),
        dist.Poisson(torch.rand(BATCH, 2, 4, 5).double(), validate_args=False),
    ],
)
def test_the_score_is_the_sum_over_observed_pixels(distribution):
    images = torch.rand(BATCH, 2, 4, 5).double().round()
    observed = torch.rand(images.shape) < 0.5
    scores = log_prob_of_pixels(distribution.to_event(3), images, observed)
    for i in range(BATCH):
        terms = distribution.log_prob(images)[i][observed[i]]
        assert scores[i].item() == pytest.approx(sum(terms.tolist()), abs=1e-12)


def test_a_mixture_sums_the_observed_channels_within_every_part():
    parts, channels, size = 3, 2, 3
    color = torch.rand(1 + parts, channels, BATCH, size, size).double()
    weight = torch.rand(1 + parts, 1, BATCH, size, size).double()
    images = torch.rand(BATCH, 1, channels, size, size).double()
    observed = torch.rand(images.shape) < 0.5
    scores = log_prob_of_pixels(PixelMixture(color, weight, 0.2), images, observed)
    for b in range(BATCH):
        total = 0.0
        for i in range(size):
            for j in range(size):
                fraction = weight[:, 0, b, i, j] / weight[:, 0, b, i, j].sum()
                density = 0.0
                for k in range(1 + parts):
                    term = fraction[k].item()
                    for c in range(channels):
                        if observed[b, 0, c, i, j]:
                            off = (images[b, 0, c, i, j] - color[k, c, b, i, j]).item() / 0.2
                            term *= math.exp(-0.5 * off**2) / (0.2 * math.sqrt(2 * math.pi))
                    density += term
                total += math.log(density)
        assert scores[b].item() == pytest.approx(total, abs=1e-10)
    nothing = log_prob_of_pixels(
        PixelMixture(color.float(), weight.float(), 0.2), images.float(), observed & False
    )
    assert torch.equal(nothing, torch.zeros(BATCH, 1))  # not even rounding


def test_a_distribution_that_ties_its_pixels_together_is_refused():
    """Unless none or all of them are missing."""
    tied, observed = dist.MultivariateNormal(torch.zeros(4), torch.eye(4)), torch.ones(4) > 0
    assert log_prob_of_pixels(tied, torch.zeros(4), observed) == tied.log_prob(torch.zeros(4))
    assert log_prob_of_pixels(tied, torch.zeros(4), ~observed) == 0
    observed[2] = False
    with pytest.raises(ValueError, match=r"MultivariateNormal.*\.to_event\(1\)"):
        log_prob_of_pixels(tied, torch.zeros(4), observed)


@pytest.mark.parametrize("name", NAMES)
def test_masks_that_share_no_pixel_add_up(name):
    entry = made(name)
    images, observed = random_images(entry.model)
    model = entry.model.with_missing_pixels()
    draws = poutine.trace(entry.guide).get_trace(images)
    whole = log_prob_of_image(entry.model, images, draws)
    parts = [log_prob_of_image(model, hide(images, m), draws) for m in (observed, ~observed)]
    torch.testing.assert_close(parts[0] + parts[1], whole)
    assert (parts[0] != whole).all()
    nothing = log_prob_of_image(model, hide(images, observed & False), draws)
    assert torch.equal(nothing, torch.zeros(BATCH))


@pytest.mark.parametrize(("name", "guide"), PAIRS)
def test_where_all_is_observed_nothing_changes(name, guide):
    entry = made(name).use_guide(guide)
    images, _ = random_images(entry.model)
    twins = entry.model.with_missing_pixels(), entry.guide.with_missing_pixels(fill=0.3)
    for discrete in (False, True):
        values = [
            evaluate(*pair, images, num_particles=2, discrete=discrete).sample_stats.log_weight
            for pair in ((entry.model, entry.guide), twins)
        ]
        assert (values[0].values == values[1].values).all()


@pytest.mark.parametrize(("name", "guide"), PAIRS)
def test_pairs_with_missing_pixels_fit_and_are_finite(name, guide):
    entry = made(name).use_guide(guide)
    images, observed = random_images(entry.model)
    hidden = hide(images, observed)
    model, twin = entry.model.with_missing_pixels(), entry.guide.with_missing_pixels()
    check_pair(model, twin, hidden)
    idata = evaluate(model, twin, hidden, num_particles=3)
    weights = torch.as_tensor(idata.sample_stats.log_weight.values)
    assert weights.shape == (1, 3, BATCH) and torch.isfinite(weights).all()
    for program in (entry.model, entry.guide):
        with pytest.raises(ValueError, match=r"NaN.*with_missing_pixels"):
            program(hidden)


@pytest.mark.parametrize("name", CLOSED)
def test_models_without_a_density_of_pixels_say_so_in_a_line(name):
    entry = made(name)
    for program in (entry.model, entry.guide):
        with pytest.raises(ValueError, match="missing pixel") as caught:
            program.with_missing_pixels()
        assert "\n" not in str(caught.value)


def test_no_gradient_comes_from_a_hidden_pixel():
    model = VariationalAutoencoder((1, 4, 4), latent=2, channels=3).double()
    images = torch.rand(BATCH, 1, 4, 4).double()
    observed = torch.rand(images.shape) < 0.5
    means = []

    def distribution(code: torch.Tensor) -> dist.TorchDistribution:
        mean = model.mean_image(code)
        mean.retain_grad()
        means.append(mean)
        return dist.Normal(mean, 0.2).to_event(3)

    object.__setattr__(model, "image_distribution", distribution)
    twin = model.with_missing_pixels()
    trace = poutine.trace(twin).get_trace(hide(images, observed))
    trace.log_prob_sum().backward()
    gradient = means[0].grad
    assert (gradient[~observed] == 0).all() and (gradient[observed] != 0).all()
    expected = (images - means[0].detach()) / 0.2**2
    torch.testing.assert_close(gradient[observed], expected[observed])


@pytest.mark.parametrize("likelihood", ["composite", "mixture"])
def test_training_on_missing_pixels_lowers_the_loss(likelihood):
    sizes = {**small_settings("part-whole"), "likelihood": likelihood}
    pyro.set_rng_seed(0)
    entry = create("part-whole", **sizes)
    images, observed = random_images(entry.model, 8)
    model, guide = entry.model.with_missing_pixels(), entry.guide.with_missing_pixels()
    before = copy.deepcopy(entry.model.state_dict())
    run = fit(
        model, guide, hide(images, observed), steps=12, lr=2e-2, checks=Checks(progress=False)
    )
    losses = run.history["loss"]
    assert all(map(math.isfinite, losses)) and sum(losses[-3:]) < sum(losses[:3])
    moved = [not torch.equal(v, before[k]) for k, v in entry.model.state_dict().items()]
    assert any(moved)  # the parameters are shared


def test_a_refined_guide_scores_observed_pixels_alone():
    """The same image several times over is refined once, and what the start is shown can matter."""
    model = PartWholeCapsules((1, 12, 12), objects=2, parts=3, painting=Painting(template_size=5))
    guide = configure(PartWholeGuide, model, channels=6, width=8, heads=2, blocks=1, inducing=3)
    images, observed = random_images(model)
    semi = SemiAmortized(guide, steps=3, distribution="delta")
    outcomes = []
    for value in (0.1, 0.9):  # of the hidden pixels
        changed = torch.where(observed, images, value)
        hidden = hide(changed, observed)
        idata = evaluate(
            model.with_missing_pixels(), semi.with_missing_pixels(), hidden, num_particles=2
        )
        outcomes.append(torch.as_tensor(idata.sample_stats.log_weight.values))
    assert torch.equal(*outcomes) and torch.isfinite(outcomes[0]).all()
    twin = semi.with_missing_pixels()
    twin(hidden.repeat(2, 1, 1, 1))
    refined = twin._last[0]
    assert refined[2].num_images == BATCH
    twin(hidden.repeat(4, 1, 1, 1))
    assert twin._last[0] is refined


@pytest.mark.parametrize("likelihood", ["composite", "mixture"])
@pytest.mark.parametrize("name", ["vae", "part-whole"])
def test_masks_reach_plates_to_the_left(name, likelihood):
    """Vectorized particles score what particles score one by one."""
    sizes = {"likelihood": likelihood} if name == "part-whole" else {}
    pyro.set_rng_seed(0)
    entry = create(name, **{**small_settings(name), **sizes})
    model, guide = entry.model.with_missing_pixels(), entry.guide.with_missing_pixels()
    images, observed = random_images(entry.model)
    hidden = hide(images, observed)

    def laid_out(program: Model) -> poutine.Trace:
        with pyro.plate("particles", 4, dim=-3):
            return poutine.trace(program).get_trace(hidden)

    draws = laid_out(guide)
    together = laid_out(poutine.replay(model, trace=draws))
    together.compute_log_prob()
    log_probs = together.nodes["image"]["log_prob"].reshape(4, BATCH)
    for i in range(4):
        one = {n: s["value"][i] for n, s in draws.nodes.items() if n in guide.covers}
        shaped = {
            n: value.reshape(value.shape[-model_rank(entry, n) :]) for n, value in one.items()
        }
        alone = poutine.trace(poutine.condition(model, shaped)).get_trace(hidden)
        alone.compute_log_prob()
        torch.testing.assert_close(log_probs[i], alone.nodes["image"]["log_prob"].reshape(BATCH))


def model_rank(entry: Entry, name: str) -> int:
    """Return the number of dims of a site's value in a plain run."""
    (site,) = (site for site in entry.model.sites if site.name == name)
    return -entry.model.plate_dims["images"] + site.event_dim
