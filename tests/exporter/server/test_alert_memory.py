from __future__ import annotations

from gpumem_exporter.server.api.alerts import MAX_REMEMBERED, AlertMemory


def test_the_least_recently_seen_alert_is_forgotten_at_the_limit() -> None:
    memory = AlertMemory()
    for number in range(MAX_REMEMBERED):
        memory.acted(str(number), "monday", 60.0, 0.0)
    assert memory.objection("0", "monday", 1.0) == "repeated"
    memory.acted("one more", "monday", 60.0, 1.0)
    assert len(memory) == MAX_REMEMBERED
    assert "0" in memory
    assert "1" not in memory
