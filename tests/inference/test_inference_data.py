"""The result of `evaluate` as arviz sees it: files, joined evaluations, names of dims."""

import math

import arviz as az
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray
from pyro.infer.autoguide import AutoDiagonalNormal
from small_entries import images_for, small_entry
from toys import BernoulliMixture, ExactGuide, NoGuide, binary_images
from toys import conjugate_images as some_images
from toys import pair as toy_pair

from capsule_zoo.guides.base import Guide
from capsule_zoo.inference import evaluate, summarize
from capsule_zoo.inference.evaluation import inference_data
from capsule_zoo.models.base import Model
from capsule_zoo.models.common.spaces import ImageSpace

JOINS = pytest.mark.skipif(not hasattr(az, "concat"), reason="arviz 1 joins no evaluations")


def groups_of(idata) -> dict:
    if isinstance(idata, xarray.DataTree):
        return {name: group.to_dataset() for name, group in idata.children.items()}
    return {name: getattr(idata, name) for name in idata.groups()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "part-whole",
            {
                "object_pose": ("objects", "coordinate"),
                "object_presence": ("objects",),
                "part_pose": ("parts", "coordinate"),
                "part_presence": ("parts",),
            },
        ),
        ("rbm", {"capsule_hidden": ("capsules", "capsule_hidden_dim_0")}),
        ("vae", {"image_code": ("image_code_dim_0",)}),
    ],
)
def test_dims_are_the_plates_of_the_model(name, expected):
    entry = small_entry(name)
    idata = evaluate(entry.model, entry.guide, images_for(entry), num_particles=2)
    dims = {site: values.dims for site, values in idata.posterior.data_vars.items()}
    assert dims == {site: ("chain", "draw", "image", *rest) for site, rest in expected.items()}
    shape = ("image", "channel", "row", "column")
    assert idata.observed_data.pixels.dims == idata.posterior_predictive.pixels.dims[2:] == shape
    plates = {site.name: site.plates for site in entry.model.sites}
    assert all(dims[site][2 : 2 + len(plates[site])][1:] == plates[site][1:] for site in dims)


def test_points_have_the_dims_of_their_space():
    entry = small_entry("constellations")
    idata = evaluate(entry.model, entry.guide, images_for(entry), num_particles=2)
    dims = ("image", *entry.model.space.dims)
    assert idata.observed_data.points.dims == idata.posterior_predictive.points.dims[2:] == dims


class Awkward(Model):
    """A model unlike the zoo's: images are the inner plate, and one plate is called "draw"."""

    space = ImageSpace((1, 2, 2))

    def forward(self, images=None, labels=None, batch_size=1):
        size = batch_size if images is None else len(images)
        with pyro.plate("images", size, dim=-1):
            with pyro.plate("draw", 2, dim=-2):
                a = pyro.sample("a_pose", dist.Normal(torch.zeros(3), 1.0).to_event(1))
            with pyro.plate("corners", 4, dim=-2):
                b = pyro.sample("b_pose", dist.Normal(torch.zeros(5), 1.0).to_event(1))
            mean = (a.sum((0, 2)) + b.sum((0, 2)))[:, None, None, None].expand(-1, 1, 2, 2)
            pyro.sample("image", dist.Normal(mean, 1.0).to_event(3), obs=images)


class Numbered(Guide):
    """A guide whose draws are the image's number, so that a misplaced dim is visible."""

    def forward(self, images, labels=None):
        with pyro.plate("images", len(images), dim=-1):
            number = images[:, 0, 0, 0, None]
            with pyro.plate("draw", 2, dim=-2):
                pyro.sample("a_pose", dist.Normal(number.expand(2, -1, 3), 1e-6).to_event(1))
            with pyro.plate("corners", 4, dim=-2):
                pyro.sample("b_pose", dist.Normal(number.expand(4, -1, 5), 1e-6).to_event(1))


def test_a_model_of_another_form_gets_names_that_are_unique_and_images_where_they_belong():
    model = Awkward()
    images = torch.linspace(0, 1, 3)[:, None, None, None].expand(-1, 1, 2, 2)
    idata = evaluate(model, Numbered(model), images, num_particles=2, draws=2)
    dims = {site: values.dims[3:] for site, values in idata.posterior.data_vars.items()}
    assert dims == {
        "a_pose": ("a_pose_dim_0", "a_pose_dim_1"),  # "draw" is taken, coordinates differ
        "b_pose": ("corners", "b_pose_dim_0"),
    }
    for values in idata.posterior.data_vars.values():
        behind = tuple(range(3, values.ndim))
        means = values.values.mean((0, 1, *behind))
        np.testing.assert_allclose(means, [0, 0.5, 1], atol=1e-4)


@pytest.mark.parametrize("name", ["part-whole", "vae", "scenes"])  # sites of scenes have slashes
def test_an_evaluation_survives_a_file(name, tmp_path):
    entry = small_entry(name)
    idata = evaluate(entry.model, entry.guide, images_for(entry), num_particles=3)
    assert {type(value) for value in idata.attrs.values()} <= {str, int, float}
    idata.to_netcdf(str(tmp_path / "evaluation.nc"))
    read = az.from_netcdf(str(tmp_path / "evaluation.nc"))
    assert read.attrs == idata.attrs
    groups = groups_of(read)
    assert groups.keys() == groups_of(idata).keys()
    for group, variables in groups_of(idata).items():
        assert groups[group].identical(variables), group
    np.testing.assert_equal(summarize(read), summarize(idata))


@JOINS
@pytest.mark.parametrize("dim", ["chain", "draw"])
def test_joined_evaluations_are_summarized_as_one(dim, tmp_path):
    model, guide = toy_pair()
    images = some_images(6)
    parts = [evaluate(model, guide, images, num_particles=40, seed=seed) for seed in range(3)]
    weights = np.concatenate([part.sample_stats.log_weight.values[0] for part in parts])
    joined = az.concat(az.concat(*parts[:2], dim=dim), parts[2], dim=dim)
    summary = summarize(joined)
    assert summary["num_particles"] == 120 and summary["num_images"] == 6 and summary["is_bound"]
    assert summary["elbo"] == pytest.approx(weights.mean(), rel=1e-12)
    iwae = np.log(np.exp(weights).mean(0)).mean()
    assert summary["iwae"] == pytest.approx(iwae, rel=1e-12)
    seconds = sum(part.attrs["seconds"] for part in parts)
    assert summary["seconds_per_image"] == pytest.approx(seconds / 6)
    two = az.concat(*parts[:2], dim=dim)
    two.to_netcdf(str(tmp_path / "two.nc"))
    read = az.from_netcdf(str(tmp_path / "two.nc"))
    np.testing.assert_equal(summarize(read), summarize(two))


@JOINS
def test_evaluations_of_different_things_are_not_summarized_as_one():
    entry = small_entry("part-whole", "normal")
    images = images_for(entry)
    parts = [
        evaluate(entry.model, entry.guide, images, num_particles=2, draws=0, discrete=discrete)
        for discrete in (True, False)
    ]
    with pytest.raises(ValueError, match=r"'presence' differs \(discrete, relaxed\)"):
        summarize(az.concat(*parts, dim="chain"))


@pytest.mark.parametrize("name", ["part-whole", "vae"])
def test_log_likelihood_is_that_of_the_image_given_the_latents(name):
    entry = small_entry(name)
    images = images_for(entry)
    idata = evaluate(
        entry.model, entry.guide, images, num_particles=3, draws=3, log_likelihood=True
    )
    assert "log_likelihood" not in evaluate(entry.model, entry.guide, images, num_particles=3)
    assert idata.log_likelihood.pixels.dims == ("chain", "draw", "image")
    model = entry.model.discretize()
    for draw in range(3):
        latents = {
            site: torch.from_numpy(values.values[0, draw])
            for site, values in idata.posterior.data_vars.items()
        }
        conditioned = pyro.poutine.trace(pyro.poutine.condition(model, latents))
        trace = conditioned.get_trace(images)
        node = trace.nodes["image"]
        expected = node["fn"].log_prob(node["value"]).reshape(3, -1).sum(1)
        log_density = torch.from_numpy(idata.log_likelihood.pixels.values[0, draw])
        torch.testing.assert_close(log_density, expected)


def test_loo_of_the_exact_posterior_is_the_evidence():
    """Its harmonic mean is right for the exact posterior, as the docstring says."""
    model, _ = toy_pair()
    model.noise = 6.0  # weak evidence, so that the harmonic mean has a small variance
    images = some_images(20)
    guide = ExactGuide(model)
    idata = evaluate(
        model, guide, images, num_particles=2000, draws=2000, log_likelihood=True, batch_size=40_000
    )
    evidence = model.log_evidence(images).sum().item()
    loo = az.loo(idata)  # arviz 1 calls it elpd
    estimate = loo.elpd if hasattr(loo, "elpd") else loo.elpd_loo
    assert estimate == pytest.approx(evidence, abs=0.2)


def test_sites_that_are_summed_out_leave_no_log_likelihood():
    model = BernoulliMixture().double()
    idata = evaluate(model, NoGuide(model), binary_images(4), num_particles=2)
    assert list(groups_of(idata)) == ["sample_stats", "observed_data"]


def test_arviz_1_gets_a_tree_with_the_same_groups(monkeypatch):
    model, guide = toy_pair()
    images = some_images(4)
    old = evaluate(model, guide, images, num_particles=6, chains=2)
    monkeypatch.setattr(inference_data, "_MODERN", True)
    # the Pareto shape is arviz's own; too few draws for it here
    new = evaluate(model, guide, images, num_particles=6, chains=2)
    assert {name for name in new.children} == set(groups_of(old))
    for group, variables in groups_of(old).items():
        assert new[group].to_dataset().identical(variables), group
    left, right = summarize(new), summarize(old)
    assert math.isnan(left.pop("pareto_k")) and math.isnan(right.pop("pareto_k"))
    left.pop("seconds_per_image"), right.pop("seconds_per_image")
    np.testing.assert_equal(left, right)
    assert {**new.attrs, "seconds": 0} == {**old.attrs, "seconds": 0}


def test_a_single_image_is_one_image_whatever_its_latents():
    """A joint density over a batch of one: its 35 coordinates are not 35 images."""
    entry = small_entry("part-whole")
    images = images_for(entry, 1)
    guide = AutoDiagonalNormal(entry.model)
    idata = evaluate(entry.model, guide, images, num_particles=2, discrete=False)
    assert idata.posterior.sizes["image"] == 1
    assert set(idata.posterior.data_vars) == {site.name for site in entry.model.latent_sites}
