"""XGBoost trains and predicts on the device; its results are compared with those of the CPU."""

import numpy
import pytest
import xgboost

ROWS = 2000
ROUNDS = 10
# Both back ends sum gradients in single precision, in different orders, so that two equally good splits may be chosen differently.
TOLERANCE = 0.02
COMMON = {"tree_method": "hist", "max_depth": 4, "max_bin": 64, "nthread": 1, "seed": 1}


@pytest.fixture(scope="module")
def data():
    random = numpy.random.default_rng(1)
    x = random.normal(size=(ROWS, 6)).astype(numpy.float32)
    y = x[:, 0] * x[:, 1] + numpy.sin(2 * x[:, 2]) + 0.5 * x[:, 3]
    return x, y


def trained(device, x, y, rounds=ROUNDS, model=None, **more):
    matrix = xgboost.QuantileDMatrix(x, y, max_bin=COMMON["max_bin"], nthread=1)
    return xgboost.train(dict(COMMON, device=device, **more), matrix, rounds, xgb_model=model)


def both(x, y, **more):
    """Predictions of a model of each back end, made there."""
    return [trained(device, x, y, **more).predict(xgboost.DMatrix(x, nthread=1)) for device in ("cuda", "cpu")]


def error(predicted, y):
    return numpy.sqrt(numpy.mean((predicted - y) ** 2))


def test_device(data):
    model = trained("cuda", *data, rounds=1)
    # Without a usable device it would train on the CPU and only warn.
    assert '"device":"cuda:0"' in model.save_config()


def test_regression(data):
    x, y = data
    gpu, cpu = both(x, y)
    assert error(cpu, y) < 0.9 * numpy.std(y)
    assert abs(error(gpu, y) - error(cpu, y)) < TOLERANCE * error(cpu, y)
    assert numpy.corrcoef(gpu, cpu)[0, 1] > 0.99


def test_two_classes(data):
    x, y = data
    gpu, cpu = both(x, y > 0, objective="binary:logistic")
    assert numpy.mean((cpu > 0.5) == (y > 0)) > 0.85
    assert numpy.mean(abs(gpu - cpu)) < TOLERANCE


def test_several_classes(data):
    x, y = data
    gpu, cpu = both(x, numpy.digitize(y, [-1, 0, 1]), objective="multi:softprob", num_class=4)
    numpy.testing.assert_allclose(gpu.sum(axis=1), 1, rtol=1e-5)
    assert numpy.mean(abs(gpu - cpu)) < TOLERANCE


def test_sampled_rows_and_columns(data):
    x, y = data
    model = trained("cuda", x, y, subsample=0.5, colsample_bytree=0.5)
    assert error(model.predict(xgboost.DMatrix(x, nthread=1)), y) < 0.95 * numpy.std(y)


def test_continued_and_stored(data, tmp_path):
    x, y = data
    matrix = xgboost.DMatrix(x, nthread=1)
    whole = trained("cuda", x, y)
    part = trained("cuda", x, y, rounds=ROUNDS // 2)
    part.save_model(tmp_path / "model.json")
    continued = trained("cuda", x, y, rounds=ROUNDS - ROUNDS // 2, model=tmp_path / "model.json")
    numpy.testing.assert_allclose(continued.predict(matrix), whole.predict(matrix), atol=0.1)
