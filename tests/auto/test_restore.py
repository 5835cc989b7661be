"""The numbers that one step leaves to the next."""

from dataclasses import replace

from quasidiag.auto.report import Report

FOUND = "looked", "divisible", "apart"


def test_going_back_keeps_what_was_found_about_the_samples() -> None:
    report = Report(alpha=1.0, doubt=True)
    before = replace(report)
    report.alpha, report.doubt = 2.0, False
    for name in FOUND:
        setattr(report, name, not getattr(report, name))
    found = [getattr(report, name) for name in FOUND]
    report.restore(before)
    assert (report.alpha, report.doubt) == (1.0, True)
    assert [getattr(report, name) for name in FOUND] == found
