"""Facts of a report from ``summary.json``, which may be of another version or damaged. Pure."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

_Number = Annotated[float, Field(allow_inf_nan=False)]
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Whole = Annotated[int, Field(ge=0)]


class _Facts(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _Rank(_Facts):
    rank: _Whole
    member: str


class SummaryFacts(_Facts):
    """The figures of a report that events lack, by their keys in ``summary.json``.

    ``confusion`` counts held-out samples by true class (row) and predicted class (column).
    """

    tokens_per_s: _Amount | None = None
    solo_tokens_per_s: list[_Amount | None] = []
    ranks: list[_Rank] = []
    solo_source: str = ""
    beside_solo_tokens_per_s: _Amount | None = None
    equal_split_tokens_per_s: _Amount | None = None
    heldout_loss: _Number | None = None
    steps: _Whole | None = None
    elapsed_s: _Amount | None = None
    machine: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    labels: list[str] = []
    confusion: list[list[_Whole]] | None = None

    @model_validator(mode="after")
    def _check_confusion(self) -> Self:
        sizes = [len(row) for row in self.confusion or []]
        if self.confusion is not None and sizes != [len(self.labels)] * len(self.labels):
            raise ValueError("confusion does not have a count for each pair of labels")
        return self

    @property
    def solo(self) -> dict[str, float]:
        """Return units per second of members alone, as far as known."""
        speeds = dict(enumerate(self.solo_tokens_per_s))
        found = {one.member: speeds.get(one.rank) for one in self.ranks}
        return {member: speed for member, speed in found.items() if speed is not None}


def read_facts(document: Any) -> SummaryFacts:
    """Take what a report shows from the document of a ``summary.json``.

    Raises:
        ValueError: It is not such a document; says which key has which problem.
    """
    try:
        return SummaryFacts.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
