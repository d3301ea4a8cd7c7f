"""A folder with one sub-folder of images for each class, as a data set of squares.

Files of numpy (.npy: bytes, height by width, or by 3 colours) need nothing more; other formats are decoded by
Pillow, which is an extra, because most users of Lanewise never need it.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

from lanewise.errors import DataError
from lanewise.recipes import recipe
from lanewise.recipes.split import split

PLAIN = ".npy"
PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Images as squares of values from -1 to 1, with the number of their class."""

    def __init__(self, files: Sequence[tuple[Path, int]], size: int, flip: bool) -> None:
        self._files = files
        self._size = size
        self._flip = flip

    def __len__(self) -> int:
        """How many images there are."""
        return len(self._files)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        file, label = self._files[place]
        image = square(decode(file), self._size)
        if self._flip and bool(torch.rand(()) < 0.5):
            image = image.flip(-1)
        return image, label


def find(data: recipe.ImageFolder, folder: Path, seed: int) -> tuple[Images, Images | None, tuple[str, ...]]:
    """Images to train on, images to evaluate, and the names of the classes."""
    root = folder / Path(data.folder).expanduser()
    if not root.is_dir():
        raise DataError(
            f"data.folder: there is no folder {root}. Paths are relative to the folder of the recipe."
        )
    folders = sorted(child for child in root.iterdir() if child.is_dir() and not child.name.startswith("."))
    if len(folders) < 2:
        found = f"only {folders[0].name!r}" if folders else "none"
        raise DataError(
            f"{root}: a classifier needs two classes or more, one sub-folder of images for each; found {found}."
        )
    files = []
    for label, child in enumerate(folders):
        images = sorted(f for f in child.rglob("*") if f.suffix.lower() in (PLAIN, *PICTURES) and f.is_file())
        if not images:
            raise DataError(
                f"{child}: no image of class {child.name!r}. Known are {PLAIN} and, with Pillow, "
                f"{', '.join(PICTURES)}. Move the folder away if it is none."
            )
        files += [(file, label) for file in images]
    _check_pillow([file for file, _ in files])
    chosen, held = split(len(files), data.valid, seed, str(root))
    train = Images([files[place] for place in chosen], data.size, data.flip)
    valid = Images([files[place] for place in held], data.size, flip=False) if held else None
    return train, valid, tuple(child.name for child in folders)


def decode(file: Path) -> torch.Tensor:
    """An image as bytes, colours by height by width."""
    try:
        pixels = numpy.load(file, allow_pickle=False) if file.suffix.lower() == PLAIN else _picture(file)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{file}: not an image that can be read: {error}.") from error
    shape = (*pixels.shape, 1) if pixels.ndim == 2 else pixels.shape
    if pixels.dtype != numpy.uint8 or len(shape) != 3 or shape[2] not in (1, 3) or 0 in shape:
        raise DataError(
            f"{file}: must hold bytes (uint8) of height x width, or of height x width x 1 or 3 colours; found "
            f"{pixels.dtype} of shape {pixels.shape}."
        )
    return torch.from_numpy(pixels.reshape(shape).copy()).permute(2, 0, 1).expand(3, -1, -1)


def square(image: torch.Tensor, size: int) -> torch.Tensor:
    """Scale the shorter side to `size`, cut the middle out, and bring values to -1 to 1."""
    _, height, width = image.shape
    factor = size / min(height, width)
    scaled = (max(size, round(height * factor)), max(size, round(width * factor)))
    values = image[None].float()
    if scaled != (height, width):
        values = F.interpolate(values, scaled, mode="bilinear", align_corners=False, antialias=True)
    top, left = (scaled[0] - size) // 2, (scaled[1] - size) // 2
    return (values[0, :, top : top + size, left : left + size] / 127.5 - 1.0).contiguous()


def _picture(file: Path) -> numpy.ndarray:
    from PIL import Image

    with Image.open(file) as picture:
        return numpy.asarray(picture.convert("RGB"))


def _check_pillow(files: Sequence[Path]) -> None:
    pictures = [file for file in files if file.suffix.lower() != PLAIN]
    if pictures and find_spec("PIL") is None:
        raise DataError(
            f"{pictures[0]}: to decode {pictures[0].suffix} files ({len(pictures)} here) Pillow is needed: "
            "pip install 'lanewise[images]'. Arrays in .npy files can be read without it."
        )
