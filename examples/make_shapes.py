"""Draw a small folder of images, one sub-folder for each shape, for examples/recipes/image-classifier.toml.

They are written as .npy files, which need nothing but numpy to read.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "recipes" / "data" / "shapes"
SIDE = 24
SHAPES: dict[str, Callable[[np.ndarray, np.ndarray, float], np.ndarray]] = {
    "disc": lambda x, y, r: x**2 + y**2 < r**2,
    "ring": lambda x, y, r: (x**2 + y**2 < r**2) & (x**2 + y**2 > (0.55 * r) ** 2),
    "stripes": lambda x, y, r: (np.maximum(abs(x), abs(y)) < r) & (x // 2 % 2 == 0),
}


def draw(shape: str, random: np.random.Generator) -> np.ndarray:
    """One image: a shape of some size and colour, somewhere, under noise."""
    rows, columns = np.mgrid[0:SIDE, 0:SIDE]
    middle = random.uniform(8, SIDE - 8, 2)
    inside = SHAPES[shape](columns - middle[0], rows - middle[1], random.uniform(4, 7))
    bright, dark = random.uniform(140, 255, 3), random.uniform(0, 100, 3)
    picture = np.where(inside[:, :, None], bright, dark) + random.normal(0, 8, (SIDE, SIDE, 3))
    return picture.clip(0, 255).astype(np.uint8)


def main(folder: Path, images: int) -> None:
    """Draw so many images of each shape."""
    random = np.random.default_rng(0)
    for shape in SHAPES:
        (folder / shape).mkdir(parents=True, exist_ok=True)
        for number in range(images):
            np.save(folder / shape / f"{number:03}.npy", draw(shape, random))
    print(f"{images} images of each of {', '.join(SHAPES)} in {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("images", nargs="?", type=int, default=100, help="images of each shape")
    options = parser.parse_args()
    main(options.folder, options.images)
