"""CatBoost on its GPU back end, compared with its CPU back end."""

import numpy
import pytest
from catboost import CatBoost, CatBoostClassifier, CatBoostRegressor, Pool
from catboost.utils import get_gpu_device_count

ROWS = 2000
# Both back ends choose splits from sums of single precision, and not always the same one.
TOLERANCE = 0.05
COMMON = {
    "iterations": 25,
    "depth": 4,
    "learning_rate": 0.2,
    "random_seed": 1,
    # Otherwise rows are drawn, and each back end draws others.
    "bootstrap_type": "No",
    "random_strength": 0,
    "border_count": 32,
    "boosting_type": "Plain",
    "leaf_estimation_method": "Newton",
    "allow_writing_files": False,
    "verbose": False,
    # Share of the device's free memory, which is small.
    "gpu_ram_part": 0.5,
}


@pytest.fixture(scope="module")
def data():
    random = numpy.random.default_rng(1)
    x = random.normal(size=(ROWS, 6)).astype(numpy.float32)
    y = x[:, 0] * x[:, 1] + numpy.sin(2 * x[:, 2]) + 0.5 * x[:, 3]
    return x, y


def trained(kind, device, x, y, **more):
    arguments = dict(COMMON, **more)
    if device == "CPU":
        del arguments["gpu_ram_part"]
    return kind(task_type=device, **arguments).fit(x, y)


def both(kind, x, y, **more):
    return [trained(kind, device, x, y, **more) for device in ("GPU", "CPU")]


def test_device():
    assert get_gpu_device_count() == 1


def test_regression(data):
    x, y = data
    gpu, cpu = (model.predict(x) for model in both(CatBoostRegressor, x, y))
    errors = [numpy.sqrt(numpy.mean((predicted - y) ** 2)) for predicted in (gpu, cpu)]
    assert errors[1] < 0.6 * numpy.std(y), errors
    assert abs(errors[0] - errors[1]) < TOLERANCE * errors[1], errors
    assert numpy.corrcoef(gpu, cpu)[0, 1] > 0.98


def test_classes(data):
    x, y = data
    gpu, cpu = (model.predict_proba(x)[:, 1] for model in both(CatBoostClassifier, x, y > 0))
    right = [numpy.mean((predicted > 0.5) == (y > 0)) for predicted in (gpu, cpu)]
    assert right[1] > 0.85, right
    assert abs(right[0] - right[1]) < TOLERANCE, right
    assert numpy.mean(abs(gpu - cpu)) < TOLERANCE


def test_several_classes(data):
    x, y = data
    classes = numpy.digitize(y, [-1, 0, 1])
    # Leaves of several classes have one formula on both.
    more = {"loss_function": "MultiClass", "leaf_estimation_method": "Gradient"}
    gpu, cpu = (model.predict(x)[:, 0] for model in both(CatBoostClassifier, x, classes, **more))
    right = [numpy.mean(predicted == classes) for predicted in (gpu, cpu)]
    assert right[1] > 0.5, right
    assert abs(right[0] - right[1]) < TOLERANCE, right


def test_categories(data):
    x, y = data
    words = numpy.array(["a", "b", "c", "d"], dtype=object)[numpy.digitize(x[:, 0], [-1, 0, 1])]
    table = [[word, float(number)] for word, number in zip(words, x[:, 1])]
    pool = Pool(table, label=y, cat_features=[0])
    model = CatBoost(dict(COMMON, task_type="GPU")).fit(pool)
    mean = numpy.sqrt(numpy.mean((y - numpy.mean(y)) ** 2))
    assert numpy.sqrt(numpy.mean((model.predict(pool) - y) ** 2)) < 0.95 * mean
