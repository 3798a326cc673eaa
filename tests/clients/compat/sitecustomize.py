"""Makes the folder of a client's packages one into which packages are installed: its .pth files count, and clients find libraries there."""

import os
import site

if "COMPAT_PACKAGES" in os.environ:
    packages = os.environ["COMPAT_PACKAGES"]
    others = site.getsitepackages
    site.getsitepackages = lambda prefixes=None: [packages, *others(prefixes)]
    site.addsitedir(packages)
