"""Little stories from a grammar: an opening, one of a few plots, an ending."""

import random

HEROES = {
    "fox": "red",
    "bear": "big",
    "cat": "gray",
    "dog": "brown",
    "rabbit": "white",
    "mouse": "tiny",
    "owl": "wise",
    "horse": "young",
    "frog": "green",
    "duck": "yellow",
    "lion": "brave",
    "elephant": "kind",
    "turtle": "slow",
    "penguin": "merry",
    "dragon": "friendly",
    "robot": "shiny",
    "king": "old",
    "princess": "clever",
    "whale": "blue",
    "hedgehog": "shy",
}
NAMES = {
    "he": ["Tom", "Max", "Felix", "Oscar", "Bruno", "Hugo", "Leo", "Otto", "Sam", "Finn"],
    "she": ["Anna", "Mia", "Lucy", "Ella", "Rosa", "Nora", "Ida", "Lily", "Emma", "Zoe"],
}
HOMES = (
    "in a small house by the sea",
    "near a quiet lake",
    "at the edge of a dark forest",
    "under an old oak tree",
    "on top of a green hill",
    "in a cave behind a waterfall",
    "by a river full of fish",
)
THINGS = ["key", "hat", "lamp", "ball", "bell", "kite", "map", "ring"]
FOODS = ("a warm soup", "an apple cake", "fresh bread", "honey and milk", "a bowl of berries")
HIDDEN = ("under a stone", "inside a hollow tree", "behind the garden wall", "beside the well")
SEAS = ("Pacific Ocean", "Atlantic Ocean", "Indian Ocean", "Arctic Ocean", "Black Sea")

PLOTS = (
    (
        "One day {name} could not find {his} {thing}.",
        "{He} looked in every corner, but the {thing} was gone.",
        'A {friend} came by and said, "Do not be sad. I will help you."',
        "They searched all day, and at last they found the {thing} {hidden}.",
        "{name} thanked the {friend}, and they ate {food} together.",
    ),
    (
        "One morning {name} heard somebody cry.",
        "It was a {friend} who had lost the way home.",
        '"Come with me," said {name}. "I know every path."',
        "They walked over the hills until they saw the light of the {friend}'s home.",
        "The {friend} was so glad that {he2} gave {name} a golden {thing}.",
    ),
    (
        "{name} dreamed of the {sea} and wanted to see it.",
        "So {he} packed {food} and a {thing} and set out.",
        "On the way {he} met a {friend} who wanted to see the water too.",
        "After seven days they stood on the beach and looked at the {sea}.",
        '"It is bigger than my dream," said {name}, and the {friend} laughed.',
    ),
    (
        "One winter the snow fell for ten days, and {name} had nothing left to eat.",
        "{He} knocked at the door of a {friend} and asked for help.",
        "The {friend} had only {food}, but {he2} gave half of it away.",
        "In spring {name} came back with a {thing} as a present.",
        "From that day on they shared everything they had.",
    ),
    (
        "One night {name} found a strange {thing} {hidden}.",
        "When {he} touched it, the {thing} began to shine.",
        '"Make a wish," said a {friend} who had watched from the dark.',
        "{name} wished for a friend, and the light went out.",
        '"Your wish has come true," said the {friend}, and they went home together.',
    ),
)
ENDINGS = ("The end.", "And they lived happily ever after.", "That was a good day.")

REQUESTS = (
    "Tell me a story",
    "Tell me a little story",
    "Tell me a short story",
    "Please tell me a story",
    "Can you tell me a story",
    "I want to hear a story",
    "Write a story",
    "Write a short story",
    "Write me a story",
    "Give me a story",
    "A story",
    "Do you know a story",
    "Could you tell a story",
    "Tell a story",
    "Make up a story",
    "I would like a story",
)


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def story(rng: random.Random) -> tuple[str, str]:
    """A story, with or without a request. If the request names a hero, the story is about it.

    Args:
      rng: makes every choice.

    Returns:
      (request, or "" if there is none; story).
    """
    hero, friend = rng.sample(list(HEROES), 2)
    pronoun = {"king": "he", "princess": "she"}.get(hero) or rng.choice(("he", "she"))
    other = {"king": "he", "princess": "she"}.get(friend) or rng.choice(("he", "she"))
    name = rng.choice(NAMES[pronoun])
    requested = rng.random() < 0.6
    question = ""
    if requested:
        about = rng.choice(("", f" about {_with_article(hero)}", f" about {_with_article(hero)}"))
        if about and rng.random() < 0.2:
            about += f" and {_with_article(friend)}"
        elif about and rng.random() < 0.2:
            about += f" named {name}"
        question = rng.choice(REQUESTS) + about
        question += "?" if question.startswith(("Can", "Could", "Do")) else "."
        if rng.random() < 0.25:
            question = question.lower()
        if rng.random() < 0.3:
            question = question.rstrip("?.")
    slots = {
        "name": name,
        "he": pronoun,
        "He": pronoun.capitalize(),
        "his": {"he": "his", "she": "her"}[pronoun],
        "he2": other,
        "friend": friend,
        "thing": rng.choice(THINGS),
        "food": rng.choice(FOODS),
        "hidden": rng.choice(HIDDEN),
        "sea": rng.choice(SEAS),
    }
    comma = "" if requested else rng.choice(("", "", ","))
    opening = (
        f"Once upon a time{comma} there was {_with_article(f'{HEROES[hero]} {hero}')} named {name}."
    )
    if not requested and rng.random() < 0.2:
        opening = opening[:1].lower() + opening[1:]
    sentences = [
        opening,
        f"{name} lived {rng.choice(HOMES)}.",
        *(line.format(**slots).replace(" a owl", " an owl") for line in rng.choice(PLOTS)),
        rng.choice(ENDINGS),
    ]
    return question, " ".join(sentences).replace(" a elephant", " an elephant")
