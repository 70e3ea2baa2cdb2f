"""Lines of the log that would otherwise come every second for ever."""

from __future__ import annotations

import itertools

from postroad.net.log import FIRST_AGAIN_S, LAST_AGAIN_S, MAX_COMPLAINTS, Complaints

REFUSED = "no connection to 127.0.0.1:7420: [Errno 111] Connection refused"


def written(complaints: Complaints, text: str, seconds: int) -> list[tuple[int, str]]:
    lines = ((second, complaints.due(text, float(second))) for second in range(seconds))
    return [(second, line) for second, line in lines if line is not None]


def test_a_complaint_is_written_at_once_and_then_at_growing_intervals() -> None:
    lines = written(Complaints(), REFUSED, 2 * 3600)
    assert lines[0] == (0, REFUSED)
    moments = [second for second, _ in lines]
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert gaps[:4] == [10, 20, 40, 80]
    assert gaps == sorted(gaps)
    assert gaps[-1] == LAST_AGAIN_S
    assert lines[1][1] == f"{REFUSED} (9 times more in 10 s)"


def test_another_complaint_is_another_matter() -> None:
    complaints = Complaints()
    assert complaints.due(REFUSED, 0.0) == REFUSED
    other = REFUSED.replace("7420", "7422")
    assert complaints.due(other, 0.0) == other


def test_the_number_of_a_connection_makes_no_difference() -> None:
    complaints = Complaints()
    assert complaints.due("closed connection 7: who is that?", 0.0) is not None
    assert complaints.due("closed connection 8: who is that?", 1.0) is None
    assert complaints.due("connection 7 was 127.0.0.1:40000", 1.0) is not None
    assert complaints.due("connection 8 was 127.0.0.1:40002", 2.0) is None
    assert complaints.due("connection 9 was 192.0.2.1:40000", 2.0) is not None
    assert complaints.due("connection 9 [::1]:40000 closed: protocol: no", 2.0) is not None
    assert complaints.due("connection 10 [::1]:40002 closed: protocol: no", 2.0) is None


def test_after_a_quiet_time_it_is_news_again() -> None:
    complaints = Complaints()
    assert complaints.due(REFUSED, 0.0) == REFUSED
    assert complaints.due(REFUSED, FIRST_AGAIN_S + 1) == REFUSED
    assert complaints.due(REFUSED, FIRST_AGAIN_S + 2) is None


def test_what_is_remembered_is_bounded() -> None:
    complaints = Complaints()
    for number in range(MAX_COMPLAINTS + 1):
        complaints.due(f"complaint {number} about {number}", 0.0)
    assert complaints.due("complaint 1 about 1", 1.0) is None
    assert complaints.due("complaint 0 about 0", 1.0) is not None
