"""Capsule Helmholtz machine with its recognition half (Li and Zhu 2019)."""

from capsule_zoo.figures.energy import gibbs, sums
from capsule_zoo.figures.generic import reconstructions, samples
from capsule_zoo.guides import RecognitionMachine
from capsule_zoo.inference import Pace, ReweightedWakeSleep
from capsule_zoo.models import CapsuleHelmholtzMachine
from capsule_zoo.registry import Entry, register
from capsule_zoo.sizes import Takes


@register(
    "capsule-helmholtz",
    small=dict(image_shape=(1, 4, 4), capsules=(2, 3), units=2),
    takes={"sizes": Takes(CapsuleHelmholtzMachine)},
)
def capsule_helmholtz(
    image_shape: tuple[int, int, int] = (1, 28, 28),
    num_particles: int = 5,
    sleep: float = 0.5,
    centered: bool = True,
    **sizes,
) -> Entry[CapsuleHelmholtzMachine, RecognitionMachine]:
    """Layers of capsules, each drawn given the one above.

    Args:
        image_shape: (channels, height, width).
        num_particles, sleep: arguments of `ReweightedWakeSleep`.
        centered: argument of `RecognitionMachine`.
        sizes: arguments of `CapsuleHelmholtzMachine`.
    """
    model = CapsuleHelmholtzMachine(image_shape, **sizes)
    return Entry(
        model=model,
        guides={"recognition": lambda entry: RecognitionMachine(entry.model, centered)},
        objective=ReweightedWakeSleep(num_particles, sleep),
        training=dict(lr=5e-3, pace=Pace("linear"), batch_size=100),
        figures={
            "samples": samples,
            "reconstructions": reconstructions,
            "sums": sums,
            "gibbs": gibbs,
        },
    )
