"""Every message of the data side."""

import pytest
import torch
from torch.utils.data import IterableDataset

import lanewise as lw
from lanewise.errors import DataError, SettingsError
from tests.unit.test_loader import Noisy, make


class Stream(IterableDataset):
    def __iter__(self):
        yield 0

    def __len__(self):
        return 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: make(Stream()),
            r"run\.loader needs a map-style data set .* found Stream\. A stream has no places",
        ),
        (lambda: make(iter([1])), r"needs a map-style data set .* found list_iterator"),
        (lambda: make([]), r"run\.loader: the data set is empty\."),
        (
            lambda: make(Noisy(9), 10),
            r"batch_size=10 is the global batch and must be a multiple of lanes=4\. Use batch_size=8 or 12, or lanes= "
            r"one of \[1, 2, 5, 10\]\.",
        ),
        (
            lambda: make(Noisy(9), 6, micro_batches=2),
            r"must be a multiple of lanes=4 times micro_batches=2\. Use batch_size=8, or lanes= one of \[1, 3\]\.",
        ),
        (lambda: make(Noisy(9), 3, micro_batches=2), r"Use batch_size=8\.$"),
        (lambda: make(Noisy(9), 0), r"batch_size=0 is the global batch .* Use batch_size=4\.$"),
        (lambda: make(Noisy(9), -4), r"batch_size=-4 is the global batch .* Use batch_size=4\.$"),
        (lambda: make(Noisy(9), "8"), r"run\.loader: batch_size must be a whole number, found '8'\."),
        (
            lambda: make(Noisy(9), num_workers=1.5),
            r"run\.loader: num_workers must be a whole number, found 1\.5\.",
        ),
        (lambda: make(Noisy(9), num_workers=-1), r"num_workers must be 0 or more, found -1\."),
        (
            lambda: make(Noisy(7), drop_last=True),
            r"the data set has 7 samples, and with drop_last no batch of 8 is full\. Use a smaller batch_size",
        ),
        (
            lambda: make(Noisy(40), drop_last=True, partition=lambda i: i % 3),
            r"lane 3 of the partition has only 0 samples, and with drop_last a step needs 2 in each lane",
        ),
        (
            lambda: make(Noisy(9), key=str),
            r"key= is used with partition='hash' only; the partition here is 'uniform'",
        ),
        (
            lambda: make(Noisy(9), key=str, partition=len),
            r"key= is used with partition='hash' only; .* a function",
        ),
        (lambda: make(Noisy(9), partition="hash"), r"partition='hash' needs key=, a function from the place"),
        (
            lambda: make(Noisy(9), partition="even"),
            r"partition must be 'uniform', 'hash' or a function, found 'even'",
        ),
        (
            lambda: make(Noisy(9), partition=lambda i: i),
            r"put sample 4 into lane 4; lanes are whole numbers from 0 to 3\.",
        ),
        (lambda: make(Noisy(9), partition=lambda i: -1), r"put sample 0 into lane -1; lanes are"),
        (lambda: make(Noisy(9), partition=lambda i: 0.5), r"put sample 0 into lane 0\.5; lanes are"),
        (
            lambda: make(Noisy(9), partition="hash", key=lambda i: frozenset({i})),
            r"key= gave a frozenset for sample 0\. Give a string, a number, or a tuple of them",
        ),
        (
            lambda: make(Noisy(9), partition="hash", key=lambda i: (1, object())),
            r"key= gave a object for sample 0\.",
        ),
    ],
)
def test_a_loader_that_cannot_be_made(call, message):
    with pytest.raises(DataError, match=message):
        call()


def test_steps_takes_one_end():
    run = lw.start(lanes=4, sinks=[])
    model = torch.nn.Linear(5, 1)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(SettingsError, match=r"run\.steps takes total= or epochs=, not both\."):
        next(run.steps(run.loader(Noisy(8), 8), total=1, epochs=1))
    run.close()
