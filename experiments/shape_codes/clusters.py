"""Classes found by k-means, compared with the kinds of shape codes."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from capsule_zoo.data import load_dataset
from capsule_zoo.experiments import Options, Result, experiment
from capsule_zoo.experiments.common.findings import group_by_quantity
from capsule_zoo.experiments.part_whole.classification import principal_components
from capsule_zoo.experiments.shape_codes.objects import measure_clusters, read_objects
from capsule_zoo.registry import load
from capsule_zoo.zoo.shape_codes.entry import parse_dataset

NUM_CLUSTERS = (10, 64)  # numbers of clusters that are tried
COMPONENTS = 50  # number of principal components of the pixels


@experiment("shape-codes/clusters", data="mnist", minutes=5)
def clusters(options: Options) -> Result:
    """Find classes by k-means on the inputs of shape codes, compared with kinds (5 minutes).

    Clusters are fitted to training images and evaluated like kinds: a cluster counts as its
    commonest class among training images. Ten clusters are also matched one to one.
    """
    data = load_dataset("mnist", root=options.data_root)
    guide = load("shape-codes-mnist").guide
    sets = parse_dataset(data, options.seed, guide=guide, tested=None)
    labels = sets.train.labels, sets.test.labels
    kinds = [read_objects(guide, split.images).belief for split in (sets.train, sets.test)]
    rows = {"kinds_64": measure_clusters(kinds, labels)}
    project = principal_components(data.train.images, COMPONENTS, options.seed)
    features = {
        "pixels": [project(guide, split.images) for split in (data.train, data.test)],
        "parts": [flatten_parts(split.images) for split in (sets.train, sets.test)],
    }
    for number in NUM_CLUSTERS:
        for name, (train_rows, test_rows) in features.items():
            options.say(f"Fitting {number} clusters to {name}")
            belief = cluster(train_rows, test_rows, number, options.seed)
            rows[f"k_means_{name}_{number}"] = measure_clusters(belief, labels)
    return Result(group_by_quantity(rows))


def flatten_parts(sets: Tensor) -> np.ndarray:
    """Flatten part sets (N, 1, P, 7) to rows of presences and poses; absent parts have pose 0."""
    presence, pose = sets[..., :1], sets[..., 1:]
    return torch.cat([presence, presence * pose], -1).flatten(1).numpy()


def cluster(
    train_rows: np.ndarray, test_rows: np.ndarray, number: int, seed: int
) -> Sequence[Tensor]:
    """Return the one-hot clusters (N, number) of rows (N, D), fitted to training rows alone."""
    from sklearn.cluster import KMeans

    clusters = KMeans(number, n_init=10, random_state=seed).fit(train_rows)
    pair = clusters.labels_, clusters.predict(test_rows)
    return [F.one_hot(torch.from_numpy(numbers).long(), number).float() for numbers in pair]
