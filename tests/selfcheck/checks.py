"""The checks of the zoo's probabilities, by name.

    sbc_       prior draws have uniform ranks among the draws of their posterior, or follow the
               probabilities that it gives them
    geweke_    samplers leave invariant the distribution that they sample from
    gradient_  the mean of an objective's gradients is the exact gradient

All checks use machines so small that the prior, the evidence and every gradient are known without
the checked code. Exact inference must pass. Approximate inference is expected to fail. A check is a
function from the number of simulations to an `Outcome`, and its options make several of it:

    @check("sbc_exact_switches", of=[ExactSwitches])
    def exact_switches(number: int) -> Outcome: ...
"""

import zlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch

from capsule_zoo.inference.calibration import Outcome

NUMBER = {"sbc": (10_000, 2000), "geweke": (10_000, 2000), "gradient": (400, 40)}  # full and quick
CHECKS: "dict[str, Check]" = {}


class Check(NamedTuple):
    """A check, the classes that it is `of`, and its numbers of simulations."""

    name: str
    function: Callable[[int], Outcome]
    of: tuple[type, ...]
    approximate: bool
    full: int
    quick: int

    def p(self, quick: bool) -> float:
        """Return the p-value of the check with all or few simulations, seeded by its name.

        The seed draws the machine too, and not every machine shows the bias of `across_plates`.
        """
        torch.manual_seed(zlib.crc32(self.name.encode()))
        return self.function(self.quick if quick else self.full).p


def check(
    name: str,
    *,
    of: Iterable[type],
    approximate: bool = False,
    fraction: float = 1.0,
    **options: Any,
) -> Callable[[Callable[..., Outcome]], Callable[..., Outcome]]:
    """Return a decorator that adds a function with these options to `CHECKS`; it may be stacked."""
    full, quick = NUMBER[name.partition("_")[0]]
    full = round(fraction * full)

    def decorate(function: Callable[..., Outcome]) -> Callable[..., Outcome]:
        assert name not in CHECKS, name
        CHECKS[name] = Check(
            name, partial(function, **options), tuple(of), approximate, full, min(full, quick)
        )
        return function

    return decorate
