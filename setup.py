"""Build the package from an empty folder.

Otherwise setuptools packs what a build of older sources has left in `build/lib`.
"""

import shutil

from setuptools import setup

shutil.rmtree("build/lib", ignore_errors=True)
setup()
