"""Data sets in memory, batches whose order can be resumed, and transforms with known parameters."""

from capsule_zoo.data import transforms as transforms
from capsule_zoo.data.batches import Batches as Batches
from capsule_zoo.data.datasets import dataset_names as dataset_names
from capsule_zoo.data.datasets import load_dataset as load_dataset
from capsule_zoo.data.datasets import register_dataset as register_dataset
from capsule_zoo.data.files import MissingData as MissingData
from capsule_zoo.data.missing import hide as hide
from capsule_zoo.data.missing import occluded as occluded
from capsule_zoo.data.points import Scenes as Scenes
from capsule_zoo.data.points import draw_scenes as draw_scenes
from capsule_zoo.data.points import read_scenes as read_scenes
from capsule_zoo.data.sources import Source as Source
from capsule_zoo.data.splits import Dataset as Dataset
from capsule_zoo.data.splits import Split as Split
from capsule_zoo.data.toys3d import Toys3D as Toys3D
from capsule_zoo.data.transforms import Binarize as Binarize
from capsule_zoo.data.transforms import Requests as Requests
from capsule_zoo.data.transforms import Rotations as Rotations
from capsule_zoo.data.transforms import Shifts as Shifts
from capsule_zoo.data.transforms import Standardize as Standardize
from capsule_zoo.data.viewpoints import SmallNORB as SmallNORB
from capsule_zoo.data.viewpoints import Views as Views

__all__ = ["transforms"]
__all__ += sorted(
    name
    for name, each in globals().items()
    if str(getattr(each, "__module__", "")).startswith("capsule_zoo.")
)
