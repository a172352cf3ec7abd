"""Numbers published in papers, each with the metric of ours to compare it with.

Such numbers are written down only here. They are as printed, except that percentages are fractions
here, as in the records.
"""

from __future__ import annotations

from dataclasses import dataclass

KOSIOREK = "Kosiorek, Sabour, Teh & Hinton 2019"
RAWLINSON = "Rawlinson, Ahmed & Kowadlo 2018"
LI = "Li & Zhu 2019"
MURRAY = "Salakhutdinov & Murray 2008"
BOLTZMANN = "Salakhutdinov & Hinton 2009"
BORNSCHEIN = "Bornschein & Bengio 2015"
BURDA = "Burda, Grosse & Salakhutdinov 2016"
HINTON = "Hinton, Sabour & Frosst 2018"
MAZZIA = "Mazzia, Salvetti & Chiaberge 2021"
SABOUR = "Sabour, Frosst & Hinton 2017"
POTAPOV = "Potapov 2018, the authors' stored scores"
SASTRY = "Sastry, Recurrent Capsule Network"
GREGOR = "Gregor, Danihelka, Graves, Rezende & Wierstra 2015"
NAZABAL = "Nazabal, Tsagkas & Williams 2021"
OTHERS = "public reproductions on small budgets"


@dataclass(frozen=True)
class Published:
    """A published number with its source and our metric for comparison.

    Attributes:
        experiment, metric: our experiment and metric that it is compared with.
        quantity: the measured quantity, with its data.
        printed: the number.
        whose: the system that reached it.
        source: the publication.
        higher: True if higher is better.
        note: differences that make the comparison difficult.
        sign: sign before the number if it is a bound.
    """

    experiment: str
    metric: str
    quantity: str
    printed: str
    whose: str
    source: str
    higher: bool = False
    note: str = ""
    sign: str = ""

    @property
    def value(self) -> float:
        """The printed number."""
        return float(self.printed)


OURS_TRANSFORMED = "our affine test images are drawn as affNIST's are, not its own files"
BINARIZED = "each binarized once, in its own way"
GRAY = "the paper's pixels are gray, ours binarized"
SMALL = "the paper's full network; ours is the small preset"
SCENES = "the paper's own scenes; ours are drawn as it describes, and exclude empty scenes"
LONG = "64 steps there; statically binarized"

PART_WHOLE = (
    Published(
        "part-whole/classify",
        "probe_presence_all",
        "Accuracy of a linear probe on presences, MNIST",
        "0.990",
        "stacked capsule autoencoder",
        KOSIOREK,
        higher=True,
    ),
    Published(
        "part-whole/classify",
        "probe_presence_pose_all",
        "Accuracy of a linear probe, with poses, MNIST",
        "0.990",
        "stacked capsule autoencoder",
        KOSIOREK,
        higher=True,
        note="their probe, as it is",
    ),
    Published(
        "part-whole/generalise",
        "affnist_presence_pose",
        "Accuracy on affNIST, trained on shifted MNIST",
        "0.922",
        "stacked capsule autoencoder",
        KOSIOREK,
        higher=True,
        note=OURS_TRANSFORMED,
    ),
    Published(
        "part-whole/generalise",
        "affnist_presence_pose",
        "Accuracy on affNIST, trained on shifted MNIST",
        "0.90",
        "sparse unsupervised capsules",
        RAWLINSON,
        higher=True,
        note=OURS_TRANSFORMED,
    ),
)

ENERGY = (
    Published(
        "capsule-rbm/learning-curve",
        "reconstruction_error_train_capsules_12000",
        "Absolute error of a pixel, MNIST, training images",
        "0.0725",
        "capsule RBM, 20 epochs",
        LI,
    ),
    Published(
        "capsule-rbm/learning-curve",
        "reconstruction_error_test_capsules_12000",
        "Absolute error of a pixel, MNIST, test images",
        "0.0718",
        "capsule RBM, 20 epochs",
        LI,
    ),
    Published(
        "capsule-rbm/mnist",
        "log_likelihood_ais",
        "Log-likelihood by AIS, binarized MNIST (nats)",
        "-86.34",
        "RBM, 500 units, CD-25",
        MURRAY,
        higher=True,
        note=BINARIZED,
    ),
    Published(
        "capsule-rbm/mnist",
        "log_likelihood_ais",
        "Log-likelihood by AIS, binarized MNIST (nats)",
        "-84.62",
        "deep Boltzmann machine",
        BOLTZMANN,
        higher=True,
        note=BINARIZED,
    ),
    Published(
        "capsule-helmholtz/mnist",
        "reconstruction_error",
        "Absolute error of a pixel, MNIST",
        "0.0581",
        "capsule Helmholtz machine",
        LI,
        note=GRAY,
    ),
    Published(
        "capsule-helmholtz/fashion",
        "reconstruction_error",
        "Absolute error of a pixel, Fashion-MNIST",
        "0.152",
        "capsule Helmholtz machine",
        LI,
    ),
    Published(
        "capsule-helmholtz/mnist",
        "iwae_1000",
        "Log-likelihood, binarized MNIST (nats)",
        "-90.1",
        "sigmoid belief net, three layers of 200",
        BORNSCHEIN,
        higher=True,
        note=BINARIZED,
    ),
    Published(
        "capsule-helmholtz/mnist",
        "iwae_1000",
        "Log-likelihood, binarized MNIST (nats)",
        "-85.5",
        "best net by reweighted wake-sleep",
        BORNSCHEIN,
        higher=True,
        note=BINARIZED,
    ),
    Published(
        "capsule-helmholtz/mnist",
        "iwae_1000",
        "Log-likelihood, binarized MNIST (nats)",
        "-84.8",
        "autoencoder by IWAE-50",
        BURDA,
        higher=True,
        note=BINARIZED,
    ),
)

MATRIX = (
    Published(
        "matrix-capsules/at-length",
        "test_error_two_iterations",
        "Test error, MNIST",
        "0.0044",
        "matrix capsules",
        HINTON,
        note=SMALL,
    ),
    *(
        Published(
            "matrix-capsules/viewpoints-smallnorb",
            f"{factor}_error_{network}",
            f"Error at novel {factor}s, smallNORB",
            printed,
            whose,
            HINTON,
            note=SMALL if network == "capsules" else "",
        )
        for network, whose, azimuth, elevation in (
            ("capsules", "matrix capsules", "0.135", "0.123"),
            ("cnn", "convolutional network", "0.20", "0.178"),
        )
        for factor, printed in (("azimuth", azimuth), ("elevation", elevation))
    ),
)


LONG_CODE = "128 numbers in the code"


def _stored(
    experiment: str,
    decoder: str,
    inside: str,
    outside: str,
    ours: str | None = None,
    note: str = "",
) -> tuple[Published, ...]:
    """Return the authors' scores of a decoder on digit 4, for requests in and outside training.

    Args:
        ours: our experiment that repeats theirs, if it has another name.
    """
    prefix = f"{experiment.replace('-', '_')}_" if ours else ""
    return tuple(
        Published(
            f"generative-capsnet/{ours or experiment}",
            f"{prefix}{decoder}_digit4_{where}",
            f"Squared error of a pixel, digit 4, {experiment}, {where} its range",
            printed,
            decoder.replace("_", " "),
            POTAPOV,
            note=note,
        )
        for where, printed in (("inside", inside), ("outside", outside))
    )


GENERATIVE = (
    *_stored("shift", "autoencoder", "0.0068", "0.0259", "shift-at-length"),
    *_stored("shift", "digit_capsules", "0.0058", "0.0106", "shift-at-length"),
    *_stored("shift", "continuous", "0.0099", "0.0105", "shift-at-length"),
    *_stored("rotate", "autoencoder", "0.0270", "0.0745", "at-length"),
    *_stored("rotate", "digit_capsules", "0.0210", "0.0537", "at-length"),
    *_stored("rotate", "autoencoder_long", "0.0071", "0.0106", "variants", LONG_CODE),
    *_stored("one-shot", "autoencoder", "0.0128", "0.089", "at-length"),
    *_stored("one-shot", "continuous", "0.0191", "0.055", "at-length"),
    *_stored("one-shot", "digit_capsules", "0.0171", "0.144", "at-length"),
    *_stored("rotate-beyond", "autoencoder", "0.027", "0.290", "at-length"),
    *_stored("rotate-beyond", "continuous", "0.034", "0.152", "at-length"),
)

NETWORK = (
    Published(
        "capsule-network/mnist",
        "test_error",
        "Test error, MNIST",
        "0.0025",
        "CapsNet, 8.2 M parameters",
        SABOUR,
        note="our network has a fifth of the parameters",
    ),
    Published(
        "capsule-network/mnist",
        "test_error",
        "Test error, MNIST",
        "0.0026",
        "Efficient-CapsNet, 161 K parameters",
        MAZZIA,
        note="its networks have self-attention in place of routing, and more augmentation",
    ),
    Published(
        "capsule-network/overlap",
        "error_capsules",
        "Error on overlapping digits",
        "0.052",
        "CapsNet",
        SABOUR,
        note="the paper's files have 60 M pairs; ours are made anew in each epoch",
    ),
    *(
        Published(
            "capsule-network/ablation",
            f"error_{row}",
            "Test error, MNIST",
            printed,
            f"CapsNet, {words}",
            SABOUR,
            note="our networks saw 10,000 images for 10 epochs",
        )
        for row, words, printed in (
            ("one_blind", "one iteration, no drawing", "0.0034"),
            ("one_drawing", "one iteration", "0.0029"),
            ("three_blind", "three iterations, no drawing", "0.0035"),
            ("three_drawing", "three iterations", "0.0025"),
        )
    ),
)

RECURRENT = (
    Published(
        "recurrent-capsules/mnist",
        "class_error_grey",
        "Test error, MNIST",
        "0.0312",
        "recurrent capsule network",
        SASTRY,
    ),
    Published(
        "recurrent-capsules/mnist",
        "class_error_grey",
        "Test error, MNIST",
        "0.0025",
        "CapsNet, a classifier alone",
        SABOUR,
    ),
    Published(
        "recurrent-capsules/cifar10",
        "class_error",
        "Test error, CIFAR-10",
        "0.131",
        "recurrent capsule network",
        SASTRY,
        note="doubtful for one shallow network",
    ),
    Published(
        "recurrent-capsules/mnist",
        "neg_elbo",
        "Negative ELBO, binarized MNIST (nats)",
        "80.97",
        "DRAW with attention",
        GREGOR,
        sign="≤ ",
        note=LONG,
    ),
    Published(
        "recurrent-capsules/ablations",
        "neg_elbo_no_attention",
        "Negative ELBO without attention, binarized MNIST (nats)",
        "87.40",
        "DRAW without attention",
        GREGOR,
        sign="≤ ",
        note=LONG,
    ),
    Published(
        "recurrent-capsules/mnist",
        "neg_elbo",
        "Negative ELBO in ten steps, binarized MNIST (nats)",
        "93.8",
        "DRAW, the best one",
        OTHERS,
    ),
    Published(
        "recurrent-capsules/mnist",
        "neg_elbo_one_step",
        "Negative ELBO in one step, binarized MNIST (nats)",
        "134.5",
        "DRAW",
        OTHERS,
    ),
)

_SEGMENTATION = {  # of points, for noise 0, 0.1 and 0.25 on the templates
    "constellation autoencoder": ("learned", "amortized", ("0.828", "0.754", "0.623")),
    "RANSAC, templates given": ("parse", "ransac", ("1.000", "0.992", "0.965")),
    "variational EM with permutations": ("parse", "sinkhorn", ("0.899", "0.882", "0.785")),
    "variational EM with a mixture": ("parse", "mixture", ("0.753", "0.757", "0.744")),
}
_NOISE = {"0": "0", "01": "0.1", "025": "0.25"}

CONSTELLATIONS = tuple(
    Published(
        f"constellations/{experiment}",
        f"segmentation_{guide}_{suffix}",
        f"Segmentation accuracy of points, noise {noise}",
        number,
        system,
        NAZABAL,
        higher=True,
        note=SCENES,
    )
    for system, (experiment, guide, numbers) in _SEGMENTATION.items()
    for (suffix, noise), number in zip(_NOISE.items(), numbers, strict=True)
)

SHORT = "300,000 updates there; ours is the small preset on 28x28 pixels"

_STACKED = {
    ("mnist", "MNIST", SHORT): ("0.987", "0.990"),
    ("cifar10", "CIFAR-10", "50,000 images there; ours are 20,000 of them"): ("0.250", "0.335"),
}
STACKED = (
    *(
        Published(
            f"stacked-capsule-autoencoder/{experiment}",
            f"{metric}_presence_stacked_capsule_autoencoder",
            f"Accuracy of {words} on presences, {data}",
            number,
            "stacked capsule autoencoder",
            KOSIOREK,
            higher=True,
            note=note,
        )
        for (experiment, data, note), printed in _STACKED.items()
        for metric, words, number in (
            ("clusters", "matched clusters", printed[0]),
            ("probe", "a linear probe", printed[1]),
        )
    ),
    Published(
        "stacked-capsule-autoencoder/affnist",
        "probe_presence_stacked_capsule_autoencoder",
        "Accuracy on affNIST, trained on shifted MNIST",
        "0.922",
        "stacked capsule autoencoder",
        KOSIOREK,
        higher=True,
        note=OURS_TRANSFORMED,
    ),
)

OBJECTS = (
    Published(
        "shape-codes/objects",
        "probe_all",
        "Accuracy of a linear probe on objects, MNIST",
        "0.990",
        "stacked capsule autoencoder",
        KOSIOREK,
        higher=True,
        note="theirs reads presences; ours reads kinds, codes and pose",
    ),
    Published(
        "shape-codes/objects",
        "classes_found_64",
        "Classes found without labels, MNIST",
        "0.987",
        "stacked capsule autoencoder",
        KOSIOREK,
        higher=True,
        note="theirs matches clusters with classes; here each of 64 kinds counts as one class",
    ),
    *(
        Published(
            "shape-codes/affnist",
            "accuracy_turned_again",
            "Accuracy on affNIST, trained on shifted MNIST",
            printed,
            system,
            source,
            higher=True,
            note=f"{OURS_TRANSFORMED}; the motion is inferred",
        )
        for printed, system, source in (
            ("0.922", "stacked capsule autoencoder", KOSIOREK),
            ("0.90", "sparse unsupervised capsules", RAWLINSON),
        )
    ),
)

PUBLISHED = (
    *PART_WHOLE,
    *OBJECTS,
    *STACKED,
    *ENERGY,
    *NETWORK,
    *MATRIX,
    *GENERATIVE,
    *RECURRENT,
    *CONSTELLATIONS,
)
