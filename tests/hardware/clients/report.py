"""The results of a client, in the form that sluice-hardware reads: one line of JSON each on standard output.

  {"versions": {NAME: VERSION}}               of the packages
  {"library": [PATH]}                         the driver's library that the process has loaded
  {"memory": {"free": BYTES, "total": BYTES}} as the framework sees it
  {"result": NAME, "value": V, "tolerance": T} a number, a text or a list of them; natively and remoted the same up to a part T
  {"time": NAME, "ms": MILLISECONDS}          the median of one step
  {"note": NAME, "value": V}                  shown and not compared
  {"error": NAME, "reason": TEXT}             a part that raised an error; the others go on
  {"skip": TEXT}                              the client cannot run on this machine
  {"done": true}                              the last line
"""

import contextlib
import importlib
import json
import os
import statistics
import sys
import time
import warnings


def line(**fields):
    print(json.dumps(fields), flush=True)


def skip(reason):
    line(skip=str(reason)[:500])
    sys.exit(0)


def modules(*names):
    """Imports packages, or ends the client if this machine lacks one."""
    found = []
    for name in names:
        try:
            found.append(importlib.import_module(name))
        except Exception as error:  # A package can fail in many ways where a library is missing.
            skip(f"{name} cannot be imported: {type(error).__name__}: {error}")
    warnings.simplefilter("ignore")  # Some packages deprecate the name of their version.
    tops = {name.split(".")[0]: sys.modules[name.split(".")[0]] for name in names}
    line(versions={name: str(getattr(module, "__version__", "unknown")) for name, module in tops.items()})
    return found if len(found) > 1 else found[0]


@contextlib.contextmanager
def part(name):
    """A part of a client. Its error ends only the part."""
    try:
        yield
    except Exception as error:
        line(error=name, reason=f"{type(error).__name__}: {error}"[:500])


def result(name, value, tolerance=0.0):
    line(result=name, value=value, tolerance=tolerance)


def note(name, value):
    line(note=name, value=value)


def timed(name, step, wait, repeats=int(os.environ.get("SLUICE_CLIENT_REPEATS", "20"))):
    """The median of one step in milliseconds; `wait` waits for the device."""
    for _ in range(3):
        step()
    wait()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        step()
        wait()
        times.append((time.perf_counter() - begun) * 1e3)
    line(time=name, ms=statistics.median(times))


def done():
    """Ends a client whose parts have all had their turn."""
    with open("/proc/self/maps") as maps:
        paths = {entry.split(maxsplit=5)[-1].strip() for entry in maps if "/" in entry}
    names = ("libcuda.so", "libsluice_guest.so", "libsoftgpu_cuda.so")
    line(library=sorted(path for path in paths if any(name in path for name in names)))
    line(done=True)
