"""Campaigns: long random searches for what the engine breaks: `python -m tests.campaigns --help`."""

import sys
from pathlib import Path

if (_TESTS := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.append(_TESTS)  # tests/support is imported as `support`, as in tests
