"""Facts of a report from ``summary.json``, which may have another version or be damaged. Pure."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Whole = Annotated[int, Field(ge=0)]


class SummaryFacts(BaseModel):
    """The figures of a report that events lack, by their keys in ``summary.json``.

    ``confusion`` counts held-out samples by true class (row) and predicted class (column).
    """

    model_config = ConfigDict(strict=True, extra="ignore")

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


def read_facts(document: Any) -> SummaryFacts:
    """Read the facts that a report shows from the document of a ``summary.json``.

    Raises:
        ValueError: It is not such a document; names the key and the problem.
    """
    try:
        return SummaryFacts.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
