"""Pictures of capsule RBMs and Helmholtz machines: samples, fields of capsules, spectra."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from capsule_zoo.figures import image_rows
from capsule_zoo.models import CapsuleHelmholtzMachine, CapsuleRBM


@torch.no_grad()
def samples(model: CapsuleRBM | CapsuleHelmholtzMachine, seed: int = 0) -> Figure:
    """36 draws from the model: the ends of Gibbs chains, or ancestral."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drawn = model(batch_size=36).clamp(0, 1).split(12)
    rows = {f"draws {12 * i + 1}-{12 * i + 12}": images for i, images in enumerate(drawn)}
    return image_rows(rows, "Draws from the model")


@torch.no_grad()
def reconstructions(reconstructed: Tensor, images: Tensor) -> Figure:
    """Up to 12 images above their reconstructions."""
    rows = {"image": images[:12], "reconstruction": reconstructed[:12].clamp(0, 1)}
    return image_rows(rows, "Test images and their reconstructions")


@torch.no_grad()
def projective_fields(model: CapsuleRBM, seed: int = 0) -> Figure:
    """What each capsule paints when it alone is on."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fields = torch.stack([model.projective_field(k) for k in range(model.num_capsules)])
    rows = {
        f"capsules {first + 1}-{min(first + 10, len(fields))}": fields[first : first + 10]
        for first in range(0, len(fields), 10)
    }
    return image_rows({k: v.clamp(0, 1) for k, v in rows.items()}, "Fields of single capsules")


def spectra(features: np.ndarray, labels: np.ndarray, title: str, each: int = 100) -> Figure:
    """Features (N, F) of up to `each` images of every class, one strip an image, class by class."""
    classes = np.unique(labels)
    figure, axes = plt.subplots(
        1, len(classes), figsize=(1.1 * len(classes) + 0.4, 2.6), squeeze=False
    )
    for axis, label in zip(axes[0], classes, strict=True):
        axis.imshow(features[labels == label][:each], cmap="gray", vmin=0, vmax=1, aspect="auto")
        axis.set_title(str(label), fontsize=8)
        axis.set_xticks([])
        axis.set_yticks([])
    figure.suptitle(title, fontsize=9)
    figure.set_layout_engine("constrained")
    return figure
