"""Names of actors on the dashboard."""

from __future__ import annotations

import pytest

from actors.drafts.node_worker import NodeDraftWorker
from actors.drafts.worker import DraftRetrievalWorker
from actors.learner.train_group import LearnerGroup
from actors.learner.worker import LearnerWorker
from actors.reward.worker import RewardWorker
from actors.rollout.worker import RolloutWorker
from pipelines.conductor import Conductor

ACTORS = (NodeDraftWorker, DraftRetrievalWorker, LearnerGroup, LearnerWorker, RewardWorker, RolloutWorker, Conductor)


@pytest.mark.parametrize("actor", ACTORS)
def test_an_actor_that_could_not_be_made_has_a_name(actor: type) -> None:
    """Ray asks for it while it stores the error; one that raises takes the place of that error."""
    assert repr(actor.__new__(actor)).startswith(actor.__name__)
