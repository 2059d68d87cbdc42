"""The long prompt of the demo: a visitor's handbook and one question about it, about 1,200 tokens."""

import json

_ROOMS = (
    ("Harbour Hall", "a fishing boat from 1902", "the smell of tar"),
    ("Lamp Room", "the great lens with its 24 panels", "the slow turning light"),
    ("Signal Deck", "forty flags and a code book", "the wind"),
    ("Rope Loft", "a rope walk of ninety metres", "the creaking floor"),
    ("Chart Cabinet", "hand-drawn maps of the coast", "the tiny soundings"),
    ("Engine Cellar", "a diesel engine that still starts", "the first cough of smoke"),
    ("Storm Gallery", "paintings of seven wrecks", "the colours"),
    ("Keeper's Kitchen", "an iron stove and a row of kettles", "the smell of bread"),
    ("Bell Tower", "the fog bell and its clockwork", "the deep note at noon"),
    ("Boat Shed", "the lifeboat and its rails", "the launch at high tide"),
    ("Tide Garden", "pools with crabs and anemones", "the changing water"),
    ("Radio Corner", "a spark transmitter behind glass", "the morse lessons"),
)
_HOURS = (
    "nine in the morning",
    "half past nine",
    "ten",
    "half past ten",
    "eleven",
    "noon",
    "one in the afternoon",
    "two",
    "half past two",
    "three",
    "four",
    "five",
)
QUESTION = "In one short sentence: what is this handbook about?"


def demo_messages() -> str:
    """The chat as JSON, for the input `messages`."""
    lines = ["Handbook for visitors of the Lighthouse Museum. Please read it before your visit.", ""]
    for number, ((room, exhibit, delight), hour) in enumerate(zip(_ROOMS, _HOURS, strict=True), 1):
        lines.append(
            f"Room {number}, the {room}. Here you find {exhibit}. It opens at {hour}, and a guide waits at "
            f"the door to answer questions. Visitors most often remember {delight}. Please do not touch what "
            "is behind the rail, keep bags in front of you, and leave by the door with the green lamp. "
            f"Children under ten may join the small tour of room {number}, which takes twenty minutes."
        )
    lines += ["", QUESTION]
    return json.dumps([{"role": "user", "content": "\n".join(lines)}])
