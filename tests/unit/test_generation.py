"""One generation on a disk: whatever is done to it, it loads as it was written or not at all."""

import json
import os
import random
import shutil
import signal
import stat
import sys
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from torch import nn
from torch.optim import lr_scheduler as lr

import lanewise as lw
from lanewise.errors import SettingsError, StateError, StepError
from lanewise.state import manifest, retain
from lanewise.state.inspect import Generation
from tests.helpers.spawn import run_ranks

FLIPS = 1500


def make(folder: Path, steps: int = 1, **settings):
    """A run of one rank after so many steps."""
    run = lw.start(lanes=3, sinks=[], **settings)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 2))
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    more(run, model, steps)
    return run, model


def more(run, model, until: int) -> None:
    data = torch.randn(24, 7, generator=torch.Generator().manual_seed(1))
    for step in run.steps(run.loader(data, batch_size=6), total=until):
        for x in step:
            step.backward(model(x).square().mean())
        step.update()


@pytest.fixture
def saved(tmp_path):
    """A generation, and the run that wrote it."""
    run, model = make(tmp_path)
    path = run.save(tmp_path, wait=True)
    yield run, model, path
    run.close()


def forge(path: Path, change) -> None:
    """Change a manifest as somebody would who knows how its hash is made."""
    file = path / manifest.NAME
    words = json.loads(file.read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[0])
    change(words)
    body = json.dumps(words, sort_keys=True, indent=1).encode()
    file.write_bytes(body + b"\n" + xxhash.xxh3_128(body).hexdigest().encode() + b"\n")


def test_other_tools_read_the_files(saved):
    run, _, path = saved
    tensors = load_file(path / "slots-00000-00003.safetensors")
    flat = run.engine.flats[0]
    whole = torch.cat([tensors[f"flat 0000/values/slot {n:05d}"] for n in range(3)])
    assert torch.equal(whole[: flat.layout.fields[0].numel], flat.parameters[0].detach().reshape(-1))


def test_every_flipped_bit_is_found_and_its_file_named(saved):
    _, _, path = saved
    draw = random.Random(0)
    originals = {file: file.read_bytes() for file in sorted(path.iterdir())}
    assert {file.name for file in originals} == {
        "buffers.safetensors",
        manifest.NAME,
        "slots-00000-00003.safetensors",
    }
    for number in range(FLIPS):
        file = list(originals)[number % len(originals)]
        data = bytearray(originals[file])
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
        with pytest.raises(StateError) as caught:
            Generation(path).verify()
        assert file.name in str(caught.value)
        file.write_bytes(originals[file])
    Generation(path).verify()


def cut(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def link(path):
    other = path.with_name("elsewhere")
    path.rename(other)
    path.symlink_to(other)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["slots-00000-00003.safetensors", "buffers.safetensors", manifest.NAME])
@pytest.mark.parametrize("harm", [cut, link, pipe, Path.unlink, lambda path: path.write_bytes(b"")])
def test_what_is_no_whole_file_is_refused_and_nothing_changes(saved, name, harm):
    run, _, path = saved
    before = run.digest()
    harm(path / name)
    with pytest.raises(StateError, match=name):
        run.load(path.parent)
    assert run.digest() == before


def first_file(words):
    return words["files"]["slots-00000-00003.safetensors"]


def first_piece(words):
    return min(first_file(words)["pieces"].values(), key=lambda piece: piece["start"])


def rename_file(name):
    def change(words):
        words["files"][name] = words["files"].pop("slots-00000-00003.safetensors")

    return change


FORGERIES = {
    "a name that leads out": (
        rename_file("../slots-00000-00003.safetensors"),
        "is not one that Lanewise writes",
    ),
    "an absolute name": (rename_file("/etc/passwd"), "is not one that Lanewise writes"),
    "a pickle": (rename_file("state.pt"), "is not one that Lanewise writes"),
    "a negative place": (lambda w: first_piece(w).update(start=-8), "begins at byte -8"),
    "an overlap": (lambda w: first_piece(w).update(stop=first_piece(w)["stop"] - 4), "bytes are not"),
    "a huge shape": (lambda w: first_piece(w).update(shape=[1 << 60]), "bytes are not"),
    "a negative shape": (lambda w: first_piece(w).update(shape=[-1]), "negative size"),
    "an unknown type": (lambda w: first_piece(w).update(dtype="OBJECT"), "is unknown"),
    "a huge file": (lambda w: first_file(w).update(num_bytes=1 << 60), "add up"),
    "a missing piece": (lambda w: first_file(w)["pieces"].popitem(), "add up|begins at byte|pieces of flats"),
    "another version": (lambda w: w.update(version=99), "version 99"),
    "an unknown word": (lambda w: w.update(code="import os"), "not a manifest of this format"),
    "another step": (lambda w: w.update(step=7), "It was moved or copied"),
    "other lanes": (lambda w: w.update(lanes=1 << 40), "pieces of flats are needed"),
    "too few flats": (lambda w: w.update(flats=w["flats"][:-1]), "pieces of flats are needed"),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_forged_manifests_are_refused_and_nothing_changes(saved, what):
    run, _, path = saved
    before = run.digest()
    change, words = FORGERIES[what]
    forge(path, change)
    with pytest.raises(StateError, match=words):
        run.load(path.parent)
    assert run.digest() == before


@pytest.mark.parametrize("data", [b"", b"\n\n", b"{}", os.urandom(300), b"[" * 100_000])
def test_manifests_that_are_none(saved, data):
    run, _, path = saved
    (path / manifest.NAME).write_bytes(data)
    with pytest.raises(StateError, match=manifest.NAME):
        run.load(path.parent)


def test_deep_nesting_with_a_right_hash(saved):
    run, _, path = saved
    body = b"[" * 100_000
    (path / manifest.NAME).write_bytes(body + b"\n" + xxhash.xxh3_128(body).hexdigest().encode() + b"\n")
    with pytest.raises(StateError, match="not a manifest"):
        run.load(path.parent)


def test_the_state_of_something_else_is_refused(saved):
    run, _, path = saved
    run.close()
    other = lw.start(lanes=3, sinks=[])
    model = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))
    other.prepare(model, torch.optim.AdamW(model.parameters()))
    before = other.digest()
    with pytest.raises(StateError, match="it is the state of something else: fields of unit"):
        other.load(path.parent)
    with pytest.raises(StateError, match="has no generation that can be loaded"):
        other.load(path.parent, step=5)
    assert other.digest() == before
    other.close()


def test_values_that_json_does_not_hold_are_refused(saved, tmp_path):
    run, _, _ = saved
    with pytest.raises(StateError, match=r"extra\.model is a Linear"):
        run.save(tmp_path / "other", extra={"model": nn.Linear(1, 1)})
    assert not (tmp_path / "other").exists()


def load_with_an_audit(folder: Path) -> list[str]:
    run, _ = make(folder, steps=0)
    seen: list[str] = []
    sys.addaudithook(lambda event, arguments: seen.append(event))
    run.load(folder)
    run.close()
    return [
        event for event in seen if event.startswith(("pickle", "marshal", "exec", "os.system", "subprocess"))
    ]


def test_nothing_is_unpickled_or_run_by_a_load(saved):
    _, _, path = saved
    assert run_ranks(1, load_with_an_audit, path.parent)[0] == []


def save_until_killed(folder: Path, moment: int) -> int:
    """Save step 2 and die before the given write, rename or fsync; how many there were, for those who live."""
    run, model = make(folder, steps=0)
    run.load(folder)
    more(run, model, 2)
    count = 0

    def count_down() -> bool:
        nonlocal count
        count += 1
        return count == moment

    def audit(event, arguments):
        if event in ("os.rename", "os.mkdir", "open") and str(folder) in str(arguments[0]) and count_down():
            os.kill(os.getpid(), signal.SIGKILL)

    real = os.fsync

    def fsync(descriptor):
        if count_down():
            if moment % 2 and stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        real(descriptor)

    os.fsync = fsync
    sys.addaudithook(audit)
    run.save(folder, wait=True)
    return count


def test_a_save_that_is_killed_at_any_moment_leaves_the_generation_before(saved, tmp_path):
    """kill -9 before every open, mkdir, fsync and rename; before every other fsync half of the file is lost too."""
    run, model, path = saved
    first = run.digest()
    more(run, model, 2)
    second = run.digest()
    whole = tmp_path / "whole"
    shutil.copytree(path.parent, whole)
    moments = run_ranks(1, save_until_killed, whole, 0)[0]
    assert moments >= 12
    outcomes = []
    for moment in range(1, moments + 1):
        folder = tmp_path / f"killed-{moment}"
        folder.mkdir()
        shutil.copytree(path, folder / path.name)
        child = os.fork()
        if child == 0:
            try:
                save_until_killed(folder, moment)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        run.load(folder)
        assert (run.position, run.digest()) in ((1, first), (2, second))
        outcomes.append(run.position)
    assert set(outcomes) == {1, 2}, "the last moments come after the rename"


def test_old_generations_go_when_a_newer_one_is_whole(tmp_path):
    run, model = make(tmp_path, steps=0)
    for step in range(1, 7):
        more(run, model, step)
        run.save(tmp_path, keep_last=2, keep_every=3, wait=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{n:09d}" for n in (3, 5, 6)]
    with pytest.raises(SettingsError, match="keep_last= too"):
        run.save(tmp_path, keep_every=3)
    with pytest.raises(SettingsError, match="must be 1 or more"):
        run.save(tmp_path, keep_last=-1)
    run.close()


def test_nothing_goes_while_the_newest_is_damaged_and_strange_files_stay(tmp_path):
    run, model = make(tmp_path, steps=0)
    for step in range(1, 4):
        more(run, model, step)
        run.save(tmp_path, wait=True)
    names = sorted(path.name for path in tmp_path.iterdir())
    newest = tmp_path / names[-1] / "buffers.safetensors"
    data = newest.read_bytes()
    newest.write_bytes(data[:-1] + b"?")
    with pytest.raises(StateError, match=r"buffers\.safetensors"):
        retain.prune(tmp_path, names, 1, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    newest.write_bytes(data)
    (tmp_path / names[0] / "notes.txt").write_text("mine")
    (tmp_path / names[1] / manifest.NAME).write_bytes(b"")
    assert retain.prune(tmp_path, names, 1, None) == [names[0]]
    assert sorted(
        path.name for path in tmp_path.rglob("*") if path.is_file() and path.parent.name not in names
    ) == ["notes.txt"]
    assert (tmp_path / names[1]).exists()
    run.close()


def test_a_run_that_went_back_keeps_what_it_saves(tmp_path):
    run, model = make(tmp_path, steps=0)
    for step in (1, 2, 4):
        more(run, model, step)
        run.save(tmp_path, wait=True)
    run.load(tmp_path, step=2)
    more(run, model, 3)
    path = run.save(tmp_path, keep_last=1, wait=True)
    assert path.exists()
    assert sorted(p.name[-1] for p in tmp_path.iterdir()) == ["3", "4"], (
        "step 4 is of another branch, and is left"
    )
    run.close()


def scheduled(make_scheduler, folder, until, loads=False):
    run = lw.start(lanes=3, sinks=[])
    torch.manual_seed(0)
    model = nn.Linear(7, 2)
    _, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    scheduler = make_scheduler(optimizer)
    if loads:
        assert run.load(folder, schedulers=scheduler) == {"a": [1, float("inf")], "b": {2: "x", "2": "y"}}
    data = torch.randn(24, 7, generator=torch.Generator().manual_seed(1))
    for step in run.steps(run.loader(data, batch_size=6), total=until):
        for x in step:
            step.backward(model(x).square().mean())
        step.update()
        scheduler.step(*([step.loss] if isinstance(scheduler, lr.ReduceLROnPlateau) else []))
    digest = run.digest()
    run.save(folder / str(loads), schedulers=scheduler, wait=True)
    if not (folder / f"step-{until:09d}").exists():
        run.save(
            folder, schedulers=scheduler, extra={"a": (1, float("inf")), "b": {2: "x", "2": "y"}}, wait=True
        )
    run.close()
    return digest, optimizer.param_groups[0]["lr"]


SCHEDULERS = {
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [3, 5]),
    "SequentialLR": lambda o: lr.SequentialLR(o, [lr.ConstantLR(o, 0.5, 2), lr.MultiStepLR(o, [2, 3])], [2]),
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.1, 20),
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda step: 0.9**step),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_schedulers_go_on(tmp_path, kind):
    straight = scheduled(SCHEDULERS[kind], tmp_path / "straight", 7)
    scheduled(SCHEDULERS[kind], tmp_path / "cut", 2)
    assert scheduled(SCHEDULERS[kind], tmp_path / "cut", 7, loads=True) == straight
    with pytest.raises(StateError, match="the list of schedulers"):
        scheduled(lambda o: lr.CosineAnnealingLR(o, 5), tmp_path / "cut", 7, loads=True)


def odd_model(size=15):
    model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 2))
    model.register_buffer("turned", torch.arange(float(size)).view(3, -1).t())
    return model


def odd_run(model):
    run = lw.start(lanes=3, sinks=[])
    torch.manual_seed(0)
    groups = [{"params": model[0].parameters(), "amsgrad": True}, {"params": model[1].parameters()}]
    run.prepare(model, torch.optim.AdamW(groups, lr=1e-2), units=[])
    return run


def test_groups_with_other_states_and_buffers_that_lie_otherwise(tmp_path):
    model = odd_model()
    run = odd_run(model)
    more(run, model, 2)
    digest = run.digest()
    Generation(run.save(tmp_path, wait=True)).verify()
    more(run, model, 4)
    later = run.digest()
    run.load(tmp_path)
    assert run.digest() == digest
    more(run, model, 4)
    assert run.digest() == later
    run.close()
    other = odd_run(odd_model(18))
    before = other.digest()
    with pytest.raises(StateError, match=r"type and shape of buffer turned is .* and .* here"):
        other.load(tmp_path)
    assert other.digest() == before
    other.close()


def test_saving_and_loading_at_the_wrong_moment(tmp_path):
    run, model = make(tmp_path, steps=1)
    run.save(tmp_path, wait=True)
    data = torch.randn(24, 7)
    for step in run.steps(run.loader(data, batch_size=6), total=3):
        for x in step:
            step.backward(model(x).square().mean())
        step.update()
        with pytest.raises(StepError, match=r"inside a loop over run\.steps"):
            run.load(tmp_path)
    with run.gathered(model, write=True), pytest.raises(StepError, match=r"inside run\.gathered"):
        run.save(tmp_path / "other")
    run.load(tmp_path)
    assert run.position == 1
    run.close()
