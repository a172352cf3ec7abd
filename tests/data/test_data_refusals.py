"""What data sets, splits, batches and transforms refuse, and the telling part of each message."""

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from capsule_zoo.data import (
    Batches,
    Binarize,
    MissingData,
    Split,
    Standardize,
    half_mask,
    hide,
    load_dataset,
)
from capsule_zoo.data import Dataset as Splits
from capsule_zoo.data.pictures import open_image, read_array
from capsule_zoo.data.scenes import gray_scenes
from capsule_zoo.data.seeds import seeded_generator
from capsule_zoo.data.streams import ItemBatches, LoaderBatches
from capsule_zoo.data.toys3d import make_toy
from capsule_zoo.data.transforms import Affine, Rotate, Shift, warp_images
from capsule_zoo.data.viewpoints import SmallNORB, read_matrix
from capsule_zoo.models.common.spaces import AnyImages

# most pictures here have one value
pytestmark = pytest.mark.filterwarnings("ignore:.*pictures have hardly any contrast")

GRAY = torch.rand(2, 3, 4, 6)
IMAGES = torch.rand(9, 1, 8, 8)
SPLIT = Split(IMAGES, torch.arange(9) % 3, "some/test")
DIGITS = torch.rand(20, 1, 8, 8), torch.arange(20) % 4
ITEMS = partial(ItemBatches, check=AnyImages().check, labels=True)
LOADER = partial(LoaderBatches, check=AnyImages().check, labels=True)


class Items(Dataset):
    """Five items that one function makes."""

    def __init__(self, item: Callable[[int], object]) -> None:
        self.item = item

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> object:
        if number >= 5:
            raise IndexError(number)
        return self.item(number)


class Endless(IterableDataset):
    def __iter__(self):
        yield from torch.zeros(5, 1, 2, 2)


class Miscounted(Endless):
    def __len__(self) -> int:
        return 8


NOISY = Items(lambda n: (torch.rand(1, 2, 2), n))
UNEQUAL = Items(lambda n: (torch.zeros(1, 2, 2 + n % 2), n))
PICTURES = Items(lambda n: (object(), n))
BYTES = Items(lambda n: (torch.zeros(1, 2, 2, dtype=torch.uint8), n))
NAMED = Items(lambda n: {"image": torch.zeros(1, 2, 2), "label": n})
ALONE = Items(lambda n: torch.zeros(1, 2, 2))
TEXT_LABELS = Items(lambda n: (torch.zeros(1, 2, 2), "a word"))


def first(batches: ItemBatches | LoaderBatches) -> None:
    list(batches.epoch(0))


def distributed() -> DataLoader:
    return DataLoader(NOISY, 8, sampler=DistributedSampler(NOISY, num_replicas=2, rank=0))


def miscounted() -> LoaderBatches:
    return LoaderBatches(DataLoader(Miscounted(), 1), check=AnyImages().check, labels=False)


def array(kind: object) -> None:
    np.save("words.npy", np.zeros((3, 4, 4), kind))
    read_array(Path("words.npy"), None)


def arrays(**named: object) -> None:
    np.savez("mine.npz", **named)
    load_dataset("./mine.npz")


def one_side_with_classes() -> None:
    for name in ("train/a/1.png", "test/2.png"):
        Path(name).parent.mkdir(parents=True)
        Image.new("L", (6, 4), 51).save(name)
    load_dataset(Path.cwd())


def one_picture(name: str) -> None:
    Path("letters").mkdir()
    Image.new("L", (6, 4), 51).save("letters/1.png")
    load_dataset(name)


ZEROS = np.zeros((3, 4, 5))
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    # names and arguments of data sets
    "a name": (lambda: load_dataset("minst"), "did you mean 'mnist'"),
    "a name in other letters": (lambda: load_dataset("Fashion_MNIST"), "mean 'fashion-mnist'"),
    "no name": (lambda: load_dataset("zebra"), "Known are: .*digits.*folder:PATH"),
    "modules": (lambda: load_dataset("sprites"), r"imported modules \(--import MODULE\)"),
    "no folder named": (lambda: load_dataset("folder:"), "folder:PATH"),
    "no file there": (lambda: load_dataset("folder:gone.npz"), r"no file .*gone\.npz; name the pl"),
    "an empty name": (lambda: load_dataset(""), "unknown data set ''"),
    "no pictures": (lambda: load_dataset("./lettres"), "no such folder of pictures either"),
    **{
        f"size {size}": (lambda size=size: load_dataset(size=size), "size")
        for size in (0, (28, -1), 2.5, "0x28", "large", (28, 2.5))
    },
    "more validation": (lambda: load_dataset(validation=1397), "validation"),
    "half an image": (lambda: load_dataset(validation=1.5), "validation must be a whole number"),
    "root": (lambda: load_dataset(root="no/such/folder"), "root must be a folder"),
    **{
        f"pictures as {name}": (lambda name=name: one_picture(name), "mean 'folder:letters'")
        for name in ("Folder:letters", "images:letters")
    },
    "a picture of one color": (lambda: one_picture("letters/1.png"), "no size can be guessed"),
    "one picture": (lambda: one_picture("./letters"), "holds 1 image, but 2 or more are needed"),
    "classes on one side": (one_side_with_classes, "one has class folders, one none"),
    # arrays and pictures
    **{
        f"array of {kind}": (lambda kind=kind: array(kind), r"words\.npy must be bytes .*; write")
        for kind in ("<U3", "M8[D]")
    },
    "no picture": (lambda: open_image(io.BytesIO(b"words"), "x.png"), "x.png is not a readable im"),
    "points": (lambda: arrays(points=np.zeros((3, 4, 2))), "points are read by constellations:"),
    "two channels": (
        lambda: arrays(images=np.zeros((3, 4, 5, 2))),
        r"1 or 3 channels, not \(3, 4, 5, 2\)",
    ),
    "a range": (lambda: arrays(images=ZEROS + 7), "not float64 from 7.0 to 7.0; rescale them"),
    "a rounded range": (
        lambda: arrays(images=ZEROS + 1.0000002),
        "from 1.0000002 to 1.0000002; rescale",
    ),
    "NaN": (lambda: arrays(images=ZEROS * np.nan), "from nan to nan; fill in what is NaN"),
    "few labels": (
        lambda: arrays(images=ZEROS, labels=np.arange(2)),
        r"whole numbers from 0 on, \(3,\)",
    ),
    "objects": (lambda: arrays(images=np.array([None])), "cannot be read as a NumPy file"),
    # splits and data sets
    "images of three dims": (lambda: Split(IMAGES[:, 0], SPLIT.labels), "images"),
    "labels of fewer": (lambda: Split(IMAGES, SPLIT.labels[:5]), "labels"),
    "a list of images": (lambda: Split(list(IMAGES), SPLIT.labels), r"of images by torch\.stack"),
    "splits of two shapes": (
        lambda: Splits("odd", SPLIT, SPLIT, Split(IMAGES[..., :4], SPLIT.labels)),
        "several shapes",
    ),
    "classes not known": (
        lambda: Splits("toy", SPLIT, SPLIT, SPLIT, ("b", "c", "d")).match_classes(["c"]),
        "'toy' has classes .* not trained on: b, d; it was .* c",
    ),
    # pixels
    "side": (lambda: half_mask((2, 2), "up"), "side must be one of left, right, top, bottom"),
    "mask of floats": (lambda: hide(GRAY, torch.ones(4, 6)), "bool, not torch.float32"),
    "mask as a list": (lambda: hide(GRAY, [[True]]), r"must have the shape.*not \(1, 1\)"),
    "mask as a word": (lambda: hide(GRAY, "left"), "a numpy array or a list.*not str"),
    "mask turned": (lambda: hide(GRAY, torch.ones(6, 4).bool()), r"have the shape.*not \(6, 4\)"),
    "binary bytes": (
        lambda: Binarize()(255 * GRAY.round(), generator=torch.Generator()),
        r"lie in \[0, 1\], not in \[0, 255\]; divide",
    ),
    "no spread": (lambda: Standardize.of(torch.ones(2, 1, 2, 2)), "scale must be positive"),
    # transforms
    "shift back": (lambda: Shift(-1), "pixels"),
    "no angle": (lambda: Rotate(float("nan")), "degrees"),
    "scale 0": (lambda: Affine(scale=(0.0, 1.0)), "scale"),
    "motions": (lambda: warp_images(IMAGES, torch.zeros(2, 2, 3)), "motions"),
    # batches
    "batch size": (lambda: Batches(SPLIT, 0), "batch_size"),
    "transform": (lambda: Batches(SPLIT, 8, transform="flip"), "must be a function of images"),
    "empty split": (lambda: Batches(SPLIT[:0], 8), "empty"),
    "key": (lambda: seeded_generator(1, -1), "negative"),
    "not by number": (
        lambda: first(ITEMS(Endless(), 4)),
        "Endless, a torch Dataset that cannot be read by number",
    ),
    "empty items": (lambda: first(ITEMS(SPLIT[:0], 4)), "empty Split"),
    "unequal": (lambda: first(ITEMS(UNEQUAL, 4)), "cannot be made into a batch"),
    "no tensors": (lambda: first(ITEMS(PICTURES, 4)), r"torchvision: transform=ToTensor\(\)"),
    "bytes": (lambda: first(ITEMS(BYTES, 4)), "divide bytes by 255"),
    "names": (lambda: first(ITEMS(NAMED, 4)), "not a dict with the keys 'image', 'label'"),
    "no labels": (lambda: first(ITEMS(ALONE, 4)), "data has no labels, which are needed"),
    "words": (lambda: first(ITEMS(TEXT_LABELS, 4)), "labels must be a tensor of integers"),
    "loader, endless": (
        lambda: first(LOADER(DataLoader(Endless(), 4))),
        "unknown length; give its IterableDataset",
    ),
    "loader, apart": (lambda: first(LOADER(distributed())), "DistributedSampler"),
    "loader, early": (lambda: first(miscounted()), "gave 5 batches in epoch 0, but"),
    # scenes and views
    "no room": (lambda: gray_scenes(*DIGITS, 2, canvas=4), "no room"),
    "least": (lambda: gray_scenes(*DIGITS, 2, least=4), "least must be"),
    "ink below 0": (lambda: gray_scenes(*DIGITS, 2, ink=-0.1), "ink must be a brightness from"),
    **{
        name: (lambda name=name: load_dataset(name), message)
        for name, message in {
            "tetrominoes:few=3": "no option 'few'; its options are train, test",
            "tetrominoes:most=three": "most of tetrominoes must be a number",
            "tetrominoes:": "no option ''; its options are train, test",
            "multi-sprites:train=0": "train and test must be at least 1, not 0 and",
            "multi-sprites:most=0,least=0": "most must be at least 1 and at most 255, not 0",
            "multi-sprites:most=256,least=256": "most must be at least 1 and at most 255, not 256",
            "tetrominoes:canvas=37": "canvas must be a multiple of 5, .* not 37",
            "multi-sprites:least=3,most=2": "least must be from 0 to most=2, not 3",
            "multi-sprites:canvas=10": "canvas=10 has no room for objects of 24 pixels",
            "tetrominoes:most=12,train=5": "12 objects do not fit; give a larger canvas",
        }.items()
    },
    **{
        f"{number} validation scenes": (
            lambda number=number: load_dataset("multi-digits:train=60,test=4", validation=number),
            f"from 0 to 6, the scenes of digits.*not {number}",
        )
        for number in (7, -1, 1.5)
    },
    "toy": (lambda: make_toy("boat", 0), "category must be one of"),
    "no matrix": (lambda: read_matrix(b"not a matrix at all"), "unknown magic"),
    "no files of views": (lambda: SmallNORB(Path("nowhere")), r"training-dat.*published at https"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_a_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as refused:
        call()
    assert "\n" not in str(refused.value)
    assert name != "no picture" or "0x" not in str(refused.value)  # no address of a stream


@pytest.mark.parametrize("index", [True, 2.5, "three", [1, 2], torch.tensor(True), None])
def test_what_a_split_is_not_indexed_by(index):
    with pytest.raises(TypeError, match="by a number, a slice or a tensor"):
        SPLIT[index]


FILES = ("mnist", "binarized-mnist", "fashion-mnist", "cifar10", "affnist", "rotated-mnist")


@pytest.mark.parametrize("name", [*FILES, "smallnorb"])
def test_data_that_is_not_there_says_what_to_set(name, tmp_path, monkeypatch):
    with pytest.raises(MissingData, match="CAPSULE_ZOO_DATA"):
        load_dataset(name, root=tmp_path)
    monkeypatch.setenv("CAPSULE_ZOO_DATA", str(tmp_path / "typo"))
    with pytest.raises(MissingData, match="CAPSULE_ZOO_DATA must be a folder"):
        load_dataset(name)
