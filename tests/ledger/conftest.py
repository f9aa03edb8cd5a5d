from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.ledger.sqlite import SqliteLedger
from tests.ledger.ledgers import open_ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[SqliteLedger]:
    ledger = open_ledger(tmp_path)
    yield ledger
    ledger.close()
