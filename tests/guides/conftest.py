"""Part-whole models of two and of three levels, and images for them, where a file has no own."""

import pytest
import torch

from capsule_zoo.models import PartWholeCapsules
from capsule_zoo.models.parts.painted_parts import Painting


@pytest.fixture(params=[(3, 4), (2, 3, 4)], ids=["two levels", "three levels"])
def model(request):
    torch.manual_seed(0)
    painting = Painting(template_size=5)
    return PartWholeCapsules((1, 12, 12), layers=request.param, painting=painting).double()


@pytest.fixture
def images():
    return torch.rand(6, 1, 12, 12, dtype=torch.float64)
