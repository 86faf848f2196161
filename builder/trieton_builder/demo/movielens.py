"""MovieLens-100k (Harper and Konstan, The MovieLens Datasets, ACM TiiS 2015), read from a wheel that carries it.

GroupLens allows research use of the data and no redistribution, so it is read where the wheel `recbole` installed it
and never copied into this project.
"""

import importlib.util
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import polars as pl

WHEEL = "recbole==1.2.1"
NEWEST_YEARS = 2  # release years that count as newest
_FOLDER = Path("dataset_example") / "ml-100k"
# An article behind its title, or behind the original title in brackets: "Blue Angel, The (Blaue Engel, Der)".
_ARTICLES = "The|A|An|Le|La|Les|L'|Un|Une|Der|Die|Das|Ein|Eine|El|Los|Las|Una|Il|Lo|Gli|Uno|O|Det"
_BEHIND = re.compile(rf"(?P<start>^|\()(?P<rest>[^()]+), (?P<article>{_ARTICLES})(?=$|\)| \()")


@dataclass(frozen=True, eq=False)
class MovieLens:
    """People and films, split by time: each person's last film is held out, everything before it is for training.

    Films are numbered by row, 0 .. num_items - 1, in ascending order of their ids.

    Attributes:
        item_ids: int64 [num_items], the ids that the data set gives its films.
        titles: title of each film.
        years: int32 [num_items], year of release; 0 where the data set does not know it.
        genre_names: identifiers such as `drama`, `sci_fi`, `film_noir`, in alphabetical order.
        genres: bool [num_items, num_genres].
        person_ids: int64 [num_people], ascending.
        histories: per person int64 [n], rows of the films in the order of time, without the last.
        targets: int64 [num_people], row of the film that is held out.
    """

    item_ids: np.ndarray
    titles: tuple[str, ...]
    years: np.ndarray
    genre_names: tuple[str, ...]
    genres: np.ndarray
    person_ids: np.ndarray
    histories: tuple[np.ndarray, ...]
    targets: np.ndarray

    @property
    def num_items(self) -> int:
        return len(self.item_ids)

    @property
    def num_people(self) -> int:
        return len(self.person_ids)

    @cached_property
    def counts(self) -> np.ndarray:
        """int64 [num_items]: how often each film stands in the training part."""
        return np.bincount(np.concatenate(self.histories), minlength=self.num_items)

    def sets(self) -> dict[str, np.ndarray]:
        """Named sets, bool [num_items] each: genres, `y1997`, `years_1990s`, and `newest` (the last two years)."""
        masks = {name: self.genres[:, i] for i, name in enumerate(self.genre_names)}
        known = np.unique(self.years[self.years > 0])
        masks |= {f"y{year}": self.years == year for year in known}
        masks |= {f"years_{decade}s": self.years // 10 == decade // 10 for decade in np.unique(known // 10 * 10)}
        masks["newest"] = self.years > known.max() - NEWEST_YEARS
        return masks


def load_movielens() -> MovieLens:
    """Read MovieLens-100k from the installed wheel, without importing it.

    Raises:
        ValueError: the wheel is not installed, or its files are not the ones that are expected.
    """
    folder = _folder()
    return read_movielens(folder / "ml-100k.inter", folder / "ml-100k.item")


def read_movielens(interactions: Path, items: Path) -> MovieLens:
    """Read the two tab-separated files; both begin with a line of `name:type` headings.

    Ties in time are broken by the order of lines, so the split is the same on every machine.

    Raises:
        ValueError: names the file and the column or line that does not fit.
    """
    films = _read(items, ("item_id", "movie_title", "release_year", "class")).sort("item_id")
    item_ids = films["item_id"].to_numpy()
    if len(np.unique(item_ids)) != len(item_ids):
        raise ValueError(f"{items}: a film stands twice")
    per_film = [[_identifier(word) for word in text.split(" ")] for text in films["class"].to_list()]
    genre_names = tuple(sorted({name for names in per_film for name in names} - {"unknown"}))
    genres = np.array([[name in names for name in genre_names] for names in per_film], np.bool_)
    years = films["release_year"].cast(pl.Int32, strict=False).fill_null(0).to_numpy()  # one film has none, one a V

    events = _read(interactions, ("user_id", "item_id", "timestamp")).with_row_index("line")
    events = events.sort(["user_id", "timestamp", "line"])
    rows = np.searchsorted(item_ids, events["item_id"].to_numpy())
    known = item_ids[np.minimum(rows, len(item_ids) - 1)] == events["item_id"].to_numpy()
    if not known.all():
        raise ValueError(f"{interactions}: film {events['item_id'][int(np.argmin(known))]} is not in {items}")
    person_ids, first = np.unique(events["user_id"].to_numpy(), return_index=True)
    sequences = np.split(rows, first[1:])
    if min(map(len, sequences)) < 2:
        raise ValueError(f"{interactions}: expected two films or more per person")
    return MovieLens(
        item_ids=item_ids,
        titles=tuple(map(article_first, films["movie_title"].to_list())),
        years=years,
        genre_names=genre_names,
        genres=genres,
        person_ids=person_ids,
        histories=tuple(sequence[:-1] for sequence in sequences),
        targets=np.array([sequence[-1] for sequence in sequences]),
    )


def article_first(title: str) -> str:
    """`Misérables, Les` -> `Les Misérables`, as people write it."""
    return _BEHIND.sub(r"\g<start>\g<article> \g<rest>", title).replace("L' ", "L'")


def _folder() -> Path:
    package = WHEEL.partition("==")[0]
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ValueError(f"MovieLens-100k comes with {WHEEL}, which is not installed: pip install --no-deps {WHEEL}")
    folder = Path(found.submodule_search_locations[0]) / _FOLDER
    if not folder.is_dir():
        raise ValueError(f"{folder}: missing; expected in {WHEEL}: pip install --no-deps --force-reinstall {WHEEL}")
    return folder


def _read(path: Path, columns: tuple[str, ...]) -> pl.DataFrame:
    try:
        table = pl.read_csv(path, separator="\t", quote_char=None, infer_schema=False)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ValueError(f"{path}: not readable ({error})") from None
    table = table.rename({name: name.partition(":")[0] for name in table.columns})
    missing = [name for name in columns if name not in table.columns]
    if missing:
        raise ValueError(f"{path}: expected a column {missing[0]!r}, got {table.columns}")
    table = table.select(columns)
    numbers = [name for name in columns if name.endswith("_id") or name == "timestamp"]
    try:
        return table.with_columns(pl.col(name).cast(pl.Float64).cast(pl.Int64) for name in numbers)
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{path}: expected integers in {numbers} ({error})") from None


def _identifier(genre: str) -> str:
    """`Sci-Fi` -> `sci_fi`, `Children's` -> `children`."""
    return genre.lower().removesuffix("'s").replace("-", "_")
