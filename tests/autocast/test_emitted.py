"""The programs that autocast emits for the zoo are those of the last commit.

Most faults in the core leave a program that runs and whose numbers are within some
tolerance. So a short form of each emitted program is committed, `emitted.json`: how
many operations, casts and products it has, in which dtypes, and a hash of its text.
Where a program is to change,

    python -m tests.emitted record

writes it anew, for the change to be read in the diff; and `python -m tests.emitted
write` and `compare` say line by line what is another.
"""

import json
from pathlib import Path

import jax
import pytest

from .. import emitted
from .zoo import OF_EACH_KIND, PROGRAMS, cases

FILE = Path(__file__).with_name("emitted.json")
# One of each kind, and all that show a decision which no other program does.
QUICK = (*OF_EACH_KIND, "gather_and_scatter", "hessian", "shard_map")
RECORD = json.loads(FILE.read_text()) if FILE.exists() else {"jax": "", "programs": {}}


@pytest.mark.skipif(
    RECORD["jax"] != jax.__version__,
    reason=f"recorded with jax {RECORD['jax']}; others write programs in another way",
)
@pytest.mark.parametrize("name", cases(QUICK))
def test_a_program_is_emitted_as_it_was(name):
    found = emitted.short_forms(name, PROGRAMS[name])
    assert found == RECORD["programs"].get(name), "see the top of this file"


def test_every_program_is_recorded():
    assert sorted(RECORD["programs"]) == sorted(PROGRAMS)
