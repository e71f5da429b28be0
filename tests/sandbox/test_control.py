"""The few bytes that cross between broker and child."""

import math

from hypothesis import given
from hypothesis import strategies as st

from sandbox import control


@given(st.sampled_from(sorted(control.STATUS)), st.booleans(), st.integers(0, 255), st.floats(0, 1e5), st.text())
def test_an_outcome_comes_back(letter, shown, code, cpu_s, name):
    status, got_shown, got_code, got_cpu, got_name = control.unpack_outcome(
        control.pack_outcome(letter, shown, code, cpu_s, name)
    )
    assert (status, got_shown, got_code) == (control.STATUS[letter], shown, code)
    assert math.isclose(got_cpu, cpu_s)
    assert name.encode("utf-8", "replace").decode().startswith(got_name) or "\0" in name


@given(st.binary(max_size=200))
def test_forged_bytes_are_an_outcome_of_known_status_or_none(data):
    outcome = control.unpack_outcome(data)
    assert outcome is None or (outcome[0] in control.STATUS.values() and 0 <= outcome[3] < 1e6)
