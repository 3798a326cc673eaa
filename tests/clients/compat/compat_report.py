"""A plugin of pytest: writes each outcome to COMPAT_REPORT at once, so that a crash loses only the test that crashed.

COMPAT_MODULES is the folder below which the paths of files of tests are the names of modules, for clients that find them under other
names than pytest."""

import importlib
import json
import os

import pytest


class NamedModule(pytest.Module):
    # Under the name that the client has for the module: a child process of a test imports it by that name.
    def _getobj(self):
        name = self.path.relative_to(os.environ["COMPAT_MODULES"]).with_suffix("")
        return importlib.import_module(".".join(name.parts))


def pytest_pycollect_makemodule(module_path, parent):
    if "COMPAT_MODULES" in os.environ:
        return NamedModule.from_parent(parent, path=module_path)
    return None


def write(test, outcome, reason=""):
    with open(os.environ["COMPAT_REPORT"], "a") as report:
        report.write(json.dumps({"test": test, "outcome": outcome, "reason": reason}) + "\n")


def reason_of(report):
    text = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr or "")
    crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", None)
    return (crash or text).strip().split("\n")[0 if crash else -1][:200]


def pytest_runtest_logstart(nodeid, location):
    write(nodeid, "started")


def pytest_runtest_logreport(report):
    # An expected failure is a skip, and an unexpected pass of one is a pass: both are the client's own judgement.
    if report.failed:
        write(report.nodeid, "failed", reason_of(report))
    elif report.skipped:
        write(report.nodeid, "skipped", reason_of(report))
    elif report.when == "call":
        write(report.nodeid, "passed")


def pytest_collectreport(report):
    if report.failed:
        write(report.nodeid, "failed", reason_of(report))
    elif report.skipped:
        write(report.nodeid, "skipped", reason_of(report))


# The configuration of numba-cuda's own repository has this fixture, and its wheel does not.
@pytest.fixture(scope="class")
def initialize_from_pytest_config(request):
    request.cls._dump_failed_filechecks = False
