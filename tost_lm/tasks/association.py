"""Needles that share no word with their question, as in NoLiMa (arXiv 2502.05167), in words of our own.

The text says which landmark a person passes, and the question asks for the country: the model must know where the
landmark stands, and cannot find the needle by the words of the question.
"""

from functools import partial

from tost_lm.tasks.grid import GridTask, section
from tost_lm.tasks.queries import Form, HaystackConfig, KeyedQueries
from tost_lm.tasks.task import Family

NAME = "association@landmarks"
LANDMARKS = {
    "France": "Eiffel Tower", "Italy": "Colosseum", "Greece": "Acropolis", "Russia": "Kremlin", "India": "Taj Mahal",
    "Egypt": "Sphinx", "Peru": "ruins of Machu Picchu", "Cambodia": "temples of Angkor Wat", "Jordan": "tombs of Petra",
    "England": "Tower of London", "Germany": "Brandenburg Gate", "America": "Statue of Liberty",
    "Australia": "Sydney Opera House", "Japan": "slopes of Mount Fuji", "China": "Forbidden City",
    "Spain": "Alhambra",
}  # fmt: skip
"""By country."""
PEOPLE = (
    "Anna", "Ben", "Carla", "David", "Emma", "Frank", "Greta", "Henry", "Irene", "Jack", "Laura", "Martin", "Nina",
    "Oscar", "Paula", "Victor",
)  # fmt: skip


FORM = Form(
    tuple(LANDMARKS),
    PEOPLE,
    lambda country, person: (f" {person}", f" walks past the {LANDMARKS[country]} every morning.\n"),
    lambda country: f"Question: Which person lives in {country}?\nAnswer:",
)

FAMILY = Family(
    "association",
    [
        GridTask(
            NAME,
            "people near landmarks in a text; the questions ask who lives in a country and share no word with it",
            partial(KeyedQueries, form=FORM),
            "choice_accuracy",
        )
    ],
    HaystackConfig,
    section,
)
