"""The small world: a template grammar over `facts`, split into training and held-out questions.

A question is a wording filled with a fact. Three kinds of questions are held out of training:

* `wording`: a wording that no training question uses, for any fact;
* `fact`: a sum of two numbers that no training question adds or subtracts, a made-up name that no
  training question mentions, or a greeting that no training question contains;
* `pair`: a wording and a fact that both occur in training, but never together.

The split hashes the texts, so it depends only on the seed, not on the order of the tables.
"""

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fdjax.models.tiny import facts
from fdjax.models.tiny.stories import story

UNKNOWN = "I do not know that."

# Wordings that ask for a thing named by a noun phrase.
FRAMES = (
    "What is {}?",
    "What's {}?",
    "Whats {}?",
    "Tell me {}.",
    "Can you tell me {}?",
    "Could you tell me {}?",
    "Can you name {}?",
    "Could you name {}?",
    "Tell me what {} is.",
    "Can you tell me what {} is?",
    "Could you tell me what {} is?",
    "Do you know {}?",
    "Do you know what {} is?",
    "I want to know {}.",
    "I would like to know {}.",
    "I'd like to know what {} is.",
    "I want to know what {} is.",
    "Name {}.",
    "Give me {}.",
    "Can you give me {}?",
    "Let me know {}.",
    "{}?",
    "{} is what?",
    "{} is called what?",
    "What is {} called?",
    "What would be {}?",
    "What was {} again?",
    "What might {} be?",
    "What do people call {}?",
    "Remind me what {} is.",
    "I forgot {}.",
    "I wonder what {} is.",
    "Any idea what {} is?",
    "Question: what is {}?",
    "And what is {}?",
    "So what is {}?",
    "Which is {}?",
    "Who knows {}?",
)

WHERE = (
    "Where is {}?",
    "Where's {}?",
    "Where can I find {}?",
    "Where could I find {}?",
    "Where would I find {}?",
    "Where do I find {}?",
    "Where do you find {}?",
    "Where is {} located?",
    "Where is {} found?",
    "Where is {} situated?",
    "Where on Earth is {}?",
    "In what place is {}?",
    "Tell me where {} is.",
    "Tell me where to find {}.",
    "Can you tell me where {} is?",
    "Could you tell me where {} is?",
    "Do you know where {} is?",
    "I want to know where {} is.",
    "I'd like to know where {} is.",
    "Where must I go to see {}?",
    "Where do I have to go to see {}?",
    "I want to visit {}. Where is it?",
    "{}: where is it?",
    "{} is where?",
    "{}, where is that?",
    "What is the location of {}?",
    "Any idea where {} is?",
    "Remind me where {} is.",
    "I forgot where {} is.",
    "I wonder where {} is.",
)

# Added before or after any question. They change its text but not its answer.
OPENERS = ("Hey, ", "Hi, ", "Hello, ", "Please, ", "OK, ", "So, ", "Hello! ", "Hi! ")
CLOSERS = (" please?", ", please.", " Thanks.", " Thank you.")

HELD_OUT_WORDINGS = 0.12
HELD_OUT_FACTS = 0.1
HELD_OUT_PAIRS = 0.1


class Example(NamedTuple):
    """A question (or the beginning of a text) and its answer, without the space between them."""

    question: str
    answer: str
    kind: str


@dataclass(frozen=True)
class Relation:
    """Facts and the ways to ask for them.

    Attributes:
      kind: name under which accuracy is reported.
      weight: share of the training documents, relative to the other relations.
      facts: rows of slots `{0}`, `{1}`, ...
      answer: template of the answer. If it has a `|`, the text before it is also a question, and
        the text after it is the answer to that.
      direct: complete wordings.
      nouns: noun phrases; each is combined with each of `frames`.
      frames: wordings with a place `{}` for a noun phrase.
      fact_group: slots that decide whether a fact is held out in every wording; () if all facts
        of the relation are trained on.
      phrasings: relations with the same value share their held-out direct wordings; default
        `kind`.
    """

    kind: str
    weight: float
    facts: tuple[tuple[str, ...], ...]
    answer: str
    direct: tuple[str, ...] = ()
    nouns: tuple[str, ...] = ()
    frames: tuple[str, ...] = FRAMES
    fact_group: tuple[int, ...] = ()
    phrasings: str = ""

    @cached_property
    def wordings(self) -> tuple[tuple[str, str], ...]:
        """Pairs (name of the phrasing, template). All nouns in a frame share the frame's name."""
        framed = [(f, f.replace("{}", n)) for f in self.frames for n in self.nouns]
        return (*framed, *((f"{self.phrasings or self.kind}: {w}", w) for w in self.direct))

    def example(self, template: str, fact: tuple[str, ...]) -> Example:
        """The example with the wording and the answer filled with a fact."""
        answer = sentence(self.answer.replace("|", "").format(*fact))
        return Example(sentence(template.format(*fact)), answer, self.kind)

    def completion(self, fact: tuple[str, ...]) -> Example:
        """The answer as an example, cut into question and answer at its `|`."""
        question, answer = self.answer.split("|")
        answer = answer.format(*fact).strip().replace("..", ".")
        return Example(sentence(question.format(*fact)), answer, "completion")


def sentence(text: str) -> str:
    """The text with a capital first letter and at most one full stop at its end."""
    return (text[:1].upper() + text[1:]).replace("..", ".")


def normalise(question: str) -> str:
    """A form that is equal for questions that differ only in case, spaces or punctuation."""
    return " ".join(re.sub(r"[^\w\s+*=-]", "", question.lower()).split())


# Opening greetings. Each has one wording, so holding it out would leave nothing to train on.
COMMON = frozenset(
    normalise(question)
    for _, questions in facts.SMALL_TALK
    for question in questions.split("; ")[:8]
)


def fraction(*key: object) -> float:
    """A number in [0, 1) that depends only on the key, in every process."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=6).digest()
    return int.from_bytes(digest) / 2**48


def _number_words() -> tuple[str, ...]:
    """The words for 0 to 99."""
    small = [
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
        "thirteen",
        "fourteen",
        "fifteen",
        "sixteen",
        "seventeen",
        "eighteen",
        "nineteen",
    ]
    tens = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
    return (*small, *(t + (f"-{small[i]}" if i else "") for t in tens for i in range(10)))


NUMBERS = _number_words()


def _sum_relations() -> list[Relation]:
    """Sums in digits up to 99 + 99, in words up to 20 + 20, and as short stories."""
    # People mostly ask for small numbers, so there are separate relations for these.
    small, large, word = range(31), range(100), range(21)

    def digits(numbers: range, sign: int) -> tuple[tuple[str, ...], ...]:
        pairs = ((a, b) for a in numbers for b in numbers if sign > 0 or a >= b)
        return tuple(
            (str(a), str(b), str(a + sign * b), str(min(a, b)), str(max(a, b))) for a, b in pairs
        )

    def words(sign: int) -> tuple[tuple[str, ...], ...]:
        return tuple(
            (NUMBERS[int(a)], NUMBERS[int(b)], NUMBERS[int(c)], low, high)
            for a, b, c, low, high in digits(word, sign)
        )

    ask = (
        "{0} {op} {1}",
        "What is {0} {op} {1}?",
        "What's {0} {op} {1}?",
        "What does {0} {op} {1} make?",
    )
    ask += ("How much is {0} {op} {1}?", "Tell me what {0} {op} {1} is.", "Calculate {0} {op} {1}.")
    ask += ("Compute {0} {op} {1}.", "Can you calculate {0} {op} {1}?", "{0} {op} {1} is what?")
    ask += ("What is the result of {0} {op} {1}?", "Solve {0} {op} {1}.", "Work out {0} {op} {1}.")
    ask += ("Do you know what {0} {op} {1} is?", "What do you get for {0} {op} {1}?")
    ask += ("How much does {0} {op} {1} make?", "What does {0} {op} {1} equal?")
    ask += ("Can you tell me what {0} {op} {1} is?", "What is the answer to {0} {op} {1}?")
    plus = ("Add {0} and {1}.", "What is the sum of {0} and {1}?", "How much is {0} and {1}?")
    plus += (
        "What do you get if you add {0} and {1}?",
        "Add {0} to {1}.",
        "The sum of {0} and {1}?",
    )
    plus += ("What is {0} added to {1}?", "Can you add {0} and {1}?", "Sum {0} and {1}.")
    plus += ("What is {0} and {1} together?", "How much are {0} and {1} together?")
    minus = ("Subtract {1} from {0}.", "Take {1} away from {0}.", "What is {0} take away {1}?")
    minus += ("What is left if you take {1} from {0}?", "Can you subtract {1} from {0}?")
    minus += ("What is the difference between {0} and {1}?", "How much is {0} less {1}?")
    minus += ("What do you get if you subtract {1} from {0}?", "{0} take away {1}")

    def wordings(*operators: str) -> tuple[str, ...]:
        return tuple(w.replace("{op}", op) for w in ask for op in operators)

    relations = []
    for size, numbers, share in (("small", small, 1.0), ("large", large, 0.8)):
        for name, sign, symbol, extra in (("add", 1, "+", plus), ("subtract", -1, "-", minus)):
            rows = digits(numbers, sign)
            spoken = "plus" if sign > 0 else "minus"
            answer = f"{{0}} {symbol} {{1}} = {{2}}."
            direct = (
                wordings(symbol, spoken) + extra + (f"{{0}}{symbol}{{1}}", f"{{0}}{symbol}{{1}}?")
            )
            kind = f"{name} {size}"
            relations += [
                Relation(kind, 5 * share, rows, answer, direct, fact_group=(3, 4), phrasings=name),
                Relation(
                    f"{kind} =",
                    share,
                    rows,
                    "{2}.",
                    (
                        f"{{0}} {symbol} {{1}} =",
                        f"{{0}}{symbol}{{1}}=",
                        f"{{0}} {symbol} {{1}} = ?",
                        f"{{0}}{symbol}{{1}}=?",
                        f"{{0}} {spoken} {{1}} is",
                    ),
                    fact_group=(3, 4),
                ),
            ]
    for name, sign, spoken, extra in (("add", 1, "plus", plus), ("subtract", -1, "minus", minus)):
        answer = f"{{0}} {spoken} {{1}} is {{2}}."
        direct = wordings(spoken) + extra
        relations.append(
            Relation(
                f"{name} words", 3, words(sign), answer, direct, fact_group=(3, 4), phrasings=name
            )
        )
    times = tuple((str(a), str(b), str(a * b)) for a in range(13) for b in range(13))
    relations.append(
        Relation(
            "multiply", 4, times, "{0} x {1} = {2}.", (*wordings("times", "x", "*"), "{0}x{1}")
        )
    )

    people = ["Anna", "Tom", "Mia", "Ben", "Lucy", "Max", "Emma", "Sam"]
    things = [
        "apples",
        "coins",
        "books",
        "eggs",
        "pens",
        "balls",
        "cards",
        "shells",
        "stones",
        "cakes",
    ]

    def problems(sign: int) -> tuple[tuple[str, ...], ...]:
        rows = []
        for a in range(2, 21):
            for b in range(2, 21):
                if a + sign * b < 2:
                    continue
                for i in range(8):
                    thing = things[int(fraction("thing", a, b, i) * len(things))]
                    low, high = sorted((a, b))
                    rows.append(
                        (str(a), str(b), str(a + sign * b), str(low), str(high), people[i], thing)
                    )
        return tuple(rows)

    asks = (
        "How many {6} does {5} have now?",
        "How many {6} does {5} have?",
        "How many {6} is that?",
    )
    asks += ("How many {6} are there now?", "How many does {5} have now?")
    gain = ("{5} has {0} {6} and gets {1} more.", "{5} has {0} {6}. {5} finds {1} more.")
    gain += (
        "{5} had {0} {6} and bought {1} more.",
        "{5} has {0} {6} and a friend gives {5} {1} more.",
    )
    loss = ("{5} has {0} {6} and loses {1}.", "{5} has {0} {6}. {5} gives away {1}.")
    loss += ("{5} had {0} {6} and sold {1}.", "{5} has {0} {6} and gives {1} to a friend.")
    for sign, stems in ((1, gain), (-1, loss)):
        relations.append(
            Relation(
                "word problem",
                2.5,
                problems(sign),
                "{5} has {2} {6}.",
                tuple(f"{stem} {question}" for stem in stems for question in asks),
                fact_group=(3, 4),
            )
        )
    return relations


def _superlatives() -> tuple[tuple[str, ...], ...]:
    """Rows (adjective, thing, where, name in the answer, answer)."""
    rows = []
    for adjectives, thing, where, what in facts.SUPERLATIVES:
        first, *_ = synonyms = adjectives.split(", ")
        optional = where.startswith("(")
        where = where.strip("()")
        name = f"{first} {thing} {where}".strip()
        if optional:
            places = ("", where)
        else:
            places = (where,) if where else ("", "in the world", "on Earth")
        rows += [(a, thing, f" {p}".rstrip(), name, what) for a in synonyms for p in places]
    return tuple(rows)


def _yes_or_no(pairs: tuple[tuple[str, ...], ...], others: int) -> tuple[tuple[str, ...], ...]:
    """Rows (Yes or No, subject, value asked for, true value), about as many of each."""
    values = sorted({value for _, value in pairs})
    rows = []
    for subject, value in pairs:
        rows += [("Yes", subject, value, value)] * others
        wrong = sorted((v for v in values if v != value), key=lambda v: fraction(subject, v))
        rows += [("No", subject, v, value) for v in wrong[:others]]
    return tuple(rows)


def _made_up_names(count: int) -> tuple[tuple[str, ...], ...]:
    """Names of places that do not exist."""
    rng = random.Random("names")
    starts = [
        "Bl",
        "Br",
        "Cr",
        "D",
        "Dr",
        "F",
        "Fl",
        "G",
        "Gl",
        "Gr",
        "K",
        "Kr",
        "M",
        "Pl",
        "Qu",
        "R",
        "Sk",
        "Sn",
        "T",
        "Tr",
        "V",
        "W",
        "Y",
        "Z",
        "Zh",
    ]
    vowels, middles = (
        ["a", "e", "i", "o", "u", "oo", "ai"],
        [
            "b",
            "d",
            "ff",
            "g",
            "l",
            "lm",
            "m",
            "nd",
            "p",
            "rb",
            "rk",
            "rv",
            "sk",
            "t",
            "v",
            "x",
            "zz",
        ],
    )
    ends = [
        "ania",
        "aria",
        "avia",
        "burg",
        "dor",
        "eth",
        "ia",
        "ica",
        "istan",
        "land",
        "ol",
        "onia",
        "oria",
        "ville",
        "um",
    ]
    real = {normalise(name) for pair in facts.CAPITALS + facts.CITIES for name in pair}
    names: dict[str, None] = {}
    while len(names) < count:
        name = rng.choice(starts) + "".join(
            rng.choice(vowels) + rng.choice(middles) for _ in range(rng.choice((1, 1, 2)))
        )
        name += rng.choice(ends)
        if normalise(name) not in real:
            names[name] = None
    return tuple((name,) for name in names)


CAPITAL_NOUNS = ("the capital of {0}", "the capital city of {0}", "{0}'s capital")
CAPITAL_NOUNS += ("{0}'s capital city", "the name of the capital of {0}")
CAPITAL_DIRECT = (
    "Which city is the capital of {0}?",
    "What city is the capital of {0}?",
    "Which city is {0}'s capital?",
    "What city is {0}'s capital?",
    "Which is the capital city of {0}?",
    "What is the capital in {0}?",
    "What capital does {0} have?",
    "Which capital does {0} have?",
    "How is the capital of {0} called?",
    "Where is the capital of {0}?",
    "Name the capital of the country {0}.",
    "{0} has which capital?",
    "{0} capital",
    "capital {0}",
    "For {0}, what is the capital?",
    "The capital of {0}, please.",
    "What city does {0} have as its capital?",
    "In {0}, which city is the capital?",
)


def _geography() -> list[Relation]:
    """Countries, cities, rivers and places."""
    capitals = facts.CAPITALS + facts.CAUCASUS
    alias_of = {alias: (country,) for alias, country in facts.ALIASES}

    def with_aliases(pairs: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
        """Add a column with the country's name in the answer, as the question may use an alias."""
        values = dict(pairs)
        own = tuple((country, value, country) for country, value in pairs)
        return own + tuple((a, values[c], c) for a, (c,) in alias_of.items() if c in values)

    # The capitals of England, Scotland and Wales are capitals of parts of a country.
    city_of = {city: country for country, city in capitals}
    unique = tuple((country, city) for city, country in city_of.items() if country != "England")
    in_country = (
        *((city, country) for country, city in unique),
        ("London", "England"),
        *facts.CITIES,
        *facts.PLACES,
    )
    continents = tuple(p for p in facts.CONTINENT_OF_COUNTRY if p[1] != "Europe and Asia")
    rivers = tuple((river, continent) for river, continent, _ in facts.RIVERS)
    in_continent = (*with_aliases(facts.CONTINENT_OF_COUNTRY), *((a, b, a) for a, b in rivers))
    in_continent += tuple((a, b, a) for a, b in facts.CONTINENT_OF_LANDSCAPE)
    flag_nouns = ("the colors of the flag of {0}", "the colours of the flag of {0}")
    flag_nouns += ("the flag of {0}", "{0}'s flag", "the colors of {0}'s flag")
    return [
        Relation(
            "capital",
            16,
            with_aliases(capitals),
            "The capital of {2} is| {1}.",
            CAPITAL_DIRECT,
            CAPITAL_NOUNS,
        ),
        Relation(
            "country of a capital",
            6,
            unique,
            "{1} is the capital of| {0}.",
            (
                "{1} is the capital of which country?",
                "{1} is the capital of what country?",
                "{1} is the capital of what?",
                "Which country has {1} as its capital?",
                "What country has {1} as its capital?",
                "Which country has the capital {1}?",
                "What country has the capital {1}?",
                "Of which country is {1} the capital?",
                "Of what country is {1} the capital?",
                "Which country's capital is {1}?",
                "What country's capital is {1}?",
                "{1} is which country's capital?",
                "Tell me which country has the capital {1}.",
                "Tell me of which country {1} is the capital.",
                "Do you know which country has {1} as its capital?",
                "Can you tell me which country {1} is the capital of?",
                "I want to know which country has the capital {1}.",
                "Which country is {1} the capital of?",
                "What country is {1} the capital of?",
                "What is {1} the capital of?",
                "Name the country whose capital is {1}.",
                "What is the country whose capital is {1}?",
            ),
        ),
        Relation(
            "continent",
            9,
            in_continent,
            "{2} is in| {1}.",
            (
                "On which continent is {0}?",
                "On what continent is {0}?",
                "In which continent is {0}?",
                "In what continent is {0}?",
                "Which continent is {0} in?",
                "What continent is {0} in?",
                "Which continent is {0} on?",
                "What continent is {0} on?",
                "On which continent can I find {0}?",
                "On what continent would I find {0}?",
                "On which continent is {0} located?",
                "What continent is {0} located on?",
                "Tell me the continent of {0}.",
                "Tell me which continent {0} is in.",
                "Tell me on which continent {0} is.",
                "Do you know which continent {0} is in?",
                "Do you know on what continent {0} is?",
                "Can you tell me what continent {0} is on?",
                "I want to know which continent {0} is in.",
                "What is the continent of {0}?",
                "In which part of the world is {0}?",
                "What part of the world is {0} in?",
                "{0} is on which continent?",
                "{0} is in what continent?",
                "Which continent does {0} belong to?",
                "To which continent does {0} belong?",
            ),
            ("{0}",),
            WHERE,
        ),
        Relation(
            "place",
            10,
            in_country,
            "{0} is in| {1}.",
            (
                "In which country is {0}?",
                "In what country is {0}?",
                "Which country is {0} in?",
                "What country is {0} in?",
                "In which country can I find {0}?",
                "In what country would I find {0}?",
                "In which country is {0} located?",
                "What country is {0} located in?",
                "Tell me which country {0} is in.",
                "Tell me in which country {0} is.",
                "Do you know which country {0} is in?",
                "Can you tell me what country {0} is in?",
                "I want to know in which country {0} is.",
                "{0} is in which country?",
                "{0} is in what country?",
                "Which country do I visit to see {0}?",
            ),
            ("{0}",),
            WHERE,
        ),
        Relation(
            "river",
            5,
            facts.RIVERS,
            "{0} flows into| {2}.",
            (
                "Into which sea does {0} flow?",
                "Into what sea does {0} flow?",
                "Into what does {0} flow?",
                "Where does {0} flow?",
                "Where does {0} flow to?",
                "Where does {0} end?",
                "Where does {0} meet the sea?",
                "Where does {0} reach the sea?",
                "Which sea does {0} flow into?",
                "What sea does {0} flow into?",
                "What does {0} flow into?",
                "What water does {0} flow into?",
                "Tell me where {0} flows.",
                "Tell me where {0} ends.",
                "Tell me what {0} flows into.",
                "Do you know where {0} flows?",
                "Do you know which sea {0} flows into?",
                "Can you tell me where {0} ends?",
                "Can you tell me which sea {0} reaches?",
                "Which sea does {0} reach?",
                "{0} flows into what?",
                "{0} flows into which sea?",
                "What is the mouth of {0}?",
                "Where is the mouth of {0}?",
            ),
        ),
        Relation(
            "flag",
            6,
            with_aliases(facts.FLAGS),
            "The flag of {2} is| {1}.",
            (
                "What color is the flag of {0}?",
                "What colour is the flag of {0}?",
                "What colors are on the flag of {0}?",
                "What colors are in the flag of {0}?",
                "Which colors are in the flag of {0}?",
                "Which colours are on the flag of {0}?",
                "Which colors does the flag of {0} have?",
                "What colors does the flag of {0} have?",
                "What colours does the flag of {0} have?",
                "What colors does {0}'s flag have?",
                "What color is {0}'s flag?",
                "What colour is {0}'s flag?",
                "What does the flag of {0} look like?",
                "What does {0}'s flag look like?",
                "How does the flag of {0} look?",
                "Describe the flag of {0}.",
                "Describe {0}'s flag.",
                "Tell me about the flag of {0}.",
                "Can you describe the flag of {0}?",
                "Tell me what the flag of {0} looks like.",
                "{0} has a flag of which colors?",
            ),
            flag_nouns,
        ),
        Relation(
            "language",
            6,
            with_aliases(facts.LANGUAGES),
            "Most people in {2} speak| {1}.",
            (
                "What language do people speak in {0}?",
                "Which language do people speak in {0}?",
                "What language do they speak in {0}?",
                "Which language do they speak in {0}?",
                "What do people speak in {0}?",
                "What do they speak in {0}?",
                "What language is spoken in {0}?",
                "Which language is spoken in {0}?",
                "What language do people in {0} speak?",
                "Which language do most people in {0} speak?",
                "What do most people in {0} speak?",
                "What is spoken in {0}?",
                "In {0}, what language do people speak?",
                "In {0}, which language is spoken?",
                "Tell me what language people speak in {0}.",
                "Tell me which language is spoken in {0}.",
                "Do you know what language they speak in {0}?",
                "Can you tell me which language people in {0} speak?",
                "I am going to {0}. Which language should I learn?",
                "How do people talk in {0}?",
            ),
            ("the language of {0}", "the main language of {0}", "the language spoken in {0}"),
        ),
        Relation(
            "yes or no, capital",
            5,
            _yes_or_no(facts.CAPITALS, 12),
            "{0}, the capital of {1} is {3}.",
            (
                "Is {2} the capital of {1}?",
                "Is {2} the capital city of {1}?",
                "Is the capital of {1} {2}?",
                "Is {1}'s capital {2}?",
                "Is it true that {2} is the capital of {1}?",
                "Is it right that the capital of {1} is {2}?",
                "Do you think {2} is the capital of {1}?",
                "Would you say {2} is the capital of {1}?",
                "Can you say if {2} is the capital of {1}?",
                "I think {2} is the capital of {1}. Is that right?",
                "Is {2} really the capital of {1}?",
                "{2} is the capital of {1}, right?",
                "The capital of {1} is {2}, right?",
                "Does {1} have the capital {2}?",
            ),
        ),
        Relation(
            "yes or no, continent",
            4,
            _yes_or_no(continents, 3),
            "{0}, {1} is in {3}.",
            (
                "Is {1} in {2}?",
                "Is {1} a country in {2}?",
                "Is {1} located in {2}?",
                "Is {1} part of {2}?",
                "Does {1} belong to {2}?",
                "Is it true that {1} is in {2}?",
                "Is it right that {1} is in {2}?",
                "Do you think {1} is in {2}?",
                "Would you say {1} is in {2}?",
                "Can I find {1} in {2}?",
                "Would I find {1} in {2}?",
                "I think {1} is in {2}. Is that right?",
                "{1} is in {2}, right?",
                "Is {1} really in {2}?",
            ),
        ),
    ]


def _nature_and_calendar() -> list[Relation]:
    """What is largest, first, next or opposite, and how many there are."""
    planets = tuple(zip(facts.ORDINALS, facts.PLANETS, strict=True))
    following = {
        "day": [(a, b) for a, b in zip(facts.DAYS, facts.DAYS[1:] + facts.DAYS[:1], strict=True)],
        "month": [
            (a, b) for a, b in zip(facts.MONTHS, facts.MONTHS[1:] + facts.MONTHS[:1], strict=True)
        ],
    }
    after = tuple((unit, a, b) for unit, pairs in following.items() for a, b in pairs)
    opposites = facts.OPPOSITES + tuple((b, a) for a, b in facts.OPPOSITES)
    described = tuple(
        (noun, what) for what, nouns in facts.DESCRIPTIONS for noun in nouns.split("; ")
    )
    counts = tuple(
        (answer, thing, place)
        for answer, thing, where in facts.COUNTS
        for place in ((f" {where}",) if where.startswith("in a") else ("", f" {where}"))
    )
    return [
        Relation(
            "superlative",
            14,
            _superlatives(),
            "The {3} is| {4}.",
            (
                "Which {1} is the {0}{2}?",
                "What {1} is the {0}{2}?",
                "Which {1}{2} is the {0}?",
                "What {1}{2} is the {0}?",
                "Which is the {0} {1}{2}?",
                "Which one is the {0} {1}{2}?",
                "Do you know which {1} is the {0}{2}?",
                "Tell me which {1} is the {0}{2}.",
                "Can you tell me which {1} is the {0}{2}?",
                "{0} {1}{2}",
                "I want to know which {1} is the {0}{2}.",
            ),
            ("the {0} {1}{2}", "the name of the {0} {1}{2}"),
        ),
        Relation("description", 5, described, "{0} is| {1}.", nouns=("{0}",)),
        Relation(
            "planet",
            3,
            planets,
            "The {0} planet from the Sun is| {1}.",
            (
                "Which planet is the {0} from the Sun?",
                "What planet is the {0} from the Sun?",
                "Which planet is {0} from the Sun?",
                "What planet comes {0} from the Sun?",
                "Counting from the Sun, which planet is the {0}?",
            ),
            ("the {0} planet from the Sun", "the {0} planet", "the {0} planet of the solar system"),
        ),
        Relation(
            "calendar",
            3,
            after,
            "The {0} after {1} is| {2}.",
            (
                "What {0} comes after {1}?",
                "Which {0} comes after {1}?",
                "What comes after {1}?",
                "What follows {1}?",
                "Which {0} follows {1}?",
                "What {0} follows {1}?",
                "What is after {1}?",
                "After {1} comes which {0}?",
                "After {1} comes what?",
                "What {0} is next after {1}?",
                "Do you know which {0} comes after {1}?",
            ),
            ("the {0} after {1}", "the next {0} after {1}"),
        ),
        Relation(
            "count",
            3,
            counts,
            "{0}",
            (
                "How many {1} are there{2}?",
                "How many {1} do we have{2}?",
                "How many {1}{2}?",
                "How many {1} exist{2}?",
                "How many {1} can you count{2}?",
                "Count the {1}{2}.",
                "Tell me how many {1} there are{2}.",
                "Can you tell me how many {1} there are{2}?",
                "Could you tell me how many {1} there are{2}?",
                "Do you know how many {1} there are{2}?",
                "I want to know how many {1} there are{2}.",
                "Remind me how many {1} there are{2}.",
                "I wonder how many {1} there are{2}.",
                "So how many {1} are there{2}?",
                "There are how many {1}{2}?",
                "Say how many {1} there are{2}.",
                "What is the number of {1}{2}?",
                "Tell me the number of {1}{2}.",
            ),
        ),
        Relation(
            "list",
            3,
            facts.LISTS,
            "{1}",
            (
                "Which are {0}?",
                "What are {0}?",
                "Name {0}.",
                "Name all of {0}.",
                "Can you name {0}?",
                "Could you name {0}?",
                "List {0}.",
                "Can you list {0}?",
                "Please list {0}.",
                "Give me a list of {0}.",
                "Give me {0}.",
                "Give me the names of {0}.",
                "Tell me {0}.",
                "Tell me the names of {0}.",
                "What are {0} called?",
                "What are the names of {0}?",
                "Do you know {0}?",
                "Do you know the names of {0}?",
                "Do you know what {0} are?",
                "I want to know {0}.",
                "Remind me what {0} are.",
                "Tell me what {0} are.",
                "Can you tell me {0}?",
                "Can you tell me what {0} are?",
                "Enumerate {0}.",
            ),
        ),
        Relation(
            "color",
            2,
            facts.COLORS,
            "The color of {0} is| {1}.",
            (
                "What color is {0}?",
                "What colour is {0}?",
                "Which color is {0}?",
                "Which colour is {0}?",
                "Which color does {0} have?",
                "What color does {0} have?",
                "What colour does {0} have?",
                "Tell me what color {0} is.",
                "Tell me which color {0} has.",
                "Do you know what color {0} is?",
                "Can you tell me what color {0} is?",
                "{0} has which color?",
                "I want to know what color {0} is.",
            ),
            ("the color of {0}", "the colour of {0}"),
        ),
        Relation(
            "opposite",
            3,
            opposites,
            "The opposite of {0} is| {1}.",
            (
                "What word means the opposite of {0}?",
                "Which word is the opposite of {0}?",
                "What word is the opposite of {0}?",
                "What means the opposite of {0}?",
                "If it is not {0}, what is the opposite?",
                "{0} opposite",
            ),
            ("the opposite of {0}", "the opposite of the word {0}", "the word opposite to {0}"),
        ),
    ]


def _small_talk_and_unknown() -> list[Relation]:
    """Greetings, and questions without an answer in this world."""
    talk = tuple(
        (question, answer)
        for answer, questions in facts.SMALL_TALK
        for question in questions.split("; ")
    )
    countries = [country for country, _ in facts.CAPITALS]
    cities = [city for city, _ in facts.CITIES]
    things = [
        "football",
        "tennis",
        "chess",
        "guitar",
        "physics",
        "chemistry",
        "algebra",
        "Python",
        "Java",
        "cooking",
        "cars",
    ]
    things += [
        "computers",
        "money",
        "love",
        "music",
        "art",
        "history",
        "poetry",
        "medicine",
        "politics",
        "football",
    ]
    foods = [
        "soup",
        "bread",
        "pizza",
        "pasta",
        "rice",
        "cake",
        "curry",
        "pancakes",
        "salad",
        "stew",
    ]
    about = {
        "What is the population of {0}?": countries,
        "How many people live in {0}?": countries,
        "Who is the president of {0}?": countries,
        "Who is the king of {0}?": countries,
        "Who is the prime minister of {0}?": countries,
        "What is the history of {0}?": countries,
        "How big is {0}?": countries,
        "How old is {0}?": cities,
        "What is the weather in {0}?": cities,
        "What is the weather like in {0} today?": cities,
        "How many people are in {0}?": cities,
        "Who is the mayor of {0}?": cities,
        "What should I eat in {0}?": cities,
        "Who invented {0}?": things,
        "What is the meaning of {0}?": things,
        "Explain {0}.": things,
        "Explain {0} to me.": things,
        "How does {0} work?": things,
        "What do you think about {0}?": things,
        "Teach me {0}.": things,
        "Can you explain {0}?": things,
        "Write a poem about {0}.": things,
        "Write a program about {0}.": things,
        "How do I cook {0}?": foods,
        "How do I make {0}?": foods,
        "Give me a recipe for {0}.": foods,
    }
    asked = tuple((w.format(x),) for w, values in about.items() for x in dict.fromkeys(values))
    asked += tuple(
        (question,)
        for question in (
            "What is the meaning of life?",
            "What time is it?",
            "What day is it today?",
            "What is the weather today?",
            "Who won the game?",
            "Who is the best player?",
            "Tell me a joke.",
            "Write some code.",
            "Write a program.",
            "What is the stock price?",
            "What is for dinner?",
            "What is a neural network?",
            "What is machine learning?",
            "Who was Einstein?",
            "Who was Napoleon?",
            "Who wrote Hamlet?",
            "What is the speed of light?",
            "What is the square root of 2?",
            "How old are you?",
            "Do you love me?",
            "Why is the sky blue?",
        )
    )
    places = ("Where is {0}?", "On which continent is {0}?", "Which country is {0} in?")
    places += ("What language do people speak in {0}?", "What color is the flag of {0}?")
    places += ("Where does the river {0} flow?", "{0} is the capital of which country?")
    return [
        Relation("small talk", 6, talk, "{1}", ("{0}",), fact_group=(0,)),
        Relation(
            "made-up name",
            6,
            _made_up_names(6000),
            UNKNOWN,
            CAPITAL_DIRECT[:8] + places,
            CAPITAL_NOUNS[:4],
            FRAMES[:16],
            fact_group=(0,),
        ),
        Relation("unknown", 5, asked, UNKNOWN, ("{0}",), fact_group=(0,)),
    ]


class World:
    """All relations and their split.

    Args:
      seed: chooses the split and the held-out questions.
      kinds: names of the relations to keep; all by default.
    """

    def __init__(self, seed: int = 0, kinds: tuple[str, ...] = ()):
        relations = (
            _geography() + _nature_and_calendar() + _sum_relations() + _small_talk_and_unknown()
        )
        self.seed = seed
        self.relations = [r for r in relations if not kinds or r.kind in kinds]
        self.held_out_wordings = self._choose_wordings()

    def _choose_wordings(self) -> set[str]:
        """Choose a share of the frames, and of the direct wordings of each relation."""
        groups: dict[str, dict[str, None]] = {}
        for relation in self.relations:
            for name, _ in relation.wordings:
                head = name.partition(":")[0] if name not in relation.frames else relation.frames[0]
                groups.setdefault(head, {})[name] = None
        chosen = set()
        for group in groups.values():
            # The first four of a group, such as "What is {}?", always stay in training.
            ranked = sorted(list(group)[4:], key=lambda name: fraction(self.seed, name))
            chosen.update(ranked[: int(HELD_OUT_WORDINGS * len(group))])
        return chosen

    def _held_out_by(self, relation: Relation, wording: str, fact: tuple[str, ...]) -> str:
        """Why a question is held out: `wording`, `fact` or `pair`; "" for a training question."""
        if normalise(fact[0]) in COMMON:
            return ""
        if wording in self.held_out_wordings:
            return "wording"
        if relation.fact_group:
            # The relation does not matter: a sum held out in digits is held out in words too.
            group = tuple(fact[i] for i in relation.fact_group)
            return "fact" if fraction(self.seed, group) < HELD_OUT_FACTS else ""
        return "pair" if fraction(self.seed, wording, fact) < HELD_OUT_PAIRS else ""

    @cached_property
    def held_out(self) -> list[tuple[Example, str]]:
        """Held-out examples, each with the reason. One example per normalised question."""
        rng = random.Random(f"held out {self.seed}")
        chosen: dict[str, tuple[Example, str]] = {}
        for relation in self.relations:
            found: dict[str, list[Example]] = {"wording": [], "fact": [], "pair": []}
            for _ in range(2000):
                fact, (name, template) = rng.choice(relation.facts), rng.choice(relation.wordings)
                reason = self._held_out_by(relation, name, fact)
                if reason and len(found[reason]) < 14:
                    found[reason].append(relation.example(template, fact))
            if "|" in relation.answer:
                facts_ = [f for f in relation.facts if self._held_out_by(relation, "|", f)]
                found["pair"] += [relation.completion(f) for f in facts_[:4]]
            for reason, examples in found.items():
                for example in examples:
                    casual = rng.random() < 0.35
                    question = casually(example.question) if casual else example.question
                    key = normalise(question)
                    chosen.setdefault(key, (example._replace(question=question), reason))
        return list(chosen.values())

    @cached_property
    def held_out_questions(self) -> frozenset[str]:
        """Normalised held-out questions."""
        return frozenset(normalise(example.question) for example, _ in self.held_out)

    def documents(self, seed: int = 0) -> Iterator[Example]:
        """Endless training documents. None contains a held-out question."""
        rng = random.Random(f"documents {self.seed} {seed}")
        weights = [relation.weight for relation in self.relations]
        while True:
            if rng.random() < 0.04:
                yield Example(*story(rng), "story")
                continue
            (relation,) = rng.choices(self.relations, weights)
            fact = rng.choice(relation.facts)
            if "|" in relation.answer and rng.random() < 0.08:
                name, example = "|", relation.completion(fact)
            else:
                name, template = rng.choice(relation.wordings)
                example = relation.example(template, fact)
            styled = styled_question(rng, example.question)
            # Different wordings can give the same text, so the texts are compared too.
            if (
                not self._held_out_by(relation, name, fact)
                and normalise(example.question) not in self.held_out_questions
                and normalise(styled) not in self.held_out_questions
            ):
                yield example._replace(question=styled)


def casually(question: str) -> str:
    """The question in lower case, without its final punctuation."""
    return question.lower().rstrip("?.!")


def styled_question(rng: random.Random, question: str) -> str:
    """The question as different people would type it."""
    if rng.random() < 0.06 and not question.endswith(("=", " is")):
        question = rng.choice(OPENERS) + question[:1].lower() + question[1:]
    if rng.random() < 0.06 and question.endswith("?"):
        closer = rng.choice(CLOSERS)
        question = (question if closer.startswith(" T") else question[:-1]) + closer
    if rng.random() < 0.25:
        question = question.lower()
    if rng.random() < 0.2:
        question = question.rstrip("?.!")
    if rng.random() < 0.04:
        question += rng.choice((" ", "\n"))
    return question
