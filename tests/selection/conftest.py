"""Shared by the tests of selection."""

from __future__ import annotations

import pytest

from headcount.selection import classifiers, time_budget


@pytest.fixture
def fast_methods(monkeypatch):
    """Small forests, one round of EM, and no timing."""
    monkeypatch.setattr(classifiers, "N_TREES", 5)
    monkeypatch.setattr(classifiers, "EM_ROUNDS", 1)
    monkeypatch.setattr(time_budget, "estimate_seconds", lambda *_: 0.1)
