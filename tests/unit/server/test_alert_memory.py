from __future__ import annotations

from gpumem_exporter.server.api.alert_memory import MAX_REMEMBERED, AlertMemory


def test_an_alert_that_was_acted_on_is_no_news_for_as_long_as_it_fires() -> None:
    memory = AlertMemory()
    assert memory.objection("a", "monday", 0.0) == ""
    memory.acted("a", "monday", 60.0, 0.0)
    assert memory.objection("a", "monday", 1.0) == "repeated"
    assert memory.objection("a", "monday", 1e9) == "repeated"
    assert memory.objection("b", "monday", 1.0) == ""


def test_another_firing_is_news_once_the_cooldown_is_over() -> None:
    memory = AlertMemory()
    memory.acted("a", "monday", 60.0, 0.0)
    assert memory.objection("a", "tuesday", 59.9) == "cooling"
    assert memory.objection("a", "tuesday", 60.0) == ""
    memory.acted("a", "tuesday", 60.0, 60.0)
    assert memory.objection("a", "tuesday", 61.0) == "repeated"


def test_it_remembers_so_many_and_forgets_the_one_heard_of_longest_ago() -> None:
    memory = AlertMemory()
    for number in range(MAX_REMEMBERED):
        memory.acted(str(number), "monday", 60.0, 0.0)
    assert memory.objection("0", "monday", 1.0) == "repeated"
    memory.acted("one more", "monday", 60.0, 1.0)
    assert len(memory) == MAX_REMEMBERED
    assert memory.knows("0")
    assert not memory.knows("1")
