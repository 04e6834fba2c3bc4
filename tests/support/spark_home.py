"""A home for Spark whose Python processes start in a third of the time.

Spark has its Python processes import PySpark from `python/lib/pyspark.zip`, before all else. In the
archive there is no bytecode, so each of them compiles PySpark anew: 1.0 s of CPU instead of 0.35 s.
A streaming query starts one for its source and one for each sink, and Spark gives it ten seconds to
connect back, which is no option; on two busy cores some took longer. Without the archive they
import the same PySpark from the virtual environment.
"""

from __future__ import annotations

import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from tests.machine import VENV


def spark_home() -> Path | None:
    """Made once for the virtual environment; None where PySpark is not installed."""
    found = find_spec("pyspark")
    if found is None or found.origin is None:
        return None
    package, home = Path(found.origin).parent, VENV / "spark-home"
    if not home.exists():
        made = Path(tempfile.mkdtemp(dir=VENV))
        for entry in package.iterdir():
            if entry.name != "python":  # all that is in it is the archives
                (made / entry.name).symlink_to(entry)
        try:
            made.rename(home)  # fails if another process was faster
        except OSError:
            shutil.rmtree(made)
    return home
