from __future__ import annotations

from gpumem_exporter.server.api.alerts import MAX_REMEMBERED, AlertMemory


def test_an_alert_is_acted_on_once_while_it_fires() -> None:
    memory = AlertMemory()
    assert memory.objection("a", "monday", 0.0) == ""
    memory.acted("a", "monday", 60.0, 0.0)
    assert memory.objection("a", "monday", 1.0) == "repeated"
    assert memory.objection("a", "monday", 1e9) == "repeated"
    assert memory.objection("b", "monday", 1.0) == ""


def test_another_firing_is_acted_on_after_the_cooldown() -> None:
    memory = AlertMemory()
    memory.acted("a", "monday", 60.0, 0.0)
    assert memory.objection("a", "tuesday", 59.9) == "cooling"
    assert memory.objection("a", "tuesday", 60.0) == ""
    memory.acted("a", "tuesday", 60.0, 60.0)
    assert memory.objection("a", "tuesday", 61.0) == "repeated"


def test_the_least_recently_seen_alert_is_forgotten_at_the_limit() -> None:
    memory = AlertMemory()
    for number in range(MAX_REMEMBERED):
        memory.acted(str(number), "monday", 60.0, 0.0)
    assert memory.objection("0", "monday", 1.0) == "repeated"
    memory.acted("one more", "monday", 60.0, 1.0)
    assert len(memory) == MAX_REMEMBERED
    assert "0" in memory
    assert "1" not in memory
