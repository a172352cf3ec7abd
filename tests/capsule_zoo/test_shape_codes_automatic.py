"""Automatic guides to shape codes, in miniature."""

from miniature import few_digits, names_in_record

from capsule_zoo.experiments import Options, training
from capsule_zoo.experiments.zoo import guide_swaps
from capsule_zoo.registry import create, small_sizes


def test_automatic_guides_are_compared_with_the_network(monkeypatch, tmp_path):
    few = few_digits(32, 8, size=12)
    monkeypatch.setattr(guide_swaps, "load_dataset", lambda name, root: few)

    def made(name, image_shape):
        return create(name, **{**small_sizes(name), "image_shape": image_shape})

    monkeypatch.setattr(training, "create", made)
    monkeypatch.setattr(guide_swaps, "list_weights", dict)
    options = Options(progress=False, processes=1)
    small = dict(images=4, particles=2, fitting=2, tuning=1, training=2)
    found, figures = names_in_record("shape-codes/automatic", options, tmp_path, **small)
    assert {"elbo_network", "elbo_autonormal", "iwae_2_autonormal", "map_autodelta"} <= found
    assert "elbo_autodelta" not in found and figures == {""}  # points give no bound
