"""Names that public methods had in an earlier release."""

import warnings


def warn_of_former_name(old: str, new: str) -> None:
    """Warn the caller of a method by a name that the next release will not have.

    Args:
        old: The former name, of the method that calls this.
        new: What it is named now.
    """
    warnings.warn(
        f"{old} is named {new} now, which is what it computes; the old name goes with the next "
        "release",
        DeprecationWarning,
        stacklevel=3,
    )
