"""All settings are in pyproject.toml; only the long description is made here.

The README's relative links lead nowhere outside of the repository, so the package index gets their text alone.
"""

import re
from pathlib import Path

from setuptools import setup

README = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")

setup(
    long_description=re.sub(r"\[([^\]]+)\]\((?!https?://)[^)]*\)", r"\1", README),
    long_description_content_type="text/markdown",
)
