"""Kinds of values that options have, and the message for those that pydantic refuses.

Every option is checked by pydantic, wherever it is given: as an argument, in YAML or by ``--set``.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import field
from numbers import Integral, Real
from typing import Annotated, Any, Final, Literal, TypeGuard, TypeVar, dataclass_transform

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WrapValidator
from pydantic.dataclasses import dataclass

from evener.errors import ConfigError
from evener.parsing import short

STRICT: Final = ConfigDict(
    extra="forbid",
    protected_namespaces=(),
    allow_inf_nan=False,
    arbitrary_types_allowed=True,
)

_Class = TypeVar("_Class")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
class Section(BaseModel, frozen=True):
    """A group of keys; unknown ones are refused."""

    model_config = STRICT


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def checked(cls: type[_Class]) -> type[_Class]:
    """Make a frozen dataclass with keywords only; errors of pydantic become ``ConfigError``."""
    made: Any = dataclass(frozen=True, kw_only=True, config=STRICT)(cls)
    validate = made.__init__

    @functools.wraps(validate)
    def check(self: object, *args: Any, **options: Any) -> None:
        try:
            validate(self, *args, **options)
        except ValidationError as error:
            raise ConfigError(explain(made, error)) from None

    made.__init__ = check
    for name in vars(made).keys() & made.__pydantic_fields__.keys():
        delattr(made, name)  # pydantic would prefer it to the default that a schema declares
    return made  # type: ignore[no-any-return]


def asks_for(words: str) -> WrapValidator:
    """Return a validator that has one message for everything that can be wrong in a value.

    It is for unions of types: pydantic would explain for each type why the value does not match.
    """

    def check(value: object, validate: Callable[[object], object]) -> object:
        try:
            return validate(value)
        except ValueError:
            raise ValueError(words) from None

    return WrapValidator(check)


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether it is a whole number, such as an ``int`` or a NumPy integer; not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether it is a number, such as a ``float`` or a NumPy number; not a bool."""
    # YAML reads `yes` and `on` as true, which Python would treat as 1. Tensors and NumPy's bool
    # values are not numbers in Python either, and NumPy's numbers are.
    return isinstance(value, Real) and not isinstance(value, bool)


def _only(fits: Callable[[object], bool], words: str) -> BeforeValidator:
    def refuse(value: object) -> object:
        if not fits(value):
            raise ValueError(words)
        return value

    return BeforeValidator(refuse)


#: An argument of Python, where ``32.0`` is a float.
Int = Annotated[int, _only(is_whole, "Input should be a whole number")]
#: A key of YAML, where ``1e3`` is a whole number, too.
Whole = Annotated[int, _only(is_number, "Input should be a whole number")]
Number = Annotated[float, _only(is_number, "Input should be a number")]
AboveZero = Annotated[Number, Field(gt=0)]
Beta = Annotated[Number, Field(ge=0, lt=1)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
NotBelowZero = Annotated[Number, Field(ge=0)]
Part = Annotated[Number, Field(gt=0, lt=1)]
PositiveInt = Annotated[Int, Field(ge=1)]
NotNegativeInt = Annotated[Int, Field(ge=0)]
Positive = Annotated[Whole, Field(ge=1)]
NotNegative = Annotated[Whole, Field(ge=0)]
Name = Annotated[str, Field(min_length=1)]
MicroBatchSize = Annotated[
    PositiveInt | Literal["auto"], asks_for("give a whole number of samples from 1, or 'auto'")
]


def whole_number(name: str, value: object, least: int) -> int:
    """Return the value of a whole-number option as an ``int``; NumPy integers are allowed.

    Raises:
        ConfigError: It is not a whole number (``32.0`` is a float), or it is below ``least``.
    """
    if not is_whole(value) or (number := int(value)) < least:
        raise ConfigError(f"{name} is {value!r}; give a whole number from {least}")
    return number


def require(name: str, value: object, kind: Any, remedy: str) -> None:
    """Refuse an argument of another type.

    Args:
        name: The argument.
        value: What was given.
        kind: A class, or several as for ``isinstance``.
        remedy: What to give instead.

    Raises:
        ConfigError: Names the argument and the type of the value.
    """
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is a {type(value).__name__}; give {remedy}")


def explain(
    schema: Any, error: ValidationError, source: str = "", overridden: Sequence[str] = ()
) -> str:
    """Return one line that names each refused key, its value, and what is allowed.

    Args:
        schema: The class whose values were refused.
        error: The error of pydantic.
        source: The origin of the values, such as ``run.yaml: ``.
        overridden: Keys that ``--set`` has changed.
    """
    lines = []
    for problem in error.errors():
        place = [str(part) for part in problem["loc"]]
        key, message = ".".join(place), problem["msg"].removeprefix("Value error, ")
        if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            section = schema
            for name in place[:-1]:
                section = section.__pydantic_fields__[name].annotation
            message = f"unknown key; allowed are {', '.join(section.__pydantic_fields__)}"
        # The message of a ConfigError, and that of a whole section, names keys and values itself.
        if place and not isinstance(problem.get("ctx", {}).get("error"), ConfigError):
            message = f"{key} is {short(problem['input'])}: {message}"
        by_user = [
            name
            for name in overridden
            if f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.")
        ]
        lines.append(f"--set {by_user[-1]}: {message}" if by_user else source + message)
    return "; ".join(lines)
