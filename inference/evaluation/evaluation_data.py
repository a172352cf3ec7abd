"""A subclass of arviz's InferenceData (up to 0.23) whose `extend` overwrites no evaluation."""

from typing import Any

from arviz import InferenceData

from capsule_zoo.inference.evaluation.summary import AT_ONCE


class EvaluationData(InferenceData):
    """The InferenceData that an evaluation returns."""

    def extend(self, other: InferenceData, *arguments: Any, **options: Any) -> None:
        """Add the groups of another InferenceData that this one lacks; see arviz.

        Raises:
            ValueError: `other` is an evaluation too, of which arviz would keep one part only.
        """
        if "sample_stats" in other.groups() and "log_weight" in other.sample_stats:
            raise ValueError(
                "extend keeps one of two evaluations and drops the other; of the same images with "
                'other seeds, join them by arviz.concat(first, second, dim="chain")' + AT_ONCE
            )
        super().extend(other, *arguments, **options)
