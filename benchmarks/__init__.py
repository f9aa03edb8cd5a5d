"""What headrace costs, measured: `python -m benchmarks` runs every row of docs/performance.md.

Most modules here are scripts as well (`python benchmarks/dispatch.py`), and a script finds its
neighbours by their bare names. So does the package.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
