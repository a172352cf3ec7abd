"""Long training with two and with three iterations of EM routing.

Each iteration of EM divides the children by the densities of sixteen numbers at once, so that it
multiplies small differences between parents, and the gradients with them. With a `power` below 1
the responsibilities are proportional to (a N)^power (see `capsule_zoo.guides.routing`).
"""

from dataclasses import replace
from typing import Any

from capsule_zoo.data import load_dataset
from capsule_zoo.experiments import Job, Options, Result, Study, create_untrained, experiment, train
from capsule_zoo.experiments.common.findings import group_by_quantity, means_of, single
from capsule_zoo.experiments.training import load_run, use_device
from capsule_zoo.experiments.zoo.equal_network import SHIFT
from capsule_zoo.inference import Checks, Inputs, error_rate
from capsule_zoo.records import Numbers, Table
from capsule_zoo.registry import load

ITERATIONS = {"two_iterations": 2, "three_iterations": 3}


@experiment("matrix-capsules/at-length", data="mnist", minutes=120, of_runs=True)
def train_long(options: Options, *, power: float = 0.25, lr: float | None = None) -> Result:
    """Train the small preset with two and with three iterations of EM (2 x 60 minutes).

    Three iterations have a power below 1 in the E step, without which they hardly learn. With
    `--run` a trained network initializes the parameters and the margin. Both networks get equal
    processor times, in parallel if there are two cores. Errors are on validation images and on
    test images. The network with the lower validation error is kept.

    Args:
        power: exponent of the responsibilities with three iterations; with two iterations it is 1.
        lr: first learning rate, which falls to 0; by default the entry's.
    """
    study, timed = Study(ITERATIONS), replace(options, minutes=options.budget)
    numbers = means_of(study.run(learn_digits, timed, power=power, lr=lr))
    best = min(numbers, key=lambda name: numbers[name]["validation_error"][0])
    entry = load(study.folders(options)[best])
    return Result({"": Table(group_by_quantity(numbers))}, {}, None, entry)


def learn_digits(job: Job[int], *, power: float, lr: float | None) -> Numbers:
    """Train a network with the job's iterations, and return its errors, updates and speed."""
    iterations, options = job.variant, job.options
    data = load_dataset("mnist", root=options.data_root)
    sizes = dict(iterations=iterations, power=1.0 if iterations == 2 else power)
    entry = create_untrained("matrix-capsules", data, options, **sizes)
    if options.run:
        entry.model.load_state_dict(load_run(options.run, entry.name).model.state_dict())
    arguments: dict[str, Any] = dict(inputs=Inputs(SHIFT), checks=Checks(clock="processor"))
    arguments |= {} if lr is None else {"lr": lr}
    run = train(entry, data, options, options.budget, **arguments)
    images = run.steps * entry.training["batch_size"]
    with use_device(entry, options):
        errors = {
            "validation_error": error_rate(entry.model, entry.guide, data.validation),
            "test_error": error_rate(entry.model, entry.guide, data.test),
        }
    speed = single(images / run.seconds, run.steps)
    return {**errors, "updates": single(run.steps), "images_per_second": speed}
