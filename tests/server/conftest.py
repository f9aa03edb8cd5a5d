from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.farm_harness import Harness


@pytest.fixture
def make_farm(tmp_path: Path) -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def make(*arguments: Any, **options: Any) -> Harness:
        made.append(Harness(tmp_path, *arguments, **options))
        return made[-1]

    yield make
    for harness in made:
        harness.ledger.close()


@pytest.fixture
def farm(make_farm: Callable[..., Harness]) -> Harness:
    return make_farm()
