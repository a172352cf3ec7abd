"""Small models of shape codes, and their joint density with every choice of parents listed."""

import itertools

import pyro
import torch
from machines import shifted
from pyro import poutine
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor

from capsule_zoo.models import Capsules, ShapeCodes, poses
from capsule_zoo.settings import configure

CODES, BATCH = 2, 2
SIZES: dict = dict(image_shape=(1, 6, 6), template_size=4, epsilon=0.5, dummy_presence=0.3)


def small(**sizes) -> ShapeCodes:
    """Return a model in float64, the same one on every call."""
    pyro.set_rng_seed(0)
    return shifted(configure(ShapeCodes, codes=CODES, **{**SIZES, **sizes}).double())


def drawn(model: ShapeCodes, objects: int) -> tuple[Capsules, Tensor, Tensor]:
    """Draw parts, and a pose and a code for each of some objects, (B, objects, ...)."""
    parts = model.levels[-1].size
    presence = torch.randn(BATCH, parts).double()
    if not model.relaxed:
        presence = (presence > 0).double()
    identity = poses.identity_like(presence)
    pose = identity + 0.3 * torch.randn(BATCH, parts, 6)
    of_objects = identity + 0.1 * torch.randn(BATCH, objects, 6)
    return Capsules(presence, pose), of_objects, torch.randn(BATCH, objects, CODES).double()


def log_joint(model: ShapeCodes, values: dict) -> Tensor:
    """Compute the log density of everything but the image at given values of all sites, (B,)."""
    trace = poutine.trace(poutine.condition(model, values)).get_trace(batch_size=BATCH)
    trace = prune_subsample_sites(trace)
    trace.compute_log_prob()
    nodes = [n for n in trace.nodes.values() if n["type"] == "sample" and "log_prob" in n]
    return sum(n["log_prob"].reshape(BATCH, -1).sum(1) for n in nodes if n["name"] != "image")


def sum_parents(
    model: ShapeCodes, kind: Tensor, parts: Capsules, pose: Tensor, code: Tensor
) -> Tensor:
    """Compute the log joint of parts and objects, (B, objects, ...), all parents listed, (B,)."""
    model, terms = model.with_selection("enumerate"), []
    for choice in itertools.product(range(1 + kind.shape[1]), repeat=parts.presence.shape[1]):
        values = {
            "object_kind": kind,
            "object_pose": pose,
            "object_code": code,
            "part_parent": torch.tensor(choice).expand(BATCH, -1),
            "part_presence": parts.presence,
            "part_pose": parts.pose,
        }
        terms.append(log_joint(model, values))
    return torch.stack(terms).logsumexp(0)
