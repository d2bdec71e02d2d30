"""What the paths of all files of this library begin with."""

from __future__ import annotations

import os

FOLDER = os.path.dirname(__file__) + os.sep
