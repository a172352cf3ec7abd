"""Capsule Helmholtz machine with its recognition half (Li and Zhu 2019)."""

from capsule_zoo.figures.energy import gibbs, sums
from capsule_zoo.figures.generic import reconstructions, samples
from capsule_zoo.guides import RecognitionMachine
from capsule_zoo.inference import Pace, ReweightedWakeSleep
from capsule_zoo.models import CapsuleHelmholtzMachine
from capsule_zoo.registry import register

register(
    "capsule-helmholtz",
    model=CapsuleHelmholtzMachine,
    guides={"recognition": RecognitionMachine},
    objective=ReweightedWakeSleep,
    training=dict(lr=5e-3, pace=Pace("linear"), batch_size=100),
    figures={"samples": samples, "reconstructions": reconstructions, "sums": sums, "gibbs": gibbs},
    summary="Layers of capsules, each drawn given the one above.",
    small=dict(image_shape=(1, 4, 4), capsules=(2, 3), units=2),
)
