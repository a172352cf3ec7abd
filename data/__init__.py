"""Data sets in memory, batches whose order can be resumed, and transforms with known parameters."""

from capsule_zoo.data import transforms
from capsule_zoo.data.batches import Batches
from capsule_zoo.data.datasets import dataset_names, load_dataset, register_dataset
from capsule_zoo.data.files import MissingData
from capsule_zoo.data.letters import LetterViews
from capsule_zoo.data.missing import half_mask, hide
from capsule_zoo.data.own_pictures import read_whole_pictures
from capsule_zoo.data.points import Scenes, draw_scenes, read_scenes
from capsule_zoo.data.sources import Source
from capsule_zoo.data.splits import Dataset, Split
from capsule_zoo.data.toys3d import Toys3D
from capsule_zoo.data.transforms import Binarize, Requests, Rotations, Shifts, Standardize
from capsule_zoo.data.viewpoints import SmallNORB, Views

__all__ = [
    "Batches",
    "Binarize",
    "Dataset",
    "LetterViews",
    "MissingData",
    "Requests",
    "Rotations",
    "Scenes",
    "Shifts",
    "SmallNORB",
    "Source",
    "Split",
    "Standardize",
    "Toys3D",
    "Views",
    "dataset_names",
    "draw_scenes",
    "half_mask",
    "hide",
    "load_dataset",
    "read_scenes",
    "read_whole_pictures",
    "register_dataset",
    "transforms",
]
