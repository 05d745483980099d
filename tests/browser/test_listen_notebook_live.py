"""Notebook 05 as a person uses it: switch while it plays, and answer a blind trial."""

from __future__ import annotations

NOTEBOOK = "05_listen.ipynb"


def test_the_keys_switch_what_is_heard(opened):
    player = opened.output("player = views.ABPlayer").locator(".vgl-player").first
    player.scroll_into_view_if_needed()
    player.get_by_role("button", name="Play (space)").click()
    opened.wait_for("player.is_playing and player.position_s > 0")
    for key, condition in (("2", "graph"), ("3", "streamed"), ("1", "eager")):
        opened.page.keyboard.press(key)
        opened.wait_for_value("player.condition", condition)
    opened.page.keyboard.press("Space")
    opened.wait_for("not player.is_playing")
    opened.wait_for_value("[switch.after for switch in player.switches]", ["graph", "streamed", "eager"])
    assert max(opened.value("[switch.crossfade_ms for switch in player.switches]")) <= 5
    opened.screenshots("05_player", player)


def test_a_blind_trial_is_answered_by_hand(opened):
    area = opened.output("blind = views.BlindTest")
    area.scroll_into_view_if_needed()
    assert opened.value("len(test.answers)") == 0
    for letter in "AXBX":
        area.get_by_role("button", name=f"Listen to {letter}").click()
        opened.page.wait_for_timeout(60)  # as long as somebody listens
    area.get_by_role("button", name="X is A").click()
    opened.wait_for_value("[answer.choice for answer in test.answers]", ["A"])
    assert opened.value("blind.message") == ""
    opened.screenshots("05_blind", area)
