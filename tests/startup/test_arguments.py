"""A number that makes no sense on the command line is refused before anything is read."""

from __future__ import annotations

import pytest

from startup import arguments


@pytest.mark.parametrize("number", ["0", "-5", "x", "1.5"])
@pytest.mark.parametrize(
    ("parser", "words"),
    [(arguments.report_parser(), ["RUN", "--trajectories"]), (arguments.compare_parser(), ["A", "B", "--last"])],
)
def test_a_count_below_one_is_refused(capsys, parser, words, number):
    with pytest.raises(SystemExit) as ended:
        parser.parse_args([*words, number])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"{parser.prog}: error: argument {words[-1]}: {number!r} is not a whole number of at least 1"
    assert parser.parse_args([*words, "1"])
