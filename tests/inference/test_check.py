"""A guide that does not fit is refused, with a list of everything that is wrong with it."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from toys import (
    BernoulliMixture,
    Conjugate,
    ExactGuide,
    NoGuide,
    PointGuide,
    binary_images,
    conjugate_images,
)

from capsule_zoo import inference
from capsule_zoo.guides.base import Guide
from capsule_zoo.inference import IncompatibleGuide, check_pair, evaluate, fit
from capsule_zoo.models import VariationalAutoencoder
from capsule_zoo.models.base import Model
from capsule_zoo.models.common.spaces import ImageSpace
from capsule_zoo.registry import create, small_settings


class Written(Guide):
    """A guide that is given by a function of the number of images."""

    def __init__(self, model, draw):
        super().__init__(model)
        self.draw = draw

    def forward(self, images, labels=None):
        with pyro.plate("images", len(images), dim=-1):
            self.draw(len(images))


class TwoLevels(Model):
    """A model with three vectors and a coin per image, and an observed sum."""

    space = ImageSpace((1, 2, 2))

    def forward(self, images=None, labels=None, batch_size=1):
        size = batch_size if images is None else len(images)
        with pyro.plate("images", size, dim=-1):
            pose = pyro.sample("pose", dist.Normal(torch.zeros(3), 1.0).to_event(1))
            coin = pyro.sample("coin", dist.Bernoulli(0.5))
            mean = (pose.sum(-1) + coin)[:, None, None, None].expand(-1, 1, 2, 2)
            pyro.sample("image", dist.Normal(mean, 1.0).to_event(3), obs=images)


def refused(model, guide, images):
    with pytest.raises(IncompatibleGuide) as caught:
        check_pair(model, guide, images)
    return caught.value


@pytest.mark.parametrize("guide", [ExactGuide, PointGuide])
def test_fitting_guides_pass_and_leave_the_random_state(guide):
    model, images = Conjugate().double(), conjugate_images(3)
    before = torch.get_rng_state()
    assert check_pair(model, guide(model).double(), images) is None
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("guide", [AutoDelta, AutoNormal, AutoMultivariateNormal])
def test_autoguides_pass(guide):
    model = Conjugate().double()
    check_pair(model, guide(model), conjugate_images(3))


def test_an_autoguide_lacks_only_the_site_that_was_hidden_from_it():
    model = TwoLevels()
    guide = AutoNormal(poutine.block(model, hide=["coin"]))
    error = refused(model, guide, conjugate_images(2, torch.float32))
    assert len(error.problems) == 1 and "'coin' is missing" in error.problems[0]


@pytest.mark.parametrize("where", ["model", "guide"])
def test_a_batch_outside_of_a_plate_is_named(where):
    model, images = Conjugate().double(), conjugate_images(3)

    def bare(images):
        pyro.sample("code", dist.Normal(images.new_zeros(len(images)), 1.0))

    pair = {"model": model, "guide": ExactGuide(model).double(), where: bare}
    error = refused(pair["model"], pair["guide"], images)
    assert error.problems == [
        "site 'code' of batch shape (3,) lies outside of a plate at dim -1 in the "
        f"{where}; draw it within pyro.plate(..., dim=-1)"
    ]


def test_a_model_with_every_site_summed_out_takes_an_empty_guide():
    model = BernoulliMixture().double()
    check_pair(model, NoGuide(model), binary_images(3))


def test_every_problem_is_listed_at_once():
    def draw(number):
        pyro.sample("pose", dist.Normal(torch.zeros(number, 4), 1.0).to_event(1))
        pyro.sample("tilt", dist.Normal(torch.zeros(number), 1.0))

    model = TwoLevels()
    error = refused(model, Written(model, draw), conjugate_images(5, torch.float32))
    assert len(error.problems) == 3
    assert "'pose' has shape (5, 3) in the model but (5, 4) in the guide" in str(error)
    assert "'coin' is missing in the guide" in str(error)
    assert "'tilt' is extra" in str(error)


def test_auxiliary_sites_are_no_extras():
    def draw(number):
        pyro.sample("pose", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("coin", dist.Bernoulli(0.5))
        pyro.sample("tilt", dist.Normal(0.0, 1.0), infer={"is_auxiliary": True})

    model = TwoLevels()
    check_pair(model, Written(model, draw), conjugate_images(5, torch.float32))


def test_a_guide_observes_nothing():
    def draw(number):
        pyro.sample("pose", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("coin", dist.Bernoulli(0.5))
        pyro.factor("flow", torch.ones(number), has_rsample=True)

    model, images = TwoLevels(), conjugate_images(5, torch.float32)
    guide = Written(model, draw)
    check_pair(model, guide, images)
    assert "model and guide swapped" in str(refused(guide, model, images))
    guide.draw = lambda number: (
        draw(number),
        pyro.sample("image", dist.Normal(0 * images, 1.0).to_event(3), obs=images),
    )
    assert "'image' is observed in the guide" in str(refused(model, guide, images))


def test_plates_that_scale_one_side_only_are_refused():
    model, images = Conjugate().double(), conjugate_images(3)
    guide, weights = ExactGuide(model).double(), torch.tensor([0.5, 1.0, 1.0])
    for scale, words in (20.0, "20"), (weights, "0.5 to 1"):
        scaled = poutine.scale(guide, scale)
        error = refused(model, scaled, images)
        assert f"'code' is scaled by 1 in the model but by {words} in the guide" in str(error)
        check_pair(poutine.scale(model, scale), scaled, images)


def test_scales_that_differ_in_the_last_digits_are_told_apart():
    model, images = Conjugate().double(), conjugate_images(3)
    guide = poutine.scale(ExactGuide(model).double(), torch.tensor(1 + 1e-9, dtype=torch.float64))
    error = refused(model, guide, images)
    assert "scaled by 1.0 in the model but by 1.000000001 in the guide" in str(error)


def test_a_scale_is_named_beside_a_wrong_event_rank():
    def draw(number):
        pyro.sample("pose", dist.Normal(torch.zeros(number), 1.0))
        pyro.sample("coin", dist.Bernoulli(0.5))

    model, images = TwoLevels(), conjugate_images(5, torch.float32)
    error = refused(model, poutine.scale(Written(model, draw), 20.0), images)
    assert "'pose' has event rank 1 in the model but 0 in the guide" in str(error)
    assert "'pose' is scaled by 1 in the model but by 20 in the guide" in str(error)


def test_a_site_that_should_be_observed_is_named():
    class Forgets(Conjugate):
        def forward(self, images=None, labels=None, batch_size=1):
            return super().forward(batch_size=1 if images is None else len(images))

    model = Forgets().double()
    error = refused(model, ExactGuide(model).double(), conjugate_images(3))
    assert "'image' is missing in the guide; the model draws it, without obs=" in str(error)


def test_relaxed_for_discrete_is_refused():
    def draw(number):
        pyro.sample("pose", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("coin", dist.RelaxedBernoulli(torch.tensor(0.5), torch.tensor(0.5)))

    model = TwoLevels()
    error = refused(model, Written(model, draw), conjugate_images(5, torch.float32))
    assert len(error.problems) == 1
    assert "'coin' is discrete in the model but continuous in the guide" in error.problems[0]
    assert "discretized()" in error.problems[0]


def test_event_rank():
    class Flat(Guide):
        def forward(self, images, labels=None):
            with pyro.plate("images", len(images), dim=-2):
                pyro.sample("pose", dist.Normal(torch.zeros(3), 1.0))
            with pyro.plate("images_again", len(images), dim=-1):
                pyro.sample("coin", dist.Bernoulli(0.5))

    model = TwoLevels()
    error = refused(model, Flat(model), conjugate_images(5, torch.float32))
    assert "'pose' has event rank 1 in the model but 0 in the guide" in error.problems[0]


OF_OTHER_PLATES = {
    "imgs": (lambda n: pyro.plate("imgs", n, dim=-1), "the plate 'imgs' in the guide, but in"),
    "dim": (
        lambda n: pyro.plate("images", n, dim=-2),
        "the plate 'images' at dim -1 in the model, but at dim -2 in the guide",
    ),
    "extra": (
        lambda n: pyro.plate_stack("extra", (1, n), rightmost_dim=-1),
        "the plate 'extra_0' in the guide, but in 'images' in the model",
    ),
}


@pytest.mark.parametrize("kind", OF_OTHER_PLATES)
def test_plates_that_the_model_has_not_are_refused(kind):
    plate, words = OF_OTHER_PLATES[kind]
    model = Conjugate().double()

    class Other(Guide):
        def forward(self, images, labels=None):
            with plate(len(images)):
                pyro.sample("code", dist.Normal(images.new_zeros(()), 1.0))

    guide = Other(model)
    assert words in str(refused(model, guide, conjugate_images(1)))
    for call in (evaluate, lambda *pair: fit(*pair, steps=1)):
        with pytest.raises(IncompatibleGuide):
            call(model, guide, conjugate_images(3))


def test_covering_an_enumerated_site_is_refused():
    model = BernoulliMixture().double()
    guide = Written(model, lambda n: pyro.sample("kind", dist.Categorical(torch.ones(n, 3))))
    error = refused(model, guide, binary_images(3))
    assert "'kind' is enumerated by the model" in error.problems[0]


def test_a_guide_that_cannot_run_is_refused_with_its_reason():
    model = TwoLevels()
    error = refused(model, Written(model, lambda n: 1 / 0), conjugate_images(2, torch.float32))
    assert "cannot run on these images: division by zero" in str(error)


def test_a_reason_is_one_line_without_numbers():
    def draw(number):
        pose = pyro.sample("pose", dist.Normal(torch.zeros(number, 3), 1.0).to_event(1))
        pyro.sample("coin", dist.Bernoulli(logits=(pose - 1e9).sqrt().sum(-1)))

    model, images = TwoLevels(), conjugate_images(40, torch.float32)
    error = refused(model, Written(model, draw), images)
    message = str(error)
    assert len(message.splitlines()) == 1 and len(message) < 400
    assert "found invalid values" in message and "tensor(" not in message and "nan" not in message
    assert "Expected parameter logits" in message


def test_points_between_0_and_1_are_no_coins():
    model = TwoLevels()

    def guide(coin):
        def draw(number):
            pyro.sample("pose", dist.Normal(torch.zeros(3), 1.0).to_event(1))
            pyro.sample("coin", dist.Delta(torch.full((number,), coin)))

        return Written(model, draw)

    images = conjugate_images(2, torch.float32)
    check_pair(model, guide(1.0), images)
    assert "'coin' is discrete in the model but continuous" in str(
        refused(model, guide(0.3), images)
    )


def test_guides_made_for_the_model_are_named():
    model = VariationalAutoencoder((1, 5, 6), 2, channels=2)
    error = refused(model, lambda images: None, torch.rand(2, 1, 5, 6))
    assert "Guides made for this model: ClassPose, ConvolutionalEncoder." in str(error)
    assert "made for" not in str(refused(TwoLevels(), NoGuide(Conjugate()), conjugate_images(2)))


def test_frozen_parameters_stay_frozen():
    model = Conjugate().double()
    model.requires_grad_(False)
    check_pair(model, PointGuide(model).double(), conjugate_images(3))
    assert not model.mean.requires_grad


def test_running_statistics_and_modes_are_left_as_they_were():
    entry = create("part-whole", **small_settings("part-whole"))
    before = {name: value.clone() for name, value in entry.guide.state_dict().items()}
    check_pair(entry.model, entry.guide, torch.rand(3, 1, 12, 12))
    assert all(torch.equal(before[n], value) for n, value in entry.guide.state_dict().items())
    assert all(part.training for part in entry.guide.modules())


def test_a_model_whose_images_are_hidden_is_refused():
    model, images = Conjugate(), conjugate_images(2, torch.float32)
    error = refused(poutine.block(model, hide=["image"]), ExactGuide(model), images)
    assert "observes no site, so that the images have no density" in str(error)
    error = refused(poutine.uncondition(model), ExactGuide(model), images)
    assert "'image' is missing in the guide; the model draws it, without obs=" in str(error)


@pytest.mark.parametrize("mask", [False, torch.tensor([True, False])])
def test_a_site_that_is_masked_in_one_half_alone_is_refused(mask):
    model, images = Conjugate(), conjugate_images(2, torch.float32)
    guide = ExactGuide(model)
    error = refused(poutine.mask(model, mask=mask), guide, images)
    assert "'code' is masked differently in model and guide" in str(error)
    check_pair(poutine.mask(model, mask=mask), poutine.mask(guide, mask=mask), images)


@pytest.mark.parametrize("verb", ["check_pair", "evaluate", "fit"])
def test_images_that_are_observed_by_name_are_refused_beside_the_argument(verb):
    """`fit` shuffles its images: those by name would be scored under the latents of others."""
    entry = create("vae", **small_settings("vae"))
    images = entry.model.space.example(4, torch.float32, torch.Generator().manual_seed(1))
    named = pyro.condition(entry.model, data={"image": images})
    with pytest.raises(IncompatibleGuide, match=r"observed by name.*without pyro.cond"):
        options = {"steps": 1} if verb == "fit" else {}
        getattr(inference, verb)(poutine.scale(named, scale=1.0), entry.guide, images, **options)
    latent = pyro.condition(entry.model, data={"image_code": torch.zeros(2, entry.model.latent)})
    check_pair(latent, NoGuide(entry.model), images[:2])
