"""A guide that does not fit is refused, with a list of everything that is wrong with it."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from small_entries import images_for, small_entry
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
from capsule_zoo.models.base import Model
from capsule_zoo.models.common.spaces import ImageSpace

HALF, IMAGES = torch.tensor(0.5), torch.rand(5, 1, 2, 2)


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


def pose(width=3):
    return pyro.sample("pose", dist.Normal(torch.zeros(width), 1.0).to_event(1))


def coin(distribution=None):
    return pyro.sample("coin", distribution or dist.Bernoulli(0.5))


def observed(number):
    distribution = dist.Normal(torch.zeros(number, 1, 2, 2), 1.0).to_event(3)
    return pyro.sample("image", distribution, obs=IMAGES[:number])


def problems(model, guide, images=IMAGES) -> list[str]:
    with pytest.raises(IncompatibleGuide) as caught:
        check_pair(model, guide, images)
    return caught.value.problems


WRONG = {  # what a guide to TwoLevels draws, and what is wrong with it
    "several": (
        lambda n: (pose(4), pyro.sample("tilt", dist.Normal(torch.zeros(n), 1.0))),
        [
            "'pose' has shape (5, 3) in the model but (5, 4) in the guide",
            "'coin' is missing in the guide",
            "'tilt' is extra",
        ],
    ),
    "relaxed": (
        lambda n: (pose(), coin(dist.RelaxedBernoulli(HALF, HALF))),
        ["'coin' is discrete in the model but continuous in the guide"],
    ),
    "a point between 0 and 1": (
        lambda n: (pose(), coin(dist.Delta(torch.full((n,), 0.3)))),
        ["'coin' is discrete in the model but continuous"],
    ),
    "observed": (lambda n: (pose(), coin(), observed(n)), ["'image' is observed in the guide"]),
    "event rank": (
        lambda n: (pyro.sample("pose", dist.Normal(torch.zeros(n), 1.0)), coin()),
        [
            "'pose' has shape (5, 3) in the model but (5,) in the guide",
            "'pose' has event rank 1 in the model but 0 in the guide",
        ],
    ),
    "an error": (lambda n: 1 / 0, ["cannot run on these images: division by zero"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_every_problem_is_listed_at_once(name):
    draw, fragments = WRONG[name]
    model = TwoLevels()
    lines = problems(model, Written(model, draw))
    assert len(lines) == len(fragments)
    assert all(any(fragment in line for line in lines) for fragment in fragments)


RIGHT = {
    "points of 0 and 1": lambda n: (pose(), coin(dist.Delta(torch.ones(n)))),
    "an auxiliary site": lambda n: (
        pose(),
        coin(),
        pyro.sample("tilt", dist.Normal(0.0, 1.0), infer={"is_auxiliary": True}),
    ),
    "a factor": lambda n: (pose(), coin(), pyro.factor("flow", torch.ones(n), has_rsample=True)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_fits_passes(name):
    model = TwoLevels()
    check_pair(model, Written(model, RIGHT[name]), IMAGES)


@pytest.mark.parametrize(
    "guide", [ExactGuide, PointGuide, AutoDelta, AutoNormal, AutoMultivariateNormal]
)
def test_fitting_guides_pass_and_leave_the_random_state(guide):
    model, images = Conjugate().double(), conjugate_images(3)
    before = torch.get_rng_state()
    assert check_pair(model, guide(model).double(), images) is None
    assert torch.equal(before, torch.get_rng_state())


def test_an_autoguide_lacks_only_the_site_that_was_hidden_from_it():
    model = TwoLevels()
    (problem,) = problems(model, AutoNormal(poutine.block(model, hide=["coin"])))
    assert "'coin' is missing" in problem


@pytest.mark.parametrize("where", ["model", "guide"])
def test_a_batch_outside_of_a_plate_is_named(where):
    model, images = Conjugate().double(), conjugate_images(3)

    def bare(images):
        pyro.sample("code", dist.Normal(images.new_zeros(len(images)), 1.0))

    pair = {"model": model, "guide": ExactGuide(model).double(), where: bare}
    assert problems(pair["model"], pair["guide"], images) == [
        "site 'code' of batch shape (3,) lies outside of a plate at dim -1 in the "
        f"{where}; draw it within pyro.plate(..., dim=-1)"
    ]


def test_a_model_with_every_site_summed_out_takes_an_empty_guide_and_no_other():
    model, images = BernoulliMixture().double(), binary_images(3)
    check_pair(model, NoGuide(model), images)
    guide = Written(model, lambda n: pyro.sample("kind", dist.Categorical(torch.ones(n, 3))))
    assert "'kind' is enumerated by the model" in problems(model, guide, images)[0]


def test_an_enumerated_site_under_a_mask_is_refused():
    """Its values would all count fully, and log p would be log 3 too high."""
    model, images = BernoulliMixture().double(), binary_images(3)
    masked = poutine.mask(model, mask=torch.tensor([True, True, False]))
    assert "'kind' is enumerated under a mask" in problems(masked, NoGuide(model), images)[0]
    check_pair(poutine.mask(model, mask=torch.ones(3).bool()), NoGuide(model), images)


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        (20.0, "by 1 in the model but by 20 in the guide"),
        (torch.tensor([0.5, 1.0, 1.0]), "by 1 in the model but by 0.5 to 1 in the guide"),
        (torch.tensor(1 + 1e-9).double() + 1e-9, "by 1.0 in the model but by 1.000000001 in the"),
    ],
)
def test_plates_that_scale_one_side_only_are_refused(scale, text):
    model, images = Conjugate().double(), conjugate_images(3)
    scaled = poutine.scale(ExactGuide(model).double(), scale)
    assert f"'code' is scaled {text}" in problems(model, scaled, images)[0]
    check_pair(poutine.scale(model, scale), scaled, images)


def test_models_that_do_not_observe_their_images_are_named():
    class Forgets(Conjugate):
        def forward(self, images=None, labels=None, batch_size=1):
            return super().forward(batch_size=1 if images is None else len(images))

    model, images, forgets = Conjugate(), IMAGES[:2], Forgets()
    drawn = "'image' is missing in the guide; the model draws it, without obs="
    for program, guide_model in ((forgets, forgets), (poutine.uncondition(model), model)):
        assert any(drawn in line for line in problems(program, ExactGuide(guide_model), images))
    hidden = poutine.block(model, hide=["image"])
    lines = problems(hidden, ExactGuide(model), images)
    assert any("observes no site, so that the images have no density" in line for line in lines)
    swapped = problems(ExactGuide(model), model, images)
    assert any("model and guide swapped" in line for line in swapped)


OF_OTHER_PLATES = {
    "the plate 'imgs' in the guide, but in": lambda n: pyro.plate("imgs", n, dim=-1),
    "the plate 'images' at dim -1 in the model, but at dim -2": lambda n: pyro.plate(
        "images", n, dim=-2
    ),
    "the plate 'extra_0' in the guide, but in 'images' in the model": lambda n: pyro.plate_stack(
        "extra", (1, n), rightmost_dim=-1
    ),
}


@pytest.mark.parametrize("message", OF_OTHER_PLATES)
def test_plates_that_the_model_has_not_are_refused(message):
    model = Conjugate().double()

    class Other(Guide):
        def forward(self, images, labels=None):
            with OF_OTHER_PLATES[message](len(images)):
                pyro.sample("code", dist.Normal(images.new_zeros(()), 1.0))

    guide = Other(model)
    assert message in problems(model, guide, conjugate_images(1))[0]
    for call in (evaluate, lambda *pair: fit(*pair, steps=1)):
        with pytest.raises(IncompatibleGuide):
            call(model, guide, conjugate_images(3))


def test_parameters_statistics_and_modes_are_left_as_they_were():
    entry = small_entry("part-whole")
    entry.model.requires_grad_(False)
    before = {name: value.clone() for name, value in entry.guide.state_dict().items()}
    check_pair(entry.model, entry.guide, images_for(entry))
    assert all(torch.equal(before[n], value) for n, value in entry.guide.state_dict().items())
    assert all(part.training for part in entry.guide.modules())
    assert not any(p.requires_grad for p in entry.model.parameters())


@pytest.mark.parametrize("mask", [False, torch.tensor([True, False])])
def test_a_site_that_is_masked_in_one_half_alone_is_refused(mask):
    model, images = Conjugate(), conjugate_images(2, torch.float32)
    guide = ExactGuide(model)
    lines = problems(poutine.mask(model, mask=mask), guide, images)
    assert any("'code' is masked differently in model and guide" in line for line in lines)
    check_pair(poutine.mask(model, mask=mask), poutine.mask(guide, mask=mask), images)


@pytest.mark.parametrize("verb", ["check_pair", "evaluate", "fit"])
def test_images_that_are_observed_by_name_are_refused_beside_the_argument(verb):
    """`fit` shuffles its images: those by name would be scored under the latents of others."""
    entry = small_entry("vae")
    images = images_for(entry, 4)
    named = pyro.condition(entry.model, data={"image": images})
    with pytest.raises(IncompatibleGuide, match=r"observed by name.*without pyro.cond"):
        options = {"steps": 1} if verb == "fit" else {}
        getattr(inference, verb)(poutine.scale(named, scale=1.0), entry.guide, images, **options)
    latent = pyro.condition(entry.model, data={"image_code": torch.zeros(2, entry.model.latent)})
    check_pair(latent, NoGuide(entry.model), images[:2])
