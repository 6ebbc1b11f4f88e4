"""Lets the test modules of this folder import the tolerance rule beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
