"""Worker of vLLM whose updates last, and that reports each one to a test."""

import time

from tests.support.update_reports import SECONDS, report
from trinity_workers.rollout_engines.vllm.transfer import WorkerExtension


class SlowWorker(WorkerExtension):
    """A worker that rests after each tensor that its model was given."""

    def trinity_fetch(self, ready):
        engine = self.weight_transfer_engine
        if "tensors" not in vars(engine):
            engine.tensors = slowed(engine.tensors)
        super().trinity_fetch(ready)


def slowed(tensors):
    """Return the generator of a version's tensors, each with its share of the seconds."""

    def yield_slowly(published):
        report(b"begun")
        rest = SECONDS / len(published.names)
        for name, tensor in tensors(published):
            yield name, tensor
            time.sleep(rest)
        report(b"ended")

    return yield_slowly
