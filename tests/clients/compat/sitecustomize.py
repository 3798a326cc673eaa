"""Makes the folder of a client's packages one into which packages are installed: its .pth files count, and clients find libraries there.

COMPAT_PRELUDE is code that runs then, before a test is imported, and in child processes of tests."""

import os
import site

if "COMPAT_PACKAGES" in os.environ:
    packages = os.environ["COMPAT_PACKAGES"]
    others = site.getsitepackages
    site.getsitepackages = lambda prefixes=None: [packages, *others(prefixes)]
    site.addsitedir(packages)
    exec(os.environ.get("COMPAT_PRELUDE", ""), {})
