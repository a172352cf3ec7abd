"""The table of names in the changelog: new names exist, and old ones are gone."""

import re
from pathlib import Path

import pytest

import capsule_zoo
from capsule_zoo import data, figures, guides, inference, models

CHANGELOG = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()
FACES = (capsule_zoo, data, figures, guides, inference, models)
TABLE = CHANGELOG.partition("### Moving from 0.1.0")[2]
ROWS = re.findall(r"^\| (`.*`.*) \| (.*) \|$", TABLE, re.M)
CLASS = r"\b([A-Z]\w+)\("
# All public names of 0.1.0, by package.
OLD = {
    capsule_zoo: """
        Entry Takes create describe list_models list_weights load register register_guide save
    """,
    models: """
        RBM CapsuleHelmholtzMachine CapsuleNetwork CapsuleRBM Capsules Classifier
        ConditionalAutoencoder Constellations ContinuousCapsNet ConvolutionalClassifier
        GenerativeCapsNet ImageSpace MatrixCapsules Model ObservationSpace OnRequest
        PartWholeCapsules RecurrentCapsules ShapeCodes Site StackedCapsuleAutoencoder
        SwitchableGaussians VariationalAutoencoder Votes check_at_least check_one_of check_positive
        free_energy over_leading poses splat templates
    """,
    guides: """
        AmortizedMatching AmortizedPartWhole AmortizedShapeCodes ClassPose ConditionalEncoder
        ConvolutionalEncoder Corrected DynamicRouting EMConstellations EMObjects EMRouting
        ExactLabel ExactMatching ExactSwitches FreeForm Guide KnownLatents MeanFieldSwitches
        MixtureMatching PartReader PartWholeGuide PerceptronObjects RansacMatching
        RecognitionMachine RecurrentEncoder RoutedCapsules RoutedParents RoutingPartWhole
        RoutingShapeCodes RoutingSlots SetTransformerObjects SetTransformers SinkhornMatching
        StackedCapsuleGuide VBRouting groups
    """,
    inference: """
        Accuracy Calibration Check CheckpointError Comparison ContrastiveDivergence Counterfactual
        FilledIn ImportanceWeightedELBO IncompatibleGuide LogPartition NonFiniteLoss Objective
        Reference Refinement Requested ReweightedWakeSleep Run Score ScoreFunctionELBO SemiAmortized
        SleepPhase StackedCapsuleObjective TermHistory ThermodynamicObjective TopPrior
        Transformations VoteHistory WakeSleep Widened annealed_bounds annealed_log_likelihood
        as_module check_calibration check_pair classify cluster_accuracy compare encode error_rate
        evaluate fgsm fill_in fit fit_top_prior frechet frechet_distance image_log_likelihood infer
        infer_transformation intervene is_bound latents learn_templates linear_probe list_references
        load_reference log_partition log_prior log_weights loss_per_image mean_images
        posterior_predictive predictions pretrain rank_uniformity reconstruct refine relabeled
        sample sbc_ranks segmentation_accuracy summarize train_classifier vote_history widen
    """,
    data: """
        Batches Binarize Dataset MissingData Requests Rotations Scenes Shifts SmallNORB Source Split
        Standardize Toys3D Views dataset_names draw_scenes hide load_dataset occluded read_scenes
        register_dataset transforms
    """,
    figures: """
        accuracy_curves animation by_iterations climbs colored_parts drawings_of error_curves fields
        frames gibbs image_rows in_rows infer_parts learned_templates learning_curves mistakes
        nudges on_scale_of parses part_colors prior_samples reconstructions samples scene_rows
        seen_of_parts signed_colors spectra strokes sums template_rows votes
    """,
}


def test_a_feature_has_one_line():
    assert re.findall(r"^ .*", CHANGELOG, re.M) == []
    assert [line for line in CHANGELOG.splitlines() if line[:2] == "- " and len(line) > 115] == []


def faces_of(name: str) -> list[str]:
    return [face.__name__ for face in FACES if name in face.__all__]


@pytest.mark.parametrize("old, new", [row for row in ROWS if re.search(CLASS, row[1])])
def test_classes_of_the_new_column_are_public(old, new):
    assert all(faces_of(name) for name in re.findall(CLASS, new)), new


def test_what_lost_its_name_is_public_no_more():
    gone = ("AmortizedPartWhole", "RoutingPartWhole", "AmortizedShapeCodes", "RoutingShapeCodes")
    for name in (*gone, "predictions"):
        assert any(f"`{name}(" in old for old, _ in ROWS) and not faces_of(name)
    assert not hasattr(models.Model, "with_discrete_presences")


@pytest.mark.parametrize("face", OLD, ids=lambda face: face.__name__)
def test_every_old_name_is_public_or_in_the_table(face):
    renamed = " ".join(old for old, _ in ROWS)
    gone = set(OLD[face].split()) - {*face.__all__}
    assert {name for name in gone if not re.search(rf"\b{name}\b", renamed)} == set()
