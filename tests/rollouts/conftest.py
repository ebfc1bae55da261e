"""The parts of rollouts on a run of its own."""

import pytest

from tests.support.rollout_parts import Parts


@pytest.fixture
def parts(client, publisher, run_id):
    return Parts(client, publisher, run_id)
