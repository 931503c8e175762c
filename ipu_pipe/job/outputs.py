"""What a config's `model.output` takes of a model's output."""

from __future__ import annotations

from typing import Optional

from ipu_pipe.config.schema import Config
from ipu_pipe.config.sections import GIVEN, OWN
from ipu_pipe.errors import BadInput
from ipu_pipe.job.import_strings import resolve_entry
from ipu_pipe.model.outputs import Part, Take


def make_take(config: Config) -> Optional[Take]:
    """A field, an element, what an import string's function gives; None where it says nothing. Raises BadInput."""
    said = config.model.output
    if isinstance(said, str) and ":" in said:
        return resolve_entry(said, "model.output")
    return None if said is None else Part(said)


def make_take_of_heads(config: Config) -> Optional[Take]:
    """The same where blocks have losses of their own, whose heads give what is taken already. Raises BadInput."""
    said = config.model.output
    if config.loss == OWN:
        raise BadInput(
            f"loss: model: {config.method}: the heads of its blocks give no loss of their own: must be one of their outputs, as "
            "cross_entropy is"
        )
    if isinstance(said, str) and (said == GIVEN or ":" in said):
        raise BadInput(
            f"model.output: {said}: {config.method}: what the heads of its blocks give is taken already: must be the name of a "
            "field, or an index"
        )
    return make_take(config)
