"""Recipes without ranks: what they may say, and what is said of data that does not fit."""

import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from lanewise.errors import DataError, SettingsError
from lanewise.recipes import images, table, text
from lanewise.recipes.models import ConvNet, Gpt, Perceptron
from lanewise.recipes.recipe import (
    GptRecipe,
    ImageFolder,
    ImageRecipe,
    Optimizer,
    Schedule,
    Table,
    TableRecipe,
    parse_text,
    read,
)
from lanewise.recipes.split import split
from lanewise.recipes.train import make_optimizer, make_schedule

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
SMALLEST = {
    "gpt": 'task="gpt"\ntrain={batch_size=8, steps=2}\ndata={files=["a.txt"]}\n',
    "table": 'task="table"\ntrain={batch_size=8, epochs=2}\ndata={file="a.csv", label="y"}\n',
    "images": 'task="images"\ntrain={batch_size=8, epochs=2}\ndata={folder="a"}\n',
}


def problems(toml: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        parse_text(toml, "r.toml")
    first, *lines = str(caught.value).splitlines()
    assert first == f"r.toml: {len(lines)} problem(s):"
    return sorted(line.removeprefix("  - ") for line in lines)


def test_the_smallest_recipes():
    kinds = {"gpt": GptRecipe, "table": TableRecipe, "images": ImageRecipe}
    for task, toml in SMALLEST.items():
        recipe = parse_text(toml, task)
        assert type(recipe) is kinds[task]
        assert (recipe.run.lanes, recipe.run.strategy, recipe.optimizer.kind) == (8, "ddp", "adamw")
        assert recipe.output.weights is None


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*.toml")), ids=lambda file: file.stem)
def test_the_example_recipes_are_read(file):
    assert read(file).train.batch_size


def test_all_problems_are_told_at_once():
    found = problems(
        """
        task = "table"
        sed = 3
        [run]
        lanez = 4
        lanes = true
        strategy = "zero-3"
        [model]
        widht = 3
        layers = 0
        dropout = 1.0
        [data]
        file = 7
        labels = "y"
        categorical = "wind"
        missing = "maen"
        [optimizer]
        kind = "adamm"
        lr = inf
        betas = [0.9]
        [schedule]
        warm_up = 3
        end = 2
        [train]
        batch_size = "8"
        [output]
        weight = "x"
        """
    )
    assert found == [
        "data.categorical: must be a list, found 'wind'",
        "data.file: must be a valid string, found 7",
        "data.label: is missing",
        "data.labels: unknown key; did you mean 'label'?",
        "data.missing: must be 'refuse' or 'mean', found 'maen'; did you mean 'mean'?",
        "model.dropout: must be less than 1, found 1.0",
        "model.layers: must be greater than or equal to 1, found 0",
        "model.widht: unknown key; did you mean 'width'?",
        "optimizer.betas.1: is missing",
        "optimizer.kind: must be 'adamw', 'adam' or 'sgd', found 'adamm'; did you mean 'adam'?",
        "optimizer.lr: must be a finite number, found inf",
        "output.weight: unknown key; did you mean 'weights'?",
        "run.lanes: must be a valid integer, found True",
        "run.lanez: unknown key; did you mean 'lanes'?",
        "run.strategy: must be 'ddp', 'zero1', 'zero2' or 'zero3', found 'zero-3'; did you mean 'zero3'?",
        "schedule.end: must be less than 1, found 2",
        "schedule.warm_up: unknown key; did you mean 'warmup'?",
        "sed: unknown key; known are data, model, optimizer, output, run, schedule, task, train.",
        "train.batch_size: must be a valid integer, found '8'",
    ]


def test_an_unknown_task_does_not_hide_other_problems():
    assert problems('task="gtp"\ndata={x=1}\n[train]\nbatch_size=0\nsteps=1\n[optimizer]\nlrr=1') == [
        "optimizer.lrr: unknown key; did you mean 'lr'?",
        "task: must be 'gpt', 'table' or 'images', found 'gtp'; did you mean 'gpt'?",
        "train.batch_size: must be greater than or equal to 1, found 0",
    ]
    assert problems('taks="gpt"') == [
        "taks: unknown key; did you mean 'task'?",
        "task: is missing",
        "train: is missing",
    ]


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("model={width=10, heads=4}", "model: width=10 must be a multiple of heads=4"),
        ("model=3", "model: must be a section of keys and values, found 3"),
        ("data={files=[]}", "data.files: has too few items, found []"),
        (
            'optimizer={kind="sgd", betas=[0.9, 0.9]}',
            "optimizer: betas belong to adam and adamw, and kind is 'sgd'; use momentum, or leave them out",
        ),
        (
            "optimizer={momentum=0.9}",
            "optimizer: momentum belongs to sgd, and kind is 'adamw'; use betas, or leave it out",
        ),
        ("train={batch_size=8}", "train: give steps or epochs, one of them; found neither"),
        (
            "train={batch_size=8, steps=1, epochs=1}",
            "train: give steps or epochs, one of them; found both",
        ),
        (
            'run={reduction="native", exchange="shared"}',
            "run: reduction='native' is the backend's own sum and needs a backend: use exchange='gloo' or 'nccl'",
        ),
        ("schedule={warmup=2}", "schedule.warmup=2 must be less than train.steps=2"),
    ],
)
def test_values_that_do_not_go_together(toml, message):
    section = toml.partition("=")[0]
    lines = [line for line in SMALLEST["gpt"].splitlines() if not line.startswith(section)]
    assert problems("\n".join([*lines, toml])) == [message]


@pytest.mark.parametrize("key", ["patience", "evaluate_every"])
def test_nothing_to_evaluate(key):
    toml = f'task="table"\ntrain={{batch_size=8, steps=2, {key}=1}}\ndata={{file="a", label="y", valid=0}}'
    assert problems(toml) == [f"train.{key} needs something to evaluate, and data.valid is 0"]


def test_a_file_that_is_no_recipe(tmp_path):
    with pytest.raises(SettingsError, match=r"there is no recipe .*none\.toml"):
        read(tmp_path / "none.toml")
    with pytest.raises(SettingsError, match="cannot be read as text"):
        read(tmp_path)
    (tmp_path / "r.toml").write_text("[train\n")
    with pytest.raises(SettingsError, match=r"r\.toml is not TOML: .*line 1"):
        read(tmp_path / "r.toml")


def test_the_command_refuses_a_recipe_before_any_rank_starts(tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text(SMALLEST["gpt"] + "[modle]\n")
    code = (
        "import sys; from lanewise.cli.main import main\n"
        f"sys.argv = ['lanewise', 'train', {str(recipe)!r}]\n"
        "try: main()\nexcept SystemExit as end: print(end.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 False\n"
    assert "modle: unknown key; did you mean 'model'?" in done.stderr


def test_split():
    chosen, held = split(10, 0.25, 3, "x")
    assert (len(held), sorted(chosen + held)) == (2, list(range(10)))
    assert (chosen, held) == split(10, 0.25, 3, "x") != split(10, 0.25, 4, "x")
    assert split(3, 0.0, 0, "x") == ([0, 1, 2], [])
    with pytest.raises(
        DataError, match=r"x: data.valid=0.1 of 3 samples leaves 3 to train on and 0 to evaluate"
    ):
        split(3, 0.1, 0, "x")


def test_text_files(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_bytes(b"bbbb")
    (tmp_path / "deep" / "a.txt").write_bytes(b"aaaa")
    train, valid = text.windows(["deep/../**/*.txt", "b.txt"], tmp_path, 3, 0.0)
    assert valid is None
    assert [bytes(x.tolist()) for x, _ in train] == [b"bbb", b"b\0a", b"aaa"]
    assert bytes(train[1][1].tolist()) == b"\0aa"
    train, valid = text.windows([f"{tmp_path}/b.txt", "../*/deep/*.txt"], tmp_path, 2, 0.4)
    assert (len(train), len(valid)) == (2, 1)
    with pytest.raises(DataError, match=r"data.files: no file matches '\*\.md' in .*relative to the folder"):
        text.windows(["*.txt", "*.md"], tmp_path, 3, 0.0)
    with pytest.raises(DataError, match=r"1 file\(s\) with 4 bytes leave not one stretch of model.length=9"):
        text.windows(["b.txt"], tmp_path, 9, 0.0)
    with pytest.raises(DataError, match=r"length=3 bytes to evaluate with data.valid=0.2"):
        text.windows(["**/*.txt"], tmp_path, 3, 0.2)


ROWS = "day,wind,sea,boat\n1,north,0.5,stay\n2,east,1.5,go\n3,east,2.5,go\n4,west,3.5,stay\n"


def table_of(tmp_path, rows, **keys):
    (tmp_path / "t.csv").write_text(rows)
    keys = {"label": "boat", "categorical": ("wind",), "ignore": ("day",), "valid": 0.0, **keys}
    return table.read(Table("t.csv", **keys), tmp_path, 0)


def test_table(tmp_path):
    rows = table_of(tmp_path, ROWS)
    assert (rows.classes, rows.numbers) == (("go", "stay"), ("sea",))
    assert rows.categories == {"wind": ("east", "north", "west")}
    numbers, codes, targets = rows.train.tensors
    assert numbers.tolist() == [[0.5], [1.5], [2.5], [3.5]]
    assert codes.tolist() == [[2], [1], [1], [3]]
    assert targets.tolist() == [1, 0, 0, 1]
    assert rows.mean.tolist() == [2.0]
    assert rows.deviation.item() == pytest.approx(5**0.5 / 2)


def test_a_table_is_judged_by_its_training_rows_alone(tmp_path):
    rows = table_of(tmp_path, ROWS, valid=0.5)
    winds = {0.5: "north", 1.5: "east", 2.5: "east", 3.5: "west"}
    trained = rows.train.tensors[0][:, 0]
    assert rows.mean.item() == trained.mean().item()
    assert set(rows.categories["wind"]) == {winds[sea] for sea in trained.tolist()}
    codes = {wind: number + 1 for number, wind in enumerate(rows.categories["wind"])}
    numbers, found, _ = rows.valid.tensors
    expected = [codes.get(winds[sea], table.UNKNOWN) for sea in numbers[:, 0].tolist()]
    assert found[:, 0].tolist() == expected
    assert table.UNKNOWN in expected


def test_an_empty_cell(tmp_path):
    rows = ROWS.replace("1.5", " ")
    with pytest.raises(DataError, match=r"t\.csv, line 3, column 'sea': the cell is empty.*missing='mean'"):
        table_of(tmp_path, rows)
    found = table_of(tmp_path, rows, missing="mean")
    assert found.mean.item() == pytest.approx(6.5 / 3)
    model = Perceptron(found.mean, found.deviation, [4], 2, 8, 1, 0.0)
    assert model(*found.train.tensors[:2]).isfinite().all()


@pytest.mark.parametrize(
    ("rows", "keys", "message"),
    [
        (ROWS, {"label": "boad"}, "data.label: there is no column 'boad'; did you mean 'boat'?"),
        (ROWS, {"ignore": ("x",)}, "no column 'x'; the header has day, wind, sea, boat."),
        (ROWS, {"ignore": ("wind",)}, "'wind' is named more than once in label, categorical and ignore"),
        (ROWS, {"ignore": ("day", "sea"), "categorical": ("wind", "wnd")}, "did you mean 'wind'?"),
        (ROWS, {"ignore": ("day", "sea", "wind"), "categorical": ()}, "no column is left to learn from"),
        (ROWS.replace("day,", "sea,"), {"ignore": ()}, "the header has two columns 'sea'"),
        (ROWS.replace("2.5", "2.5m"), {}, "line 4, column 'sea': must be a finite number, found '2.5m'"),
        (ROWS.replace("2.5", "1_0"), {}, "line 4, column 'sea': must be a finite number, found '1_0'"),
        (ROWS.replace("2.5", "nan"), {}, "line 4, column 'sea': must be a finite number, found 'nan'"),
        (ROWS.replace("2.5,", ""), {}, "line 4: 3 cells, where the header has 4"),
        (ROWS, {"delimiter": ";"}, "data.label: there is no column 'boat'"),
        (ROWS.replace("west,3.5,stay", "west,3.5,"), {}, "line 5: the label column 'boat' is empty"),
        (ROWS.replace("stay", "go"), {}, "the label column 'boat' has 1 class(es), go;"),
        ("day,boat\n", {}, "needs a header and at least one row, found 1 line(s)"),
        (ROWS + '5,"a"b,1,go\n', {}, "line 6: not csv"),
        (ROWS.replace("0.5", "").replace("1.5", ""), {"missing": "mean", "valid": 0.5}, "has no number in the rows"),
    ],
)  # fmt: skip
def test_a_table_that_does_not_fit(tmp_path, rows, keys, message):
    if "no number" in message:
        rows = re.sub(r"\d\.5", "", rows)
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        table_of(tmp_path, rows, **keys)
    assert "t.csv" in str(caught.value)


def test_a_table_that_is_not_there_or_no_text(tmp_path):
    with pytest.raises(DataError, match=r"data.file: there is no .*none\.csv"):
        table.read(Table("none.csv", "y"), tmp_path, 0)
    (tmp_path / "t.csv").write_bytes(b"a,y\n\xff\xfe,1\n")
    with pytest.raises(DataError, match=r"t\.csv cannot be read as UTF-8 text"):
        table.read(Table("t.csv", "y"), tmp_path, 0)


def folder_of(tmp_path, **classes):
    for name, arrays in classes.items():
        (tmp_path / name).mkdir()
        for number, array in enumerate(arrays):
            numpy.save(tmp_path / name / f"{number}.npy", array)
    return ImageFolder(".", size=4, valid=0.0)


GREY = numpy.full((6, 4), 255, dtype=numpy.uint8)


def test_images(tmp_path):
    data = folder_of(tmp_path, dark=[GREY * 0, (GREY * 0)[:, :, None]], light=[GREY])
    colours = numpy.zeros((8, 8, 3), dtype=numpy.uint8)
    colours[:, :, 1] = 255
    Image.fromarray(colours).save(tmp_path / "light" / "green.png")
    train, valid, classes = images.find(data, tmp_path, 0)
    assert (valid, classes) == (None, ("dark", "light"))
    assert [label for _, label in train] == [0, 0, 1, 1]
    assert all(image.shape == (3, 4, 4) for image, _ in train)
    assert [image.mean().item() for image, _ in train] == pytest.approx([-1, -1, 1, -1 / 3])
    assert train[3][0][1].tolist() == pytest.approx(numpy.ones((4, 4)))


def test_images_are_flipped_only_where_they_are_trained_on():
    image = torch.arange(48, dtype=torch.uint8).view(3, 4, 4)
    assert images.square(image, 4).equal(image / 127.5 - 1)
    assert images.square(image[:, :, :2], 2).shape == (3, 2, 2)


def test_flips(tmp_path):
    steps = numpy.arange(16, dtype=numpy.uint8).reshape(4, 4)
    numpy.save(tmp_path / "a.npy", steps)
    torch.manual_seed(0)
    once = images.Images([(tmp_path / "a.npy", 0)], 4, flip=False)[0][0]
    shown = [images.Images([(tmp_path / "a.npy", 0)], 4, flip=True)[0][0] for _ in range(12)]
    as_is, mirrored = (sum(image.equal(way) for image in shown) for way in (once, once.flip(-1)))
    assert as_is + mirrored == 12
    assert 0 < mirrored < 12


def test_image_folders_that_do_not_fit(tmp_path, monkeypatch):
    data = folder_of(tmp_path)
    with pytest.raises(DataError, match="two classes or more, one sub-folder of images for each; found none"):
        images.find(data, tmp_path, 0)
    folder_of(tmp_path, light=[GREY])
    with pytest.raises(DataError, match="found only 'light'"):
        images.find(data, tmp_path, 0)
    folder_of(tmp_path, dark=[])
    with pytest.raises(DataError, match="no image of class 'dark'"):
        images.find(data, tmp_path, 0)
    with pytest.raises(DataError, match=r"data.folder: there is no folder .*none"):
        images.find(ImageFolder("none"), tmp_path, 0)
    (tmp_path / "dark" / "x.png").write_bytes(b"no picture")
    train, _, _ = images.find(data, tmp_path, 0)
    with pytest.raises(DataError, match=r"x\.png: not an image that can be read"):
        train[0]
    numpy.save(tmp_path / "dark" / "x.npy", GREY.astype(float))
    with pytest.raises(DataError, match=r"x\.npy: must hold bytes .* found float64 of shape \(6, 4\)"):
        images.decode(tmp_path / "dark" / "x.npy")
    numpy.save(tmp_path / "dark" / "x.npy", numpy.array([{}]), allow_pickle=True)
    with pytest.raises(DataError, match=r"x\.npy: not an image that can be read"):
        images.decode(tmp_path / "dark" / "x.npy")
    monkeypatch.setattr(images, "find_spec", lambda name: None)
    with pytest.raises(
        DataError, match=r"x\.png: to decode \.png files \(1 here\) Pillow is needed: pip install"
    ):
        images.find(data, tmp_path, 0)


def test_optimizers_and_weight_decay():
    model = ConvNet(8, 2, 3, 0.0)
    for chosen, kind in (
        (Optimizer(weight_decay=0.1, betas=(0.8, 0.9)), torch.optim.AdamW),
        (Optimizer(kind="adam", weight_decay=0.1), torch.optim.Adam),
        (Optimizer(kind="sgd", weight_decay=0.1, momentum=0.5), torch.optim.SGD),
    ):
        optimizer = make_optimizer(chosen, model)
        assert type(optimizer) is kind
        for group in optimizer.param_groups:
            assert all((p.dim() > 1) == (group["weight_decay"] > 0) for p in group["params"])
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_schedules():
    def rates(schedule, total):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
        made = make_schedule(schedule, optimizer, total)
        found = []
        for _ in range(total):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            made.step()
        return found

    assert rates(Schedule(warmup=1), 3) == [1.0, 2.0, 2.0]
    assert rates(Schedule("linear", warmup=1, end=0.5), 4) == [1.0, 2.0, 1.5, 1.0]
    assert rates(Schedule("cosine", end=0.0), 3) == pytest.approx([2.0, 1.0, 0.0])
    assert rates(Schedule("linear"), 1) == [2.0]


def test_the_gpt_sees_no_future_byte():
    torch.manual_seed(0)
    model = Gpt(16, 2, 2, 8, 0.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            model.init(name, parameter)
        tokens = torch.randint(0, 256, (1, 8))
        other = tokens.clone()
        other[0, 5] = (other[0, 5] + 1) % 256
        same = (model(tokens) == model(other)).all(dim=-1)[0]
    assert same.tolist() == [True] * 5 + [False] * 3
